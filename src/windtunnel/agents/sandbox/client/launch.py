"""Where a daemon answers, and how that of a home is started when none runs.

It is started once, however many ask at the same time: who asks takes a lock on the home, looks again, and
starts one in a session of its own, with its words in ``daemon.log``; the others find it running when they get
the lock.
"""

from __future__ import annotations

import fcntl
import os
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from windtunnel.agents.sandbox.errors import SandboxError
from windtunnel.agents.sandbox.place import default_home
from windtunnel.base.errors import UserError

SOCKET = "daemon.sock"
LONGEST = 107
"""Bytes that the kernel accepts as the path of a Unix socket."""
COMMAND: tuple[str, ...] = (sys.executable, "-m", "windtunnel.agents.sandbox.daemon.server")
LOG = "daemon.log"
READY_SECONDS = 60.0
"""A daemon takes over the sandboxes of its home before it answers."""


@dataclass(frozen=True)
class Address:
    """``home``: the folder whose daemon is meant; None for one that is reached over HTTP at ``url``."""

    home: Path | None
    url: str
    token: str = field(default="", repr=False)

    @property
    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.token}"} if self.token else {}


def socket_of(home: Path) -> Path:
    """The Unix socket of a home; UserError where its path is too long for the kernel."""
    path = home / SOCKET
    if len(os.fsencode(path)) > LONGEST:
        raise UserError(
            f"sandbox: home {home} is too long: the path of its socket has {len(os.fsencode(path))} bytes, "
            f"at most {LONGEST} are possible"
        )
    return path


def address(where: str | os.PathLike[str] | None, token: str | None = None) -> Address:
    """What ``where`` means: None is ``$WINDTUNNEL_SANDBOX_URL`` or else the default home.

    The token comes from the argument or ``$WINDTUNNEL_SANDBOX_TOKEN``.
    """
    if where is None:
        where = os.environ.get("WINDTUNNEL_SANDBOX_URL") or default_home()
    if isinstance(where, str) and "://" in where:
        scheme = where.split("://", 1)[0]
        if scheme not in ("http", "https"):
            raise UserError(
                f"sandbox: URL {where!r} has scheme {scheme!r}; use http://HOST:PORT or https://…"
            )
        given = token or os.environ.get("WINDTUNNEL_SANDBOX_TOKEN", "")
        if not given:
            raise UserError(f"sandbox: {where} needs a token; set WINDTUNNEL_SANDBOX_TOKEN or give one")
        if not given.isascii() or not given.isprintable() or " " in given:
            raise UserError(f"sandbox: the token for {where} must be ASCII without spaces")
        return Address(None, where.rstrip("/"), given)
    return Address(Path(where).absolute(), "http://sandbox")


def answers(home: Path) -> bool:
    """Whether a daemon accepts connections on the socket of ``home``."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(5)
        try:
            probe.connect(str(socket_of(home)))
        except OSError:
            return False
        return True


def ensure(home: Path, *, command: Sequence[str] | None = None, seconds: float = READY_SECONDS) -> bool:
    """Make sure that a daemon of ``home`` runs; True when this call started it.

    Raises SandboxError, with the end of the daemon's log, when it ends at once or does not answer in time.
    """
    if answers(home):
        return False
    try:
        home.mkdir(parents=True, exist_ok=True, mode=0o700)
        lock = os.open(home / "daemon.start", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise UserError(
            f"sandbox: home {home} cannot be used: {error.strerror}; "
            "set WINDTUNNEL_SANDBOX_HOME to a folder that you may write"
        ) from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if answers(home):
            return False
        _start(home, command or COMMAND, seconds)
        return True
    finally:
        os.close(lock)


def wait_gone(home: Path, seconds: float = 150.0) -> None:
    """Wait until no daemon holds ``home``: one that was told to end first finishes what is under way.

    Raises SandboxError when it is still there after ``seconds``.
    """
    deadline = time.monotonic() + seconds
    with (home / "daemon.lock").open("rb") as lock:
        while time.monotonic() < deadline:
            try:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except OSError:
                time.sleep(0.02)
            else:
                return
    raise SandboxError(
        f"sandbox: the daemon of home {home} has not ended after {seconds:g} s; see {home / LOG}"
    )


def _start(home: Path, command: Sequence[str], seconds: float) -> None:
    log = home / LOG
    with log.open("ab") as words:
        log.chmod(0o600)
        begin = words.tell()
        process = subprocess.Popen(
            [*command, "--home", str(home)],
            stdin=subprocess.DEVNULL,
            stdout=words,
            stderr=words,
            cwd="/",
            start_new_session=True,
        )
    deadline = time.monotonic() + seconds
    while not answers(home):
        if process.poll() is not None:
            raise _failed(log, begin, process.returncode)
        if time.monotonic() > deadline:
            process.terminate()
            raise SandboxError(f"sandbox: the daemon did not answer within {seconds:g} s; see {log}")
        time.sleep(0.02)


def _failed(log: Path, begin: int, status: int) -> Exception:
    """What the daemon said last: its own sentence for the user, or that it failed."""
    with log.open("rb") as words:
        words.seek(begin)
        said = words.read().decode(errors="replace").strip()
    last = said.splitlines()[-1] if said else "it said nothing"
    if status == 2:
        return UserError(last.removeprefix("windtunnel: "))
    return SandboxError(f"sandbox: the daemon ended with status {status}: {last}; see {log}")
