"""What both kinds of pool do alike: import an image, and find what nobody refers to."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from windtunnel.agents.sandbox.live.files import mounting
from windtunnel.agents.sandbox.live.files.layout import Layout, abandoned, draft, faults, names
from windtunnel.agents.sandbox.live.files.source import look_at
from windtunnel.linux.system import locked


def imported(
    at: Layout,
    source: str,
    progress: Callable[[str], None] | None,
    make: Callable[[Path], None],
    publish: Callable[[Path, Path], None],
    remove: Callable[[Path], None],
) -> str:
    """Import ``source`` under its own name, whole or not at all; ``make`` makes the draft."""
    if source in names(at.images):
        return source
    found = look_at(source)
    with locked(at.images):
        if found.name in names(at.images):
            return found.name
        with faults(f"image {source!r} cannot be imported"), draft(at, found.name, make, remove) as made:
            made.chmod(0o755)
            found.fill(made, progress or (lambda text: None))
            publish(made, at.images / found.name)
    return found.name


def usage(at: Layout) -> tuple[int, int]:
    """Bytes of the pool's file system that are used, and all of them."""
    about = os.statvfs(at.folder)
    return (about.f_blocks - about.f_bfree) * about.f_frsize, about.f_blocks * about.f_frsize


def leftovers(at: Layout, boxes: set[str], snapshots: set[str] | None) -> list[str]:
    """In words, what nobody refers to."""
    with faults("leftovers of the pool cannot be listed"):
        return [words for _, words, _ in unclaimed(at, boxes, snapshots)]


def unclaimed(at: Layout, boxes: set[str], snapshots: set[str] | None) -> list[tuple[str, str, Path]]:
    """What nobody refers to: (kind, words, path). Kinds: mount, live, snapshot, draft."""
    found = []
    for point in mounting.stale(at, boxes):
        found.append(("mount", f"mount {point}", point))
    for name in names(at.live):
        if name not in boxes:
            found.append(("live", f"root of sandbox {name}", at.live / name))
    for name in names(at.snaps):
        if snapshots is not None and name not in snapshots:
            found.append(("snapshot", f"snapshot {name}", at.snaps / name))
    for path in abandoned(at):
        found.append(("draft", f"half-made or discarded {path.name}", path))
    return found


def collect(
    at: Layout,
    boxes: set[str],
    snapshots: set[str] | None,
    drop_box: Callable[[str], None],
    drop_snapshot: Callable[[str], None],
    remove: Callable[[Path], None],
) -> list[str]:
    """Remove what ``unclaimed`` finds; returns it in words."""
    removed = []
    with faults("leftovers of the pool cannot be removed"):
        for kind, words, path in unclaimed(at, boxes, snapshots):
            if kind == "mount":
                mounting.hidden(at, path.name)
            elif kind == "live":
                drop_box(path.name)
            elif kind == "snapshot":
                drop_snapshot(path.name)
            else:
                remove(path)
            removed.append(words)
    return removed
