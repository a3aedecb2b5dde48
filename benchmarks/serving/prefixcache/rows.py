"""Policies side by side: hit rates, FLOPs saved and time to the first token by trace and size of the
cache.

Requests go through a cache in the order of their times; what an oracle that knows them all would have
kept.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from heapq import heappop, heappush
from math import inf
from pathlib import Path

import numpy as np

from benchmarks.harness.measure import quantile
from benchmarks.harness.rows import Missing, Row, figure
from benchmarks.serving.prefixcache.sessions import Asked, Symbols, sessions, traced
from windtunnel.base.errors import UserError
from windtunnel.cluster.catalogue import device
from windtunnel.serving.prefixcache.policy.rules import RULES, CacheRules
from windtunnel.serving.prefixcache.policy.shapes import ModelShape, paper_hybrid
from windtunnel.serving.prefixcache.policy.tree import PrefixCache, PrefixNode
from windtunnel.traces import requests as traces


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
            peak = max(peak, cache.used)
            if (replay := cache.due()) is not None:
                cache.settle(replay.run())

    for place, one in enumerate(asked):
        finish(one.arrival)
        found = cache.look(one.prompt, one.arrival, (one.tokens - 1) // unit)
        keep = tuple(depth for depth in found.keep if depth * unit <= one.tokens)
        heappush(running, (one.done, place, keep, found.end))
        hit = found.depth * unit
        hits += hit
        saved += shape.flops(0, hit)
        times.append(speed.base + shape.flops(hit, one.tokens) / speed.rate)
    finish(inf)
    tokens = sum(one.tokens for one in asked)
    flops = sum(shape.flops(0, one.tokens) for one in asked)
    return Outcome(hits / tokens, saved / flops, quantile(times, 0.95), peak)


class Future:
    """Which prompts begin with a prefix: all of them in one tree, each node with the times of its prompts."""

    def __init__(self, asked: Sequence[Asked]) -> None:
        self._tree = PrefixCache(ModelShape(1, 0, 0.0), 1 << 62, CacheRules((), order="lru"))
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
        rules: CacheRules,
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
        if node.id in self._index:
            when = self._when(node)
            self._index.put(node.id, when, self._worth(node), 0)
            if when < inf:
                heappush(self._expiring, (when, node.id))

    def _victim(self) -> int:
        while self._expiring and self._expiring[0][0] <= self._now:
            node = heappop(self._expiring)[1]
            if node in self._index:
                self._refresh(self._nodes[node])
        nodes, next_use, worth = self._index.columns()[:3]
        until = np.maximum(next_use - self._now, 1e-6)
        return int(nodes[(worth / (until if self._knows_when else np.where(until < inf, 1, inf))).argmin()])


SHAPE = paper_hybrid(expand=2, state_width=4)
PLAIN = paper_hybrid(ssm=0, attention=32, mlp=32)
OURS, ORACLE, BLIND, FINEST = "density", "oracle", "oracle without times", "every32"
VLLM, SGLANG = (FINEST, "every528", "block528", "block1648", "block2048"), ("radix", "ends")
POLICIES = ("none", *VLLM, *SGLANG, "marconi", "three-lru", "three", "seglen", OURS, BLIND, ORACLE)
SESSIONS, RATE, SEED, GB = 100, 0.5, 7, 10**9
PAPER = "Marconi (MLSys '25)"
H100 = device("h100-sxm")
SPEED = Speed(0.01, 0.5 * H100.sustained * H100.peak_flops["bfloat16"])  # half of what its clock sustains
_ASKED: list[Asked] = []  # of a process that a pool has forked: they are too many to be sent


def agents_rows(quick: bool) -> Iterator[Row]:
    asked = sessions("agent", SESSIONS // 2 if quick else SESSIONS, RATE, SEED)
    yield from _held("agents", asked, (40,) if quick else (8, 40, 80), (34.4, 3.197), "SWE-bench")


def chats_rows(quick: bool) -> Iterator[Row]:
    sizes = (5, 20, 40)
    for kind, times, name in (("chat long", (7.3, 1.19), "ShareGPT"), ("chat short", (4.5, 1.456), "LMSys")):
        asked = sessions(kind, SESSIONS * (1 if kind == "chat long" else 4), RATE * 2, SEED)
        yield from _held(kind, asked, sizes[1:2] if quick else sizes, times, name)


def mooncake_rows(quick: bool, trace: Path | None) -> Iterator[Row]:
    if trace is None:
        raise Missing("give --trace conversation_trace.jsonl of kvcache-ai/Mooncake")
    told = traces.load(trace)
    if not told.ids:
        raise UserError(
            f"bench: --trace {trace}: it does not tell what prompts share; accepted are traces with hashes"
        )
    asked = traced(told)[: 3000 if quick else None]
    names = [one for one in POLICIES if one not in (FINEST, "block1648", "three")]
    sizes = (800,) if quick else (200, 800, 3000)
    yield from _held(trace.name, asked, sizes, None, "", names, told.unit)


def _held(
    name: str, asked: Sequence[Asked], sizes: Sequence[int],
    times: tuple[float, float] | None, peer: str, names: Sequence[str] = POLICIES, unit: int = 1,
) -> Iterator[Row]:  # fmt: skip
    """All policies at each size; ours against the best of vLLM's and SGLang's kinds, Marconi, the oracle."""
    for size in sizes:
        here = [one for one in names if one != FINEST or size == sizes[len(sizes) // 2]]  # it takes minutes
        with ProcessPoolExecutor(initializer=_ASKED.extend, initargs=(asked,)) as pool:
            found = dict(zip(here, pool.map(partial(_shared, size * GB, unit), here), strict=True))
        about = f"{name}, {size} GB"
        for policy, one in found.items():
            yield _row(f"{about}: {policy}", one)
        yield from _against(about, found, times, peer)


def _shared(capacity: int, unit: int, policy: str) -> Outcome:
    return emulated(policy, _ASKED, capacity, unit)


def emulated(
    policy: str, asked: Sequence[Asked], capacity: int, unit: int, shape: ModelShape = SHAPE
) -> Outcome:
    if policy in (ORACLE, BLIND):
        oracle = Oracle(shape, capacity, RULES[OURS], asked, unit, when=policy == ORACLE)
        return through(oracle, asked, SPEED)
    return through(PrefixCache(shape, capacity, RULES[policy], unit=unit), asked, SPEED)


def _row(name: str, one: Outcome) -> Row:
    note = f"FLOPs saved {one.flops:.1%}, P95 TTFT {one.ttft * 1e3:.0f} ms"
    return figure(f"{name}, token hit rate", "", emulated=one.hits, note=note)


def _against(
    about: str, found: Mapping[str, Outcome], times: tuple[float, float] | None, peer: str
) -> Iterator[Row]:
    ours, oracle = found[OURS], found[ORACLE]
    there = {
        kind: max((one for one in kinds if one in found), key=lambda one: found[one].hits)
        for kind, kinds in (("vLLM-like", VLLM), ("SGLang-like", SGLANG))
    }
    told = {f"the best {kind}": one for kind, one in there.items()}
    if FINEST in found:
        told = {"vLLM+ as in the paper": FINEST, **told}
    published = dict(zip(("vLLM+ as in the paper", "the best SGLang-like"), times or (), strict=False))
    for name, other in told.items():
        yield figure(
            f"{about}: {OURS} / {name} ({other}), hit rate", "x",
            emulated=ours.hits / max(found[other].hits, 1e-9), published=published.get(name),
            source=f"{PAPER}, {peer}, mean of Marconi over it",
            note=f"P95 TTFT {1 - ours.ttft / found[other].ttft:.1%} lower",
        )  # fmt: skip
    least = min(found[one].ttft for one in there.values())
    name, note = f"{about}: P95 TTFT lower than of the better", f"by {(least - ours.ttft) * 1e3:.0f} ms"
    source = f"{PAPER}: up to, by 617 ms"
    yield figure(name, "", emulated=1 - ours.ttft / least, published=0.711, source=source, note=note)
    name, note = f"{about}: {OURS} / oracle eviction, FLOPs saved", "the same points are kept"
    yield figure(name, "", goal=">= 90%", emulated=ours.flops / oracle.flops, note=note)
    name, note = f"{about}: {OURS} / {BLIND}, FLOPs saved", "it knows which prompts come, and not when"
    yield figure(name, "", emulated=ours.flops / found[BLIND].flops, note=note)


def ties_rows(quick: bool) -> Iterator[Row]:
    """A model without states, of which any block can be used."""
    asked = sessions("chat long", SESSIONS // 2, RATE, SEED, unit=16)
    for size in (20,) if quick else (20, 200):
        found = {one: emulated(one, asked, size * GB, 16, PLAIN) for one in ("block16", "radix", OURS)}
        for policy, one in found.items():
            yield _row(f"attention only, {size} GB: {policy}", one)
