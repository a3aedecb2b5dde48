"""Every sender on emulated links, five seeds of 60 s each. Emulated; beside it what the paper measured."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType

import numpy as np

from benchmarks.harness.measure import spread
from benchmarks.harness.rows import Row, figure
from windtunnel.network.mobilerate.outcome import MobileResult
from windtunnel.network.mobilerate.twin import ARMS, emulate
from windtunnel.traces.bandwidth import GENERATORS, BandwidthTrace

SOURCE = "SIRA, IWQoS 2016"
PUBLISHED = {
    "cubic": (6.77, 895.7), "vegas": (5.16, 211.4), "reno": (6.30, 981.6), "sira": (6.67, 363.3),
    "sprout": (None, 161.8), "sira-h": (6.24, 90.2), "sira-h-literal": (6.24, 90.2),
}  # fmt: skip
"""Mb/s, and ms in the queue at the 95th percentile."""
GOAL = 0.88, 1 / 9


def near_stationary_rows(quick: bool) -> Iterator[Row]:
    """The paper's premise, and its figures."""
    results = _drawn("near-stationary", quick)
    goal = f">= {GOAL[0]:.0%} of the link at <= 1/9 of CUBIC's p95"
    met = _use(results["sira-h"]) >= GOAL[0] and _p95(results["sira-h"]) <= GOAL[1] * _p95(results["cubic"])
    yield from _rows(results, goal, met, PUBLISHED)


def driving_rows(quick: bool) -> Iterator[Row]:
    """Rates that swing within a second, and outages: the front of what can be had."""
    results = _drawn("driving", quick)
    goal, alone = "nobody has both more rate and a shorter p95 (but the oracle)", results["sira-h"]
    met = not any(
        _use(other) >= _use(alone) and _p95(other) <= _p95(alone)
        for arm, other in results.items()
        if arm not in ("sira-h", "oracle")
    )
    yield from _rows(results, goal, met)


def lossy_rows(quick: bool) -> Iterator[Row]:
    """One packet in a hundred is lost on the way."""
    yield from _rows(_drawn("lossy", quick))


def _drawn(name: str, quick: bool) -> dict[str, list[MobileResult]]:
    seeds, seconds = (range(2), 20.0) if quick else (range(5), 60.0)
    links: list[BandwidthTrace] = [GENERATORS[name](seconds, np.random.default_rng(seed)) for seed in seeds]
    return {
        arm: [emulate(link, arm, seconds, seed) for link, seed in zip(links, seeds, strict=True)]
        for arm in ARMS
    }


def _rows(
    results: dict[str, list[MobileResult]], goal: str = "", met: bool | None = None,
    published: Mapping[str, tuple[float | None, float]] = MappingProxyType({}),
) -> Iterator[Row]:  # fmt: skip
    for arm, outcomes in results.items():
        rate, p95 = published.get(arm, (None, None))
        own, judged = (goal, met) if arm == "sira-h" else ("", None)
        yield figure(
            f"{arm}: rate", "Mb/s", goal=own, met=judged, published=rate, source=SOURCE,
            emulated=spread(outcome.rate for outcome in outcomes).median * 8e-6,
            note=f"{_use(outcomes):.1%} of the link; {min(outcome.use for outcome in outcomes):.1%} to"
            f" {max(outcome.use for outcome in outcomes):.1%}",
        )  # fmt: skip
        yield figure(
            f"{arm}: p95 in the queue", "ms", emulated=_p95(outcomes) * 1e3, published=p95, source=SOURCE,
            note=f"mean {spread(outcome.mean for outcome in outcomes).median * 1e3:.1f} ms;"
            f" {spread(float(outcome.dropped) for outcome in outcomes).median:.0f} packets dropped",
        )  # fmt: skip


def _use(outcomes: Sequence[MobileResult]) -> float:
    return spread(outcome.use for outcome in outcomes).median


def _p95(outcomes: Sequence[MobileResult]) -> float:
    return spread(outcome.p95 for outcome in outcomes).median
