"""Which rows lie on every device, which once in every host, and which once in all (after FlexShard, 2023).

Where lookups are not pooled, every looked-up row crosses the network. Rows are sorted by how often they are
asked for, so a table has two cuts: its *hot* rows lie on every device, the *warm* ones once in every host,
striped over its devices, the *cold* ones once in all. A lookup crosses to the row's device and its vector
back; a gradient crosses to the row's device, and for hot and warm rows it is summed from host to host and
handed to all copies. The paper's abstract names the tiers; the rule is ours: a row lies where what crosses
for it takes least time, and where memory binds, rows go up in the order of time saved per byte.

Per row with probability p, for n lookups a device and iteration, in a world of N hosts of g devices: expected
requests f are n p (every lookup asks), or u = 1 - (1 - p)^n (each device asks once); gradients b likewise;
t = 1 - (1 - p)^(n N g) is the chance that anybody touched it. What crosses on average for a device:

    cold  (f + b) (N - 1) / N between hosts, (f + b) (g - 1) / (N g) inside
    warm  (f + b) (g - 1) / g inside; sums, from host to host and back
    hot   (u + t) (g - 1) / g inside; sums, from host to host and back

So a row is hot where f + b > u + t: if every lookup asks, roughly where p > 1 / n; if each device asks once,
never. It is warm where the second costs less than the first.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from windtunnel.base.errors import UserError
from windtunnel.base.units import size
from windtunnel.data.embeddings.model import EmbeddingTable, Replicas, checked

COLD, WARM, HOT = range(3)
INDEX_BYTES = 4
"""Of a row's number on its device, as it crosses beside a gradient or asks for a vector."""
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class ReplicationRequest:
    """``tables`` are to be spread over ``hosts`` of ``devices`` each; in an iteration each device looks
    ``samples`` up. ``intra`` and ``inter``: bytes/s of a device to others of its host, and of other hosts.
    ``distinct``: a device asks once for each row of a batch, and sends one gradient for it; otherwise it does
    so for each lookup, but for gradients of hot rows. ``memory``: bytes a device has for rows and buffers;
    None: what row-wise sharding takes, all rows cold, when each lookup asks: replicas then need no more.
    ``partial_sums``: pooled tables are spread row-wise and summed where rows lie, so that sums cross: fewer
    bytes where bags are long, but the sum of sums has not the bits of one table's.
    """

    tables: tuple[EmbeddingTable, ...]
    hosts: int
    devices: int
    intra: float
    inter: float
    samples: float
    distinct: bool = True
    memory: float | None = None
    partial_sums: bool = False

    def sums(self, table: EmbeddingTable) -> bool:
        """Whether sums of it cross."""
        return self.partial_sums and not table.sequence

    @property
    def world(self) -> int:
        return self.hosts * self.devices

    @property
    def stripes(self) -> int:
        """In how many parts sums go from host to host, so that all hosts work at once."""
        return max(1, 4 * (self.hosts - 2))


@dataclass(frozen=True)
class Replication:
    """The two cuts of every table, in the observation's order."""

    tables: tuple[Replicas, ...]


@dataclass(frozen=True)
class RowMessages:
    """Messages of one row that leave a device, on average, each an array of (tier, inside or between hosts,
    rows): ``requests`` that bring a vector back, ``gradients`` to the row's device, ``sums`` from host to
    host and back, ``copies`` of the sum to all devices of a host."""

    requests: Floats
    gradients: Floats
    sums: Floats
    copies: Floats


def segments(table: EmbeddingTable) -> tuple[NDArray[np.int64], Floats]:
    """Runs of rows that are wanted alike, hottest first: how many, and each row's share of the lookups."""
    ranks, shares = table.curve()
    rows = np.diff(ranks).astype(np.int64)
    return rows[rows > 0], np.clip(np.diff(shares)[rows > 0] / rows[rows > 0], 0, 1)


