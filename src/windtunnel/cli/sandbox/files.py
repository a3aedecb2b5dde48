"""``put`` and ``get``: files in and out of a sandbox."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from windtunnel.base import atomic
from windtunnel.base.errors import UserError
from windtunnel.cli.sandbox.common import Name, box

Inside = Annotated[str, typer.Argument(metavar="PATH", help="An absolute path inside the sandbox.")]


def add_to(app: typer.Typer) -> None:
    app.command()(put)
    app.command()(get)


def put(
    context: typer.Context,
    name: Name,
    source: Annotated[
        str, typer.Argument(metavar="FILE", help="A file of this machine; '-': standard input.")
    ],
    path: Inside,
    mode: Annotated[
        str | None, typer.Option(metavar="OCTAL", help="Such as 755; by default that of FILE.")
    ] = None,
) -> None:
    """Write a file into a sandbox. A PATH that ends with '/' is a folder."""
    found = box(context, name)
    if source == "-":
        found.put(path, sys.stdin.buffer, _mode(mode, 0o644))
        return
    file = Path(source).expanduser()
    if path.endswith("/"):
        path += file.name
    try:
        with file.open("rb") as data:
            found.put(path, data, _mode(mode, os.fstat(data.fileno()).st_mode & 0o777))
    except (FileNotFoundError, IsADirectoryError, PermissionError) as error:
        raise UserError(f"sandbox put: {file}: {error.strerror}; a regular file is needed") from error


def get(
    context: typer.Context,
    name: Name,
    path: Inside,
    target: Annotated[
        str, typer.Argument(metavar="[FILE]", help="A file or folder of this machine; '-': standard output.")
    ] = "-",
) -> None:
    """Read a file of a sandbox."""
    found = box(context, name)
    if target == "-":
        found.get_to(path, sys.stdout.buffer)
        sys.stdout.buffer.flush()
        return
    file = Path(target).expanduser()
    if file.is_dir():
        file = file / Path(path).name
    try:
        # a file that came only in part must not be taken for the whole one
        with atomic.replacing(file) as part, part.open("wb") as out:
            found.get_to(path, out)
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError, PermissionError) as error:
        raise UserError(f"sandbox get: {file}: {error.strerror}") from error


def _mode(text: str | None, default: int) -> int:
    if text is None:
        return default
    try:
        mode = int(text, 8)
    except ValueError:
        mode = -1
    if not 0 <= mode <= 0o7777:
        raise UserError(f"sandbox put: --mode {text!r} is not accepted; use octal digits such as 644 or 755")
    return mode
