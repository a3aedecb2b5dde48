"""What the rooms of ingest exchange: sessions, their transforms, and splits.

A *session* is a table (columnar files), the features wanted, a filter of rows, transforms, and the size of a
batch. It is cut into *splits*, runs of row groups of one file: what a worker reads at a time. All that a
split becomes follows from the session and the split alone: a second worker makes the same batches, and on
that "exactly once" stands.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Transform:
    """``kind``: its name; ``inputs``: the columns it reads; ``output``: the column it makes, which may be
    one of them; ``options``: its own settings."""

    kind: str
    inputs: tuple[str, ...]
    output: str
    options: dict[str, Any] = field(default_factory=dict, hash=False)


@dataclass(frozen=True)
class Session:
    """``table``: a URL of fsspec, or a path: a Parquet file, or a folder of them. ``columns``: what batches
    have, in this order; each is of the table or a transform's output; ``map/key`` and ``struct/field`` are
    columns of a table that has such a map or struct. ``where``: (column, operator, value),
    of which a row must meet all. ``batch``: rows of a batch; the last one of a split has the rest.
    ``shuffle``: splits, and rows in a split, in an order drawn from ``seed`` and the epoch."""

    table: str
    columns: tuple[str, ...]
    transforms: tuple[Transform, ...] = ()
    where: tuple[tuple[str, str, Any], ...] = ()
    batch: int = 1024
    epochs: int = 1
    shuffle: bool = False
    seed: int = 0
    split_rows: int = 65_536
    storage: dict[str, Any] = field(default_factory=dict, hash=False)
    """Options of the file system, given to fsspec."""
    drift: str = "refuse"
    """What becomes of a file that lacks a column of the first one: ``refuse``, or ``fill`` it with nulls."""


@dataclass(frozen=True)
class Split:
    """Row groups of one file. ``number``: in its session, from 0; ``rows``: those stored, before a filter."""

    number: int
    file: str
    groups: tuple[int, ...]
    rows: int
