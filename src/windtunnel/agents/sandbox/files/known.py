"""What a file was called as an image, for as long as it is the same file.

To hash a tarball takes seconds for each gigabyte, and every `create --image` would do it again. A file is
taken for the same while its path, device, inode, size and both its times are: ctime moves with every change
and cannot be set back. Two changes within one tick of the clock that stamps files give the same times, so a
file that was changed less than ``TICK`` before it was looked at is not noted, and is looked at again the next
time: git's rule for its index (Documentation/technical/racy-git).
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from dataclasses import dataclass
from pathlib import Path

from windtunnel.base import atomic

TICK = 2.0
"""Seconds: the coarsest stamps that file systems have (FAT's), and more than clocks of this host differ."""
MOST = 256
"""Files that are remembered; the oldest notes go first."""

Stamp = tuple[int, ...]


@dataclass(frozen=True)
class Look:
    """A file as it was at a ``moment`` (seconds since the epoch), before its bytes were read by ``how``."""

    path: Path
    how: str
    stamp: Stamp
    moment: float

    def changed(self) -> bool:
        return _stamp(self.path) != self.stamp


def look(path: Path, how: str) -> Look | None:
    """``path`` as it is now; None where it cannot be seen."""
    moment = time.time()
    stamp = _stamp(path)
    return None if stamp is None else Look(path, how, stamp, moment)


def _stamp(path: Path) -> Stamp | None:
    try:
        seen = os.stat(path)
    except OSError:
        return None
    return seen.st_dev, seen.st_ino, seen.st_size, seen.st_mtime_ns, seen.st_ctime_ns


class Known:
    """The notes in ``file``. One that is damaged or cannot be written costs time, and nothing else."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def name(self, seen: Look) -> str | None:
        """What the file was called, if it is still the same."""
        stamp, name = self._read().get(_key(seen), (None, None))
        return name if stamp == list(seen.stamp) else None

    def note(self, seen: Look, name: str) -> None:
        """What was read of it since that look gives it this name."""
        if seen.moment - seen.stamp[-1] / 1e9 <= TICK or seen.changed():
            return
        notes = self._read()
        notes.pop(_key(seen), None)
        notes[_key(seen)] = (list(seen.stamp), name)
        with contextlib.suppress(OSError):
            atomic.replace(self._file, json.dumps(dict(list(notes.items())[-MOST:])), mode=0o600)

    def _read(self) -> dict[str, tuple[list[int], str]]:
        try:
            return {
                key: (stamp, str(name)) for key, (stamp, name) in json.loads(self._file.read_text()).items()
            }
        except (OSError, ValueError, TypeError, AttributeError):
            return {}


def _key(seen: Look) -> str:
    return f"{seen.how}:{seen.path}"
