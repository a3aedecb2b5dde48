"""The daemon: its home, where it listens, its signals, and its end.

One daemon for a home: it holds the home's lock, which the kernel frees when it dies, so a socket that is left
over can be told from one that is in use. It ends on SIGTERM, on request, or, if it was started in passing,
when there has been no sandbox and no call for a while. The sandboxes run on in each case, and the next
daemon takes them over.

Other languages call the methods of `protocol` by one route of HTTP: ``POST /v1/{part}/{method}``, with the
token. ``part`` is one of `PARTS` (``turn``: the checkpoint under way that ``end_turn`` named). The body is a
JSON object: ``on`` names the sandbox or the turn, ``with`` holds the arguments by their names; bytes are
base64. The answer is ``{"value": …}``, or ``{"error": class, "text": sentence}`` with an error's status.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hmac
import json
import logging
import os
import select
import signal
import socket
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from windtunnel.agents.sandbox.daemon import ERRORS, answers, host_and_port, refuse_open, socket_of
from windtunnel.agents.sandbox.errors import SandboxError, disk_full
from windtunnel.agents.sandbox.model import SandboxEvent
from windtunnel.agents.sandbox.place import Home, checked_name
from windtunnel.agents.sandbox.protocol import AnyDaemon, AnyHost, AnySandbox, PendingTurn
from windtunnel.base.calls import Message
from windtunnel.base.errors import UserError, WindtunnelError
from windtunnel.base.keys import SHORTEST, Keys
from windtunnel.base.rpc import RpcServer, RpcService
from windtunnel.linux.processes import session_first

if TYPE_CHECKING:
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import JSONResponse

LOG = logging.getLogger("windtunnel.sandbox.daemon")
KEPT_TURNS = 1024
IDLE_SECONDS = 300.0
"""After which a daemon that was started in passing ends, unused."""
TAKEOVER_SECONDS = 30.0
"""How long a daemon that is just ending is waited for."""
GRACE_SECONDS = 10
"""How long calls may go on after the daemon is told to end, before they are cancelled."""
CLOSE_SECONDS = 120.0
"""How long checkpoints under way may take when the daemon ends."""
PARTS = {"daemon": AnyDaemon, "host": AnyHost, "sandbox": AnySandbox, "turn": PendingTurn}
"""What is served, and its name by HTTP."""
HTTP_CALLS = 512
"""At a time, each in a thread: a command occupies one until it ends."""
STATUS = {"UserError": 400, "SandboxDied": 410, "IncompleteError": 417, "TimeoutError": 504}


def listening(option: str, text: str, keys: Keys | None) -> tuple[str, int]:
    """Host and port of ``text``, PORT or ADDRESS:PORT. Raises UserError: it is neither, or would be without a
    token, with one that can be guessed by who hears the proof of it, or open to other machines."""
    host, port = host_and_port(text if ":" in text else f"127.0.0.1:{text}")
    if not host:
        raise UserError(f"sandbox serve: {option} {text!r} is not accepted; write PORT or ADDRESS:PORT")
    if keys is None:
        raise UserError(
            f"sandbox serve: {option} needs a token; give --token FILE or set WINDTUNNEL_SANDBOX_TOKEN"
        )
    if len(keys.secret) < SHORTEST:
        raise UserError(f"serve: the token has {len(keys.secret)} bytes; at least {SHORTEST} are accepted")
    if keys.tls is None:
        refuse_open(host, f"{option} {host}")
    return host, port


@dataclass
class Daemon:
    """Itself, as `AnyDaemon`; and the objects that calls are about."""

    host: AnyHost
    stop: Callable[[], object]
    _turns: dict[str, PendingTurn] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def down(self) -> None:
        self.stop()

    def find(self, kind: type, name: str) -> object:
        if kind is AnySandbox:
            return self.host.get(checked_name(name))
        if kind is PendingTurn:
            if name not in self._turns:
                raise UserError(f"sandbox: no turn {name!r} is under way; the log tells how it ended")
            return self._turns[name]
        return self if kind is AnyDaemon else self.host

    def refer(self, value: Any) -> str:
        if not hasattr(value, "promote"):
            return str(value.name)
        name = uuid.uuid4().hex
        with self._lock:
            self._turns[name] = value
            settled = [ticket for ticket, turn in self._turns.items() if turn.done]
            for ticket in settled[: max(0, len(self._turns) - KEPT_TURNS)]:
                del self._turns[ticket]
        return name


def explained(error: Exception) -> Exception:
    """The error for the caller: a full disk with what frees it, a defect of ours with its traceback in the
    log."""
    if disk_full(error):
        return SandboxError(f"{error}; the disk is full: 'windtunnel sandbox gc' frees what can go")
    if isinstance(error, WindtunnelError | OSError):
        return error
    LOG.error("a call failed unexpectedly", exc_info=error)
    return SandboxError(f"sandbox: unexpected {type(error).__name__}: {error}")


def run(
    home: Path, *, keys: Keys | None = None, tcp: str | None = None, http: str | None = None,
    idle_seconds: float | None = None, ready: Callable[[str], None] = lambda where: None,
) -> None:  # fmt: skip
    """Be the daemon of ``home`` until told to end. Raises UserError where another one is.

    ``tcp``, ``http``: where else it answers, as `listening` has it (port 0: any that is free), to whoever
    knows ``keys``. ``ready`` is told each address as soon as it answers.
    """
    tcp_place = None if tcp is None else listening("--tcp", tcp, keys)
    http_place = None if http is None else listening("--http", http, keys)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    with contextlib.ExitStack() as stack:
        host = open_host(home, _log_event, stack.enter_context(home_lock(home)))
        stack.callback(_close, host)
        stopping, telling = socket.socketpair()
        telling.setblocking(False)
        signal.set_wakeup_fd(telling.fileno())  # whichever thread the kernel gives it: this one waits
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: None)
        daemon = Daemon(host, lambda: telling.send(b"1"))
        service = RpcService(tuple(PARTS.values()), daemon.find, daemon.refer, ERRORS, explained)
        servers = [RpcServer(service, f"unix:{socket_of(home)}")]
        stack.callback(socket_of(home).unlink, missing_ok=True)
        ready(str(socket_of(home)))
        if tcp_place is not None:
            servers.append(RpcServer(service, "tcp:{}:{}".format(*tcp_place), keys))
            ready(servers[-1].address.replace("tcp:", "tcp://", 1))
        if http_place is not None and keys is not None:
            ready(stack.enter_context(http_serving(service, keys, *http_place)))
        _tell_systemd()
        _until_stopped(host, service, stopping, idle_seconds)
        LOG.info("ending; sandboxes run on")
        for server in servers:
            server.refuse()
        _finished(service, GRACE_SECONDS)
        for server in servers:
            server.close()  # which cancels the commands that still run
        _finished(service, GRACE_SECONDS)


def open_host(home: Path, on_event: Callable[[SandboxEvent], None], lock: IO[str]) -> AnyHost:
    from windtunnel.agents.sandbox.host import SandboxHost

    return SandboxHost(home, on_event=on_event, lock=lock)


def _until_stopped(
    host: AnyHost, service: RpcService, stopping: socket.socket, idle_seconds: float | None
) -> None:
    """Until told to end, or nobody needs the daemon: no sandbox, no call for ``idle_seconds``."""
    left = None if idle_seconds is None else 0.05
    while True:
        if select.select([stopping], [], [], left)[0]:
            return None
        assert idle_seconds is not None
        left = idle_seconds - (time.monotonic() - service.last)
        if service.busy == 0 and left <= 0:
            if not host.boxes():
                return LOG.info("no sandbox and no call for %g s", idle_seconds)
            left = idle_seconds
        left = min(max(left, 0.05), 60.0)


def _finished(service: RpcService, seconds: float) -> None:
    end = time.monotonic() + seconds
    while service.busy and time.monotonic() < end:
        time.sleep(0.02)


def home_lock(home: Path) -> IO[str]:
    """The lock of ``home``: whoever has it open is the daemon. Raises UserError where another process has it,
    and does not end."""
    socket_of(home)
    home.mkdir(parents=True, exist_ok=True, mode=0o700)
    deadline = time.monotonic() + TAKEOVER_SECONDS
    while True:
        try:
            return Home(home).lock()
        except UserError:
            if answers(home) or time.monotonic() > deadline:
                raise
            time.sleep(0.05)


def _close(host: AnyHost) -> None:
    """Close the host; one whose calls hang must not keep the daemon (and with it the home) for ever."""
    closer = threading.Thread(target=host.close, name="sandbox-close", daemon=True)
    closer.start()
    closer.join(CLOSE_SECONDS)
    if closer.is_alive():
        LOG.error("the host did not close in %g s", CLOSE_SECONDS)


def _log_event(event: SandboxEvent) -> None:
    LOG.warning("%s: %s %s", event.kind, event.box, event.detail)


def _tell_systemd() -> None:
    """Say that calls are answered now, where systemd has started this process: sd_notify(3)."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if address:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as line, contextlib.suppress(OSError):
            line.connect("\0" + address[1:] if address[0] == "@" else address)
            line.send(b"READY=1")


