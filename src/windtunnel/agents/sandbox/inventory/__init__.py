"""What stands in a sandbox when its image is taken, and whether all of it came back."""

from __future__ import annotations

from pathlib import Path

from windtunnel.agents.sandbox.errors import CriuError
from windtunnel.agents.sandbox.inventory.mend import mend
from windtunnel.agents.sandbox.inventory.read import alarms, inventory
from windtunnel.agents.sandbox.model import Inventory, Lack
from windtunnel.agents.sandbox.policy.kinds import undumpable
from windtunnel.agents.sandbox.policy.standing import differences
from windtunnel.linux.cgroup import pids_of
from windtunnel.linux.snapshot import read_snapshot

__all__ = ["alarms", "inventory", "put_right", "refuse_undumpable"]


def refuse_undumpable(stood: Inventory) -> None:
    """Raises CriuError where CRIU would make an image that no restore brings back."""
    if why := undumpable(stood):
        raise CriuError(f"process image: {why}")


def put_right(before: Inventory, freezer: Path, init: int) -> tuple[Lack, ...]:
    """Mend what can be mended of a restored sandbox that stands in its freezer; what is still not as it was.
    ``init``: its first process."""
    mend(before, freezer)
    return differences(before, inventory(read_snapshot(pids_of(freezer)), init))
