"""The daemon's life: its home, its sockets, who may ask over HTTP, its signals, and its end.

One daemon for a home: it holds a lock that the kernel frees when it dies, so a socket that is left over can
be told from one that is in use. It ends on SIGTERM, on request, or, if it was started in passing, when there
has been no sandbox and no request for a while. The sandboxes run on in each case, and the next daemon takes
them over.

Over HTTP may ask whoever knows the token, and only under a name that is this host's. The second check is
against DNS rebinding: a page in the user's browser can make a name of its own mean 127.0.0.1, but its
requests then carry that name in ``Host``.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import fcntl
import hmac
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from ipaddress import ip_address
from pathlib import Path

import uvicorn
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from windtunnel.agents.sandbox.client.launch import answers, socket_of
from windtunnel.agents.sandbox.daemon.app import build_app, counted
from windtunnel.agents.sandbox.daemon.service import LOG, Events, Service
from windtunnel.agents.sandbox.model import Event, Facility
from windtunnel.agents.sandbox.protocol import AnyHost
from windtunnel.base.errors import UserError
from windtunnel.base.web import Server
from windtunnel.linux.processes import session_first

TAKEOVER_SECONDS = 30.0
"""How long a daemon that is just ending is waited for."""
GRACE_SECONDS = 10.0
"""How long commands may go on after the daemon is told to end, before they are cancelled."""
CLOSE_SECONDS = 120.0
"""How long checkpoints under way may take when the daemon ends."""
OPEN = "/openapi.json"
"""What describes the interface holds no secret: it is there without the token."""


def run(
    home: Path,
    *,
    http: tuple[str, int] | None = None,
    token: str = "",
    allow_remote: bool = False,
    idle_seconds: float | None = None,
    ready: Callable[[str], None] = lambda where: None,
    open_host: Callable[[Path, Callable[[Event], None]], AnyHost] | None = None,
    doctor: Callable[[], list[Facility]] | None = None,
) -> None:
    """Be the daemon of ``home`` until told to end. Raises UserError where another one is.

    ``http``: also listen on this address and port (0: any free one), for whoever knows ``token``; loopback
    only, unless ``allow_remote``. ``ready`` is told each address as soon as it answers. ``open_host`` and
    ``doctor`` stand in for the real host and its report.
    """
    if http is not None and not token:
        raise UserError("serve: HTTP needs a token; give --token FILE or set WINDTUNNEL_SANDBOX_TOKEN")
    if http is not None and not allow_remote and not is_loopback(http[0]):
        raise UserError(
            f"serve: address {http[0]!r} can be reached from other machines, and the token would travel "
            "unencrypted; use 127.0.0.1, or say --allow-remote"
        )
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
    events = Events()
    with contextlib.ExitStack() as closing:
        closing.enter_context(held(home))
        host = (open_host or real_host)(home, events.publish)
        closing.callback(_closed, host)
        local = closing.enter_context(listening(home))
        remote = closing.enter_context(_tcp(*http)) if http is not None else None

        async def life() -> None:
            service = Service(host, home, events, doctor or real_doctor)
            events.attach(asyncio.get_running_loop())
            app = counted(build_app(service), service)
            servers = [(_server(app), local)]
            where = [str(socket_of(home))]
            if remote is not None and http is not None:
                servers.append((_server(guarded(app, token=token, host=http[0])), remote))
                where.append(_url(remote))
            for address in where:
                ready(address)
            tell_systemd()
            await _until_stopped(service, servers, idle_seconds)

        asyncio.run(life())


def tell_systemd() -> None:
    """Say that requests are answered now, where systemd has started this process: sd_notify(3)."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if address:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as line, contextlib.suppress(OSError):
            line.connect("\0" + address[1:] if address[0] == "@" else address)
            line.send(b"READY=1")


def _closed(host: AnyHost) -> None:
    """Close the host; one whose calls hang must not keep the daemon (and with it the home) for ever."""
    closer = threading.Thread(target=host.close, name="sandbox-close", daemon=True)
    closer.start()
    closer.join(CLOSE_SECONDS)
    if closer.is_alive():
        LOG.error("the host did not close in %g s", CLOSE_SECONDS)


def real_host(home: Path, on_event: Callable[[Event], None]) -> AnyHost:
    from windtunnel.agents.sandbox.host import Host

    return Host(home, on_event=on_event)


def real_doctor() -> list[Facility]:
    from windtunnel.agents.sandbox.criu import doctor

    return doctor()


def end(status: int) -> None:
    """Leave at once: a thread that hangs in the kernel would keep the process from ending."""
    logging.shutdown()
    os._exit(status)


