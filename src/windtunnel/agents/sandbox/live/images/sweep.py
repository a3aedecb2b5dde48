"""Remove from the store what no image needs. The caller holds the lock alone."""

from __future__ import annotations

import contextlib
import os
import secrets
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from windtunnel.agents.sandbox.live.images.fault import ImageError
from windtunnel.agents.sandbox.live.images.packs import FRAME, ZERO, Recipe, compress, opened, tail
from windtunnel.agents.sandbox.live.images.pages import PAGE, Pages
from windtunnel.base.atomic import PART, sync_folder, write_all


def sweep(folder: Path) -> int:
    """Remove packs from which no image takes a page, and thin those of which less than half is needed.

    Raises ImageError, with nothing removed, when the recipe of an image cannot be read.
    """
    whole, used = _mark(folder)
    freed = 0
    thin: list[Path] = []
    for path in sorted(folder.iterdir()):
        if path.suffix == PART or (path.suffix == ".pack" and path.stem not in whole | used.keys()):
            freed += path.stat().st_size
            path.unlink()
        elif path.suffix == ".pack" and path.stem not in whole:
            thin.append(path)
    for path in thin:
        # a damaged pack is left as it is: what is still right in it can be read
        with contextlib.suppress(ImageError):
            freed += _thinned(path, np.unique(np.concatenate(used[path.stem])))
    sync_folder(folder)
    return freed


def _mark(folder: Path) -> tuple[set[str], dict[str, list[NDArray[np.uint32]]]]:
    """Packs that belong to an image, which takes all their pages; and the pages taken from the others."""
    whole: set[str] = set()
    used: dict[str, list[NDArray[np.uint32]]] = {}
    for path in sorted(folder.glob("*.image")):
        try:
            with opened(path) as pack:
                recipe = pack.recipe()
        except ImageError as error:
            raise ImageError(
                f"nothing is collected while an image that is needed is damaged: {error}"
            ) from None
        whole.add(recipe.packs[0])
        places = np.unique(recipe.places[recipe.places != ZERO])
        number = places >> np.uint64(32)
        for one, name in enumerate(recipe.packs[1:], 1):
            pages = places[number == one] & np.uint64(2**32 - 1)
            used.setdefault(name, []).append(pages.astype(np.uint32))
    return whole, used


def _thinned(path: Path, needed: NDArray[np.uint32]) -> int:
    """Replace a pack by one that holds only the pages ``needed``; returns bytes freed."""
    with opened(path) as pack:
        index = pack.index()
        if 2 * len(needed) > len(index.numbers):
            return 0
        pages = np.empty((len(needed), PAGE), np.uint8)
        sums = np.empty((len(needed), index.digests.shape[1]), np.uint8)
        for frame, which, rows in pack.frames_of(index, needed):
            pages[which] = pack.pages(index, frame, rows)
            sums[which] = index.digests[index.starts[frame] + rows]
        temporary = path.with_name(f"{path.stem}.{secrets.token_hex(4)}{PART}")
        try:
            _write(temporary, path.stem, pages, needed, sums)
            size = temporary.stat().st_size
            temporary.rename(path)
        except BaseException:
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise
        return pack.size - size


def _write(path: Path, name: str, pages: Pages, numbers: NDArray[np.uint32], sums: NDArray[np.uint8]) -> None:
    frames: list[tuple[int, int]] = []
    written = 0
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        for at in range(0, len(pages), FRAME):
            some = pages[at : at + FRAME]
            packed = compress(some.reshape(-1).data)
            write_all(file, packed)
            frames.append((len(packed), len(some)))
            written += len(packed)
        recipe = Recipe("", (), (name,), np.empty(0, np.uint64))
        write_all(file, tail(written, frames, numbers, sums.tobytes(), recipe))
        os.fsync(file)
    finally:
        os.close(file)
