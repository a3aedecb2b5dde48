"""What the commands of ``windtunnel sandbox`` share: options, the connection, and how things are printed.

Tables are plain text: to import what draws nicer ones would double what a short command costs.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from windtunnel.base import units
from windtunnel.base.errors import HostError, UserError
from windtunnel.base.plain import to_plain

if TYPE_CHECKING:
    from windtunnel.agents.sandbox.client import Client, RemoteBox
    from windtunnel.agents.sandbox.model import Lack

T = TypeVar("T")
Name = Annotated[str, typer.Argument(metavar="NAME", help="The sandbox.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON value instead of a table.")]


@dataclass(frozen=True)
class Place:
    """What the command line means: a home, or a URL (None: the default), and files for TLS."""

    where: str | None
    tls: tuple[str, ...]


def client(context: typer.Context, *, start: bool = True) -> Client:
    """The daemon that the command line means; it is started where none runs."""
    from windtunnel.agents.sandbox.client import Client
    from windtunnel.agents.sandbox.daemon.launch import address

    place: Place = context.obj
    return Client(address(place.where, tls=place.tls or None), start=start)


def box(context: typer.Context, name: str) -> RemoteBox:
    """The sandbox of that name. Whether it exists is found out by the first thing that is asked of it."""
    from windtunnel.agents.sandbox.client import RemoteBox

    return RemoteBox(client(context)._link, name)


def home_of(context: typer.Context) -> Path:
    """The home that the command line means; UserError where it means a URL."""
    from windtunnel.agents.sandbox.place import default_home

    where = context.obj.where or ""
    if "://" in where:
        raise UserError(f"sandbox: this command is about a home of this host, not about {where}; give --home")
    return Path(where).absolute() if where else default_home()


def print_json(value: Any) -> None:
    typer.echo(json.dumps(to_plain(value), indent=2, ensure_ascii=False))


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


def lacking(lacks: Sequence[Lack]) -> None:
    """What was not reached, one a line."""
    for lack in lacks:
        typer.echo(f"  lacks {lack.what}: {lack.why}")


def show_table(
    head: Sequence[str], rows: Iterable[Sequence[str]], right: Sequence[str] = (), title: str = ""
) -> None:
    """Columns as wide as what they hold, those of ``right`` with numbers."""
    cells = [head, *(tuple(map(printable, row)) for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    if title:
        typer.echo(f"\n{title}")
    for row in cells:
        padded = [
            cell.rjust(width) if name in right else cell.ljust(width)
            for name, cell, width in zip(head, row, widths, strict=True)
        ]
        typer.echo("  ".join(padded).rstrip())


def printable(text: str) -> str:
    """What a sandbox named, without what a terminal would obey."""
    return text if text.isprintable() else ascii(text)[1:-1]


def size(count: float) -> str:
    """Bytes at a scale that reads well."""
    return units.size(count, places=1, largest="GiB")


def moment(seconds: float) -> str:
    """When something happened, in local time."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


def amount(text: str, option: str, accepted: str, kind: Callable[[str], T]) -> T | None:
    """A number, read by ``kind``, or None for ``none``; whether it can be is the host's to say."""
    if text.lower() == "none":
        return None
    try:
        return kind(text)
    except ValueError as error:
        raise UserError(
            f"sandbox: {option} {text!r} is not accepted; give a number {accepted}, or 'none'"
        ) from error


def bytes_of(text: str) -> int:
    """``2G``, ``512M``, or a number of bytes."""
    return int(units.parse_quantity(text, "bytes of memory"))


def pairs(given: list[str], option: str) -> dict[str, str]:
    """``KEY=VALUE`` options as a mapping."""
    values = {}
    for text in given:
        key, equals, value = text.partition("=")
        if not key or not equals:
            raise UserError(f"sandbox create: {option} {text!r} is not accepted; write {option} KEY=VALUE")
        if key in values:
            raise UserError(f"sandbox create: {option} {key} is given twice")
        values[key] = value
    return values


@contextlib.contextmanager
def told_of_file(what: str, more: str = "") -> Iterator[None]:
    """What is wrong with a file of this machine, in a sentence: a full disk is a fault of the host."""
    try:
        yield
    except OSError as error:
        if error.errno is None:  # a time that ran out at the daemon
            raise
        kind = HostError if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EIO) else UserError
        raise kind(f"{what}: {error.strerror}{f'; {more}' if more else ''}") from error


def local_url(text: str) -> str:
    """A URL as it is; a path of this machine made absolute, since the daemon has another directory."""
    if not text.strip():
        raise UserError("sandbox: the URL is empty; give a folder, or a URL such as s3://bucket/path")
    return text if "://" in text else os.path.abspath(os.path.expanduser(text))
