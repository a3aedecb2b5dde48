"""What a live layer had in common with its last snapshot: (inode, time of change) of every file.

Every write to a file, its attributes or its names moves ``ctime``, which no process can set back; so a
file whose inode and ``ctime`` are the ones noted holds what the snapshot holds.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

from windtunnel.base import atomic


@dataclass(frozen=True)
class Known:
    """``base``: the folder of the pool that holds the same files; ``files``: path -> (inode, ctime)."""

    base: str
    files: dict[str, tuple[int, int]]

    def has(self, path: str, about: os.stat_result) -> bool:
        return about.st_nlink == 1 and self.files.get(path) == version(about)


def version(about: os.stat_result) -> tuple[int, int]:
    return about.st_ino, about.st_ctime_ns


def load(tree: Path) -> Known:
    """The note of a live root; an absent or broken one says nothing, which is always true."""
    try:
        found = json.loads((tree / "known.json").read_text(encoding="utf-8", errors="surrogateescape"))
        return Known(found["base"], {path: (inode, time) for path, (inode, time) in found["files"].items()})
    except (OSError, ValueError, KeyError, TypeError):
        return Known("", {})


def save(tree: Path, known: Known) -> None:
    text = json.dumps({"base": known.base, "files": known.files})
    atomic.replace(tree / "known.json", text.encode(errors="surrogateescape"))
