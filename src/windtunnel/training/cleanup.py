"""Nothing of a run stays behind: neither processes nor files in memory, whatever was killed with SIGKILL.

Every process that a launcher starts carries the run's token in its environment, and so does what it starts in
turn; by it they are found in /proc, whoever is their parent by now. The folder of the run in memory has the
token for its name and says which processes own it: the launcher, and the agents, which outlive it for a
while. Folders whose owners are all gone are swept: by the fork server, which notices the last one's end, or
at the next start.
"""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path

from windtunnel.base.processes import Identity, add_owner, owned
from windtunnel.linux import network, processes

TOKEN = "WINDTUNNEL_LAUNCH"
MEMORY = Path("/dev/shm")
OWNER = "owner"


def claim(token: str) -> Path:
    """Make the folder in memory of the run ``token``, owned by this process."""
    folder = MEMORY / token
    folder.mkdir(mode=0o700)
    add_owner(folder / OWNER, Identity.own())
    return folder


def sweep() -> list[str]:
    """Remove what runs left of whom nobody is there any more, in memory and of networks: their tokens."""
    swept = []
    for folder in MEMORY.glob("windtunnel-*"):
        with contextlib.suppress(OSError, ValueError):
            if not owned(folder / OWNER):
                kill_marked(folder.name)
                shutil.rmtree(folder, ignore_errors=True)
                swept.append(folder.name)
    network.sweep()
    return swept


def marked(token: str) -> list[int]:
    """Process ids of everything that carries ``token``, but for this process."""
    return processes.carrying(f"{TOKEN}={token}")


def kill_marked(token: str) -> int:
    """SIGKILL to everything that carries ``token``, until nothing does: how many there were."""
    return processes.kill_carrying(f"{TOKEN}={token}")
