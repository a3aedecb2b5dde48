"""Mean job completion times under each rule, over slots, jitter, round trips and mixes; gains and losses.

*live*: the switch as a process, 4 and 8 workers, each in a network namespace on a link of its own, which is a
token bucket (tc tbf) in either direction.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import psutil
import torch
import torch.distributed as dist

from benchmarks.harness.measure import in_turn, ratios, seconds_of
from benchmarks.harness.ranks import ranks
from benchmarks.harness.rows import Row, figure
from windtunnel.linux import network
from windtunnel.network.aggregation.policy import ATP, ESA, SWITCHML, SwitchRules
from windtunnel.network.aggregation.twin import AggregationJob, AggregationWorld, emulate

HEAVY, LIGHT = AggregationJob(compute=20e-6), AggregationJob(compute=200e-6)
"""A worker sends for 45 us an iteration: the first communicates for longer than it computes."""
MIXES = {"4 heavy, 4 light": [HEAVY] * 4 + [LIGHT] * 4, "8 heavy": [HEAVY] * 8, "8 light": [LIGHT] * 8}
ARMS: dict[str, SwitchRules] = {"atp": ATP, "switchml": SWITCHML, "esa": ESA}
SLOTS = (64, 128, 256, 512, 1024)


@dataclass(frozen=True)
class Point:
    """A place on the map: jobs in a world."""

    name: str
    jobs: Sequence[AggregationJob]
    world: AggregationWorld


def points(quick: bool) -> list[Point]:
    """The map."""
    grid = [
        Point(
            f"{mix}, {slots} slots, jitter {jitter} us",
            jobs,
            AggregationWorld(slots=slots, jitter=jitter / 1e6),
        )
        for mix, jobs in list(MIXES.items())[: 1 if quick else None]
        for slots in ((128, 1024) if quick else SLOTS)
        for jitter in ((100,) if quick else (20, 100))
    ]
    mix, jobs = next(iter(MIXES.items()))
    others = {
        "jitter 300 us": AggregationWorld(jitter=300e-6),
        "round trip 20 us, window 300": AggregationWorld(delay=5e-6, window=300),
        "jitter 100 us, two racks": AggregationWorld(jitter=100e-6, racks=2),
        "jitter 100 us, results direct": AggregationWorld(jitter=100e-6, direct=True),
        "jitter 100 us, 0.1 % lost": AggregationWorld(jitter=100e-6, loss=1e-3),
    }
    return [
        *grid,
        *(Point(f"{mix}, 256 slots, {words}", jobs, world) for words, world in others.items()),
    ]


def means(point: Point, arms: Mapping[str, SwitchRules], seeds: Sequence[int]) -> dict[str, list[float]]:
    """Mean JCT of each seed under each rule.

    Raises:
        RuntimeError: a sum was not the plain sum.
    """
    times: dict[str, list[float]] = {}
    for name, rules in arms.items():
        for seed in seeds:
            outcome = emulate(point.jobs, point.world, rules, seed)
            if outcome.wrong:
                raise RuntimeError(f"{point.name}, {name}: {outcome.wrong} sums are wrong")
            times.setdefault(name, []).append(sum(outcome.jct) / len(outcome.jct))
    return times


def twin_rows(quick: bool) -> Iterator[Row]:
    """The map, and a job alone."""
    seeds = range(2 if quick else 5)
    best, worst = (0.0, ""), (99.0, "")
    for point in points(quick):
        times = means(point, ARMS, seeds)
        over = {name: ratios(times[name], times["esa"]) for name in ("atp", "switchml")}
        each_rule = ", ".join(f"{name} {median(own) * 1e6:.0f} us" for name, own in times.items())
        here = (median(over["atp"]), point.name)
        best, worst = max(best, here), min(worst, here)
        note = f"mean JCT: {each_rule}; over switchml {median(over['switchml']):.2f}x"
        yield figure(f"{point.name}: esa over atp", "x", emulated=over["atp"], note=note)
    yield figure(
        "esa over atp, at its best", "x", goal=">= 1.2x", emulated=best[0], published=1.35,
        source="arXiv 2201.06398, abstract: up to 1.35x in average JCT",
        note=f"{best[1]}; at its worst {worst[0]:.2f}x: {worst[1]}",
    )  # fmt: skip
    alone = means(Point("alone", [HEAVY], AggregationWorld()), {"atp": ATP, "esa": ESA}, seeds)
    gain, same = ratios(alone["atp"], alone["esa"]), alone["atp"] == alone["esa"]
    yield figure("a job alone: esa over atp", "x", goal="equal", emulated=gain, passed=same)


CASES = {4: (6.25e6, 4 << 20, ">= 1.2x (ideal 1.5)"), 8: (2.5e6, 2 << 20, ">= 1.4x (ideal 1.75)")}
"""Of so many workers: each link's bytes/s, the tensor's bytes, and the target over gloo's ring."""
LOSSES = (0.01, 0.05, 0.1, 0.2)
SLOT_COUNT, SHORT, LIMIT = 512, 0.95, 200.0
"""Of the CPUs' time, what may be used before a run counts as short of them; seconds of one run."""
SWITCH_PORT, SERVER_PORT, TOKEN = 7000, 7001, 4711


