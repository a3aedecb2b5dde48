"""The compiled program that runs before and within CRIU (source in ``program/``); as a module, builds it.

It starts CRIU where it has to run, is its action script in a restore, and stands in for the ``tar`` with
which CRIU keeps a tmpfs: a sandbox's /dev/shm is mostly empty, and a tar that packs nothing takes ten
milliseconds.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from windtunnel.agents.sandbox.machine import native
from windtunnel.base.native import Freestanding
from windtunnel.linux import cgroup, processes

STEPS = Freestanding(
    Path(__file__).parent / "program" / "main.c",
    "steps",
    "",
    native.FLAGS,
    "program beside CRIU",
    (native.PROGRAM.folder / "system.h",),
)


def starting(
    command: Sequence[str], *, netns: Path | None = None, cache: Path | None = None, moves: bool = False
) -> list[str]:
    """Words that start ``command`` in that network and with that folder on /run. ``moves``: it is to move a
    process to other control groups.

    Where the kernel serves sessions in turn, this one comes first: a sandbox stands still while it works.
    """
    urgency = processes.SESSION_FIRST if processes.SESSION_WEIGHT.exists() else None
    warm = cgroup.own() / "cgroup.procs" if moves else None
    return [
        str(STEPS.locate()),
        "start",
        *(str(one or "-") for one in (netns, cache, urgency, warm)),
        *command,
    ]


def environment_in(work: Path) -> dict[str, str]:
    """The environment for a CRIU with messages in ``work``."""
    found = dict(os.environ)
    if (tar := _tar()) is not None:
        with contextlib.suppress(FileExistsError):  # of a run before
            (work / "tar").symlink_to(STEPS.locate())
        found |= {"PATH": f"{work}:{os.environ.get('PATH', os.defpath)}", "WINDTUNNEL_TAR": tar}
    return found


def script(groups: Sequence[Path], hold: Path, wanted: Path | None) -> tuple[str, dict[str, str]]:
    """The action script of a restore, and what it has to find in the environment: the lists of processes that
    the first process is to enter, the v2 group to freeze when all is made, and a file without which all of it
    is ended then."""
    found = {"WINDTUNNEL_GROUPS": "".join(f"{one}\n" for one in groups), "WINDTUNNEL_HOLD": str(hold)}
    if wanted is not None:
        found["WINDTUNNEL_WANTED"] = str(wanted)
    return str(STEPS.locate()), found


@cache
def _tar() -> str | None:
    return shutil.which("tar")


if __name__ == "__main__":
    STEPS.rebuild()
