"""The daemon's life: its home, where it listens, its signals, and its end.

One daemon for a home: it holds the home's lock, which the kernel frees when it dies, so a socket that is left
over can be told from one that is in use. It ends on SIGTERM, on request, or, if it was started in passing,
when there has been no sandbox and no call for a while. The sandboxes run on in each case, and the next
daemon takes them over.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import select
import signal
import socket
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from windtunnel import __version__
from windtunnel.agents.sandbox.daemon import ERRORS, answers, refuse_open, socket_of
from windtunnel.agents.sandbox.errors import SandboxError
from windtunnel.agents.sandbox.model import SandboxEvent
from windtunnel.agents.sandbox.place import Home, checked_name
from windtunnel.agents.sandbox.protocol import AnyDaemon, AnyHost, AnySandbox, DaemonHealth, PendingTurn
from windtunnel.base.errors import UserError, WindtunnelError
from windtunnel.base.keys import SHORTEST, Keys
from windtunnel.base.rpc import RpcServer, RpcService
from windtunnel.base.tls import OPTIONS
from windtunnel.linux.processes import session_first

LOG = logging.getLogger("windtunnel.sandbox.daemon")
KEPT_TURNS = 1024
IDLE_SECONDS = 300.0
"""After which a daemon that was started in passing ends, unused."""
TAKEOVER_SECONDS = 30.0
"""How long a daemon that is just ending is waited for."""
GRACE_SECONDS = 10.0
"""How long calls may go on after the daemon is told to end, before they are cancelled."""
CLOSE_SECONDS = 120.0
"""How long checkpoints under way may take when the daemon ends."""
Place = tuple[str, int]


def check(option: str, where: Place, keys: Keys | None) -> None:
    """Raises UserError: it would be without a token, with one that can be guessed by who hears the proof of
    it, or open to other machines."""
    if keys is None:
        raise UserError(
            f"sandbox serve: {option} needs a token; give --token FILE or set WINDTUNNEL_SANDBOX_TOKEN"
        )
    if len(keys.secret) < SHORTEST:
        raise UserError(f"serve: the token has {len(keys.secret)} bytes; at least {SHORTEST} are accepted")
    if keys.tls is None:
        refuse_open(where[0], f"{option} {where[0]}")


@dataclass
class Daemon:
    """Itself, as `AnyDaemon`; and the objects that calls are about."""

    host: AnyHost
    home: Path
    stop: Callable[[], object]
    _turns: dict[str, PendingTurn] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def health(self) -> DaemonHealth:
        return DaemonHealth(os.getpid(), str(self.home), __version__)

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
    at: BaseException | None = error
    while at is not None:
        if isinstance(at, OSError) and at.errno in (errno.ENOSPC, errno.EDQUOT):
            return SandboxError(f"{error}; the disk is full: 'windtunnel sandbox gc' frees what can go")
        at = at.__cause__
    if isinstance(error, WindtunnelError | OSError):
        return error
    LOG.error("a call failed unexpectedly", exc_info=error)
    return SandboxError(f"sandbox: unexpected {type(error).__name__}: {error}")


def run(
    home: Path, *, keys: Keys | None = None, tcp: Place | None = None, http: Place | None = None,
    idle_seconds: float | None = None, ready: Callable[[str], None] = lambda where: None,
) -> None:  # fmt: skip
    """Be the daemon of ``home`` until told to end. Raises UserError where another one is.

    ``tcp``, ``http``: where else it answers (port 0: any that is free), to whoever knows ``keys``. ``ready``
    is told each address as soon as it answers.
    """
    for option, where in (("--tcp", tcp), ("--http", http)):
        if where is not None:
            check(option, where, keys)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    with contextlib.ExitStack() as stack:
        host = open_host(home, _log_event, stack.enter_context(home_lock(home)))
        stack.callback(_close, host)
        stopping, telling = socket.socketpair()
        telling.setblocking(False)
        signal.set_wakeup_fd(telling.fileno())  # whichever thread the kernel gives it: this one waits
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: None)
        daemon = Daemon(host, home, lambda: telling.send(b"1"))
        protocols = (AnyDaemon, AnyHost, AnySandbox, PendingTurn)
        service = RpcService(protocols, daemon.find, daemon.refer, ERRORS, explained)
        servers = [RpcServer(service, f"unix:{socket_of(home)}")]
        stack.callback(socket_of(home).unlink, missing_ok=True)
        ready(str(socket_of(home)))
        if tcp is not None:
            servers.append(RpcServer(service, f"tcp:{tcp[0]}:{tcp[1]}", keys))
            ready(servers[-1].address.replace("tcp:", "tcp://", 1))
        if http is not None and keys is not None:
            from windtunnel.agents.sandbox.daemon.http import serving

            ready(stack.enter_context(serving(service, keys, *http)))
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


@contextlib.contextmanager
def home_lock(home: Path) -> Iterator[IO[str]]:
    """Be the daemon of ``home`` within the block, with its lock. Raises UserError where another process has
    that, and does not end."""
    socket_of(home)
    home.mkdir(parents=True, exist_ok=True, mode=0o700)
    deadline = time.monotonic() + TAKEOVER_SECONDS
    while True:
        try:
            lock = Home(home).lock()
            break
        except UserError:
            if answers(home) or time.monotonic() > deadline:
                raise
            time.sleep(0.05)
    with lock:
        yield lock


def _close(host: AnyHost) -> None:
    """Close the host; one whose calls hang must not keep the daemon (and with it the home) for ever."""
    closer = threading.Thread(target=host.close, name="sandbox-close", daemon=True)
    closer.start()
    closer.join(CLOSE_SECONDS)
    if closer.is_alive():
        LOG.error("the host did not close in %g s", CLOSE_SECONDS)


def _log_event(event: SandboxEvent) -> None:
    if event.kind in ("failed", "weaker", "died"):
        LOG.warning("%s: %s %s", event.kind, event.box, event.detail)


def _tell_systemd() -> None:
    """Say that calls are answered now, where systemd has started this process: sd_notify(3)."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if address:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as line, contextlib.suppress(OSError):
            line.connect("\0" + address[1:] if address[0] == "@" else address)
            line.send(b"READY=1")


def end(status: int) -> None:
    """Leave at once: a thread that hangs in the kernel would keep the process from ending."""
    logging.shutdown()
    os._exit(status)


UNIT = """\
[Unit]
Description=windtunnel sandboxes of {home}
After=local-fs.target network.target
StartLimitIntervalSec=60
StartLimitBurst=5

[Service]
Type=notify
ExecStart={command}
Restart=on-failure
RestartSec=100ms
RestartPreventExitStatus=2
# the sandboxes outlive the daemon, in control groups of their own
KillMode=process
Delegate=yes
LimitNOFILE=65536
TimeoutStartSec=300
TimeoutStopSec=180

[Install]
WantedBy=multi-user.target
"""


def unit(home: Path, tls: Sequence[str], options: Sequence[str]) -> str:
    """The unit file of a daemon of ``home``, with the files of ``tls`` and ``options`` of ``serve``."""
    before = [word for pair in zip(OPTIONS, tls, strict=False) for word in pair]
    program = Path(sys.executable).with_name("windtunnel")
    command = [str(program), "sandbox", "--home", str(home), *before, "serve", *options]
    return UNIT.format(home=str(home).replace("%", "%%"), command=" ".join(map(_quoted, command)))


def _quoted(word: str) -> str:
    for plain, instead in (("\\", "\\\\"), ('"', '\\"'), ("%", "%%"), ("$", "$$")):
        word = word.replace(plain, instead)
    return f'"{word}"'


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
