"""Which table lies on which device, and how many of its rows in fast memory (RecShard, ASPLOS '22).

A device's time is taken to be that of reading its rows: bytes from each tier over the tier's bandwidth. What
is wanted is the plan whose slowest device is fastest, within both memories of every device. Rows are sorted
by how often they are asked for, so a table has one cut: those before it are fast.

Policies: ``recshard`` searches, and proves by an exact solver where that can be done; ``search`` leaves the
solver out. The others place whole tables, each on the device that has least so far, the largest first:
``size`` by rows times dimension, ``lookup`` by rows looked up times dimension, ``size-lookup`` by that times
the logarithm of the rows. A table is fast where one of the devices has room for it whole, else slow. These
are the rivals of the paper (section 6).

Tables that are spread over all devices row by row are another question, a `ReplicationRequest`: see
`replicas`. Its policies are ``flexshard`` and ``row-wise``, all rows once; those above answer it as
``flexshard`` does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import overload

import numpy as np

from windtunnel.base.errors import UserError
from windtunnel.base.units import size
from windtunnel.data.embeddings.model import EmbeddingTable, MemoryTier, TableShard, checked
from windtunnel.data.embeddings.policy import greedy, pieces, replicas, search
from windtunnel.data.embeddings.policy.replicas import Replication, ReplicationRequest

__all__ = [
    "POLICIES",
    "Decision",
    "Observation",
    "PlacementRequest",
    "Replication",
    "ReplicationRequest",
    "TablePlacement",
    "decide",
]

CUTTING = ("recshard", "search")
"""Policies that may cut a table into columns."""
PLACING = (*CUTTING, *greedy.ORDERS)
BINARIES = 200
"""Pieces times devices up to which the exact solver is asked: beyond it gains nothing within a minute."""


@dataclass(frozen=True)
class PlacementRequest:
    """``tables`` are to be placed on ``devices`` alike, each with a ``fast`` and a ``slow`` tier, for batches
    of ``batch`` samples (of all devices together). ``columns``: the fewest that a shard may have where a
    table is too large or too much wanted for one device; 0: tables are never cut. ``seed``: of the search."""

    tables: tuple[EmbeddingTable, ...]
    devices: int
    fast: MemoryTier
    slow: MemoryTier
    batch: int
    policy: str = "recshard"
    columns: int = 16
    seed: int = 0


@dataclass(frozen=True)
class TablePlacement:
    """A plan. ``shards``: in the order of tables and columns. Of each device ``seconds``, modelled, to read
    the rows of a batch, and ``fast_bytes`` and ``slow_bytes`` of memory, the optimiser's state included.

    No plan's slowest device takes less than any of the bounds, in seconds: ``pooled``, all fast memory as one
    and all work spread evenly; ``largest``, one shard alone with a whole device; ``proven``, by the solver (0
    where it was not asked). The last two hold for plans that cut tables into the same columns.
    """

    shards: tuple[TableShard, ...]
    seconds: tuple[float, ...]
    fast_bytes: tuple[int, ...]
    slow_bytes: tuple[int, ...]
    pooled: float
    largest: float
    proven: float
    solver: str
    reason: str

    @property
    def devices(self) -> int:
        return len(self.seconds)

    @property
    def slowest(self) -> float:
        """Seconds of the slowest device."""
        return max(self.seconds)

    @property
    def gap(self) -> float:
        """By what share the slowest device may be slower than the best plan's: 0 is optimal."""
        bound = max(self.pooled, self.largest, self.proven)
        return max(0.0, self.slowest / bound - 1) if bound else 0.0


Observation = PlacementRequest | ReplicationRequest
Decision = TablePlacement | Replication


