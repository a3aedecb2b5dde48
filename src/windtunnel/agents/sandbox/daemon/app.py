"""The HTTP application: endpoints, errors as sentences; OpenAPI describes them at /openapi.json."""

from __future__ import annotations

import time

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Receive, Scope, Send

from windtunnel import __version__
from windtunnel.agents.sandbox.client.wire import STATUS
from windtunnel.agents.sandbox.daemon.routes import box_routes, checkpoint_routes, host_routes
from windtunnel.agents.sandbox.daemon.service import Refused, Service, told
from windtunnel.agents.sandbox.daemon.transfer import file_routes
from windtunnel.base.errors import WindtunnelError

ABOUT = """Sandboxes that can be checkpointed, restored, forked and rolled back.

Errors are `{"error": sentence, "kind": kind}`; of kind "less" also `lacks` (what was wanted and is not there:
kind, what, why), and the `manifest` that is kept all the same, or the `report` of a restore. The class of a
turn is 0 none, 1 shell, 2 files, 3 full. A command's output is a stream of lines: `{"stdout": text}` or
`{"stdout_base64": bytes}`, the same for stderr, and at last `{"result": …}` or `{"error": …}`."""


def build_app(service: Service) -> FastAPI:
    """The application, without any check of who asks: that is the listener's."""
    app = FastAPI(
        title="windtunnel sandbox",
        version=__version__,
        description=ABOUT,
        docs_url=None,
        redoc_url=None,
    )
    for routes in (host_routes, box_routes, checkpoint_routes, file_routes):
        app.include_router(routes(service))

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> JSONResponse:
        return JSONResponse({"error": _sentence(error), "kind": "user"}, 400)

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> JSONResponse:
        kind = "unknown" if error.status_code == 404 else "user"
        sentence = f"sandbox: {request.method} {request.url.path}: {error.detail}; see /openapi.json"
        return JSONResponse({"error": sentence, "kind": kind}, error.status_code)

    async def failed(request: Request, error: Exception) -> JSONResponse:
        body = told(error)
        return JSONResponse(body, STATUS[body["kind"]])

    # What only the handler of Exception knows is a defect of ours: the server logs its traceback as well.
    for kind in (Refused, WindtunnelError, OSError, Exception):
        app.add_exception_handler(kind, failed)

    return app


def counted(app: ASGIApp, service: Service) -> ASGIApp:
    """``app``, with the requests under way counted: a daemon that nobody uses ends."""

    async def counting(scope: Scope, receive: Receive, send: Send) -> None:
        service.busy += 1
        try:
            await app(scope, receive, send)
        finally:
            service.busy -= 1
            service.last = time.monotonic()

    return counting


def _sentence(error: RequestValidationError) -> str:
    """What is wrong with a request: the first field that does not fit, and how many more."""
    first, *more = error.errors()
    where = ".".join(str(part) for part in first["loc"])
    value = "" if first["type"] == "missing" else f" (given: {first.get('input')!r})"
    rest = f"; and {len(more)} more" if more else ""
    return f"sandbox: {where}: {first['msg']}{value}{rest}"
