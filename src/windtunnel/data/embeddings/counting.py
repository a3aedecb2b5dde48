"""How often each row of a table was asked for: exact counts in one byte a row, and what follows from them.

A row's byte counts modulo 256; whenever it comes round, the row is noted, at most once in 256 lookups, and
what was noted is kept by row beside the bytes. So a table of a billion rows takes one billion bytes, and 16
more for each row that is asked for 256 times or more often.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from windtunnel.base.compiled import jit
from windtunnel.data.embeddings.model import HeldOut, id_type

Ints = NDArray[np.int64]
CHUNK = 1 << 18
"""Rows that are looked at together."""
PENDING = 1 << 20
"""Noted rows that are kept before they are put together by row."""
POINTS = 100
"""Most points of a curve."""


class RowCounts:
    """Lookups of the rows 0 to ``rows`` - 1."""

    def __init__(self, rows: int) -> None:
        self.cells = np.zeros(rows, np.uint8)
        self.total = 0
        self._round = np.empty(0, np.int64)
        self._rounds = np.empty(0, np.int64)
        self._noted: list[Ints] = []
        self._pending = 0

    def add(self, ids: Ints) -> None:
        """Count ``ids``, each of which is a row of the table."""
        noted = np.empty(len(ids), np.int64)
        fresh = _count(ids, self.cells, noted)
        self.total += len(ids)
        if fresh:
            self._noted.append(noted[:fresh].copy())
            self._pending += fresh
            if self._pending > PENDING + len(self._round):
                self._settle()

    def grow(self, rows: int) -> None:
        """Have at least ``rows`` rows; there may be more, never asked for, until `trim`."""
        if rows > len(self.cells):
            cells = np.zeros(max(rows, 2 * len(self.cells)), np.uint8)
            cells[: len(self.cells)] = self.cells
            self.cells = cells

    def trim(self, rows: int) -> None:
        """Have ``rows`` rows; those after them were never asked for."""
        self.cells = self.cells[:rows]

    def fold(self, other: RowCounts) -> None:
        """Add the counts of ``other``, which has no more rows."""
        self.total += other.total
        rows, _ = other.hottest()
        self._merge(rows, other._rounds)
        for first in range(0, len(other.cells), CHUNK):
            more = other.cells[first : first + CHUNK]
            here = self.cells[first : first + len(more)]
            here += more
            noted = np.flatnonzero(here < more) + first
            self._noted.append(noted)
            self._pending += len(noted)
        self._settle()

    def hottest(self) -> tuple[Ints, Ints]:
        """The rows that were asked for 256 times or more often, in the order of ids, and how often."""
        self._settle()
        return self._round, self._rounds * 256 + self.cells[self._round]

    def of(self, ids: Ints) -> Ints:
        """How often these rows were asked for."""
        rows, counts = self.hottest()
        counted = self.cells[ids].astype(np.int64)
        if len(rows):
            at = np.minimum(np.searchsorted(rows, ids), len(rows) - 1)
            hot = rows[at] == ids
            counted[hot] = counts[at[hot]]
        return counted

    def span(self, first: int, last: int) -> Ints:
        """How often the rows from ``first`` on, before ``last``, were asked for."""
        rows, counts = self.hottest()
        counted = self.cells[first:last].astype(np.int64)
        hot = slice(*np.searchsorted(rows, (first, last)))
        counted[rows[hot] - first] = counts[hot]
        return counted

    def histogram(self) -> tuple[Ints, Ints]:
        """The different counts there are, largest first, and how many rows have each. The last is 0 where
        rows were never asked for."""
        hot, counts = self.hottest()
        less = np.zeros(256, np.int64)
        for first in range(0, len(self.cells), CHUNK):
            less += np.bincount(self.cells[first : first + CHUNK], minlength=256)
        less -= np.bincount(self.cells[hot], minlength=256)
        values, rows = np.unique(counts, return_counts=True)
        tails = np.flatnonzero(less)
        return np.concatenate((values[::-1], tails[::-1])), np.concatenate((rows[::-1], less[tails][::-1]))

    def order(self) -> Iterator[tuple[int, Ints]]:
        """All ids by count, the most wanted first, equal ones by id: pieces of it, each with its place."""
        hot, counts = self.hottest()
        yield 0, hot[np.lexsort((hot, -counts))]
        values, rows = self.histogram()
        places = np.zeros(256, np.int64)
        places[values[values < 256]] = (np.cumsum(rows) - rows)[values < 256]
        for first in range(0, len(self.cells), CHUNK):
            cells = self.cells[first : first + CHUNK]
            ids = np.argsort(255 - cells, kind="stable")
            here = hot[np.searchsorted(hot, first) : np.searchsorted(hot, first + CHUNK)] - first
            if len(here):
                cold = np.ones(len(cells), bool)
                cold[here] = False
                ids = ids[cold[ids]]
            sizes = np.bincount(cells[ids], minlength=256)[::-1]
            ends = np.cumsum(sizes)
            for back in np.flatnonzero(sizes):
                value = 255 - back
                yield int(places[value]), ids[ends[back] - sizes[back] : ends[back]] + first
                places[value] += sizes[back]

    def write_order(self, path: Path) -> None:
        """`order` as an .npy file."""
        kind = np.dtype(id_type(len(self.cells)))
        with path.open("wb") as file:
            shape = {"descr": kind.str, "fortran_order": False, "shape": (len(self.cells),)}
            np.lib.format.write_array_header_1_0(file, shape)
            start = file.tell()
            for place, ids in self.order():
                file.seek(start + place * kind.itemsize)
                file.write(ids.astype(kind).data)

    def top(self, count: int) -> Ints:
        """The ``count`` most wanted rows (fewer where fewer are wanted), in the order of ids."""
        hot, counts = self.hottest()
        count = min(count, len(self.cells))
        if len(hot) >= count:
            return np.sort(hot[np.lexsort((hot, -counts))[:count]])
        values, rows = self.histogram()
        upto = np.cumsum(rows)
        last = min(int(np.searchsorted(upto, count)), len(values) - 1)  # the count of the last row taken
        least, ties = int(values[last]), count - int(upto[last] - rows[last])
        ids = [hot]
        for first in range(0, len(self.cells), CHUNK):
            cells = self.cells[first : first + CHUNK].copy()
            here = hot[np.searchsorted(hot, first) : np.searchsorted(hot, first + CHUNK)] - first
            cells[here] = 0
            ids.append(np.flatnonzero(cells > least) + first)
            if least and ties:
                equal = np.flatnonzero(cells == least)[:ties]
                ties -= len(equal)
                ids.append(equal + first)
        return np.sort(np.concatenate(ids))

    def _settle(self) -> None:
        if self._pending:
            rows, times = np.unique(np.concatenate(self._noted), return_counts=True)
            self._noted, self._pending = [], 0
            self._merge(rows, times)

    def _merge(self, rows: Ints, times: Ints) -> None:
        rows_of_round, at = np.unique(np.concatenate((self._round, rows)), return_inverse=True)
        rounds = np.zeros(len(rows_of_round), np.int64)
        np.add.at(rounds, at, np.concatenate((self._rounds, times)))
        self._round, self._rounds = rows_of_round, rounds


@jit
def _count(ids: Ints, cells: NDArray[np.uint8], noted: Ints) -> int:
    """Count ``ids`` in ``cells``; those whose cell came round go into ``noted``, their number is returned."""
    zeros = 0
    for at in range(len(ids)):
        row = ids[at]
        value = np.uint8(cells[row] + 1)
        cells[row] = value
        noted[zeros] = row
        zeros += value == 0
    return zeros


def curve(values: Ints, rows: Ints) -> tuple[tuple[int, ...], tuple[float, ...], float]:
    """``ranks`` and ``shares`` of a `Table` from its `RowCounts.histogram`, at most `POINTS` of them, and the
    most that the share of any number of rows is less than it was.

    Between rows that were asked for equally often the curve is straight, so all of it is known at the last of
    each. Of these points it keeps the ends, where the rows begin that were never asked for, and then always
    the one that is furthest from the curve so far.
    """
    total = int(values @ rows)
    if not total:
        return (), (), 0.0
    ranks = np.concatenate(([0], np.cumsum(rows)))
    shares = np.concatenate(([0.0], np.cumsum(values * rows) / total))
    shares[ranks == ranks[-1]] = 1.0
    ends = [0, *([len(ranks) - 2] if values[-1] == 0 else []), len(ranks) - 1]
    shares[ends[1:]] = 1.0
    chosen, error = _thinned(ranks, shares, ends)
    return tuple(ranks[chosen].tolist()), tuple(shares[chosen].tolist()), error


def held_out(counts: RowCounts, sample_counts: RowCounts, samples: int) -> HeldOut | None:
    """What ``samples`` that ``sample_counts`` counts, and ``counts`` beside others, ask of the rows as the
    others rank them (rows that those asked for equally often share a rank). None: they ask for nothing."""
    if not sample_counts.total:
        return None
    few, groups, unseen = np.zeros((2, 257), np.int64), list[Ints](), 0
    for first in range(0, len(sample_counts.cells), CHUNK):
        later = sample_counts.span(first, first + CHUNK)
        before = counts.span(first, first + CHUNK) - later
        unseen += int(np.count_nonzero(later[before == 0]))
        capped = np.minimum(before, 256)
        few += [np.bincount(capped, minlength=257), np.bincount(capped, later, 257).astype(np.int64)]
        hot = np.flatnonzero(before >= 256)
        groups.append(np.stack((before[hot], np.ones_like(hot), later[hot])))
    counts_of_rows = 1 + np.flatnonzero(few[0, 1:256])
    groups.append(np.stack((counts_of_rows, *few[:, counts_of_rows])))
    values, *sums = np.concatenate(groups, 1)
    counts_of_rows, at = np.unique(values, return_inverse=True)
    rows, lookups = (np.bincount(at, weights, len(counts_of_rows)).astype(np.int64)[::-1] for weights in sums)
    ranks = np.concatenate(([0], np.cumsum(rows)))
    shares = np.concatenate(([0], np.cumsum(lookups))) / sample_counts.total
    counted, ends = int(ranks[-1]), {0, len(ranks) - 1}
    if counted < len(sample_counts.cells):
        ranks, shares = np.append(ranks, len(sample_counts.cells)), np.append(shares, 1.0)
    chosen, _ = _thinned(ranks, shares, sorted(ends | {len(ranks) - 1}))
    return HeldOut(samples, counted, unseen, tuple(ranks[chosen].tolist()), tuple(shares[chosen].tolist()))


def _thinned(ranks: Ints, shares: NDArray[np.float64], ends: list[int]) -> tuple[list[int], float]:
    """At most `POINTS` of the points, with ``ends`` among them, and the most that a share is off then."""
    positions = set(ends)
    heap = [_furthest(ranks, shares, a, b) for a, b in pairwise(ends)]
    heapq.heapify(heap)
    while heap[0][0] < 0 and len(positions) < POINTS:
        _, first, middle, last = heapq.heappop(heap)
        positions.add(middle)
        for a, b in ((first, middle), (middle, last)):
            heapq.heappush(heap, _furthest(ranks, shares, a, b))
    return sorted(positions), -heap[0][0]


def _furthest(ranks: Ints, shares: NDArray[np.float64], first: int, last: int) -> tuple[float, int, int, int]:
    """Minus the largest distance of the points between two from the straight line, and where it is."""
    if last - first < 2:
        return 0.0, first, first, last
    ends = [first, last]
    away = shares[first + 1 : last] - np.interp(ranks[first + 1 : last], ranks[ends], shares[ends])
    middle = int(np.argmax(np.abs(away)))
    return -abs(float(away[middle])), first, first + 1 + middle, last