@overload
def decide(observation: PlacementRequest) -> TablePlacement: ...
@overload
def decide(observation: ReplicationRequest) -> Replication: ...
def decide(observation: Observation) -> Decision:
    """The plan.

    Raises:
        UserError: the tables need more than all tiers have, one of them more than a device has, they do not
            fit together, or the observation makes no sense.
    """
    if isinstance(observation, ReplicationRequest):
        return replicas.decide(observation)
    _check(observation)
    devices, policy = observation.devices, observation.policy
    least = observation.columns if policy in CUTTING else 0
    cut = pieces.cut(
        observation.tables, devices, observation.fast, observation.slow, observation.batch, least
    )
    if policy in CUTTING:
        device = search.assign(cut, devices, observation.seed)
        solver, proven = "search", 0.0
        if policy == "recshard" and devices > 1 and len(cut) * devices <= BINARIES:
            from windtunnel.data.embeddings.policy import milp

            device, proven = milp.improve(cut, devices, device)
            solver = "milp"
        rows = pieces.fast_rows(cut, device, devices)
    else:
        device, rows = greedy.assign(cut, devices, policy)
        solver, proven = "greedy", 0.0
    fast = rows * cut.stored
    rows_by_tier = [np.bincount(device, some, devices).astype(int) for some in (fast, cut.total - fast)]
    placed = TablePlacement(
        tuple(
            TableShard(observation.tables[of].name, int(where), int(first), int(last), int(some))
            for of, where, first, last, some in zip(cut.of, device, cut.first, cut.last, rows, strict=True)
        ),
        tuple(map(float, np.bincount(device, pieces.seconds(cut, rows), devices))),
        tuple(map(int, rows_by_tier[0])), tuple(map(int, rows_by_tier[1])),
        pieces.pooled(cut, devices), float(pieces.largest(cut).max()), proven, solver, "",
    )  # fmt: skip
    for what, tier, most in (
        ("fast", observation.fast, rows_by_tier[0]),
        ("slow", observation.slow, rows_by_tier[1]),
    ):
        assert most.max() <= tier.capacity, what
    return replace(placed, reason=_reason(placed))


def _reason(placed: TablePlacement) -> str:
    bounds = {"all work spread evenly": placed.pooled, "the largest shard alone": placed.largest,
              "the solver": placed.proven}  # fmt: skip
    name = max(bounds, key=lambda bound: bounds[bound])
    times = f"{placed.gap:.2%} above" if placed.gap < 1 else f"{1 + placed.gap:.3g} times"
    return f"{times} the bound of {name}"


def _check(observation: PlacementRequest) -> None:
    if observation.policy not in PLACING:
        raise UserError(f"policy {observation.policy!r} is unknown; accepted are {', '.join(PLACING)}")
    counts = {"devices": observation.devices, "batch": observation.batch}
    figures = {
        f"{name}.{part}": getattr(tier, part)
        for name, tier in (("fast", observation.fast), ("slow", observation.slow))
        for part in ("capacity", "bandwidth")
    }
    for name, value in {**counts, **figures}.items():
        if not 0 < value < float("inf") and not (name.endswith("capacity") and value == 0):
            raise UserError(f"{name} is {value:g}, a positive number is accepted")
    if observation.slow.bandwidth > observation.fast.bandwidth:
        raise UserError(
            f"slow.bandwidth is {observation.slow.bandwidth:g}, accepted is what fast.bandwidth has,"
            f" {observation.fast.bandwidth:g}, or less"
        )
    if not observation.tables:
        raise UserError("there are no tables, one or more are accepted")
    checked(observation.tables, "embeddings")
    needed = float(sum(table.total_bytes for table in observation.tables))
    fast, slow = observation.fast.capacity, observation.slow.capacity
    if needed > observation.devices * (fast + slow):
        raise UserError(
            f"the tables take {size(needed)}, {observation.devices} devices have"
            f" {size(observation.devices * (fast + slow))}: {size(fast)} of fast and {size(slow)} of slow"
            " memory each"
        )


def _by(policy: str, observation: Observation) -> Decision:
    if isinstance(observation, ReplicationRequest):
        return replicas.rowwise(observation) if policy == "row-wise" else decide(observation)
    return decide(replace(observation, policy=policy) if policy in PLACING else observation)


POLICIES: Mapping[str, Callable[[Observation], Decision]] = {
    name: partial(_by, name) for name in (*PLACING, "flexshard", "row-wise")
}