@contextlib.contextmanager
def held(home: Path) -> Iterator[None]:
    """Be the daemon of ``home`` within the block. Raises UserError where another one is."""
    socket_of(home)
    home.mkdir(parents=True, exist_ok=True, mode=0o700)
    lock = os.open(home / "daemon.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        deadline = time.monotonic() + TAKEOVER_SECONDS
        while not _locked(lock):
            holder = os.pread(lock, 32, 0).decode(errors="replace").strip() or "unknown"
            if answers(home):
                raise UserError(
                    f"sandbox: a daemon of home {home} runs already (process {holder}); "
                    "'windtunnel sandbox down' ends it"
                )
            if time.monotonic() > deadline:
                raise UserError(f"sandbox: process {holder} holds home {home} but does not answer")
            time.sleep(0.05)
        os.ftruncate(lock, 0)
        os.pwrite(lock, str(os.getpid()).encode(), 0)
        yield
    finally:
        os.close(lock)


def guarded(app: ASGIApp, *, token: str, host: str) -> ASGIApp:
    """``app`` for a listener on ``host``: other names are refused, and all but the description needs
    ``token``."""
    expected = f"Bearer {token}".encode()

    async def checking(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        headers = dict(scope["headers"])
        name = headers.get(b"host", b"").decode("latin-1")
        given = headers.get(b"authorization", b"")
        answer = app
        if not named_here(name, host):
            answer = _denied(403, f"sandbox: host name {name!r} is not accepted here")
        elif scope["path"] != OPEN and not hmac.compare_digest(given, expected):
            answer = _denied(
                401, "sandbox: the token is missing or wrong; send 'Authorization: Bearer TOKEN'"
            )
        await answer(scope, receive, send)

    return checking


def _denied(status: int, sentence: str) -> ASGIApp:
    headers = {"WWW-Authenticate": "Bearer"} if status == 401 else None
    return JSONResponse({"error": sentence, "kind": "denied"}, status, headers=headers)


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


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches ``host``."""
    try:
        return ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host.lower() == "localhost"


async def _until_stopped(
    service: Service, servers: list[tuple[Server, socket.socket]], idle_seconds: float | None
) -> None:
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, service.stopping.set)
    idle = asyncio.create_task(_stop_when_idle(service, idle_seconds)) if idle_seconds else None
    running = [asyncio.create_task(server.serve(sockets=[listener])) for server, listener in servers]
    stopped = asyncio.create_task(service.stopping.wait())
    await asyncio.wait([stopped, *running], return_when=asyncio.FIRST_COMPLETED)
    service.stopping.set()
    LOG.info("ending; sandboxes run on")
    service.events.end()
    for server, _ in servers:
        server.should_exit = True
    if not await service.executions.finished(GRACE_SECONDS):
        service.executions.cancel_all()
        await service.executions.finished(GRACE_SECONDS)
    await asyncio.gather(*running)
    if idle is not None:
        idle.cancel()
    service.threads.close()


async def _stop_when_idle(service: Service, idle_seconds: float) -> None:
    """End a daemon that nobody needs: no sandbox, no request."""
    while not service.stopping.is_set():
        since = time.monotonic() - service.last
        if service.busy == 0 and since >= idle_seconds:
            if not await service.threads.call(service.names) and service.busy == 0:
                LOG.info("no sandbox and no request for %g s", idle_seconds)
                service.stopping.set()
                return
            since = 0.0
        await asyncio.sleep(min(max(idle_seconds - since, 0.05), 60.0))


def _server(app: ASGIApp) -> Server:
    return Server(
        uvicorn.Config(
            app,
            lifespan="off",
            access_log=False,
            log_config=None,
            proxy_headers=False,
            server_header=False,
            timeout_keep_alive=120,
            timeout_graceful_shutdown=int(2 * GRACE_SECONDS) + 5,
        )
    )


@contextlib.contextmanager
def listening(home: Path) -> Iterator[socket.socket]:
    """The listening Unix socket of ``home``, which only its owner reaches; one that was only left over is
    replaced."""
    path = socket_of(home)
    if answers(home):
        raise UserError(f"sandbox: a daemon answers on {path} already; 'windtunnel sandbox down' ends it")
    with _bound(path) as listener:
        inode = path.stat().st_ino
        try:
            yield listener
        finally:
            with contextlib.suppress(FileNotFoundError):
                if path.stat().st_ino == inode:
                    path.unlink()


def _bound(path: Path) -> socket.socket:
    path.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    before = os.umask(0o177)
    try:
        listener.bind(str(path))
        listener.listen(1024)
    except BaseException:
        listener.close()
        raise
    finally:
        os.umask(before)
    return listener


@contextlib.contextmanager
def _tcp(host: str, port: int) -> Iterator[socket.socket]:
    """A listening TCP socket."""
    bare = host.strip("[]")
    family = socket.AF_INET6 if ":" in bare else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((bare, port))
        except (OSError, OverflowError) as error:
            raise UserError(f"serve: cannot listen on {host}:{port}: {error}") from error
        listener.listen(1024)
        yield listener


def _url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _locked(lock: int) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def main() -> None:
    """The daemon as it is started in passing; its words go to the home's ``daemon.log``."""
    parser = argparse.ArgumentParser(prog="python -m windtunnel.agents.sandbox.daemon.server")
    parser.add_argument("--home", type=Path, required=True)
    parser.add_argument("--idle", type=float, default=300.0, help="end after so many seconds unused")
    given = parser.parse_args()
    session_first()  # its threads store what agents wait for
    try:
        run(given.home.absolute(), idle_seconds=given.idle)
    except UserError as error:
        print(f"windtunnel: {error}", file=sys.stderr, flush=True)
        end(2)
    end(0)


if __name__ == "__main__":
    main()
