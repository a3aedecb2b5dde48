"""How who waits for the database is woken: LISTEN and NOTIFY of Postgres, or datagrams beside SQLite's file.

A listener at a SQLite database has a Unix socket in the folder ``NAME-bell`` beside it; to ring is to send each
socket of a channel an empty datagram. One whose process is gone is removed by the next who rings. A ring that is
lost costs a wait until the listener looks by itself (its timeout), nothing else.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
import select
import socket
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from sqlalchemy import Engine, make_url
from sqlalchemy.exc import SQLAlchemyError

from windtunnel.store.transactions import DatabaseError

_COUNT = itertools.count()


def _name(channel: str) -> str:
    return "wt_" + hashlib.sha256(channel.encode()).hexdigest()[:24]


def _folder(engine: Engine) -> Path:
    database = make_url(str(engine.url)).database or ""
    return Path(f"{Path(database).absolute()}-bell")


def ring(engine: Engine, channels: Iterable[str]) -> None:
    """Wake whoever listens to any of ``channels``."""
    names = {_name(channel) for channel in channels}
    if engine.dialect.name != "sqlite":
        with contextlib.suppress(SQLAlchemyError), engine.connect() as connection:
            for name in sorted(names):
                connection.exec_driver_sql(f"NOTIFY {name}")
            connection.commit()
        return
    try:
        folder = os.open(_folder(engine), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:  # nobody has ever listened
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        sender.setblocking(False)
        for entry in os.listdir(folder):
            if entry.partition("@")[0] in names:
                try:
                    sender.sendto(b"", f"/proc/self/fd/{folder}/{entry}")  # a path of any length
                except ConnectionRefusedError:
                    with contextlib.suppress(OSError):
                        os.unlink(entry, dir_fd=folder)
                except OSError:  # full: it is awake; or just gone
                    pass
    os.close(folder)


class Listener:
    """Hears the rings of one channel; ``fileno`` is readable when there was one.

    Raises:
        DatabaseError: the database, or the folder beside it, cannot be used.
    """

    def __init__(self, engine: Engine, channel: str) -> None:
        self._socket: socket.socket | None = None
        try:
            if engine.dialect.name != "sqlite":
                import psycopg

                url = make_url(engine.url).set(drivername="postgresql").render_as_string(hide_password=False)
                self._server: Any = psycopg.connect(url, autocommit=True)
                self._server.execute(f"LISTEN {_name(channel)}")
                return
            folder = _folder(engine)
            folder.mkdir(exist_ok=True)
            self._path = folder / f"{_name(channel)}@{os.getpid()}.{next(_COUNT)}"
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
            opened = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
            self._path.unlink(missing_ok=True)
            self._socket.bind(f"/proc/self/fd/{opened}/{self._path.name}")
            os.close(opened)
        except Exception as error:  # psycopg's own kinds, and OSError
            raise DatabaseError(f"{engine.url.database}: nobody can wait for it ({str(error).splitlines()[0]})") from error

    def fileno(self) -> int:
        descriptor: int = self._server.fileno() if self._socket is None else self._socket.fileno()
        return descriptor

    def wait(self, timeout: float, others: Iterable[int] = ()) -> None:
        """Until somebody rings, one of the descriptors ``others`` is readable, or ``timeout`` seconds are over.

        Raises:
            DatabaseError: the server is gone.
        """
        poll = select.poll()
        for descriptor in (self.fileno(), *others):
            poll.register(descriptor, select.POLLIN)
        poll.poll(max(0.0, timeout) * 1000)
        if self._socket is None:
            try:
                for _ in self._server.notifies(timeout=0):
                    pass
            except Exception as error:
                raise DatabaseError(f"the server of Postgres is gone ({str(error).strip()})") from error
        else:
            with contextlib.suppress(BlockingIOError):
                while True:
                    self._socket.recv(1)

    def close(self) -> None:
        if self._socket is None:
            self._server.close()
        else:
            self._socket.close()
            self._path.unlink(missing_ok=True)