def live_rows(quick: bool) -> Iterator[Row]:
    """Times without loss, and sums with it. The last two ranks are the switch, whose link has room for all,
    and the server; the arms are in turn on the same links: the switch, gloo's ring of float32, and of float16
    with half of the bytes and a few bits. A ring sends 2 (n - 1) / n of the bytes a worker, a switch takes
    them once: 1.5 and 1.75 times sooner at best."""
    with ranks("windtunnel.network.aggregation.live.worker") as run:

        def measured(workers: int, rate: float, size: int, loss: float, repeats: int) -> dict[str, Any]:
            arguments, wide = [size, loss, repeats], {workers: rate * (workers + 2)}
            return run(f"{__name__}:on_rank", arguments, workers + 2, rate, LIMIT, wide)[0]  # type: ignore[no-any-return]

        for workers, (rate, size, target) in list(CASES.items())[: 1 if quick else None]:
            result = measured(workers, rate, size, 0.0, 2 if quick else 5)
            busy, times = result["busy"], result["seconds"]
            short = f"CPUs {busy:.0%} busy" + ("; SHORT OF CPU: not counted" if busy > SHORT else "")
            where = f"{workers} workers, {rate * 8e-6:.0f} Mb/s, {size >> 20} MiB"
            each_variant = ", ".join(f"{name} {median(own) * 1e3:.0f} ms" for name, own in times.items())
            for name, goal in (("gloo fp32", target), ("gloo fp16", "")):
                gains, words = ratios(times[name], times["switch"]), f"{where}: switch over {name}"
                yield figure(words, "x", gains, goal, judged=busy <= SHORT, note=f"{each_variant}; {short}")
            yield _sums(where, 0.0, result)
            for loss in LOSSES[-1:] if quick else LOSSES:
                result = measured(workers, rate, size >> 3, loss, 2)
                yield _sums(f"{workers} workers, {size >> 13} KiB", loss, result)


def _sums(where: str, loss: float, result: dict[str, Any]) -> Row:
    name = f"{where}, {loss:.0%} lost at the switch, in and out: sums that are exact"
    middle = median(result["seconds"]["switch"])
    note = f"median {middle * 1e3:.0f} ms, {result['resent']:.0f} fragments sent again by all workers"
    return figure(name, "", float(result["exact"]), "100%", note=note)


def on_rank(arguments: Any) -> dict[str, Any] | None:
    """Of a worker the seconds of each arm by repeat (the slowest worker's), whether sums were exact,
    fragments that all sent again, and the part of all CPUs that was used meanwhile."""
    from windtunnel.network.aggregation.live.server import ParameterServer
    from windtunnel.network.aggregation.live.switch import Switch
    from windtunnel.network.aggregation.live.worker import connect

    size, loss, repeats = arguments
    rank, workers = dist.get_rank(), dist.get_world_size() - 2
    group = dist.new_group(list(range(workers)))
    plug = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    plug.bind(("0.0.0.0", SWITCH_PORT if rank == workers else SERVER_PORT))
    addresses: list[Any] = [None] * (workers + 2)
    dist.all_gather_object(addresses, psutil.net_if_addrs()[network.INTERFACE][0].address)
    switch, server = (addresses[workers], SWITCH_PORT), (addresses[workers + 1], SERVER_PORT)
    if rank >= workers:
        part: Any = ParameterServer(plug, switch) if rank > workers else None
        part = part or Switch(plug, server, jobs=1, loss=loss, slots=SLOT_COUNT, policy="esa")
        threading.Thread(target=part.serve, daemon=True).start()
        return None
    own = torch.randint(-1000, 1000, (size // 4,), generator=torch.Generator().manual_seed(rank)).float()
    total, half = own.clone(), own.half()
    dist.all_reduce(total, group=group)
    joined = connect(switch, rank=rank, world=workers, token=TOKEN, window=64, deadline=60.0)
    exact = True

    def aggregated() -> None:
        nonlocal exact
        exact &= torch.equal(joined.all_reduce(own.clone()), total)

    def slowest(arm: Callable[[], object]) -> float:
        dist.barrier(group)
        seconds = torch.tensor(seconds_of(arm, time.monotonic))
        dist.all_reduce(seconds, dist.ReduceOp.MAX, group=group)
        return float(seconds)

    arms: dict[str, Callable[[], object]] = {"switch": aggregated}
    if loss == 0:
        arms["gloo fp32"] = lambda: dist.all_reduce(own.clone(), group=group)
        arms["gloo fp16"] = lambda: dist.all_reduce(half.clone(), group=group)
    for arm in arms.values():
        arm()  # connections are made, and functions compiled
    psutil.cpu_percent()
    times = in_turn({name: partial(slowest, arm) for name, arm in arms.items()}, repeats)
    busy, counts = psutil.cpu_percent() / 100, torch.tensor([float(not exact), float(joined.resent)])
    dist.all_reduce(counts, group=group)
    dist.barrier(group)
    joined.close()
    return {"seconds": times, "exact": counts[0].item() == 0, "resent": counts[1].item(), "busy": busy}
