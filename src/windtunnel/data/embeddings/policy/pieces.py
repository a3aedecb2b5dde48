"""Tables as the planner sees them: pieces, each with the bytes and the time that runs of its rows stand for.

A piece is a table, or a run of its columns. Between two points of a table's curve rows are wanted alike: such
a *segment* takes bytes of fast memory and saves seconds, and seconds per byte fall from one segment of a
piece to the next. So a device whose pieces are known fills its fast memory from the best segment of any of
them on: a fractional knapsack, solved exactly by sorting once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from windtunnel.base.errors import UserError
from windtunnel.base.units import size
from windtunnel.data.embeddings.model import ITEM_BYTES, EmbeddingTable, MemoryTier

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
STEP = 4
"""Columns of a shard are a multiple of it where the table's are: kernels read four numbers at once."""


def stored_bytes(table: EmbeddingTable, columns: int) -> int:
    """Bytes of memory of a row of a shard of ``columns``. An optimiser's state of less than a byte a column
    is one of whole rows, and every shard keeps it; else it is cut as the columns are."""
    state = table.state_bytes
    if state >= table.dim:
        state = math.ceil(state * columns / table.dim)
    return columns * ITEM_BYTES[table.dtype] + state


@dataclass(frozen=True, eq=False)
class Pieces:
    """Of each piece its table's place ``of``, columns ``first`` to ``last``, ``stored`` bytes a row,
    ``total`` bytes, and ``slow`` seconds to read what a batch wants of it from the slow tier.

    Of each segment, those first that save most per byte: its ``piece``, its ``rows``, its ``nbytes``, and the
    seconds that it ``saves`` in the fast tier.
    """

    tables: tuple[EmbeddingTable, ...]
    fast: MemoryTier
    backing: MemoryTier
    of: Ints
    first: Ints
    last: Ints
    stored: Ints
    total: Ints
    slow: Floats
    piece: Ints
    rows: Ints
    nbytes: Floats
    saves: Floats

    def __len__(self) -> int:
        return len(self.of)

    @property
    def room(self) -> float:
        """Bytes of a device for pieces. Where they lie in both tiers, less than a row stays free: none is
        cut."""
        fast, slow = self.fast.capacity, self.backing.capacity
        return max(fast, slow, fast + slow - float(self.stored.max(initial=0)))

    def name(self, piece: int) -> str:
        """In words."""
        table = self.tables[self.of[piece]]
        whole = self.last[piece] - self.first[piece] == table.dim
        return table.name if whole else f"{table.name}[{self.first[piece]}:{self.last[piece]}]"


def build_pieces(
    tables: Sequence[EmbeddingTable],
    fast: MemoryTier,
    slow: MemoryTier,
    batch: int,
    columns: Sequence[Sequence[int]],
) -> Pieces:
    """``columns``: of each table the widths of its pieces, in order."""
    of, first, last = list[int](), list[int](), list[int]()
    seconds = list[float]()
    piece, rows, nbytes, saves, density = (list[NDArray[np.float64]]() for _ in range(5))
    faster = 1 / slow.bandwidth - 1 / fast.bandwidth
    for place, (table, widths) in enumerate(zip(tables, columns, strict=True)):
        ranks, shares = table.curve()
        more, lookups = np.diff(ranks), np.diff(shares)
        begin = 0
        for width in widths:
            read = batch * table.lookups * width * ITEM_BYTES[table.dtype]
            here = more * stored_bytes(table, width)
            piece.append(np.full(len(more), float(len(of))))
            rows.append(more)
            nbytes.append(here)
            saves.append(read * lookups * faster)
            # a curve read from a file is concave but for rounding
            density.append(np.minimum.accumulate(saves[-1] / here))
            seconds.append(read / slow.bandwidth)
            of.append(place)
            first.append(begin)
            last.append(begin := begin + width)
    order = np.argsort(-np.concatenate(density), kind="stable")
    owner = np.array(of)
    stored = np.array([stored_bytes(tables[i], b - a) for i, a, b in zip(of, first, last, strict=True)])
    return Pieces(
        tuple(tables), fast, slow, owner, np.array(first), np.array(last), stored,
        np.array([tables[i].rows for i in of]) * stored, np.array(seconds),
        np.concatenate(piece)[order].astype(int), np.concatenate(rows)[order].astype(int),
        np.concatenate(nbytes)[order], np.concatenate(saves)[order],
    )  # fmt: skip


