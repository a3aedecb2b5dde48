"""What checkpoints in memory ask: which step a job goes on from, which slot may be overwritten, when to send.

Observations hold all that the answer depends on; live writes them beside the answers to the run's events.
How often copies are made (`interval`) is settled before a run begins, unless they go in idle spans: then
after some steps (`pacing.spread`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from windtunnel.training.checkpoint.model import Copy, Log, Placement, RestorePlan, StoredStep
from windtunnel.training.checkpoint.policy.pacing import (
    Allowance,
    CopiesWanted,
    NetworkProfile,
    NetworkSample,
    Profiles,
    Sending,
    Spread,
    Window,
    allowance,
    holders,
    spread,
    window,
)
from windtunnel.training.checkpoint.policy.restore import BadCopy, plan_restore
from windtunnel.training.checkpoint.policy.slots import may_overwrite, slot_for

__all__ = [
    "POLICIES",
    "Allowance",
    "CopiesWanted",
    "Decision",
    "Inventory",
    "NetworkProfile",
    "NetworkSample",
    "Observation",
    "Profiles",
    "Sending",
    "Slot",
    "SlotWanted",
    "Spread",
    "Window",
    "decide",
]


@dataclass(frozen=True)
class Inventory:
    """What is there to go on from: ``copies`` in the memory of all reachable hosts, steps ``stored`` in
    storage, and those that turned out ``bad`` while they were read. ``log``, ``restart``, ``unread``: as in
    `plan_restore`."""

    copies: tuple[Copy, ...]
    stored: tuple[StoredStep, ...]
    bad: tuple[BadCopy, ...] = ()
    log: Log | None = None
    restart: bool = True
    unread: bool = False


@dataclass(frozen=True)
class SlotWanted:
    """``step`` is to be saved to a slot; fields as in `slots.may_overwrite`. ``base``: the step that all went
    back to, before which nothing may go until it is committed again; -1 for none."""

    step: int
    slot_steps: tuple[int, ...]
    committed: int
    base: int = -1


@dataclass(frozen=True)
class Slot:
    """The slot for a step, and whether it may be written now; if not, ask again after the next commit."""

    index: int
    free: bool


Observation = Inventory | SlotWanted | CopiesWanted | Sending | NetworkSample | Profiles
Decision = RestorePlan | Slot | Placement | Allowance | Window | Spread


def decide(observation: Observation) -> Decision:
    """The newest step that every shard has a good copy of, the slot to write to, where copies lie, when they
    are sent, and how often then."""
    match observation:
        case Inventory(copies, stored, bad, log, restart, unread):
            return plan_restore(copies, stored, frozenset(bad), log, restart, unread)
        case SlotWanted(step, slot_steps, committed, base):
            free = committed >= base and may_overwrite(step, slot_steps, committed)
            return Slot(slot_for(step, slot_steps), free)
        case CopiesWanted():
            return holders(observation)
        case Sending():
            return allowance(observation)
        case NetworkSample():
            return window(observation)
        case Profiles():
            return spread(observation)


def _from_storage(observation: Observation) -> Decision:
    """As if there were no checkpoints in memory."""
    return decide(replace(observation, copies=()) if isinstance(observation, Inventory) else observation)


def _from_memory(observation: Observation) -> Decision:
    """As if nothing were in storage."""
    return decide(replace(observation, stored=()) if isinstance(observation, Inventory) else observation)


POLICIES: Mapping[str, Callable[[Observation], Decision]] = {
    "newest": decide,
    "storage": _from_storage,
    "memory": _from_memory,
}
