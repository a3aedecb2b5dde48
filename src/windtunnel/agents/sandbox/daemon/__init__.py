"""Where the process that holds the sandboxes of a home answers, and how it is started when none runs.

It is started once, however many ask at the same time: who asks takes a lock on the home, looks again, and
starts one in a session of its own, with its words in ``daemon.log``; the others find it running when they get
the lock.
"""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from windtunnel.agents.sandbox.errors import IncompleteError, SandboxDied, SandboxError
from windtunnel.agents.sandbox.place import LOCK, default_home
from windtunnel.base import wire
from windtunnel.base.errors import HostError, UserError

if TYPE_CHECKING:
    from windtunnel.base.keys import Keys


ERRORS = (SandboxDied, IncompleteError, SandboxError, HostError)
"""What travels as what it is, the narrowest first."""
Tls = Sequence[str] | None
"""Files: a certificate, its key, the CA of both sides."""
LONGEST = 107
"""Bytes that the kernel accepts as the path of a Unix socket."""
COMMAND: tuple[str, ...] = (sys.executable, "-m", "windtunnel.agents.sandbox.daemon.server")
LOG = "daemon.log"
READY_SECONDS = 60.0
"""A daemon takes over the sandboxes of its home before it answers."""
GONE_SECONDS = 150.0


@dataclass(frozen=True)
class Address:
    """``home``: the folder whose daemon is meant; None for one that is reached over TCP. ``address``: as
    `windtunnel.base.calls` has it."""

    home: Path | None
    address: str
    keys: Keys | None = field(default=None, repr=False)


def socket_of(home: Path) -> Path:
    """The Unix socket of a home; UserError where its path is too long for the kernel."""
    path = home / "daemon.sock"
    if len(os.fsencode(path)) > LONGEST:
        raise UserError(
            f"sandbox: home {home} is too long: the path of its socket has {len(os.fsencode(path))} bytes, "
            f"at most {LONGEST} are possible"
        )
    return path


def address(where: str | os.PathLike[str] | None, token: str | None = None, tls: Tls = None) -> Address:
    """What ``where`` means: None is ``$WINDTUNNEL_SANDBOX_URL`` or else the default home.

    The token comes from the argument or ``$WINDTUNNEL_SANDBOX_TOKEN``.
    """
    if where is None:
        where = os.environ.get("WINDTUNNEL_SANDBOX_URL") or default_home()
    if not (isinstance(where, str) and "://" in where):
        home = Path(where).absolute()
        return Address(home, f"unix:{socket_of(home)}")
    host, port = host_and_port(where.partition("://")[2].rstrip("/"))
    if not where.startswith("tcp://") or not host:
        raise UserError(f"sandbox: URL {where!r} is not accepted; use tcp://HOST:PORT")
    keys = keys_of(token or os.environ.get("WINDTUNNEL_SANDBOX_TOKEN", ""), tls)
    if keys is None:
        raise UserError(f"sandbox: {where} needs a token; set WINDTUNNEL_SANDBOX_TOKEN or give one")
    if tls is None:
        refuse_open(host, where)
    return Address(None, f"tcp:{host}:{port}", keys)


def keys_of(token: str, tls: Tls) -> Keys | None:
    """What proves a peer by ``token``; None without one. Raises UserError: it is not one that an HTTP header
    could hold, or the files of ``tls`` cannot be used."""
    from windtunnel.base.keys import Keys
    from windtunnel.base.tls import Certificates

    if not token.isascii() or not token.isprintable() or " " in token:
        raise UserError("sandbox: the token must be ASCII without spaces")
    certificates = Certificates.load(tls) if tls else None
    if certificates is not None:
        certificates.verify()
    return Keys(token.encode(), certificates) if token else None


def host_and_port(text: str) -> tuple[str, int]:
    """Of ``HOST:PORT``; an empty host where it is none."""
    host, _, port = text.rpartition(":")
    return (host, int(port)) if port.isdecimal() and int(port) < 65536 else ("", 0)


def refuse_open(host: str, what: str) -> None:
    """Raises UserError unless only this machine reaches ``host``: what travels there is not encrypted."""
    from ipaddress import ip_address

    try:
        own = ip_address(host.strip("[]")).is_loopback
    except ValueError:
        own = host.lower() == "localhost"
    if not own:
        raise UserError(
            f"sandbox: {what} is reached from other machines, which is accepted only with "
            "--tls-cert, --tls-key and --tls-ca"
        )


def answers(home: Path) -> bool:
    """Whether a daemon accepts connections on the socket of ``home``."""
    try:
        wire.connect(f"unix:{socket_of(home)}", 5.0).close()
    except OSError:
        return False
    return True


def ensure(home: Path) -> None:
    """Make sure that a daemon of ``home`` runs.

    Raises SandboxError, with the end of the daemon's log, when it ends at once or does not answer in time.
    """
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
        if not answers(home):
            _start(home)
    finally:
        os.close(lock)


def wait_gone(home: Path) -> None:
    """Wait until no daemon holds ``home``: one that was told to end first finishes what is under way.

    Raises SandboxError when it is still there after `GONE_SECONDS`.
    """
    deadline = time.monotonic() + GONE_SECONDS
    with (home / LOCK).open("ab") as lock:  # a daemon of an earlier version may have had another
        while time.monotonic() < deadline:
            try:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except OSError:
                time.sleep(0.02)
            else:
                return
    raise SandboxError(
        f"sandbox: the daemon of home {home} has not ended after {GONE_SECONDS:g} s; see {home / LOG}"
    )


def _start(home: Path) -> None:
    log = home / LOG
    with log.open("ab") as words:
        log.chmod(0o600)
        begin = words.tell()
        process = subprocess.Popen(
            [*COMMAND, "--home", str(home)],
            stdin=subprocess.DEVNULL,
            stdout=words,
            stderr=words,
            cwd="/",
            start_new_session=True,
        )
    deadline = time.monotonic() + READY_SECONDS
    while not answers(home):
        if process.poll() is not None:
            raise _failed(log, begin, process.returncode)
        if time.monotonic() > deadline:
            process.terminate()
            raise SandboxError(f"sandbox: the daemon did not answer within {READY_SECONDS:g} s; see {log}")
        time.sleep(0.02)


def _failed(log: Path, begin: int, status: int) -> Exception:
    """What the daemon said last: its own sentence for the user, or that it failed."""
    with log.open("rb") as words:
        words.seek(begin)
        output = words.read().decode(errors="replace").strip()
    last = output.splitlines()[-1] if output else "it said nothing"
    if status == 2:
        return UserError(last.removeprefix("windtunnel: "))
    return SandboxError(f"sandbox: the daemon ended with status {status}: {last}; see {log}")
