"""The HTTP application: endpoints, errors as sentences, and a page that describes them."""

from __future__ import annotations

import time
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Receive, Scope, Send

from windtunnel import __version__
from windtunnel.agents.sandbox.live.daemon.faults import status_of, told
from windtunnel.agents.sandbox.live.daemon.page import page
from windtunnel.agents.sandbox.live.daemon.routes import box_routes, checkpoint_routes, host_routes
from windtunnel.agents.sandbox.live.daemon.service import Service
from windtunnel.agents.sandbox.live.daemon.transfer import file_routes

ABOUT = """Sandboxes that can be checkpointed, restored, forked and rolled back.

Errors are `{"error": sentence, "kind": kind}`. The class of a turn is 0 none, 1 shell, 2 files, 3 full.
A command's output is a stream of lines: `{"stdout": text}` or `{"stdout_base64": bytes}`, the same for
stderr, and at last `{"result": …}` or `{"error": …}`."""


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
        sentence = f"sandbox: {request.method} {request.url.path}: {error.detail}; see /docs"
        return JSONResponse({"error": sentence, "kind": kind}, error.status_code)

    async def failed(request: Request, error: Exception) -> JSONResponse:
        body = told(error)
        return JSONResponse(body, status_of(body))

    # A handler of Exception alone would also let the error through to the server, which prints it.
    app.add_middleware(_Failures, handler=failed)

    @app.get("/docs", include_in_schema=False)
    async def docs() -> HTMLResponse:
        return HTMLResponse(page(app.openapi()))

    return app


class _Failures:
    """Answers with a sentence when an endpoint raises; once an answer has begun, the connection breaks."""

    def __init__(self, app: ASGIApp, handler: Any) -> None:
        self._app, self._handler = app, handler

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        begun = False

        async def sending(message: Any) -> None:
            nonlocal begun
            begun = True
            await send(message)

        try:
            await self._app(scope, receive, sending)
        except Exception as error:
            if begun:
                raise
            response = await self._handler(Request(scope), error)
            await response(scope, receive, send)


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
