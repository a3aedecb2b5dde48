"""Which inotify watches are of files that have no name any more.

Such a file lives on while somebody has it open, and so does its watch; a restore makes the file anew and
takes its name away again, which ends the watch. The kernel tells of each watch its file's handle; opened by
it, the file says how many names it has.

Source: open_by_handle_at(2); Linux, fs/notify/fdinfo.c.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import struct
from collections.abc import Iterable, Mapping
from pathlib import Path

from windtunnel.agents.sandbox.inventory.descriptors import Described
from windtunnel.agents.sandbox.policy.standing import NAMELESS
from windtunnel.linux.mounts import table
from windtunnel.linux.system import checked, libc

FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def mark_nameless(have: Iterable[Described], init: int) -> None:
    """Add to the words of each descriptor which of its watches are of deleted files, for the sandbox whose
    first process is ``init``. One whose file system cannot be reached stays as it is."""
    watching = [of for of in have if of.watches]
    if not watching:
        return
    with contextlib.ExitStack() as stack:
        mounts: dict[int, int] = {}
        for each in table(Path(f"/proc/{init}/mountinfo")):
            if each.device not in mounts:
                with contextlib.suppress(OSError):
                    mount = os.open(f"/proc/{init}/root{each.point}", FOLDER)
                    stack.callback(os.close, mount)
                    mounts[each.device] = mount
        for of in watching:
            for number, watch in of.watches:
                fields = dict(word.split(":", 1) for word in watch.split()[1:] if ":" in word)
                if _nameless(fields, mounts):
                    of.words[number] = f"watch {watch.split()[0]} {NAMELESS}, {of.words[number]}"


def _nameless(watch: Mapping[str, str], mounts: Mapping[int, int]) -> bool:
    """``watch``: ``sdev``, ``fhandle-type`` and ``f_handle``, each in hexadecimal, and others."""
    with contextlib.suppress(OSError, KeyError, ValueError):
        handle = bytes.fromhex(watch["f_handle"])
        asked = struct.pack("=Ii", len(handle), int(watch["fhandle-type"], 16)) + handle
        mount = mounts[int(watch["sdev"], 16)]
        file = libc.open_by_handle_at(mount, ctypes.c_char_p(asked), os.O_PATH | os.O_CLOEXEC)
        checked(file, "open_by_handle_at")
        try:
            return os.fstat(file).st_nlink == 0
        finally:
            os.close(file)
    return False
