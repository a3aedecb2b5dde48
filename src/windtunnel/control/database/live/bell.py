"""How who waits for the database is woken: LISTEN and NOTIFY of Postgres, or named pipes beside SQLite's
file.

A listener at SQLite reads a pipe in the folder ``FILE-bell``; to ring is to write a byte. A ring that is
lost, or that another listener of the channel took, costs a wait until this one looks by itself, nothing else.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import select
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from sqlalchemy import Engine
from sqlalchemy.exc import SQLAlchemyError

from windtunnel.store.transactions import DatabaseError


def _name(channel: str) -> str:
    return "wt_" + hashlib.sha256(channel.encode()).hexdigest()[:24]


def _pipe(engine: Engine, channel: str) -> Path:
    return Path(f"{Path(engine.url.database or '').absolute()}-bell", _name(channel))


def ring(engine: Engine, channels: Iterable[str]) -> None:
    """Wake who listens to ``channels``."""
    if engine.dialect.name != "sqlite":
        with contextlib.suppress(SQLAlchemyError), engine.begin() as connection:
            for channel in channels:
                connection.exec_driver_sql(f"NOTIFY {_name(channel)}")
        return
    for channel in channels:
        with contextlib.suppress(OSError):  # nobody listens, or the pipe is full of rings
            pipe = os.open(_pipe(engine, channel), os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            with contextlib.closing(os.fdopen(pipe, "wb", buffering=0)) as file:
                file.write(b"!")


class BellListener:
    """Hears the rings of one channel from when it is made until it is closed.

    Raises:
        DatabaseError: the database, or the folder beside it, cannot be used.
    """

    def __init__(self, engine: Engine, channel: str) -> None:
        self._engine, self._files = engine, contextlib.ExitStack()
        self._source: Any
        with self._named():
            if engine.dialect.name == "sqlite":
                path = _pipe(engine, channel)
                path.parent.mkdir(exist_ok=True)
                with contextlib.suppress(FileExistsError):
                    os.mkfifo(path)
                # for writing too: else it would be at its end whenever nobody rings
                self._source = self._files.enter_context(
                    os.fdopen(os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC), "rb", buffering=0)
                )
            else:
                connection = engine.raw_connection()
                self._source = connection.driver_connection
                self._files.callback(self._source.close)
                connection.detach()  # from the pool
                self._source.autocommit = True
                self._source.execute(f"LISTEN {_name(channel)}")

    def wait(self, timeout: float, stop: threading.Event, others: Iterable[int] = ()) -> bool:
        """Until somebody rings (then True), one of the descriptors ``others`` is readable, ``timeout``
        seconds are over, or ``stop`` is set.

        Raises:
            DatabaseError: the server is gone.
        """
        poll = select.poll()
        for descriptor in (self._source.fileno(), *others):
            poll.register(descriptor, select.POLLIN)
        end = time.monotonic() + timeout
        while not stop.is_set() and not poll.poll(max(0.0, min(0.2, end - time.monotonic())) * 1000):
            if time.monotonic() >= end:
                break
        with self._named():
            if self._engine.dialect.name == "sqlite":
                return bool(self._source.read(1 << 16))
            return bool(list(self._source.notifies(timeout=0)))

    @contextlib.contextmanager
    def _named(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # also the driver's own kinds
            why = str(error).strip().partition("\n")[0]
            raise DatabaseError(f"{self._engine.url.database}: nobody can wait for it ({why})") from error

    def close(self) -> None:
        self._files.close()
