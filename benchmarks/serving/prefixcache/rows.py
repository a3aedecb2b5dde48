"""Policies side by side: hit rates, FLOPs saved and time to the first token by trace and size of the
cache.

Requests go through a cache in the order of their times; what an oracle that knows them all would have
kept.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from heapq import heappop, heappush
from math import inf
from pathlib import Path

import numpy as np

from benchmarks.harness.measure import process_pool, quantile
from benchmarks.harness.rows import Missing, Row, figure
from benchmarks.serving.prefixcache.sessions import CacheRequest, Symbols, sessions, traced
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


def through(cache: PrefixCache, requests: Sequence[CacheRequest], speed: Speed) -> Outcome:
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
            whole = requests[place].whole
            last = len(whole) // end * end if end else 0
            cache.admit(whole, (*keep, last) if last else keep, done)
            peak = max(peak, cache.used)
            if (replay := cache.due()) is not None:
                cache.settle(replay.run())

    for place, request in enumerate(requests):
        finish(request.arrival)
        match = cache.look(request.prompt, request.arrival, (request.tokens - 1) // unit)
        keep = tuple(depth for depth in match.keep if depth * unit <= request.tokens)
        heappush(running, (request.done, place, keep, match.end))
        hit = match.depth * unit
        hits += hit
        saved += shape.flops(0, hit)
        times.append(speed.base + shape.flops(hit, request.tokens) / speed.rate)
    finish(inf)
    tokens = sum(request.tokens for request in requests)
    flops = sum(shape.flops(0, request.tokens) for request in requests)
    return Outcome(hits / tokens, saved / flops, quantile(times, 0.95), peak)


class Future:
    """Which prompts begin with a prefix: all of them in one tree, each node with the times of its prompts."""

    def __init__(self, requests: Sequence[CacheRequest]) -> None:
        self._tree = PrefixCache(ModelShape(1, 0, 0.0), 1 << 62, CacheRules((), order="lru"))
        for request in requests:
            self._tree.admit(request.prompt, (), 0.0)
        self._times: dict[int, list[float]] = {}
        for request in requests:
            for node in self._tree._walk(request.prompt)[0]:
                self._times.setdefault(node.id, []).append(request.arrival)

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
        requests: Sequence[CacheRequest],
        unit: int,
        when: bool = True,
    ) -> None:
        self._future, self._knows_when = Future(requests), when
        self._times: dict[int, list[float]] = {}
        self._expiring: list[tuple[float, int]] = []
        super().__init__(shape, capacity, replace(rules, order="flops", tuned=False), unit=unit)

    def _when(self, node: PrefixNode) -> float:
        """When the node is used next, beyond what its child serves."""
        times = self._use_times(node)
        place = bisect_right(times, self._now)
        if len(node.children) == 1:
            [only] = node.children.values()
            child = self._use_times(only)
            while place < len(times):
                other = bisect_right(child, times[place] - 1e-12)
                if other == len(child) or child[other] != times[place]:
                    break
                place += 1
        return times[place] if place < len(times) else inf

    def _use_times(self, node: PrefixNode) -> list[float]:
        if node.id not in self._times:
            labels, above = [node.label], node.parent
            while above is not None:
                labels.append(above.label)
                above = above.parent
            prefix = np.concatenate(labels[::-1])
            self._times[node.id] = self._future.times(prefix if self._state else prefix[: node.begin + 1])
        times: list[float] = self._times[node.id]
        return times

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
OURS, ORACLE, BLIND, FINEST = "density", "oracle", "oracle without times", "every32"
VLLM, SGLANG = (FINEST, "every528", "block528", "block1648", "block2048"), ("radix", "ends")
POLICIES = ("none", *VLLM, *SGLANG, "marconi", "three-lru", "three", "seglen", OURS, BLIND, ORACLE)
SESSIONS, RATE, SEED, GB = 100, 0.5, 7, 10**9
PAPER = "Marconi (MLSys '25)"
H100 = device("h100-sxm")
SPEED = Speed(0.01, 0.5 * H100.sustained * H100.peak_flops["bfloat16"])  # half of what its clock sustains
_ASKED: list[CacheRequest] = []  # of a process that a pool has forked: they are too many to be sent


def agents_rows(quick: bool) -> Iterator[Row]:
    requests = sessions("agent", SESSIONS // 2 if quick else SESSIONS, RATE, SEED)
    yield from _side_by_side("agents", requests, (40,) if quick else (8, 40, 80), (34.4, 3.197), "SWE-bench")


def chats_rows(quick: bool) -> Iterator[Row]:
    sizes = (5, 20, 40)
    for kind, times, name in (("chat long", (7.3, 1.19), "ShareGPT"), ("chat short", (4.5, 1.456), "LMSys")):
        requests = sessions(kind, SESSIONS * (1 if kind == "chat long" else 4), RATE * 2, SEED)
        yield from _side_by_side(kind, requests, sizes[1:2] if quick else sizes, times, name)


def mooncake_rows(quick: bool, trace: Path | None) -> Iterator[Row]:
    if trace is None:
        raise Missing("give --trace conversation_trace.jsonl of kvcache-ai/Mooncake")
    loaded = traces.load(trace)
    if not loaded.ids:
        raise UserError(
            f"--trace {trace}: it does not tell what prompts share; accepted are traces with hashes"
        )
    requests = traced(loaded)[: 3000 if quick else None]
    names = [policy for policy in POLICIES if policy not in (FINEST, "block1648", "three")]
    sizes = (800,) if quick else (200, 800, 3000)
    yield from _side_by_side(trace.name, requests, sizes, None, "", names, loaded.unit)


def _side_by_side(
    name: str, requests: Sequence[CacheRequest], sizes: Sequence[int],
    times: tuple[float, float] | None, peer: str, names: Sequence[str] = POLICIES, unit: int = 1,
) -> Iterator[Row]:  # fmt: skip
    """All policies at each size; ours against the best of vLLM's and SGLang's kinds, Marconi, the oracle."""
    for size in sizes:
        here = [
            policy for policy in names if policy != FINEST or size == sizes[len(sizes) // 2]
        ]  # it takes minutes
        with process_pool(initializer=_ASKED.extend, initargs=(requests,)) as pool:
            outcomes = dict(zip(here, pool.map(partial(_shared, size * GB, unit), here), strict=True))
        about = f"{name}, {size} GB"
        for policy, outcome in outcomes.items():
            yield _row(f"{about}: {policy}", outcome)
        yield from _against(about, outcomes, times, peer)


def _shared(capacity: int, unit: int, policy: str) -> Outcome:
    return emulated(policy, _ASKED, capacity, unit)


def emulated(
    policy: str, requests: Sequence[CacheRequest], capacity: int, unit: int, shape: ModelShape = SHAPE
) -> Outcome:
    if policy in (ORACLE, BLIND):
        oracle = Oracle(shape, capacity, RULES[OURS], requests, unit, when=policy == ORACLE)
        return through(oracle, requests, SPEED)
    return through(PrefixCache(shape, capacity, RULES[policy], unit=unit), requests, SPEED)


def _row(name: str, outcome: Outcome) -> Row:
    note = f"FLOPs saved {outcome.flops:.1%}, P95 TTFT {outcome.ttft * 1e3:.0f} ms"
    return figure(f"{name}, token hit rate", "", emulated=outcome.hits, note=note)


def _against(
    about: str, outcomes: Mapping[str, Outcome], times: tuple[float, float] | None, peer: str
) -> Iterator[Row]:
    ours, oracle = outcomes[OURS], outcomes[ORACLE]
    there = {
        kind: max(
            (policy for policy in kinds if policy in outcomes), key=lambda policy: outcomes[policy].hits
        )
        for kind, kinds in (("vLLM-like", VLLM), ("SGLang-like", SGLANG))
    }
    rivals = {f"the best {kind}": policy for kind, policy in there.items()}
    if FINEST in outcomes:
        rivals = {"vLLM+ as in the paper": FINEST, **rivals}
    published = dict(zip(("vLLM+ as in the paper", "the best SGLang-like"), times or (), strict=False))
    for name, other in rivals.items():
        yield figure(
            f"{about}: {OURS} / {name} ({other}), hit rate", "x",
            emulated=ours.hits / max(outcomes[other].hits, 1e-9), published=published.get(name),
            source=f"{PAPER}, {peer}, mean of Marconi over it",
            note=f"P95 TTFT {1 - ours.ttft / outcomes[other].ttft:.1%} lower",
        )  # fmt: skip
    least = min(outcomes[policy].ttft for policy in there.values())
    name, note = f"{about}: P95 TTFT lower than of the better", f"by {(least - ours.ttft) * 1e3:.0f} ms"
    source = f"{PAPER}: up to, by 617 ms"
    yield figure(name, "", emulated=1 - ours.ttft / least, published=0.711, source=source, note=note)
    name, note = f"{about}: {OURS} / oracle eviction, FLOPs saved", "the same points are kept"
    yield figure(name, "", goal=">= 90%", emulated=ours.flops / oracle.flops, note=note)
    name, note = f"{about}: {OURS} / {BLIND}, FLOPs saved", "it knows which prompts come, and not when"
    yield figure(name, "", emulated=ours.flops / outcomes[BLIND].flops, note=note)
