"""Files from Python: the client of the hosts, which a lost primary does not stop.

    files = connect("demo")  # or FileClient(store, secret)
    files.perform(Kind.CREATE, "/a")
    files.write("/a", 0, b"content")
    files.sync()  # returns when as many hosts as hold the files have it on their disks

What was written and is not known to be on all disks is kept here, and sent again to the next primary: each
operation has a number, and is performed once.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from windtunnel.base.errors import UserError
from windtunnel.base.keys import Keys
from windtunnel.base.paths import home
from windtunnel.base.remote import Blocking
from windtunnel.data.files.live.membership import MembershipStore
from windtunnel.data.files.model import (
    ERRORS,
    WRITE_MOST,
    FilesError,
    FilesHost,
    NotPrimary,
    Operation,
    OperationKind,
    OperationResult,
    Stat,
    Status,
    TooFew,
)
from windtunnel.data.files.protocol import FileCalls

T = TypeVar("T")
TIMEOUT = 30.0
"""Seconds in which another primary must have come."""
KEPT = 64 << 20
"""Bytes of writes that are not synced, of which more are synced by themselves."""
_PAUSE = 0.05
_ENOUGH = 10.0  # seconds that an fsync waits for hosts to come back, where too few are left
_ANSWER = 3.0  # seconds after which a call is made again, of another primary if there is one


@dataclass
class PendingOperation:
    operation: Operation
    data: bytes
    sequence: int = 0


class FileClient:
    """``store``: URL of the membership. Threads may share it; their operations take turns.

    Every method raises OSError as the kernel would, and `FilesError`: no primary came in time, or fewer hosts
    are left than an fsync needs.
    """

    def __init__(
        self, store: str, secret: bytes, timeout: float = TIMEOUT, used: BinaryIO | None = None
    ) -> None:  # fmt: skip
        self._used = used  # what keeps the hosts of a demo, while it is open
        self._store, self._secret, self._timeout = MembershipStore(store), secret, timeout
        self._turn = threading.RLock()
        self._remote: Blocking | None = None
        self._pending: deque[PendingOperation] = deque()
        self._pending_bytes = 0  # bytes of what is pending
        self._client, self._request = secrets.randbits(63) | 1, 0

    def perform(
        self, kind: OperationKind, path: str, data: bytes = b"", *, offset: int = 0, target: str = ""
    ) -> OperationResult:  # fmt: skip
        """One operation. ``offset``: of a write (-1: at the end), or the size of a truncation."""
        with self._turn:
            self._request += 1
            number = Operation(kind, path, target, offset, time.time(), self._client, self._request)
            pending = PendingOperation(number, data)
            self._pending.append(pending)
            self._pending_bytes += len(data)
            try:
                done: OperationResult = self._call(lambda remote: remote.perform(number, data=data))
            except OSError:
                self._pending.remove(pending)
                self._pending_bytes -= len(data)
                raise
            pending.sequence = done.sequence
            self._forget(done.synced)
            if self._pending_bytes > KEPT:
                self.sync()
            return done

    def write(self, path: str, offset: int, data: bytes) -> int:
        """Write ``data``, at the end where ``offset`` is -1; returns where it began."""
        first = -1
        for at in range(0, len(data), WRITE_MOST):
            place = offset if offset < 0 else offset + at
            done = self.perform(OperationKind.WRITE, path, data[at : at + WRITE_MOST], offset=place)
            first = done.offset if first < 0 else first
        return first

    def sync(self) -> None:
        """All that was written is on the disks of all hosts that hold the files."""
        with self._turn:
            self._forget(self._call(lambda remote: remote.sync(0)))

    def read(self, path: str, offset: int, length: int) -> bytes:
        """Bytes of a file, less at its end."""
        parts = []
        while length > 0:
            call = partial(_read, path=path, offset=offset, length=min(length, WRITE_MOST))
            part: bytes = self._call(call)
            if not part:
                break
            parts.append(part)
            offset, length = offset + len(part), length - len(part)
        return b"".join(parts)

    def stat(self, path: str) -> Stat:
        status: Stat = self._call(lambda remote: remote.stat(path))
        return status

    def names(self, path: str) -> tuple[str, ...]:
        names: tuple[str, ...] = self._call(lambda remote: remote.names(path))
        return names

    def status(self) -> list[Status | str]:
        """Of all hosts of the chain; what went wrong for one that does not answer."""
        newest = self._store.newest()
        rows: list[Status | str] = []
        for host in newest.chain if newest is not None else ():
            try:
                with contextlib.closing(self._remote_of(host, 2.0)) as remote:
                    rows.append(remote.status())
            except (OSError, FilesError) as error:
                rows.append(f"{host.name}: {error or 'no answer'}")
        return rows

    def close(self) -> None:
        with self._turn:
            self._disconnect()
        if self._used is not None:
            self._used.close()

    def _call(self, call: Callable[[Any], T]) -> T:
        """Of the primary, or of the next one."""
        begun = time.monotonic()
        while True:
            with self._turn:
                try:
                    return call(self._connected())
                except TooFew:  # hosts may be on their way
                    if time.monotonic() - begun > min(_ENOUGH, self._timeout):
                        raise
                except (ConnectionError, TimeoutError, NotPrimary) as error:
                    self._disconnect()
                    if time.monotonic() - begun > self._timeout:
                        raise FilesError(f"no primary answers for {self._timeout:g} s: {error}") from error
            time.sleep(_PAUSE)

    def _connected(self) -> Blocking:
        if self._remote is None:
            newest = self._store.newest()
            if newest is None:
                raise NotPrimary("no host has come yet")
            self._remote = self._remote_of(newest.chain[0], _ANSWER)
            for pending in self._pending:
                done = self._remote.perform(pending.operation, data=pending.data)
                pending.sequence = done.sequence
        return self._remote

    def _remote_of(self, host: FilesHost, timeout: float) -> Blocking:
        return Blocking(FileCalls, host.server, keys=Keys(self._secret), errors=ERRORS, timeout=timeout)

    def _disconnect(self) -> None:
        if self._remote is not None:
            self._remote.close()
        self._remote = None

    def _forget(self, synced: int) -> None:
        while self._pending and 0 < self._pending[0].sequence <= synced:
            self._pending_bytes -= len(self._pending.popleft().data)


def _read(remote: Any, **arguments: Any) -> Any:
    return remote.read(**arguments)


def place(name: str) -> Path:
    """The folder of the files that this user calls ``name``."""
    return home() / "files" / name


def connect(name: str, timeout: float = TIMEOUT) -> FileClient:
    """The files that this user has served under ``name``; "demo": those of the last demo.

    Raises:
        UserError: there are none.
    """
    used = None
    if name == "demo":
        from windtunnel.data.files.live.demo import use

        used = use()
    try:
        access = json.loads((place(name) / "access.json").read_text())
    except OSError as error:
        raise UserError(
            f"lines://{name}: no files of that name are known; accepted are demo, and what was served by"
            " `windtunnel files serve --name NAME`"
        ) from error
    return FileClient(access["store"], Keys.read(Path(access["secret"]), "secret").secret, timeout, used)
