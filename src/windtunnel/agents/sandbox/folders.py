"""Folders in and out of a sandbox: files as they are, modes, and links as links."""

from __future__ import annotations

import os
import shlex
import stat
from collections.abc import Iterator
from pathlib import Path

from windtunnel.agents.sandbox.errors import LessError
from windtunnel.agents.sandbox.model import Lack
from windtunnel.agents.sandbox.protocol import AnySandbox
from windtunnel.base import atomic
from windtunnel.base.errors import UserError

AT_ONCE = 200
"""Folders or links that one command makes."""


def put_folder(box: AnySandbox, source: Path, target: str) -> None:
    """Copy the folder ``source`` of this machine to ``target``, with what it holds.

    Raises LessError, after all else is copied, where it holds what is neither file, folder nor link.
    """
    folders, links, lacks = [f"mkdir -p -- {shlex.quote(target)}"], [], []
    files: list[tuple[Path, str, int]] = []
    for entry in sorted(source.rglob("*")):
        inside = f"{target}/{entry.relative_to(source)}"
        mode = entry.lstat().st_mode
        if stat.S_ISLNK(mode):
            links.append(f"ln -sfn -- {shlex.quote(os.readlink(entry))} {shlex.quote(inside)}")
        elif stat.S_ISDIR(mode):
            folders.append(f"mkdir -p -m {mode & 0o777:o} -- {shlex.quote(inside)}")
        elif stat.S_ISREG(mode):
            files.append((entry, inside, mode & 0o777))
        else:
            lacks.append(Lack("files", str(entry), "it is neither file, folder nor link"))
    _run_all(box, folders)
    for file, inside, mode in files:
        with file.open("rb") as data:
            box.put(inside, data, mode)
    _run_all(box, links)
    _refuse(lacks, source)


def get_folder(box: AnySandbox, source: str, target: Path) -> None:
    """Copy the folder ``source`` of a sandbox to ``target`` on this machine, with what it holds. Raises as
    `put_folder` does."""
    target.mkdir(parents=True, exist_ok=True)
    lacks = []
    for entry in box.listdir(source):
        inside, here = f"{source.rstrip('/')}/{entry.name}", target / entry.name
        if entry.kind == "folder":
            get_folder(box, inside, here)
        elif entry.kind == "link":
            here.unlink(missing_ok=True)
            here.symlink_to(entry.target)
        elif entry.kind == "file":
            with atomic.replacing(here) as part, part.open("wb") as out:
                box.get_to(inside, out)
            here.chmod(entry.mode & 0o777)
        else:
            lacks.append(Lack("files", inside, "it is neither file, folder nor link"))
    _refuse(lacks, source)


def is_folder(box: AnySandbox, path: str) -> bool:
    """Whether that is a folder of the sandbox."""
    try:
        box.listdir(path)
    except (UserError, OSError):
        return False
    return True


def _run_all(box: AnySandbox, lines: list[str]) -> None:
    for part in _parts(lines):
        result = box.run(f"({'; '.join(['set -e', *part])})")
        if result.exit_code != 0:
            words = result.stderr.decode(errors="replace").strip() or result.note
            raise UserError(f"sandbox {box.name}: the folder cannot be made: {words}")


def _parts(lines: list[str]) -> Iterator[list[str]]:
    for at in range(0, len(lines), AT_ONCE):
        yield lines[at : at + AT_ONCE]


def _refuse(lacks: list[Lack], source: object) -> None:
    if lacks:
        raise LessError(f"not all of {source} is copied: {lacks[0]}", lacks)
