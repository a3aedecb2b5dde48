"""What the rooms of embeddings exchange: tables and how their rows are asked for, memory, decisions.

Ranks. A table's rows are counted from the one asked for most, rank 0, to those never asked for. All that is
decided is said in ranks; which id has which rank is the table's *order*, an array of its own (``order[rank]``
is an id), which lies beside the statistics and goes to those who look rows up.

Bytes are of weights and of the optimiser's state together where they are bytes of memory, of weights alone
where they are bytes moved.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from windtunnel.base.errors import UserError

ITEM_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
Order = NDArray[np.unsignedinteger[Any]]
"""The ids of a table by rank, of the type that `id_type` says."""


def id_type(rows: int) -> type[np.uint32] | type[np.uint64]:
    """The type of ids in the order of a table of so many rows."""
    return np.uint32 if rows <= 1 << 32 else np.uint64


@dataclass(frozen=True)
class HeldOut:
    """What ``samples`` that were left out of the counting ask of a table's rows, as the others rank them.

    ``counted``: rows that the others asked for; ``unseen``: rows that these samples alone asked for.
    ``ranks`` and ``shares``: points of the curve as of `EmbeddingTable`, which need not be concave.
    """

    samples: int
    counted: int
    unseen: int
    ranks: tuple[int, ...]
    shares: tuple[float, ...]


@dataclass(frozen=True)
class EmbeddingTable:
    """One table and its feature.

    ``rows``: its hash size. ``pooling``: rows looked up by a sample that has the feature, on average;
    ``coverage``: the share of samples that have it. ``sequence``: its rows are not pooled, every one goes to
    the sample's device. ``ranks`` and ``shares``: points of the curve of accesses, from (0, 0) to (rows, 1):
    the ``ranks[i]`` most wanted rows get ``shares[i]`` of all lookups; concave, straight between its points.
    ``state_bytes``: what the optimiser keeps for each row. ``held_out``: what forecasts are made of where the
    curve is that of a sample, of which it knows more than of the lookups to come.
    """

    name: str
    rows: int
    dim: int
    dtype: str = "float32"
    pooling: float = 1.0
    coverage: float = 1.0
    sequence: bool = False
    ranks: tuple[int, ...] = ()
    shares: tuple[float, ...] = ()
    state_bytes: int = 0
    held_out: HeldOut | None = None

    @property
    def lookups(self) -> float:
        """Rows looked up by an average sample."""
        return self.pooling * self.coverage

    @property
    def row_bytes(self) -> int:
        """Bytes that one lookup moves."""
        return self.dim * ITEM_BYTES[self.dtype]

    @property
    def stored_bytes(self) -> int:
        """Bytes of memory that one row takes, with its optimiser's state."""
        return self.row_bytes + self.state_bytes

    @property
    def total_bytes(self) -> int:
        """Bytes of memory that the table takes."""
        return self.rows * self.stored_bytes

    def curve(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """``ranks`` and ``shares`` as arrays; without any, all rows are wanted alike."""
        return np.array(self.ranks or (0, self.rows), float), np.array(self.shares or (0, 1), float)

    def share(self, rows: float | NDArray[np.float64]) -> NDArray[np.float64]:
        """The share of lookups that the ``rows`` most wanted rows get."""
        return np.interp(np.asarray(rows), *self.curve())


def checked(tables: tuple[EmbeddingTable, ...], where: str) -> None:
    """Every table is one that can be planned for; ``where`` names the file in errors.

    Raises:
        UserError: the first field that is wrong.
    """
    names: set[str] = set()
    for entry in tables:

        def wrong(name: str, value: object, accepted: str, table: str = entry.name) -> UserError:
            return UserError(f"{where}: table {table}: {name} is {value!r}, accepted is {accepted}")

        if not entry.name or entry.name in names:
            raise wrong("name", entry.name, "a name that no other table has")
        names.add(entry.name)
        for name, value in (("rows", entry.rows), ("dim", entry.dim)):
            if value < 1:
                raise wrong(name, value, "a whole number from 1")
        if entry.dtype not in ITEM_BYTES:
            raise wrong("dtype", entry.dtype, ", ".join(ITEM_BYTES))
        if not 0 <= entry.pooling < np.inf:
            raise wrong("pooling", entry.pooling, "a finite number from 0")
        if not 0 <= entry.coverage <= 1:
            raise wrong("coverage", entry.coverage, "a number from 0 to 1")
        if entry.state_bytes < 0:
            raise wrong("state_bytes", entry.state_bytes, "a whole number of bytes from 0")
        if not entry.ranks and not entry.shares:
            continue
        ranks, shares = np.array(entry.ranks, float), np.array(entry.shares)
        ends = len(ranks) >= 2 and (ranks[0], ranks[-1]) == (0, entry.rows)
        if len(ranks) != len(shares) or not ends or (np.diff(ranks) <= 0).any():
            raise wrong("ranks", entry.ranks[-3:], f"whole numbers that rise from 0 to rows, {entry.rows}")
        slopes = np.diff(shares) / np.diff(ranks)
        rising = shares[0] == 0 and shares[-1] == 1 and (slopes >= 0).all()
        if not rising or (np.diff(slopes) > 1e-9 * slopes[:-1] + 1e-15).any():
            raise wrong("shares", entry.shares[-3:], "a concave curve from 0 to 1")


@dataclass(frozen=True)
class MemoryTier:
    """A kind of memory of a device: ``capacity`` in bytes for rows, ``bandwidth`` in bytes/s of rows read."""

    capacity: float
    bandwidth: float


@dataclass(frozen=True)
class TableShard:
    """Columns ``first`` to ``last`` (not included) of a table, on a ``device``; the ``fast_rows`` most wanted
    rows lie in its fast memory, the others in its slow one."""

    table: str
    device: int
    first: int
    last: int
    fast_rows: int


@dataclass(frozen=True)
class Replicas:
    """A table whose rows are spread over all devices: its ``hot`` most wanted rows lie on every device, the
    ranks from there to ``warm`` once in every host, those after it once in all."""

    table: str
    hot: int
    warm: int
