"""The methods of `protocol` for other languages, by one route: ``POST /v1/{part}/{method}``, with the token.

``part`` is ``daemon``, ``host``, ``sandbox`` or ``turn`` (the checkpoint under way that ``end_turn`` named).
The body is a JSON object: ``on`` names the sandbox or the turn, ``with`` holds the arguments by their names;
bytes are base64. The answer is ``{"value": …}``, or ``{"error": class, "text": sentence}`` with another
status than 200.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hmac
import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from windtunnel.agents.sandbox.protocol import AnyDaemon, AnyHost, AnySandbox, PendingTurn
from windtunnel.base.calls import Message
from windtunnel.base.keys import Keys
from windtunnel.base.rpc import RpcService
from windtunnel.base.web import WebServer, listen

PARTS = {"daemon": AnyDaemon, "host": AnyHost, "sandbox": AnySandbox, "turn": PendingTurn}
CALLS = 512
"""At a time, each in a thread: a command occupies one until it ends."""
ENDING = 10
"""Seconds that calls have to end when the daemon does."""
STATUS = {"UserError": 400, "SandboxDied": 410, "IncompleteError": 417, "TimeoutError": 504}


@contextlib.contextmanager
def serving(service: RpcService, keys: Keys, host: str, port: int) -> Iterator[str]:
    """Answer at this URL, within the block. The token is the secret of ``keys``."""
    listener = listen("serve", host.strip("[]"), port)
    files = keys.tls.paths if keys.tls is not None else (None, None)
    server = WebServer(
        uvicorn.Config(
            application(service, keys.secret), http="h11", lifespan="off", access_log=False,
            log_config=None, proxy_headers=False, server_header=False,
            timeout_graceful_shutdown=ENDING, ssl_certfile=files[0], ssl_keyfile=files[1],
        )
    )  # fmt: skip
    thread = threading.Thread(target=server.run, args=([listener],), name="sandbox-http", daemon=True)
    thread.start()
    try:
        yield f"{'http' if keys.tls is None else 'https'}://{host}:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()
        listener.close()


def application(service: RpcService, token: bytes) -> Starlette:
    expected, threads = b"Bearer " + token, ThreadPoolExecutor(CALLS, thread_name_prefix="sandbox-http")

    def perform(message: Message) -> tuple[Message, bytes]:
        with service.at_work():
            return service.perform(message)

    async def call(request: Request) -> JSONResponse:
        if not hmac.compare_digest(request.headers.get("authorization", "").encode("latin-1"), expected):
            return _refused(401, "the token is missing or wrong; send 'Authorization: Bearer TOKEN'")
        part, name = request.path_params["part"], request.path_params["method"]
        if part not in PARTS:
            return _refused(404, f"part {part!r} is unknown; accepted are {', '.join(PARTS)}")
        try:
            body = json.loads(await request.body() or b"{}")
            on, arguments = body.get("on", ""), body.get("with", {})
            if not isinstance(on, str) or not isinstance(arguments, dict) or body.keys() - {"on", "with"}:
                raise ValueError
        except (ValueError, AttributeError):
            return _refused(400, 'the body is not accepted; send {"on": NAME, "with": {ARGUMENT: VALUE, …}}')
        message = {"do": f"{PARTS[part].__name__}.{name}", "on": on, "with": arguments}
        answer, data = await asyncio.get_running_loop().run_in_executor(threads, perform, message)
        if data:
            answer = {"value": base64.b64encode(data).decode()}
        return JSONResponse(answer, STATUS.get(answer["error"], 500) if "error" in answer else 200)

    return Starlette(routes=[Route("/v1/{part}/{method}", call, methods=["POST"])])


def _refused(status: int, sentence: str) -> JSONResponse:
    return JSONResponse({"error": "UserError", "text": f"sandbox: {sentence}"}, status)
