"""The methods of `protocol` for other languages, by one route: ``POST /v1/{part}/{method}``.

``part`` is ``daemon``, ``host``, ``sandbox`` or ``turn`` (the checkpoint under way that ``end_turn`` named).
The body is a JSON object: ``on`` names the sandbox or the turn, ``with`` holds the arguments by their names;
bytes are base64. The answer is ``{"value": …}``, or ``{"error": class, "text": sentence}`` with another
status than 200.

May ask whoever knows the token, and only under a name that is this host's: a page in the user's browser can
make a name of its own mean 127.0.0.1, but its requests then carry that name in ``Host``.
"""

from __future__ import annotations

import base64
import hmac
import json
from ipaddress import ip_address

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from windtunnel.agents.sandbox.protocol import AnyDaemon, AnyHost, AnySandbox, PendingTurn
from windtunnel.base.rpc import Service

PARTS = {"daemon": AnyDaemon, "host": AnyHost, "sandbox": AnySandbox, "turn": PendingTurn}
STATUS = {"UserError": 400, "SandboxDied": 410, "LessError": 417, "TimeoutError": 504}


def application(service: Service, token: str, host: str) -> Starlette:
    """For a listener on ``host``."""
    expected = f"Bearer {token}".encode()

    async def call(request: Request) -> JSONResponse:
        if not named_here(request.headers.get("host", ""), host):
            return _refused(403, f"host name {request.headers.get('host')!r} is not accepted here")
        if not hmac.compare_digest(request.headers.get("authorization", "").encode("latin-1"), expected):
            return _refused(401, "the token is missing or wrong; send 'Authorization: Bearer TOKEN'")
        part, name = request.path_params["part"], request.path_params["method"]
        if part not in PARTS:
            return _refused(404, f"part {part!r} is unknown; accepted are {', '.join(PARTS)}")
        try:
            body = json.loads(await request.body() or b"{}")
            on, given = body.get("on", ""), body.get("with", {})
            if not isinstance(on, str) or not isinstance(given, dict) or body.keys() - {"on", "with"}:
                raise ValueError
        except (ValueError, AttributeError):
            return _refused(400, 'the body is not accepted; send {"on": NAME, "with": {ARGUMENT: VALUE, …}}')
        answer, data = await service.perform(
            {"do": f"{PARTS[part].__name__}.{name}", "on": on, "with": given}
        )
        if data:
            answer = {"value": base64.b64encode(data).decode()}
        return JSONResponse(answer, STATUS.get(answer["error"], 500) if "error" in answer else 200)

    return Starlette(routes=[Route("/v1/{part}/{method}", call, methods=["POST"])])


def named_here(given: str, host: str) -> bool:
    """Whether a ``Host`` header names an address, localhost, or the name that was bound."""
    name = given.rsplit("]", 1)[0].removeprefix("[") if given.startswith("[") else given.rsplit(":", 1)[0]
    name = name.lower().rstrip(".")
    if name in ("localhost", host.lower()):
        return True
    try:
        ip_address(name)
    except ValueError:
        return False
    return True


def _refused(status: int, sentence: str) -> JSONResponse:
    return JSONResponse({"error": "UserError", "text": f"sandbox: {sentence}"}, status)
