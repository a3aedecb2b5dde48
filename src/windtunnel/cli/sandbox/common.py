"""What the commands of ``windtunnel sandbox`` share: the connection, and how things are printed.

Tables are plain text: to import what draws nicer ones would double what a short command costs.
"""

from __future__ import annotations

import contextlib
import errno
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from windtunnel.base import units
from windtunnel.base.errors import HostError, UserError
from windtunnel.cli import common

if TYPE_CHECKING:
    from windtunnel.agents.sandbox.client import Client, RemoteBox

Name = Annotated[str, typer.Argument(metavar="NAME", help="The sandbox.")]


@dataclass(frozen=True)
class Place:
    """What the command line means: a home, or a URL (None: the default), and files for TLS."""

    where: str | None
    tls: tuple[str, ...]

    @property
    def home(self) -> Path | None:
        """The home; None where it is a URL."""
        from windtunnel.agents.sandbox.place import default_home

        where = self.where or ""
        return None if "://" in where else Path(where).absolute() if where else default_home()

    def need_home(self) -> Path:
        """The home; UserError where it is a URL."""
        if (home := self.home) is None:
            raise UserError(f"sandbox: this command needs a home of this host, not {self.where}; give --home")
        return home


def client(context: typer.Context, *, start: bool = True) -> Client:
    """The daemon that the command line means; it is started where none runs."""
    from windtunnel.agents.sandbox.client import Client
    from windtunnel.agents.sandbox.daemon import address

    place: Place = context.obj
    return Client(address(place.where, tls=place.tls or None), start=start)


def box(context: typer.Context, name: str) -> RemoteBox:
    """The sandbox of that name. Whether it exists is found out by the first call to it."""
    from windtunnel.agents.sandbox.client import RemoteBox

    return RemoteBox(client(context)._link, name)


def print_json(value: Any) -> None:
    common.print_json(value, indent=2)


@contextlib.contextmanager
def less_as_json(as_json: bool) -> Iterator[None]:
    """A LessError in the block: what there is all the same is printed, where JSON is asked for."""
    from windtunnel.agents.sandbox.errors import LessError

    try:
        yield
    except LessError as error:
        if as_json:
            print_json(error.manifest or error.report)
        raise


def printable(text: str) -> str:
    """What a sandbox named, without what a terminal would obey."""
    return text if text.isprintable() else ascii(text)[1:-1]


def size(count: float) -> str:
    """Bytes at a scale that reads well."""
    return units.size(count, places=1, largest="GiB")


def moment(seconds: float) -> str:
    """When something happened, in local time."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


@contextlib.contextmanager
def file_errors(what: str, more: str = "") -> Iterator[None]:
    """What is wrong with a file of this machine, in a sentence: a full disk is a fault of the host."""
    try:
        yield
    except OSError as error:
        if error.errno is None:  # a time that ran out at the daemon
            raise
        kind = HostError if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EIO) else UserError
        raise kind(f"{what}: {error.strerror}{f'; {more}' if more else ''}") from error
