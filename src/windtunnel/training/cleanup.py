"""Nothing of a run stays behind: neither processes nor files in memory, whatever was killed with SIGKILL.

Every process that a launcher starts carries the run's token in its environment, and so does what it starts in
turn; by it they are found in /proc, whoever is their parent by now. The folder of the run in memory has the
token for its name and says which process owns it; folders whose owner is gone are swept at the next start.
"""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path

from windtunnel.base.processes import Identity
from windtunnel.linux import processes

TOKEN = "WINDTUNNEL_LAUNCH"
MEMORY = Path("/dev/shm")
OWNER = "owner"


def claim(token: str) -> Path:
    """Make the folder in memory of the run ``token``, owned by this process."""
    folder = MEMORY / token
    folder.mkdir(mode=0o700)
    (folder / OWNER).write_text(f"{Identity.own()}\n")
    return folder


def sweep() -> list[str]:
    """Remove what runs left whose launcher is gone: their tokens."""
    swept = []
    for folder in MEMORY.glob("windtunnel-*"):
        with contextlib.suppress(OSError, ValueError):
            if not Identity.parse((folder / OWNER).read_text()).lives():
                kill_marked(folder.name)
                shutil.rmtree(folder, ignore_errors=True)
                swept.append(folder.name)
    return swept


def marked(token: str) -> list[int]:
    """Process ids of everything that carries ``token``, but for this process."""
    return processes.carrying(f"{TOKEN}={token}")


def kill_marked(token: str) -> int:
    """SIGKILL to everything that carries ``token``, until nothing does: how many there were."""
    return processes.kill_carrying(f"{TOKEN}={token}")
