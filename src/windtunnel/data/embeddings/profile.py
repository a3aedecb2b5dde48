"""What a log says of its tables: ``windtunnel embeddings profile``.

Of every feature: the curve of its rows' lookups and their order, pooling, coverage, lengths, rows never used,
and how the hot rows change from one window of the log to the next. Counts are exact (`counting`), but that of
a table of more than `FULL` rows the windows look at one row in 2, 4, 8 ... (those whose id that number
divides).

What a sample's own hot rows get of it is more than they get of samples to come. So the last fifth of the
samples is counted apart, too, and what it asks of the rows as the others rank them is kept as what is to be
expected (`HeldOut`).

Rows are ids as they are, or ids hashed: ``splitmix64`` is the finaliser of Steele, Lea and Flood (OOPSLA
2014) modulo the rows, ``modulo`` the id modulo the rows.

A hash leaves rows unused and others shared (the birthday paradox). How many different values were there
follows from the rows never used, if the ids are hashes: linear counting (Whang, Vander-Zanden, Taylor, ACM
TODS 1990, equations 4 and 9), with its standard error.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from windtunnel.base.errors import UserError
from windtunnel.base.fields import suggest
from windtunnel.base.plain import to_plain
from windtunnel.data.embeddings import logs
from windtunnel.data.embeddings.counting import Ints, RowCounts, curve, held_out
from windtunnel.data.embeddings.files import write_statistics
from windtunnel.data.embeddings.model import EmbeddingTable

HASHES = ("splitmix64", "modulo")
LARGEST = 1 << 32
"""Ids are below this where the rows are not said, so that memory is bounded."""
FULL = 1 << 28
"""Rows of which all are looked at in every window."""
HOT = 0.01
"""The share of a table's rows that are its hot ones, at most `MOST_HOT`."""
MOST_HOT = 1 << 20
WINDOWS = 32
"""Most windows, where files are not said to be cut otherwise."""
QUANTILES = (0.5, 0.9, 0.99, 1.0)
HELD_OUT = 5
"""One in so many samples is held out: the last ones."""


@dataclass(frozen=True)
class LogWindow:
    """``hot_share``: of its lookups, those of its own hot rows; ``kept_share``: those of the rows that were
    hot in the window before; ``overlap``: of those rows, the part that is hot now. None in the first."""

    samples: int
    lookups: int
    hot_share: float
    kept_share: float | None = None
    overlap: float | None = None


@dataclass(frozen=True)
class Facts:
    """What is known of a table beyond `EmbeddingTable`.

    ``null_ids``: nulls within lists, which are no lookups. ``lengths``: quantiles `QUANTILES` of rows asked
    for by a sample that has the feature. ``curve_error``: the most that the table's curve is below the exact
    one. ``values``: different values if ids are hashes, with ``values_error``, one standard error; None where
    no row is unused. ``hot_rows``: rows that a window's hot ones are, of one row in ``drift_stride``.
    """

    samples: int
    lookups: int
    rows_used: int
    null_ids: int
    lengths: tuple[int, ...]
    hash: str
    curve_error: float
    values: float | None
    values_error: float | None
    hot_rows: int
    drift_stride: int
    windows: tuple[LogWindow, ...]


def mixed(ids: NDArray[Any], rows: int, named: str) -> Ints:
    """The rows that the hash of that name, one of `HASHES`, gives ids; int64."""
    values = ids.astype(np.uint64)
    if named == "splitmix64":
        values += np.uint64(0x9E3779B97F4A7C15)
        values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        values ^= values >> np.uint64(31)
    return (values % np.uint64(rows)).astype(np.int64)


