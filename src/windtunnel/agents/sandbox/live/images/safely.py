"""Write files so that a crash leaves the old state or the new one, never a part of one."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
from pathlib import Path

from windtunnel.agents.sandbox.live.images.fault import ImageError

PART = ".part"
"""Ending of files that are being written: whoever finds one without its writer may remove it."""

_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,119}")


def checked_id(id: str) -> str:
    """``id``, or ImageError: it becomes the name of files."""
    if not _ID.fullmatch(id) or id.endswith(PART):
        raise ImageError(f"checkpoint id {id!r} cannot name a file")
    return id


def write_all(file: int, data: bytes | memoryview) -> None:
    """Write every byte; ``os.write`` may stop short, on a disk that is nearly full for one."""
    view = memoryview(data).cast("B")
    while view:
        view = view[os.write(file, view) :]


def sync_folder(folder: Path) -> None:
    """New names in ``folder`` are on the disk."""
    file = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def write_new(path: Path, data: bytes) -> None:
    """Create ``path`` with ``data``, whole and on the disk. FileExistsError when it is there already."""
    temporary = path.with_name(f"{path.name}.{secrets.token_hex(4)}{PART}")
    file = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        try:
            write_all(file, data)
            os.fsync(file)
        finally:
            os.close(file)
        # a link, unlike a rename, never replaces what another process has put there meanwhile
        os.link(temporary, path)
    finally:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
    sync_folder(path.parent)
