"""Which loops share a kernel: what Inductor's scheduler does, on plain data.

Two kernels become one when they share data (one reads what the other writes, or both read the same), their
loops fit, and no path leads out of one and back into the other. Pairs that share most bytes come first, and
rounds follow until nothing joins. Loops fit that have the same points, by rows the same rows; values for each
row fit a reduction over those rows. A pointwise kernel that is read by one other only is computed where
it is read, whatever its size. Nothing joins across a segment (a collective, a wait for another stream), an
extern operator, or the second stage of a reduction. The order of the loops and what each reads decide alone,
so the same graph always gets the same kernels.

Source: PyTorch 2.13, ``torch/_inductor/scheduler.py`` (``fuse_nodes_once``, ``can_fuse``,
``will_fusion_create_cycle``, ``score_fusion_memory``) and ``config.max_fusion_size``.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from windtunnel.training.emulate.twin.compiler.loops import Loops

LARGEST = 64


@dataclass(frozen=True, slots=True)
class Item:
    """A node as fusion sees it: its loops (None: extern), values read and written (numbers), bytes of each
    value read, whether what it writes is wanted outside the graph, and its segment."""

    loops: Loops | None
    reads: tuple[int, ...]
    sizes: tuple[int, ...]
    writes: tuple[int, ...]
    wanted: bool
    segment: int


def kernels(items: Sequence[Item]) -> list[int]:
    """The kernel of each of ``items``, which are in an order that they can run in; a kernel is named by its
    first member."""
    return _Fusion(items).run()


class _Fusion:
    def __init__(self, items: Sequence[Item]) -> None:
        self.items = items
        self.of = list(range(len(items)))
        self.members = {i: 1 << i for i in range(len(items))}
        self.readers: dict[int, set[int]] = defaultdict(set)
        writer: dict[int, int] = {}
        self.before = [0] * len(items)  # bits of the items that must come before, through kernels as they are
        for i, item in enumerate(items):
            for value in item.reads:
                self.readers[value].add(i)
                at = writer.get(value)
                if at is not None:
                    self.before[i] |= self.before[at] | 1 << at
            for value in item.writes:
                writer[value] = i
        self.writer = writer

    def run(self) -> list[int]:
        while any(self._round()):
            pass
        return self.of

    def _round(self) -> list[bool]:
        return [self._join(a, b) for _, a, b in self._pairs()]

    def _pairs(self) -> list[tuple[int, int, int]]:
        """(-shared bytes, kernel, kernel) of the pairs that share a value."""
        shared: dict[tuple[int, int], int] = defaultdict(int)
        for value, readers in self.readers.items():
            pairs = (zip(self.items[i].reads, self.items[i].sizes, strict=True) for i in sorted(readers))
            size = max(size for each in pairs for read, size in each if read == value)
            touched = {self.of[i] for i in readers if self.items[i].loops}
            writer = self.writer.get(value)
            if writer is not None and self.items[writer].loops:
                touched.add(self.of[writer])
            ordered = sorted(touched)
            for n, a in enumerate(ordered):
                for b in ordered[n + 1 :]:
                    shared[a, b] += size
        return sorted((-size, a, b) for (a, b), size in shared.items())

    def _join(self, a: int, b: int) -> bool:
        a, b = self.of[a], self.of[b]
        if a == b or not self._fit(a, b):
            return False
        mine = self.members[a] | self.members[b]
        if mine.bit_count() > LARGEST:
            return False
        before = self.before[a] | self.before[b]
        outside = before & ~mine
        while outside:  # something that must come before, and itself comes after one of them
            low = outside & -outside
            if self.before[low.bit_length() - 1] & mine:
                return False
            outside ^= low
        first = min(a, b)
        self.members[first] = mine
        del self.members[max(a, b)]
        before &= ~mine
        for i in _bits(mine):
            self.of[i] = first
            self.before[i] = before
        for i in range(len(self.items)):
            if self.before[i] & mine:
                self.before[i] |= mine | before
        return True

    def _fit(self, a: int, b: int) -> bool:
        ours, theirs = self._loops(a), self._loops(b)
        if self.items[a].segment != self.items[b].segment:
            return False
        if self._inlined(a, b) or self._inlined(b, a):
            return not any(mine.staged for mine in ours) or not any(its.staged for its in theirs)
        points = max(loops.points for loops in (*ours, *theirs))
        rows = {loops.rows for loops in (*ours, *theirs) if loops.rows}
        kinds = {loops.kind for loops in (*ours, *theirs)}
        if len(rows) > 1 or {"row", "column"} <= kinds or {"full", "column"} <= kinds:
            return False
        wide = [max(loops.points for loops in side) == points for side in (ours, theirs)]
        if all(wide):
            return True
        small = ours if not wide[0] else theirs
        return bool(rows) and all(loops.kind == "pointwise" and loops.points in rows for loops in small)

    def _inlined(self, a: int, b: int) -> bool:
        """Whether all that kernel ``a`` makes is pointwise and read by kernel ``b`` alone."""
        for i in _bits(self.members[a]):
            item = self.items[i]
            if item.loops is None or item.loops.kind != "pointwise" or item.wanted:
                return False
            for value in item.writes:
                if any(self.of[reader] not in (a, b) for reader in self.readers.get(value, ())):
                    return False
        return True

    def _loops(self, kernel: int) -> list[Loops]:
        loop = [self.items[i].loops for i in _bits(self.members[kernel])]
        return [loops for loops in loop if loops is not None]


def _bits(mask: int) -> list[int]:
    numbers = []
    while mask:
        low = mask & -mask
        numbers.append(low.bit_length() - 1)
        mask ^= low
    return numbers
