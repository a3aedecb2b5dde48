"""Mean job completion times under each rule, over slots, jitter, round trips and mixes; gains and losses."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from benchmarks.harness.measure import Spread, spread
from benchmarks.harness.rows import Row, figure
from windtunnel.network.aggregation.policy import ATP, ESA, SWITCHML, SwitchRules
from windtunnel.network.aggregation.twin import AggregationJob, AggregationWorld, emulate

HEAVY, LIGHT = AggregationJob(compute=20e-6), AggregationJob(compute=200e-6)
"""A worker sends for 45 us an iteration: the first communicates for longer than it computes."""
MIXES = {"4 heavy, 4 light": [HEAVY] * 4 + [LIGHT] * 4, "8 heavy": [HEAVY] * 8, "8 light": [LIGHT] * 8}
ARMS: dict[str, SwitchRules] = {"atp": ATP, "switchml": SWITCHML, "esa": ESA}
PARTS = {
    "esa without priority (a newcomer always wins)": replace(ESA, priority=False),
    "esa without ageing": replace(ESA, ageing=False),
    "atp without reminders": replace(ATP, remind=False),
    "atp that holds slots until the result passes": replace(ATP, hold=True),
}
SLOTS = (64, 128, 256, 512, 1024)


@dataclass(frozen=True)
class Point:
    """A place on the map: jobs in a world."""

    name: str
    jobs: Sequence[AggregationJob]
    world: AggregationWorld


def points(quick: bool) -> list[Point]:
    """The map."""
    found = [
        Point(
            f"{mix}, {slots} slots, jitter {jitter * 1e6:.0f} us",
            jobs,
            AggregationWorld(slots=slots, jitter=jitter),
        )
        for mix, jobs in list(MIXES.items())[: 1 if quick else None]
        for slots in ((128, 1024) if quick else SLOTS)
        for jitter in ((100e-6,) if quick else (20e-6, 100e-6))
    ]
    mix, jobs = next(iter(MIXES.items()))
    big, far = AggregationWorld(jitter=300e-6), AggregationWorld(delay=5e-6, window=300)
    racks = AggregationWorld(jitter=100e-6, racks=2)
    return [
        *found,
        Point(f"{mix}, 256 slots, jitter 300 us", jobs, big),
        Point(f"{mix}, 256 slots, round trip 20 us, window 300", jobs, far),
        Point(f"{mix}, 256 slots, jitter 100 us, two racks", jobs, racks),
        Point(
            f"{mix}, 256 slots, jitter 100 us, results direct",
            jobs,
            AggregationWorld(jitter=100e-6, direct=True),
        ),
        Point(
            f"{mix}, 256 slots, jitter 100 us, 0.1 % lost", jobs, AggregationWorld(jitter=100e-6, loss=1e-3)
        ),
    ]


def means(point: Point, arms: Mapping[str, SwitchRules], seeds: Sequence[int]) -> dict[str, list[float]]:
    """Mean JCT of each seed under each rule.

    Raises:
        RuntimeError: a sum was not the plain sum.
    """
    found: dict[str, list[float]] = {}
    for name, rules in arms.items():
        for seed in seeds:
            one = emulate(point.jobs, point.world, rules, seed)
            if one.wrong:
                raise RuntimeError(f"{point.name}, {name}: {one.wrong} sums are wrong")
            found.setdefault(name, []).append(sum(one.jct) / len(one.jct))
    return found


def ratio(over: Sequence[float], own: Sequence[float]) -> Spread:
    """How many times sooner the second ends, seed by seed."""
    return spread(one / other for one, other in zip(over, own, strict=True))


def twin_rows(quick: bool) -> Iterator[Row]:
    """The map, then what each part of the rules is worth where memory is scarce."""
    seeds = range(2 if quick else 5)
    best, worst = (0.0, ""), (99.0, "")
    for point in points(quick):
        found = means(point, ARMS, seeds)
        over = {name: ratio(found[name], found["esa"]) for name in ("atp", "switchml")}
        told = ", ".join(f"{name} {spread(own).median * 1e6:.0f} us" for name, own in found.items())
        best, worst = (
            max(best, (over["atp"].median, point.name)),
            min(worst, (over["atp"].median, point.name)),
        )
        yield figure(
            f"{point.name}: esa over atp", "x", emulated=over["atp"].median,
            note=f"mean JCT: {told}; over switchml {over['switchml'].median:.2f}x; best seed over atp "
            f"{over['atp'].p95:.2f}x",
        )  # fmt: skip
    yield figure(
        "esa over atp, at its best", "x", goal=">= 1.2x", emulated=best[0], published=1.35,
        source="arXiv 2201.06398, abstract: up to 1.35x in average JCT",
        note=f"{best[1]}; at its worst {worst[0]:.2f}x: {worst[1]}",
    )  # fmt: skip
    mix, jobs = next(iter(MIXES.items()))
    scarce = Point(f"{mix}, 128 slots, jitter 100 us", jobs, AggregationWorld(slots=128, jitter=100e-6))
    found = means(scarce, ARMS | PARTS, seeds)
    for name in PARTS:
        gain = ratio(found["atp"], found[name])
        yield figure(f"{scarce.name}: {name}, over atp", "x", emulated=gain.median)
    alone = means(Point("alone", [HEAVY], AggregationWorld()), {"atp": ATP, "esa": ESA}, seeds)
    same, gain = alone["atp"] == alone["esa"], ratio(alone["atp"], alone["esa"])
    yield figure("a job alone: esa over atp", "x", goal="equal", emulated=gain.median, met=same)