def touched(p: Floats, lookups: float) -> Floats:
    """The chance that at least one of ``lookups`` is the row's."""
    with np.errstate(divide="ignore"):
        return -np.expm1(lookups * np.log1p(-p)) if lookups else np.zeros_like(p)


def crossing(exchange: ReplicationRequest, table: EmbeddingTable, p: Floats) -> RowMessages:
    """What crosses for rows with shares ``p`` of the lookups; see above."""
    hosts, devices, world = exchange.hosts, exchange.devices, exchange.world
    lookups = exchange.samples * table.lookups
    once, anybody = touched(p, lookups), touched(p, lookups * world)
    requested = once if exchange.distinct else lookups * p
    arrays = [np.zeros((3, 2, len(p))) for _ in range(4)]
    requests, gradients, sums, copies = arrays
    for kind in (requests, gradients):
        kind[COLD] = requested * (devices - 1) / world, requested * (hosts - 1) / hosts
        kind[WARM, 0] = requested * (devices - 1) / devices
    gradients[HOT, 0] = once * (devices - 1) / devices
    forth = sum((touched(p, lookups * devices * before) for before in range(1, hosts)), np.zeros_like(p))
    sums[WARM:, 1] = (forth + (hosts - 1) * anybody) / world
    copies[HOT, 0] = anybody * (devices - 1) / devices
    return RowMessages(*arrays)


def seconds(exchange: ReplicationRequest, table: EmbeddingTable, p: Floats) -> Floats:
    """Of (tier, row): how long a device's links are busy for it in an iteration."""
    crosses = crossing(exchange, table, p)
    vector = table.row_bytes + INDEX_BYTES
    pace = np.array([[1 / exchange.intra], [1 / exchange.inter]])
    # hosts wait for the first parts of the sums that go from one to the next
    filling = (exchange.stripes + max(0, exchange.hosts - 2)) / exchange.stripes
    total = crosses.requests + crosses.gradients + crosses.sums * filling + crosses.copies
    return np.asarray((total * vector * pace).sum(1))


def memory(exchange: ReplicationRequest, table: EmbeddingTable, p: Floats) -> Floats:
    """Of (tier, row): bytes of a device for its part of the row, and to send and receive its gradients and
    sums (vectors before them took no more)."""
    lookups = exchange.samples * table.lookups
    once, anybody = touched(p, lookups), touched(p, lookups * exchange.world)
    requested = once if exchange.distinct else lookups * p
    stored = table.stored_bytes * np.array([[1 / exchange.world], [1 / exchange.devices], [1.0]])
    buffers = np.array([requested, requested + anybody / exchange.devices, once + anybody])
    return np.asarray(stored + 2 * table.row_bytes * buffers)


def rowwise_memory(exchange: ReplicationRequest) -> float:
    """Bytes of a device when all rows are cold and every lookup asks."""
    table_bytes = sum(table.total_bytes for table in exchange.tables) / exchange.world
    return table_bytes + sum(
        2 * exchange.samples * table.lookups * table.row_bytes for table in exchange.tables
    )


def memory_of(exchange: ReplicationRequest, decision: Replication) -> float:
    """Bytes of a device, as `memory` counts them."""
    total = 0.0
    for table, cuts in zip(exchange.tables, decision.tables, strict=True):
        rows, p = segments(table)
        total += float((memory(exchange, table, p) * tiers_of(rows, cuts)).sum())
    return total


def tiers_of(rows: NDArray[np.int64], cuts: Replicas) -> NDArray[np.int64]:
    """Of (tier, segment): how many of the segment's rows lie in the tier."""
    ends = np.concatenate(([0], np.cumsum(rows)))
    hot, warm = (np.diff(np.minimum(ends, cut)) for cut in (cuts.hot, cuts.warm))
    return np.stack([rows - warm, warm - hot, hot])


