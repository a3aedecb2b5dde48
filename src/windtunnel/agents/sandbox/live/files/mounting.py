"""Make live roots visible at mount points of their own, and find those that nobody owns any more."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

from windtunnel.agents.sandbox.live.files.layout import Layout
from windtunnel.linux import mounts
from windtunnel.linux.system import locked

FLAGS = mounts.MS_NOATIME | mounts.MS_NODEV
"""No device files: an image may bring some, and they would reach this machine's devices. No access times:
reading must not count as a change."""


def visible(at: Layout, box: str, same: Callable[[Path], bool], attach: Callable[[Path], None]) -> Path:
    """The mount point of ``box``; ``attach`` mounts there unless ``same`` says that the right thing is."""
    point = at.mounts / box
    if _is_mounted(point) and same(point):
        return point
    with locked(at.mounts):
        if _is_mounted(point):
            if same(point):
                return point
            while mounts.unmount(point):
                pass
        if not mounts.at(at.mounts):
            # what is mounted below must not spread to other mount namespaces, and pivot_root(2) asks for it
            mounts.bind(at.mounts, at.mounts)
        point.mkdir(exist_ok=True)
        attach(point)
    return point


def hidden(at: Layout, box: str) -> None:
    point = at.mounts / box
    while mounts.unmount(point):
        pass
    try:
        point.rmdir()
    except FileNotFoundError:
        return


def _is_mounted(point: Path) -> bool:
    """Whether ``point`` is a mount of its own: cheaper than reading all mounts, and right for binds too."""
    try:
        return mounts.mount_id(point) != mounts.mount_id(point.parent)
    except FileNotFoundError:
        return False


def view(at: Layout, attach: Callable[[Path], None]) -> Path:
    """A mount point for a moment, named after this process; to be given to ``hidden`` by name."""
    name = f"view-{os.getpid()}-{time.monotonic_ns()}"
    return visible(at, name, lambda point: False, attach)


def stale(at: Layout, boxes: set[str]) -> list[Path]:
    """Mount points, mounted or not, of sandboxes that are not among ``boxes``, and of views of dead
    processes."""
    found = []
    for entry in sorted(os.scandir(at.mounts), key=lambda entry: entry.name):
        if entry.name.startswith("view-"):
            if not os.path.exists(f"/proc/{entry.name.split('-')[1]}"):
                found.append(Path(entry.path))
        elif entry.name not in boxes:
            found.append(Path(entry.path))
    return found


def hide_all(at: Layout) -> None:
    for name in os.listdir(at.mounts):
        hidden(at, name)
    while mounts.unmount(at.mounts):
        pass