def cut(
    tables: Sequence[EmbeddingTable], devices: int, fast: MemoryTier, slow: MemoryTier, batch: int, least: int
) -> Pieces:
    """Tables as pieces, whole where that does: one that alone takes a whole device longer than all tables
    would take it if work were spread evenly, or more memory than a device has, is cut into columns, ``least``
    at the fewest (0: never), until a piece takes half of either.

    Raises:
        UserError: one is larger than a device, even when cut.
    """
    whole = build_pieces(tables, fast, slow, batch, [[table.dim] for table in tables])
    even, alone = pooled(whole, devices), largest(whole)
    if not least or (alone.max() <= even and whole.total.max() <= whole.room):
        return _fitting(whole, least)
    columns = []
    for place, table in enumerate(tables):
        count = 1
        if alone[place] > even or whole.total[place] > whole.room:
            step = STEP if table.dim % STEP == 0 and least >= STEP else 1
            most = max(1, table.dim // step // math.ceil(least / step))
            while count < most and not _small(table, fast, slow, batch, math.ceil(table.dim / count), even):
                count += 1
        else:
            step = table.dim
        units = table.dim // step
        columns.append([step * (units // count + (i < units % count)) for i in range(count)])
    return _fitting(build_pieces(tables, fast, slow, batch, columns), least)


def _small(
    table: EmbeddingTable, fast: MemoryTier, slow: MemoryTier, batch: int, columns: int, even: float
) -> bool:
    pieces = build_pieces([table], fast, slow, batch, [[columns]])
    return bool(largest(pieces)[0] <= even / 2 and pieces.total[0] <= pieces.room / 2)


def _fitting(cut: Pieces, least: int) -> Pieces:
    worst = int(cut.total.argmax())
    if cut.total[worst] > cut.fast.capacity + cut.backing.capacity:
        why = f"a shard has {least} columns or more" if least else "this policy cuts no table"
        raise UserError(
            f"table {cut.name(worst)} takes {size(float(cut.total[worst]))}, a device has"
            f" {size(cut.fast.capacity)} of fast and {size(cut.backing.capacity)} of slow memory, and {why}"
        )
    return cut


def filled(cut: Pieces, group: Ints, groups: int, capacity: float) -> tuple[Ints, Floats]:
    """The knapsacks of all groups at once (``group``: of each piece). Returns the order of segments, by group
    and then by what they save per byte, and what share of each segment, in that order, is fast."""
    owner = group[cut.piece]
    order = np.argsort(owner, kind="stable")
    nbytes = cut.nbytes[order]
    before = np.cumsum(nbytes) - nbytes
    begins = np.searchsorted(owner[order], np.arange(groups))
    base = np.append(before, 0.0)[np.minimum(begins, len(before))]
    left = capacity - (before - base[owner[order]])
    return order, np.clip(left / nbytes, 0, 1)


def least_seconds(cut: Pieces, group: Ints, groups: int, capacity: float) -> Floats:
    """Seconds of each group with ``capacity`` bytes of fast memory, rows being cut where that fits."""
    order, part = filled(cut, group, groups, capacity)
    slow = np.bincount(group, cut.slow, groups).astype(float)
    return slow - np.bincount(group[cut.piece[order]], cut.saves[order] * part, groups)


def fast_rows(cut: Pieces, group: Ints, groups: int) -> Ints:
    """Of each piece the rows that are fast in the best use of its device's fast memory."""
    order, part = filled(cut, group, groups, cut.fast.capacity)
    piece = cut.piece[order]
    rows = np.where(part == 1, cut.rows[order], np.floor(part * cut.nbytes[order] / cut.stored[piece]))
    return np.bincount(piece, rows, len(cut)).astype(int)


def prices(cut: Pieces, group: Ints, groups: int, capacity: float) -> Floats:
    """Of each group what another byte of fast memory would save: seconds a byte; 0 where all is fast."""
    order, part = filled(cut, group, groups, capacity)
    rest = np.flatnonzero(part < 1)[::-1]
    best = np.zeros(groups)
    best[group[cut.piece[order[rest]]]] = (cut.saves / cut.nbytes)[order[rest]]
    return best


def pooled(cut: Pieces, devices: int) -> float:
    """Seconds a device if all fast memory were one and work were spread evenly: no plan is faster."""
    assigned = np.zeros(len(cut), int)
    return float(least_seconds(cut, assigned, 1, devices * cut.fast.capacity)[0]) / devices


def largest(cut: Pieces) -> Floats:
    """Seconds of each piece alone with a whole device: no plan of these pieces is faster than the longest."""
    return least_seconds(cut, np.arange(len(cut)), len(cut), cut.fast.capacity)


def seconds(cut: Pieces, rows: Ints) -> Floats:
    """Of each piece, with that many of its rows fast."""
    share = np.array(
        [float(cut.tables[of].share(some)) for of, some in zip(cut.of, rows, strict=True)], float
    )
    return cut.slow * (1 - share * (1 - cut.backing.bandwidth / cut.fast.bandwidth))
