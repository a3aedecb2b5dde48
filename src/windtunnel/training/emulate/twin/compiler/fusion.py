"""Which loops share a kernel.

Two kernels become one when they share data (one reads what the other writes, or both read the same), their
loops fit, and no path leads out of one and back into the other. The nodes of a graph are taken in order, and
each joins the kernels before it, those first with which it shares most bytes. Loops fit that have the same
points, by rows the same rows; values for each row fit a reduction over those rows. Nothing joins across a
segment (a collective, a wait for another stream), an extern operator, or the end of a staged reduction.

Source: PyTorch 2.13, ``torch/_inductor/scheduler.py`` (``fuse_nodes_once``, ``can_fuse``,
``will_fusion_create_cycle``, ``score_fusion_memory``; ``config.max_fusion_size``), whose rounds over all
pairs of nodes this does without.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from graphlib import TopologicalSorter
from math import ceil

from windtunnel.training.emulate.twin.compiler.regions import Regions

LARGEST = 64


@dataclass(frozen=True, slots=True)
class FusedKernel:
    """A kernel, or an extern operator by itself: its nodes, and where it goes: the event that it stands at,
    and an order among those that stand there."""

    nodes: tuple[int, ...]
    key: tuple[float, float]
    fused: bool


def kernels(regions: Regions, numbers: list[int]) -> list[FusedKernel]:
    """The kernels of one graph, whose live nodes are ``numbers``, in an order that they can run in."""
    fusion = Fusion(regions, numbers)
    fusion.run()
    needs = {kernel: fusion.needs(kernel) for kernel in fusion.members}
    placed: dict[int, float] = {}
    result = []
    for order, kernel in enumerate(TopologicalSorter(needs).static_order()):
        nodes = fusion.members[kernel]
        own = max(regions.nodes[node].at for node in nodes)
        placed[kernel] = max([own, *(placed[need] for need in needs[kernel])])
        fused = regions.nodes[kernel].loops is not None
        result.append(FusedKernel(tuple(nodes), (placed[kernel], 1.0 + order), fused))
    return result


class Fusion:
    """The kernels of a graph so far; each is named by its first node."""

    def __init__(self, regions: Regions, numbers: list[int]) -> None:
        self.regions, self.numbers = regions, numbers
        self.of = {number: number for number in numbers}
        self.members = {number: [number] for number in numbers}
        self.makers: dict[int, set[int]] = {}  # of each kernel: the nodes that write what it reads
        for number in numbers:
            makers = {regions.values[read.value].maker for read in regions.nodes[number].reads}
            self.makers[number] = makers & self.of.keys()

    def run(self) -> None:
        """Join what can be joined."""
        nodes, values = self.regions.nodes, self.regions.values
        shared: dict[tuple[int, int], int] = defaultdict(int)
        for number in self.numbers:
            for read in nodes[number].reads:
                others = {values[read.value].maker, *values[read.value].users}
                for other in others & self.of.keys():
                    if other < number:
                        shared[other, number] += read.nbytes
        for a, b in sorted(shared, key=lambda pair: (-shared[pair], pair)):
            self._join(self.of[a], self.of[b])

    def needs(self, kernel: int) -> set[int]:
        """The kernels that must come before it."""
        return {self.of[maker] for maker in self.makers[kernel]} - {kernel}

    def _join(self, a: int, b: int) -> None:
        if a == b or not self._fit(a, b) or self._needs_by_way(a, b) or self._needs_by_way(b, a):
            return
        a, b = min(a, b), max(a, b)
        self.members[a] = sorted(self.members[a] + self.members.pop(b))
        self.makers[a] |= self.makers.pop(b)
        self.of.update(dict.fromkeys(self.members[a], a))

    def _fit(self, a: int, b: int) -> bool:
        nodes, values = self.regions.nodes, self.regions.values
        members = [*self.members[a], *self.members[b]]
        loops = [loop for number in members if (loop := nodes[number].loops)]
        segments = {int(self.regions.segment[ceil(nodes[number].at)]) for number in members}
        if len(loops) < len(members) or len(segments) > 1 or len(members) > LARGEST:
            return False
        for number, loop in zip(members, loops, strict=True):
            written = [values[write.value] for write in nodes[number].writes if loop.kind == "staged"]
            if any(user in members for value in written for user in value.users):
                return False
        rows = {loop.rows for loop in loops if loop.kind == "row"}
        if len(rows) > 1:
            return False
        points = max(loop.points for loop in loops)
        return all(
            loop.points == points or (loop.kind == "pointwise" and loop.points in rows) for loop in loops
        )

    def _needs_by_way(self, kernel: int, other: int) -> bool:
        """Whether ``kernel`` needs ``other`` by way of a third one."""
        asked = self.needs(kernel) - {other}
        waiting = list(asked)
        while waiting:
            third = waiting.pop()
            if self.members[third][-1] < other:
                continue  # older than anything that needs the other
            needs = self.needs(third)
            if other in needs:
                return True
            waiting += needs - asked
            asked |= needs
        return False
