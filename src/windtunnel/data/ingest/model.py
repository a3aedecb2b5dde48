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
    """A column that is computed from others."""

    kind: str
    """its name"""
    inputs: tuple[str, ...]
    """the columns that it reads"""
    output: str
    """the column that it makes, which may be one of its inputs"""
    options: dict[str, Any] = field(default_factory=dict, hash=False)
    """its own settings"""


@dataclass(frozen=True)
class IngestSession:
    """What batches are made of: a table, columns, a filter, transforms, and the size of a batch."""

    table: str
    """a Parquet file or a folder of them, as a path or a URL of fsspec; files in the order of their names,
    without those that begin with `_` or `.`"""
    columns: tuple[str, ...]
    """the columns of a batch, in this order; `map/key` is a feature within a map, `struct/field` one within a
    struct"""
    transforms: tuple[Transform, ...] = ()
    """a list, applied in order: `kind`, `inputs` (a column; two of `cross`), `output` (default: the input) or
    `each` for a list of columns one by one, then the settings of the kind"""
    where: tuple[tuple[str, str, Any], ...] = ()
    """a list of `[column, operator, value]`, all of which a row must meet: `==`, `!=`, `<`, `<=`, `>`, `>=`,
    `in`, `not in`; with `null` as value, `==` and `!=` say whether there is one. Row groups that statistics
    rule out are not read"""
    batch: int = 1024
    """rows of a batch; the last one of a split has the rest"""
    epochs: int = 1
    """passes over the table"""
    shuffle: bool = False
    """rows change places within their split, and splits theirs, by `seed` and epoch"""
    seed: int = 0
    """of the shuffle"""
    split_rows: int = 65_536
    """row groups are joined to splits of at least so many rows"""
    storage: dict[str, Any] = field(default_factory=dict, hash=False)
    """Options of the file system, given to fsspec."""
    drift: str = "refuse"
    """What becomes of a file that lacks a column of the first one: ``refuse``, or ``fill`` it with nulls."""


@dataclass(frozen=True)
class TableSplit:
    """Row groups of one file. ``number``: in its session, from 0; ``rows``: those stored, before a filter."""

    number: int
    file: str
    groups: tuple[int, ...]
    rows: int
