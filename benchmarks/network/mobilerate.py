"""Every sender on emulated links, five seeds of 60 s each. Emulated; beside it what the paper measured.

Real packets through the relay: ours over UDP and this kernel's TCP, each beside its twin.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from statistics import median
from types import MappingProxyType

import numpy as np

from benchmarks.harness.measure import in_turn
from benchmarks.harness.rows import Row, figure, left_out, need
from windtunnel.network.mobilerate import live
from windtunnel.network.mobilerate.live.place import missing
from windtunnel.network.mobilerate.outcome import MobileResult
from windtunnel.network.mobilerate.policy import POLICIES
from windtunnel.network.mobilerate.twin import ARMS, emulate
from windtunnel.traces.bandwidth import GENERATORS, BandwidthTrace

SOURCE = "SIRA, IWQoS 2016"
PUBLISHED = {
    "cubic": (6.77, 895.7), "vegas": (5.16, 211.4), "reno": (6.30, 981.6), "sira": (6.67, 363.3),
    "sprout": (None, 161.8), "sira-h": (6.24, 90.2), "sira-h-literal": (6.24, 90.2),
}  # fmt: skip
"""Mb/s, and ms in the queue at the 95th percentile."""


def near_stationary_rows(quick: bool) -> Iterator[Row]:
    """The paper's premise, and its figures."""
    results = _drawn("near-stationary", quick)
    ours, cubic = _middle(results["sira-h"]), _middle(results["cubic"])
    goal, reached = ">= 88% of the link at <= 1/9 of CUBIC's p95", ours[0] >= 0.88 and ours[1] <= cubic[1] / 9
    yield from _rows(results, goal, reached, PUBLISHED)


def driving_rows(quick: bool) -> Iterator[Row]:
    """Rates that swing within a second, and outages: the front of what can be had."""
    results = _drawn("driving", quick)
    use, p95 = _middle(results["sira-h"])
    others = [_middle(other) for arm, other in results.items() if arm not in ("sira-h", "oracle")]
    reached = not any(other[0] >= use and other[1] <= p95 for other in others)
    yield from _rows(results, "nobody has both more rate and a shorter p95 (but the oracle)", reached)


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
    results: dict[str, list[MobileResult]], goal: str = "", reached: bool | None = None,
    published: Mapping[str, tuple[float | None, float]] = MappingProxyType({}),
) -> Iterator[Row]:  # fmt: skip
    for arm, outcomes in results.items():
        rate, p95 = published.get(arm, (None, None))
        own, judged = (goal, reached) if arm == "sira-h" else ("", None)
        yield figure(
            f"{arm}: rate", "Mb/s", goal=own, passed=judged, published=rate, source=SOURCE,
            emulated=[each.rate * 8e-6 for each in outcomes], note=f"{_middle(outcomes)[0]:.1%} of the link",
        )  # fmt: skip
        yield figure(
            f"{arm}: p95 in the queue", "ms", emulated=[each.p95 * 1e3 for each in outcomes], published=p95,
            source=SOURCE, note=f"mean {median(outcome.mean for outcome in outcomes) * 1e3:.1f} ms;"
            f" {median(outcome.dropped for outcome in outcomes):.0f} packets dropped",
        )  # fmt: skip


def _middle(outcomes: Sequence[MobileResult]) -> tuple[float, float]:
    """The part of the link that was used, and seconds in the queue at the 95th percentile."""
    return median(outcome.use for outcome in outcomes), median(outcome.p95 for outcome in outcomes)


LIVE_ARMS = ("sira-h", "sira-h-literal", "cubic", "reno", "bbr")


def live_rows(quick: bool) -> Iterator[Row]:
    """What of the link each used, and how long packets waited."""
    need(missing())
    repeats, seconds = (1, 5.0) if quick else (3, 20.0)
    for name in ("near-stationary", "driving"):
        trace = GENERATORS[name](seconds, np.random.default_rng(0))
        lacking = {arm: why for arm in LIVE_ARMS if (why := live.lacking(arm))}
        for arm, why in lacking.items():
            yield left_out(f"{name}, {arm}", why)
        arms = [arm for arm in LIVE_ARMS if arm not in lacking]
        rounds = in_turn({arm: partial(live.measure, trace, arm, seconds) for arm in arms}, repeats)
        for arm, tries in rounds.items():
            thrown, late = sum(each.thrown_away for each in tries), max(max(each.late) for each in tries)
            valid = [measured.result for measured in tries if measured.result is not None]
            if not valid:
                yield left_out(f"{name}, {arm}", f"all {thrown} tries came late")
                continue
            twin = emulate(trace, arm, seconds)
            yield figure(
                f"{name}, {arm}: of the link", "", [result.use for result in valid], emulated=twin.use,
                goal="within 10 % of the twin's" if arm in POLICIES else "",
                passed=abs(median(result.use for result in valid) / twin.use - 1) <= 0.1,
                note=f"queue p95 {median(result.p95 for result in valid) * 1e3:.0f} ms, twin's"
                f" {twin.p95 * 1e3:.0f} ms; {thrown} tries thrown away; at most {late * 1e3:.2f} ms late",
            )  # fmt: skip
