"""Whether the process of a run still lives: by a lock in the run's folder, which the kernel takes from it.

The lock tells it wherever the folder is seen, also from another container of the same host, whose processes
have other numbers. Where the folder is not here, or its file system has no locks, the process is looked for
by its number and its beginning; of one on another host nothing can be said.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import platform
from pathlib import Path
from typing import Any

from windtunnel.base.processes import Identity

NAME = ".running"
_lock_files: dict[Path, int] = {}  # by folder, the open file that has the lock


def hold(folder: Path) -> None:
    """Take the lock of a run, until `release` or the end of this process."""
    with contextlib.suppress(OSError):
        if folder in _lock_files:
            return
        file = os.open(folder / NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:  # a file system without locks
            os.close(file)
            (folder / NAME).unlink()
            raise
        _lock_files[folder] = file


def release(folder: Path) -> None:
    """The run has ended."""
    file = _lock_files.pop(folder, None)
    if file is not None:
        with contextlib.suppress(OSError):
            (folder / NAME).unlink()
        os.close(file)


def is_gone(process: dict[str, Any], folder: Path) -> bool:
    """Whether the process of the run surely does not live any more."""
    try:
        file = os.open(folder / NAME, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        if process.get("host") != platform.node():
            return False
        identity = Identity(process.get("pid", 0), process.get("started", 0), process.get("boot", "?"))
        return not identity.lives()
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    finally:
        os.close(file)
    return True
