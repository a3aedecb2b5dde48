"""Overlay mounts, and what two layers over one image say about where their trees differ.

Features that make an upper folder mean more than it shows (renamed folders by reference, metadata without
data) are switched off: a layer can then be copied as it is.

Source: Documentation/filesystems/overlayfs.rst.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

from windtunnel.agents.sandbox.live.files import shared
from windtunnel.agents.sandbox.live.files.shared import Layout
from windtunnel.agents.sandbox.live.files.tree import remove
from windtunnel.linux import mounts

_PLAIN = "redirect_dir=nofollow,metacopy=off,index=off"


def mount(
    label: str, point: Path, lower: list[Path], upper: Path | None = None, work: Path | None = None
) -> None:
    """``lower`` from the top down; without ``upper`` the mount is read-only."""
    options = [_PLAIN, "lowerdir=" + ":".join(_escaped(path) for path in lower)]
    if upper is not None and work is not None:
        options += [f"upperdir={_escaped(upper)}", f"workdir={_escaped(work)}"]
    mounts.mount(label, point, "overlay", shared.FLAGS, ",".join(options))
    try:
        mounts.mount("none", point, flags=mounts.MS_PRIVATE)
    except OSError:
        mounts.unmount(point)
        raise


def _escaped(path: Path) -> str:
    text = str(path)
    for mark in ("\\", ":", ","):
        text = text.replace(mark, "\\" + mark)
    return text


def works(at: Layout) -> bool:
    """Whether an overlay with its upper folder in this pool can be mounted and written."""
    tried = at.trash / f"try-{os.getpid()}"
    remove(tried)
    lower, upper, work = (tried / name for name in ("lower", "upper", "work"))
    for folder in (lower, upper, work):
        folder.mkdir(parents=True)
    (lower / "file").touch()
    try:
        point = shared.view(at, lambda point: mount("windtunnel-try", point, [lower], upper, work))
        try:
            (point / "file").unlink()
            return stat.S_ISCHR(os.lstat(upper / "file").st_mode)
        finally:
            shared.hidden(at, point.name)
    except OSError:
        return False
    finally:
        remove(tried)


def touched(older: Path, newer: Path, untouched: Callable[[str], bool]) -> Iterator[tuple[str, bool]]:
    """Paths at which the trees of two layers over one image can differ, and whether all below may differ
    too."""
    pending = [""]
    while pending:
        below = pending.pop()
        for name in sorted({*_names(older, below), *_names(newer, below)}):
            inside = f"{below}/{name}"
            if untouched(inside):
                continue
            merged = all(_merges(f"{layer}{inside}") for layer in (older, newer))
            if merged:
                pending.append(inside)
            yield inside, not merged


def _names(layer: Path, below: str) -> list[str]:
    path = f"{layer}{below}"
    return os.listdir(path) if os.path.isdir(path) and not os.path.islink(path) else []


def _merges(path: str) -> bool:
    """Whether a layer leaves the image's entries below ``path`` as they are, but for those that it lists."""
    try:
        about = os.lstat(path)
    except OSError:
        # not in this layer: the image's own shows through, if nothing above hides it
        return True
    if not stat.S_ISDIR(about.st_mode):
        return False
    try:
        return os.getxattr(path, "trusted.overlay.opaque") not in (b"y", b"x")
    except OSError:
        return True