@dataclass
class _Feature:
    """One feature on the way through the log."""

    name: str
    rows: int | None
    hashed: str
    windowed: bool
    cut: int
    """The first sample that is held out."""
    at: int = 0
    highest: int = -1
    lengths: Ints = field(default_factory=lambda: np.zeros(1, np.int64))
    nulls: int = 0
    hot: Ints | None = None
    windows: list[LogWindow] = field(default_factory=list)

    def __post_init__(self) -> None:
        size = self.rows or 0
        self.counts = RowCounts(size)
        self.stride = 1 << max(0, math.ceil(math.log2(max(size, 1) / FULL)))
        self.now = RowCounts(-(-size // self.stride)) if self.windowed else None
        self.held_counts = RowCounts(size)

    def add(self, piece: logs.FeatureLookups, where: str) -> None:
        ids = piece.ids
        self.nulls += piece.nulls
        histogram = np.bincount(piece.lengths)
        if len(histogram) > len(self.lengths):
            self.lengths = np.concatenate(
                (self.lengths, np.zeros(len(histogram) - len(self.lengths), np.int64))
            )
        self.lengths[: len(histogram)] += histogram
        before = self.cut - self.at
        self.at += len(piece.lengths)
        if not len(ids):
            return
        if self.hashed:
            rows = mixed(ids, self.rows or 0, self.hashed)
        else:
            low, high = int(ids.min()), int(ids.max())
            limit = self.rows or LARGEST
            if low < 0 or high >= limit:
                hashed = f"`rows` {self.name}=N `hashes` {self.name}=splitmix64"
                raise UserError(
                    f"{where}, column {self.name}: id {low if low < 0 else high} is out of range, accepted"
                    f" are 0 to {limit - 1}; for ids that are no rows there is {hashed}"
                )
            self.highest = max(self.highest, high)
            rows = ids.astype(np.int64, copy=False)
            if self.rows is None:
                (self.now or self.counts).grow(high + 1)
                self.held_counts.grow(high + 1)
        if self.now is None or self.stride > 1:
            self.counts.add(rows)
        if self.now is not None:
            self.now.add(rows if self.stride == 1 else rows[rows % self.stride == 0] // self.stride)
        if before < len(piece.lengths):
            self.held_counts.add(rows[int(piece.lengths[: max(0, before)].sum()) :])

    def end_window(self, samples: int) -> None:
        """What the window was; its counts go to all."""
        now = self.now
        if now is None:
            return
        rows = self.rows or self.highest + 1
        hot = now.top(min(MOST_HOT, max(1, round(HOT * rows / self.stride))))
        before, lookups = self.hot, max(1, now.total)
        retained_share = overlap = None
        if before is not None:
            retained_share = float(now.of(before).sum()) / lookups
            overlap = len(np.intersect1d(before, hot, assume_unique=True)) / max(1, len(before))
        self.windows.append(
            LogWindow(samples, now.total, float(now.of(hot).sum()) / lookups, retained_share, overlap)
        )
        self.hot = hot
        if self.stride == 1:
            self.counts.grow(len(now.cells))
            self.counts.fold(now)
        self.now = RowCounts(len(now.cells))

    def table(self, samples: int, like: EmbeddingTable) -> tuple[EmbeddingTable, Facts]:
        """The table, with what ``like`` says of its form, and the facts."""
        rows = max(1, self.rows or self.highest + 1)
        for counts in (self.counts, self.held_counts):
            counts.grow(rows)
            counts.trim(rows)
        values, many = self.counts.histogram()
        ranks, shares, error = curve(values, many)
        used = rows - (int(many[-1]) if values[-1] == 0 else 0)
        present = samples - int(self.lengths[0])
        lookups = self.counts.total
        result = replace(
            like, name=self.name, rows=rows, pooling=lookups / present if present else 0.0,
            coverage=present / samples if samples else 0.0, ranks=ranks, shares=shares,
            held_out=held_out(self.counts, self.held_counts, samples - self.cut),
        )  # fmt: skip
        upto = np.cumsum(self.lengths[1:])
        lengths = (1 + int(np.searchsorted(upto, share * present)) for share in QUANTILES)
        load = -math.log1p(-used / rows) if used < rows else None  # different values a row
        spread = None if load is None else math.sqrt(rows * max(0.0, math.expm1(load) - load))
        facts = Facts(
            samples, lookups, used, self.nulls, tuple(lengths) if present else (), self.hashed, error,
            None if load is None else load * rows, spread,
            min(MOST_HOT, max(1, round(HOT * rows / self.stride))), self.stride, tuple(self.windows),
        )  # fmt: skip
        return result, facts


@dataclass(frozen=True)
class TableProfiles:
    """``tables``, and by the name of each ``facts`` and how often its rows were asked for."""

    tables: tuple[EmbeddingTable, ...]
    facts: Mapping[str, Facts]
    counts: Mapping[str, RowCounts]

    def save(self, folder: Path) -> None:
        """Make ``folder`` with the statistics and the orders.

        Raises:
            UserError: it is there already, or cannot be made.
            HostError: it cannot be written, and is not there.
        """
        orders = {name: count.write_order for name, count in self.counts.items()}
        write_statistics(folder, self.tables, orders, {n: to_plain(fact) for n, fact in self.facts.items()})


def profile(
    named: Sequence[str], *, features: Iterable[str] = (), rows: Mapping[str, int] | None = None,
    hashes: Mapping[str, str] | None = None, like: Mapping[str, EmbeddingTable] | None = None,
    window: int | None = None, progress: Callable[[str, float], None] | None = None,
) -> TableProfiles:  # fmt: skip
    """Read the logs (paths, folders, globs, URLs of fsspec), after their numbers of samples.

    ``features``: only these (default: all that the first file has, which every file must have then). By
    feature, or "*" for those not named: ``rows`` of the table, without which it ends with the highest id;
    ``hashes``: how ids become rows; ``like``: the form of the table. ``window``: samples of a window of
    drift, which ends with a row group, record batch or .npz file; without it a window is a file, or several
    where there are many, and a single file has none.

    Raises:
        UserError: a log that cannot be read, is damaged, or lacks a feature; ids out of range.
    """
    rows, hashes, like = rows or {}, hashes or {}, like or {}
    files = logs.files(named)
    together = -(-len(files) // WINDOWS)
    total = sum(part.samples for file in files for part in logs.parts(file))
    chosen: list[_Feature] = []
    samples = begun = 0
    for number, file in enumerate(files):
        if progress is not None:
            progress(file, number / len(files))
        for part in logs.parts(file):
            if not chosen:
                names = tuple(dict.fromkeys(features)) or part.features
                for name in sorted({*rows, *hashes, *like} - {"*", *names}):
                    raise UserError(f"{file}: {name} is no feature that is read{suggest(name, names)}")
                windowed = window is not None or len(files) > 1
                cut = total - total // HELD_OUT
                chosen = [_feature(name, rows, hashes, windowed, cut) for name in names]
            for entry in chosen:
                if entry.name not in part.features:
                    raise UserError(
                        f"{file}: has no feature {entry.name}{suggest(entry.name, part.features)}"
                        "; a feature is a column of integers or of lists of them"
                    )
                for piece in part.pieces(entry.name):
                    entry.add(piece, part.where)
            samples += part.samples
            if window is not None and samples - begun >= window:
                begun = _end(chosen, begun, samples)
        if window is None and ((number + 1) % together == 0 or number + 1 == len(files)):
            begun = _end(chosen, begun, samples)
    _end(chosen, begun, samples)
    if not samples:
        raise UserError(f"{', '.join(named)}: has no samples, accepted are logs that have some")
    if not chosen:
        raise UserError(f"{files[0]}: has no feature, accepted are columns of integers or of lists of them")
    results = {}
    for entry in chosen:
        form = like.get(entry.name, like.get("*", EmbeddingTable(entry.name, 1, 64)))
        results[entry.name] = entry.table(samples, form)
    return TableProfiles(
        tuple(table for table, _ in results.values()),
        {name: facts for name, (_, facts) in results.items()},
        {feature.name: feature.counts for feature in chosen},
    )


def _feature(
    name: str, rows: Mapping[str, int], hashes: Mapping[str, str], windowed: bool, cut: int
) -> _Feature:  # fmt: skip
    size, hashed = rows.get(name, rows.get("*")), hashes.get(name, hashes.get("*", ""))
    if hashed and hashed not in HASHES:
        raise UserError(f"`hashes` {name}={hashed} is unknown{suggest(hashed, HASHES)}")
    if hashed and size is None:
        raise UserError(f"`hashes` {name}={hashed} needs the rows to hash into, `rows` {name}=N")
    if size is not None and size < 1:
        raise UserError(f"`rows` {name}={size} is not accepted, accepted is a whole number from 1")
    try:
        return _Feature(name, size, hashed, windowed, cut)
    except MemoryError:
        raise UserError(
            f"`rows` {name}={size} is not accepted: they take more memory than there is"
        ) from None


def _end(chosen: Iterable[_Feature], begun: int, samples: int) -> int:
    """End the window of all features, unless it has no samples; where the next begins."""
    if samples > begun:
        for feature in chosen:
            feature.end_window(samples - begun)
    return samples
