"""What a host has on its disk once its processes have ended: checked, and as digests by path."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from mmap import PAGESIZE
from pathlib import Path

from windtunnel.base.errors import UserError
from windtunnel.data.files.live.area import FilesState, newest
from windtunnel.data.files.log import LogRing
from windtunnel.data.files.model import WRITE_MOST, Position


@dataclass(frozen=True)
class Contents:
    """``digests``: of the content of each file by its path ("" of a folder), up to ``position`` of the log.
    ``logged``: operations that only the log has. ``damage``: what does not fit, in words."""

    digests: dict[str, str]
    position: Position
    logged: int
    damage: tuple[str, ...]


def check(folder: Path) -> Contents:
    """Recover the state of the host in ``folder``, changing nothing.

    Raises:
        UserError: there is no host's folder.
    """
    path = folder / "ring"
    if not path.exists() or not (folder / "superblocks").exists():
        raise UserError(f"{folder}: no host of files was here; accepted is the folder of `files serve`")
    ring = LogRing(path, path.stat().st_size - PAGESIZE)  # the last page is the engine's own
    try:
        published = newest(folder)[1]
        state = FilesState.recovered(folder, ring)
    except (ValueError, KeyError, FileNotFoundError) as error:
        return Contents({}, Position(), 0, (f"the newest checkpoint is damaged: {error}",))
    finally:
        ring.close()
    digests = {name: "" if node.folder else _digest(state, name) for name, node in state.tree.nodes.items()}
    inodes = {str(node.inode) for node in state.tree.files()}
    damage = [f"inodes/{p.name} has no name" for p in (folder / "inodes").iterdir() if p.name not in inodes]
    return Contents(digests, state.tail, state.tail.sequence - published.sequence, tuple(damage))


def _digest(state: FilesState, path: str) -> str:
    total, offset = hashlib.blake2b(digest_size=16), 0
    while part := state.read(path, offset, WRITE_MOST):
        total.update(part)
        offset += len(part)
    return total.hexdigest()
