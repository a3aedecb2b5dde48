"""What stands in a sandbox when its image is taken, and whether all of it came back."""

from __future__ import annotations

import time
from pathlib import Path

from windtunnel.agents.sandbox.live.standing.mend import mend
from windtunnel.agents.sandbox.live.standing.read import inventory
from windtunnel.agents.sandbox.model import Inventory, Lack
from windtunnel.agents.sandbox.policy.standing import differences
from windtunnel.linux.cgroup import pids_of

__all__ = ["inventory", "put_right"]


LAZY_SECONDS = 2.0
"""For which an environment that cannot be read is waited for."""


def put_right(before: Inventory, freezer: Path, init: int, *, lazy: bool) -> tuple[Lack, ...]:
    """Mend what can be mended of a restored sandbox that stands in its freezer; what is still not as it was.
    ``init``: its first process. ``lazy``: its memory comes when it is touched."""
    mend(before, freezer)
    deadline = time.monotonic() + (LAZY_SECONDS if lazy else 0)
    while True:
        found = differences(before, inventory(pids_of(freezer), init))
        # an environment lies in the process's memory, which may still be on its way in a lazy restore
        if all(one.kind != "environment" for one in found) or time.monotonic() > deadline:
            return found
        time.sleep(0.02)
