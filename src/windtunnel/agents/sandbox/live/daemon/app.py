"""The HTTP application: endpoints, errors as sentences, and a page that describes them and loads nothing."""

from __future__ import annotations

import time
from html import escape
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Receive, Scope, Send

from windtunnel import __version__
from windtunnel.agents.sandbox.client.wire import STATUS
from windtunnel.agents.sandbox.live.daemon.routes import box_routes, checkpoint_routes, host_routes
from windtunnel.agents.sandbox.live.daemon.service import Refused, Service, told
from windtunnel.agents.sandbox.live.daemon.transfer import file_routes
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
        sentence = f"sandbox: {request.method} {request.url.path}: {error.detail}; see /docs"
        return JSONResponse({"error": sentence, "kind": kind}, error.status_code)

    async def failed(request: Request, error: Exception) -> JSONResponse:
        body = told(error)
        return JSONResponse(body, STATUS[body["kind"]])

    # What only the handler of Exception knows is a defect of ours: the server logs its traceback as well.
    for kind in (Refused, WindtunnelError, OSError, Exception):
        app.add_exception_handler(kind, failed)

    @app.get("/docs", include_in_schema=False)
    async def docs() -> HTMLResponse:
        return HTMLResponse(page(app.openapi()))

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


_STYLE = """
:root{color-scheme:light dark}
body{font:15px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem}
code,pre{font-family:ui-monospace,monospace;font-size:.93em}
pre{white-space:pre-wrap}
details{border:1px solid #8886;border-radius:6px;margin:.4rem 0;padding:.4rem .8rem}
summary{cursor:pointer}
.m{display:inline-block;min-width:4.2em;font-weight:700}
table{border-collapse:collapse;margin:.5rem 0}
td,th{text-align:left;vertical-align:top;padding:.15rem 1rem .15rem 0}
"""


def page(openapi: dict[str, Any]) -> str:
    """The OpenAPI description as an HTML page."""
    groups: dict[str, list[str]] = {}
    for path, methods in openapi["paths"].items():
        for method, endpoint in methods.items():
            group = (endpoint.get("tags") or ["other"])[0]
            groups.setdefault(group, []).append(_endpoint(openapi, method, path, endpoint))
    body = "".join(f"<h2>{escape(group)}</h2>{''.join(parts)}" for group, parts in groups.items())
    title = escape(f"{openapi['info']['title']} {openapi['info']['version']}")
    return (
        f"<!doctype html><html lang='en'><meta charset='utf-8'><title>{title}</title><style>{_STYLE}</style>"
        f"<h1>{title}</h1><pre>{escape(openapi['info'].get('description', ''))}</pre>"
        f"<p>The same for programs: <a href='/openapi.json'>/openapi.json</a></p>{body}</html>"
    )


def _endpoint(openapi: dict[str, Any], method: str, path: str, endpoint: dict[str, Any]) -> str:
    rows = [
        (one["name"], one.get("schema", {}), one.get("required", False), one.get("description", ""))
        for one in endpoint.get("parameters", ())
    ]
    for kind in endpoint.get("requestBody", {}).get("content", {}).values():
        fields = _resolved(openapi, kind.get("schema", {}))
        rows += [
            (name, one, name in fields.get("required", ()), one.get("description", ""))
            for name, one in fields.get("properties", {}).items()
        ]
    answers = [
        _type(kind.get("schema", {}))
        for status, answer in endpoint.get("responses", {}).items()
        if status.startswith("2")
        for kind in answer.get("content", {}).values()
    ]
    table = f"<table>{''.join(map(_row, rows))}</table>" if rows else "<p>no parameters</p>"
    answer = f"<p>Answer: <code>{escape(', '.join(answers) or 'nothing')}</code></p>"
    head = f"<span class='m'>{method.upper()}</span><code>{escape(path)}</code>"
    return (
        f"<details><summary>{head} {escape(endpoint.get('summary', ''))}</summary>{table}{answer}</details>"
    )


def _row(given: tuple[str, dict[str, Any], bool, str]) -> str:
    name, schema, required, about = given
    default = "required" if required else f"default {schema['default']!r}" if "default" in schema else ""
    cells = (f"<code>{escape(name)}</code>", escape(_type(schema)), escape(default), escape(about))
    return "<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>"


def _type(schema: dict[str, Any]) -> str:
    if "$ref" in schema:
        return str(schema["$ref"].rsplit("/", 1)[1])
    if "anyOf" in schema:
        return " or ".join(map(_type, schema["anyOf"]))
    if "enum" in schema:
        return " | ".join(map(str, schema["enum"]))
    kind = str(schema.get("type", "any"))
    return f"list of {_type(schema['items'])}" if kind == "array" and "items" in schema else kind


def _resolved(openapi: dict[str, Any], schema: dict[str, Any]) -> dict[str, Any]:
    if "$ref" not in schema:
        return schema
    found: dict[str, Any] = openapi["components"]["schemas"][schema["$ref"].rsplit("/", 1)[1]]
    return found
