"""Nothing of a run stays behind: neither processes nor files in memory, whatever was killed with SIGKILL.

Every process that a launcher starts carries the run's token in its environment, and so does what it starts in
turn; by it they are found in /proc, whoever is their parent by now. The folder of the run in memory has the
token for its name and says which process owns it; folders whose owner is gone are swept at the next start.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import time
from pathlib import Path

from windtunnel.base.processes import start_time

TOKEN = "WINDTUNNEL_LAUNCH"
MEMORY = Path("/dev/shm")
OWNER = "owner"
_PR_SET_CHILD_SUBREAPER = 36


def adopt() -> None:
    """Become the parent of what our descendants leave behind, so that it can be waited for."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def claim(token: str) -> Path:
    """Make the folder in memory of the run ``token``, owned by this process."""
    folder = MEMORY / token
    folder.mkdir(mode=0o700)
    (folder / OWNER).write_text(f"{os.getpid()} {start_time(os.getpid())}\n")
    return folder


def sweep() -> list[str]:
    """Remove what runs left whose launcher is gone: their tokens."""
    swept = []
    for folder in MEMORY.glob("windtunnel-*"):
        with contextlib.suppress(OSError, ValueError):
            pid, began = (folder / OWNER).read_text().split()
            if str(start_time(int(pid))) != began:
                kill_marked(folder.name)
                shutil.rmtree(folder, ignore_errors=True)
                swept.append(folder.name)
    return swept


def marked(token: str) -> list[int]:
    """Process ids of everything that carries ``token``, but for this process."""
    wanted = f"{TOKEN}={token}".encode()
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit() and int(entry) != os.getpid():
            with contextlib.suppress(OSError):
                if wanted in Path(f"/proc/{entry}/environ").read_bytes().split(b"\0"):
                    found.append(int(entry))
    return found


def kill_marked(token: str, timeout: float = 5.0) -> int:
    """SIGKILL to everything that carries ``token``, until nothing does: how many there were."""
    killed: set[int] = set()
    last = time.monotonic() + timeout
    while time.monotonic() < last:
        found = marked(token)
        if not found:
            break
        for pid in found:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        killed.update(found)
        time.sleep(0.01)
    reap(killed)
    return len(killed)


def reap(pids: set[int]) -> set[int]:
    """Wait for those of ``pids`` that are ended children of ours: the ids of these."""
    reaped = set()
    for pid in pids:
        with contextlib.suppress(ChildProcessError):
            if os.waitpid(pid, os.WNOHANG)[0]:
                reaped.add(pid)
    return reaped