class _Climb:
    """One table on its way up: rows before ``at[WARM]`` are at least warm, before ``at[HOT]`` hot."""

    def __init__(self, exchange: ReplicationRequest, table: EmbeddingTable) -> None:
        self.rows, p = segments(table)
        self.time, self.bytes = seconds(exchange, table, p), memory(exchange, table, p)
        if exchange.sums(table):
            self.time[:] = 0  # no copy would save any
        self.at = {WARM: 0, HOT: 0}  # segments
        self.part = {WARM: 0, HOT: 0}  # rows of the next one, when the room was too small for it
        self.used_bytes = float((self.bytes[COLD] * self.rows).sum())

    def steps(self) -> list[tuple[float, int, float, float]]:
        """What may come next: (time saved per byte, to which tier, seconds saved, bytes) of one row."""
        options = []
        for to in (WARM, HOT):
            here = self.at[to]
            if here == len(self.rows) or self.part[to] or (to == HOT and self.part[WARM]):
                continue
            came = WARM if to == HOT and here < self.at[WARM] else COLD
            saved = float(self.time[came, here] - self.time[to, here])
            more = float(self.bytes[to, here] - self.bytes[came, here])
            if saved > 1e-9 * self.time[came, here]:
                options.append((saved / more if more > 0 else math.inf, to, saved, more))
        return sorted(options, reverse=True)

    def up(self, to: int, rows: int) -> None:
        """The first ``rows`` of the segment that is next go up to a tier."""
        here = self.at[to]
        whole = rows == self.rows[here]
        for tier in (WARM, HOT) if to == HOT and self.at[WARM] == here else (to,):
            self.at[tier] += whole
            self.part[tier] = 0 if whole else rows

    def cut(self, tier: int) -> int:
        return int(self.rows[: self.at[tier]].sum()) + self.part[tier]


def decide(exchange: ReplicationRequest) -> Replication:
    """The two cuts of every table.

    All rows begin cold. The hottest that are not yet where they take least time go up, those that save most
    per byte first, until none saves time or memory is full.

    Raises:
        UserError: the observation makes no sense, or the tables do not fit even so.
    """
    _check(exchange)
    climbs = [_Climb(exchange, table) for table in exchange.tables]
    limit = rowwise_memory(exchange) if exchange.memory is None else exchange.memory
    room = limit * (1 + 1e-12) - sum(table_climb.used_bytes for table_climb in climbs)
    waiting = [
        (-steps[0][0], number) for number, table_climb in enumerate(climbs) if (steps := table_climb.steps())
    ]
    heapq.heapify(waiting)
    while waiting:
        _, number = heapq.heappop(waiting)
        climb = climbs[number]
        for _, to, _, more in climb.steps():
            whole = int(climb.rows[climb.at[to]])
            rows = whole if more * whole <= max(room, 0) else int(max(room, 0) // more)
            if rows:
                climb.up(to, rows)
                room -= more * rows
                break
        else:
            continue
        if steps := climb.steps():
            heapq.heappush(waiting, (-steps[0][0], number))
    if room < 0:
        raise UserError(
            f"memory is {size(limit)} a device, the tables with their buffers take {size(limit - room)} on"
            f" each of {exchange.world}; accepted are more devices or more memory"
        )
    pairs = zip(exchange.tables, climbs, strict=True)
    return Replication(
        tuple(
            Replicas(table.name, table_climb.cut(HOT), table_climb.cut(WARM)) for table, table_climb in pairs
        )
    )


def rowwise(exchange: ReplicationRequest) -> Replication:
    """All rows cold: row-wise sharding."""
    _check(exchange)
    return Replication(tuple(Replicas(table.name, 0, 0) for table in exchange.tables))


def _check(exchange: ReplicationRequest) -> None:
    figures = {
        "hosts": exchange.hosts,
        "devices": exchange.devices,
        "intra": exchange.intra,
        "inter": exchange.inter,
        "samples": exchange.samples,
        "memory": 1.0 if exchange.memory is None else exchange.memory,
    }
    for name, value in figures.items():
        if not 0 < value < math.inf:
            raise UserError(f"{name} is {value:g}, a positive number is accepted")
    if not exchange.tables:
        raise UserError("there are no tables, one or more are accepted")
    checked(exchange.tables, "exchange")