@contextlib.contextmanager
def http_serving(service: RpcService, keys: Keys, host: str, port: int) -> Iterator[str]:
    """Answer at this URL, within the block. The token is the secret of ``keys``."""
    import uvicorn

    from windtunnel.base.web import WebServer, listen

    listener = listen("serve", host.strip("[]"), port)
    files = keys.tls.paths if keys.tls is not None else (None, None)
    server = WebServer(
        uvicorn.Config(
            application(service, keys.secret), http="h11", lifespan="off", access_log=False,
            log_config=None, proxy_headers=False, server_header=False,
            timeout_graceful_shutdown=GRACE_SECONDS, ssl_certfile=files[0], ssl_keyfile=files[1],
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
    """The route of HTTP, for who knows the token."""
    from starlette.applications import Starlette
    from starlette.responses import JSONResponse
    from starlette.routing import Route

    expected, threads = b"Bearer " + token, ThreadPoolExecutor(HTTP_CALLS, thread_name_prefix="sandbox-http")

    def perform(message: Message) -> tuple[Message, bytes]:
        with service.at_work():
            return service.perform(message)

    def refused(status: int, sentence: str) -> JSONResponse:
        return JSONResponse({"error": "UserError", "text": f"sandbox: {sentence}"}, status)

    async def call(request: Request) -> JSONResponse:
        if not hmac.compare_digest(request.headers.get("authorization", "").encode("latin-1"), expected):
            return refused(401, "the token is missing or wrong; send 'Authorization: Bearer TOKEN'")
        part, name = request.path_params["part"], request.path_params["method"]
        if part not in PARTS:
            return refused(404, f"part {part!r} is unknown; accepted are {', '.join(PARTS)}")
        try:
            body = json.loads(await request.body() or b"{}")
            on, arguments = body.get("on", ""), body.get("with", {})
            if not isinstance(on, str) or not isinstance(arguments, dict) or body.keys() - {"on", "with"}:
                raise ValueError
        except (ValueError, AttributeError):
            return refused(400, 'the body is not accepted; send {"on": NAME, "with": {ARGUMENT: VALUE, …}}')
        message = {"do": f"{PARTS[part].__name__}.{name}", "on": on, "with": arguments}
        answer, data = await asyncio.get_running_loop().run_in_executor(threads, perform, message)
        if data:
            answer = {"value": base64.b64encode(data).decode()}
        return JSONResponse(answer, STATUS.get(answer["error"], 500) if "error" in answer else 200)

    return Starlette(routes=[Route("/v1/{part}/{method}", call, methods=["POST"])])


def end(status: int) -> None:
    """Leave at once: a thread that hangs in the kernel would keep the process from ending."""
    logging.shutdown()
    os._exit(status)


def main() -> None:
    """The daemon of ``--home HOME``, started in passing; its words go to the home's ``daemon.log``."""
    session_first()  # its threads store what agents wait for
    try:
        run(Path(sys.argv[2]), idle_seconds=IDLE_SECONDS)
    except UserError as error:
        print(f"windtunnel: {error}", file=sys.stderr, flush=True)
        end(2)
    end(0)


if __name__ == "__main__":
    main()
