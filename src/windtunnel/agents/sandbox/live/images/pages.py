"""Cut a folder of files into pages of 4096 bytes, and tell which of them are new.

The last page of a file is filled up with zeros; the size of the file, kept beside, cuts it again. So small
files are stored by the same means as memory. A page is addressed by 20 bytes of its SHA-256: a sandbox
chooses the bytes of its own memory, so a hash for which collisions can be made would let it exchange pages of
others; and processors of today hash 4 KiB by SHA-256 faster than by BLAKE2.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from windtunnel.agents.sandbox.live.images.fault import ImageError

PAGE = 4096
DIGEST = 20
WINDOW = 1024
"""Pages that are looked at together: bounds the memory that an image of any size needs."""

_SAMPLE = 64
_BLOCK = 64

Pages = NDArray[np.uint8]


def page_count(size: int) -> int:
    return -(-size // PAGE)


def files_in(folder: Path) -> list[tuple[str, int]]:
    """Names and sizes of the files of an image, sorted by name."""
    found = []
    with os.scandir(folder) as entries:
        for entry in entries:
            if not entry.is_file(follow_symlinks=False):
                raise ImageError(f"{entry.path} is no plain file, so it cannot be part of a process image")
            found.append((entry.name, entry.stat().st_size))
    return sorted(found)


def windows(path: Path, size: int) -> Iterator[tuple[int, Pages]]:
    """The pages of a file, some at a time: (number of the first, pages). The array is used again."""
    buffer = np.empty((min(WINDOW, page_count(size)), PAGE), np.uint8)
    flat = buffer.reshape(-1).data
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        for first in range(0, page_count(size), WINDOW):
            wanted = min(WINDOW * PAGE, size - first * PAGE)
            read_exactly(file, flat[:wanted], first * PAGE, str(path))
            count = page_count(wanted)
            flat[wanted : count * PAGE] = bytes(count * PAGE - wanted)
            yield first, buffer[:count]
    finally:
        os.close(file)


def read_exactly(file: int, into: memoryview, at: int, name: str) -> None:
    """Fill ``into`` from offset ``at``; ImageError when the file is shorter."""
    done = 0
    while done < len(into):
        count = os.preadv(file, [into[done:]], at + done)
        if count == 0:
            raise ImageError(
                f"{name} is cut short: {at + len(into)} bytes were expected, {at + done} are there"
            )
        done += count


def digests(pages: Pages) -> NDArray[np.uint8]:
    """The address of each page, one a row."""
    flat = pages.reshape(-1).data
    sha256 = hashlib.sha256
    whole = b"".join(
        [sha256(flat[at : at + PAGE], usedforsecurity=False).digest() for at in range(0, len(flat), PAGE)]
    )
    return np.frombuffer(whole, np.uint8).reshape(-1, 32)[:, :DIGEST].copy()


def zeros(pages: Pages) -> NDArray[np.bool_]:
    """Which pages hold nothing but zeros."""
    words = pages.view(np.uint64)
    found = np.logical_not(words[:, ::_SAMPLE].any(axis=1))
    likely = found.nonzero()[0]
    found[likely] = np.logical_not(words[likely].any(axis=1))
    return found


def differing(pages: Pages, others: Pages) -> NDArray[np.bool_]:
    """Which of the pages are not equal; in blocks, so that the intermediate result stays in the cache."""
    found = np.empty(len(pages), np.bool_)
    left, right = pages.view(np.uint64), others.view(np.uint64)
    for at in range(0, len(pages), _BLOCK):
        (left[at : at + _BLOCK] != right[at : at + _BLOCK]).any(axis=1, out=found[at : at + _BLOCK])
    return found
