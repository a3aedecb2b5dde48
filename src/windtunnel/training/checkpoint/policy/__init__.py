"""What checkpoints in memory ask: which step a job goes on from, and which slot may be overwritten.

Observations hold all that the answer depends on; live writes them beside the answers to the run's events.
Where copies lie (`placement`) and how often they are made (`interval`) is settled before a run begins.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from windtunnel.training.checkpoint.model import Copy, Log, RestorePlan, Twins
from windtunnel.training.checkpoint.policy.restore import BadCopy, StoredStep, plan_restore
from windtunnel.training.checkpoint.policy.slots import may_overwrite, slot_for

__all__ = ["POLICIES", "Decision", "Inventory", "Observation", "Slot", "SlotWanted", "decide"]


@dataclass(frozen=True)
class Inventory:
    """What is there to go on from: ``copies`` in the memory of all reachable hosts, steps ``stored`` in
    storage, and those that turned out ``bad`` while they were read. ``log``, ``restart``, ``twins``: as
    in `plan_restore`."""

    copies: tuple[Copy, ...]
    stored: tuple[StoredStep, ...]
    bad: tuple[BadCopy, ...] = ()
    log: Log | None = None
    restart: bool = True
    twins: tuple[Twins, ...] = ()


@dataclass(frozen=True)
class SlotWanted:
    """``step`` is to be saved to one of ``slots``; fields as in `slots.may_overwrite`. ``base``: the step
    that all went back to, before which nothing may go until it is committed again; -1 for none."""

    slots: int
    step: int
    held: tuple[int, ...]
    committed: int
    base: int = -1


@dataclass(frozen=True)
class Slot:
    """The slot for a step, and whether it may be written now; if not, ask again after the next commit."""

    index: int
    free: bool


Observation = Inventory | SlotWanted
Decision = RestorePlan | Slot


def decide(observation: Observation) -> Decision:
    """The newest step that every shard has a good copy of, or the slot to write to."""
    match observation:
        case Inventory(copies, stored, bad, log, restart, twins):
            return plan_restore(copies, stored, frozenset(bad), log, restart, twins)
        case SlotWanted(slots, step, held, committed, base):
            free = committed >= base and may_overwrite(slots, step, held, committed)
            return Slot(slot_for(slots, step, held), free)


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
