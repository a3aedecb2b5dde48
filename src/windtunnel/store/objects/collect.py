"""Remove chunks that nothing needs, beside writers that are at work.

A chunk may be needed by what is just being written: the writer found it there and did not write it again. So
a sweep goes about it in this order, and the writer in its own:

- sweep: mark all chunks that manifests name (also those of what is not complete); move the others to a folder
  of this sweep; mark again; move back what is named now; delete the rest;
- writer: write the chunks that are missing; publish the manifest; look whether all chunks are there, and
  write again those that are not.

If the manifest was published before the second mark, the chunk is moved back. Else the writer looks after it
was moved away, and writes it again. A reader meanwhile finds it in the folder. A sweep that was killed
leaves its folder behind; the next one begins by moving back what is needed of it.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable, Container, Iterable

from windtunnel.store.objects import chunks
from windtunnel.store.objects.files import Files, ObjectError

STALE = 86_400.0
"""Seconds after which an unfinished write is taken for abandoned."""


def sweep(files: Files, needed: Callable[[], Container[str]]) -> int:
    """Remove the chunks that are not ``needed``, which is asked anew for each mark; returns how many went."""
    for left in files.names(chunks.TRASH):
        _empty(files, left, needed)
    marked = needed()
    mine = secrets.token_hex(6)
    for folder in files.names(chunks.FOLDER):
        for name in files.names(f"{chunks.FOLDER}/{folder}"):
            if name not in marked:
                with contextlib.suppress(FileNotFoundError):
                    files.move(chunks.path(name), f"{chunks.TRASH}/{mine}/{name}")
    return _empty(files, mine, needed)


def scrub(files: Files, names: Iterable[str]) -> list[str]:
    """Read these chunks, and move damaged ones away, so that the next to need them writes them again.

    Returns what is damaged or missing, in words.
    """
    found = []
    for name in sorted(names):
        try:
            chunks.get(files, name)
        except ObjectError as error:
            found.append(str(error))
            with contextlib.suppress(FileNotFoundError):
                files.move(chunks.path(name), f"damaged/{name}")
    return found


def tidy(files: Files, *folders: str) -> None:
    """Remove what long abandoned writes left among the chunks, in ``folders``, and one level below."""
    for folder in (chunks.FOLDER, chunks.TRASH, *folders):
        for inside in ["", *files.names(folder)]:
            files.tidy(f"{folder}/{inside}".rstrip("/"), STALE)


def _empty(files: Files, folder: str, needed: Callable[[], Container[str]]) -> int:
    """Move back what of a folder of removed chunks is needed, remove the rest; returns how many went."""
    where = f"{chunks.TRASH}/{folder}"
    # In this order: what another sweep moves here after the marking is not touched.
    there = files.names(where)
    marked = needed() if there else ()
    removed = 0
    for name in there:
        if name in marked and files.size(chunks.path(name)) is None:
            with contextlib.suppress(FileNotFoundError):
                files.move(f"{where}/{name}", chunks.path(name))
            continue
        files.remove(f"{where}/{name}")
        removed += name not in marked
    files.settle()
    files.remove_empty(where)
    return removed
