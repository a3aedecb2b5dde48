"""Requests go through a cache in the order of their times; what an oracle that knows them all would have
kept."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from math import inf

import numpy as np

from benchmarks.harness.measure import quantile
from benchmarks.serving.prefixcache.sessions import Asked, Symbols
from windtunnel.serving.prefixcache.policy.rules import Rules
from windtunnel.serving.prefixcache.policy.shapes import ModelShape
from windtunnel.serving.prefixcache.policy.tree import PrefixCache, PrefixNode


@dataclass(frozen=True)
class Outcome:
    """``hits``: share of prompt tokens that were not computed; ``flops``: share of the FLOPs that were saved;
    ``ttft``: its 95th percentile, seconds, from FLOPs and without waiting; ``peak``: most bytes."""

    hits: float
    flops: float
    ttft: float
    peak: int


@dataclass(frozen=True)
class Speed:
    """Seconds until a first token whatever is computed, and FLOP/s of a prefill."""

    base: float
    rate: float


def through(cache: PrefixCache, asked: Sequence[Asked], speed: Speed) -> Outcome:
    """Each prompt is looked up when it arrives, and all that its request knows is admitted when that is
    done."""
    unit, shape = cache.unit, cache.shape
    hits, saved, peak = 0, 0.0, 0
    times: list[float] = []
    running: list[tuple[float, int, tuple[int, ...], int]] = []

    def finish(until: float) -> None:
        nonlocal peak
        while running and running[0][0] <= until:
            done, place, keep, end = heappop(running)
            whole = asked[place].whole
            last = len(whole) // end * end if end else 0
            cache.admit(whole, (*keep, last) if last else keep, done)
            peak = max(peak, cache.used[0])
            if (replay := cache.due()) is not None:
                cache.settle(replay.run())

    for place, one in enumerate(asked):
        finish(one.arrival)
        found = cache.look(one.prompt, one.arrival, (one.tokens - 1) // unit)
        if found.away and not cache.restore(found, one.arrival)[0]:
            found = cache.look(one.prompt, one.arrival, (one.tokens - 1) // unit, near=True)
        keep = tuple(depth for depth in found.keep if depth * unit <= one.tokens)
        heappush(running, (one.done, place, keep, found.end))
        hit = found.depth * unit
        hits += hit
        saved += shape.flops(0, hit)
        times.append(speed.base + found.seconds + shape.flops(hit, one.tokens) / speed.rate)
    finish(inf)
    tokens = sum(one.tokens for one in asked)
    flops = sum(shape.flops(0, one.tokens) for one in asked)
    return Outcome(hits / tokens, saved / flops, quantile(times, 0.95), peak)


class Future:
    """Which prompts begin with a prefix: all of them in one tree, each node with the times of its prompts."""

    def __init__(self, asked: Sequence[Asked]) -> None:
        self._tree = PrefixCache(ModelShape(1, 0, 0.0), 1 << 62, Rules((), order="lru"))
        for one in asked:
            self._tree.admit(one.prompt, (), 0.0)
        self._times: dict[int, list[float]] = {}
        for one in asked:
            for node in self._tree._walk(one.prompt)[0]:
                self._times.setdefault(node.id, []).append(one.arrival)

    def times(self, prefix: Symbols) -> list[float]:
        """When prompts arrive that begin with ``prefix``."""
        path, depth = self._tree._walk(prefix)
        return self._times[path[-1].id] if path and depth == len(prefix) else []


class Oracle(PrefixCache):
    """Belady's rule by FLOPs: what goes is what saves the fewest FLOPs a byte, by the time until it is used
    again. With one child, it is used again by the next prompt that does not go on as the child does. Without
    ``when`` it knows only whether, and not when."""

    def __init__(
        self,
        shape: ModelShape,
        capacity: int,
        rules: Rules,
        asked: Sequence[Asked],
        unit: int,
        when: bool = True,
    ) -> None:
        self._future, self._knows_when = Future(asked), when
        self._times: dict[int, list[float]] = {}
        self._expiring: list[tuple[float, int]] = []
        super().__init__(shape, capacity, replace(rules, order="flops", tuned=False), unit=unit)

    def _when(self, node: PrefixNode) -> float:
        """When the node is used next, beyond what its child serves."""
        times = self._known(node)
        place = bisect_right(times, self._now)
        if len(node.children) == 1:
            [only] = node.children.values()
            child = self._known(only)
            while place < len(times):
                other = bisect_right(child, times[place] - 1e-12)
                if other == len(child) or child[other] != times[place]:
                    break
                place += 1
        return times[place] if place < len(times) else inf

    def _known(self, node: PrefixNode) -> list[float]:
        if node.id not in self._times:
            labels, above = [node.label], node.parent
            while above is not None:
                labels.append(above.label)
                above = above.parent
            prefix = np.concatenate(labels[::-1])
            self._times[node.id] = self._future.times(prefix if self._state else prefix[: node.begin + 1])
        found: list[float] = self._times[node.id]
        return found

    def _refresh(self, node: PrefixNode) -> None:
        """As for all, but with the time of the next use in place of the last."""
        super()._refresh(node)
        if node.id in self._index[0]:
            when = self._when(node)
            self._index[0].put(node.id, when, self._worth(node, 0, self._leaf(node, 0)), 0)
            if when < inf:
                heappush(self._expiring, (when, node.id))

    def _victim(self, tier: int) -> int:
        while self._expiring and self._expiring[0][0] <= self._now:
            node = heappop(self._expiring)[1]
            if node in self._index[0]:
                self._refresh(self._nodes[node])
        nodes, next_use, worth = self._index[0].columns()[:3]
        until = np.maximum(next_use - self._now, 1e-6)
        return int(nodes[(worth / (until if self._knows_when else np.where(until < inf, 1, inf))).argmin()])
