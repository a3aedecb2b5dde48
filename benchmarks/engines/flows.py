"""Fluid flows: how fast rates are found, and how far completion times are off those of packets.

The network of the first is a leaf-spine of 1,024 hosts with 3,072 directed links; flows between random pairs
of hosts, of random sizes, all begin at 0.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np

from benchmarks.harness.measure import quantile
from benchmarks.harness.rows import Row, figure
from windtunnel.engines.flows import World
from windtunnel.engines.packets import Flow, PacketLink, Queue, Simulation

HOSTS, LEAVES, SPINES, RATE = 1024, 32, 16, 12.5e9
Transfer = tuple[float, list[int]]


def capacities() -> list[float]:
    """Of the links host → leaf, leaf → host, leaf → spine and spine → leaf, in this order."""
    up = RATE * HOSTS / LEAVES / SPINES
    return [RATE] * (2 * HOSTS) + [up] * (2 * LEAVES * SPINES)


def route_of(source: int, target: int, hosts: int, leaves: int, spines: int) -> list[int]:
    """The links from host to host; a pair keeps its spine, both ways."""
    a, b, spine = source * leaves // hosts, target * leaves // hosts, (source + target) * 31 % spines
    between = [2 * hosts + a * spines + spine, 2 * hosts + (leaves + b) * spines + spine]
    return [source, *(between if a != b else []), hosts + target]


def transfers(count: int, seed: int = 1) -> list[Transfer]:
    """Sizes and routes between random pairs of hosts."""
    rng = np.random.default_rng(seed)
    flows = []
    for _ in range(count):
        source, target = (int(host) for host in rng.choice(HOSTS, 2, replace=False))
        route = route_of(source, target, HOSTS, LEAVES, SPINES)
        flows.append((float(rng.integers(1_000_000, 50_000_000)), route))
    return flows


def ours(flows: list[Transfer]) -> tuple[float, float, World]:
    """CPU seconds to start and run them, and the time at which the last one ends."""
    began = time.process_time()
    world = World(capacities())
    for size, route in flows:
        world.start(size, route)
    _, ends = world.run()
    return time.process_time() - began, float(ends[-1]), world


def speed_rows(quick: bool) -> Iterator[Row]:
    """CPU seconds, events and solves a second."""
    ours(transfers(16))  # compiled by now
    for count in (1024,) if quick else (1024, 8192):
        flows = transfers(count)
        runs = [ours(flows) for _ in range(1 if quick else 3)]
        seconds, (solves, reached) = min(run[0] for run in runs), runs[0][2].solves
        name = f"{count:,} flows over {HOSTS:,} hosts"
        note = f"{', '.join(f'{run[0]:.2f}' for run in runs)} CPU s"
        yield figure(name, "s", seconds, "<= 13 CPU s" if count == 8192 else "", note=note)
        yield figure(f"{name}: events", "1/s", count / seconds)
        note = f"{solves} solves reached {reached / solves:.0f} flows each"
        yield figure(f"{name}: solves", "1/s", solves / seconds, note=note)


def packets_rows(quick: bool) -> Iterator[Row]:
    """How far completion times are from those of the packet engine, on flows that come at random."""
    hosts, leaves, spines, rate, delay, load = 32, 4, 4, 1.25e9, 2e-6, 0.5
    for sender, queue in (("dctcp", Queue(packets=500, mark_at=65)), ("cubic", Queue(packets=500))):
        errors: list[float] = []
        large: list[float] = []
        for seed in range(1 if quick else 5):
            rng = np.random.default_rng(seed)
            sizes = np.clip(rng.lognormal(np.log(100e3), 1.5, 1000), 10e3, 10e6).round()
            starts = np.cumsum(rng.exponential(sizes.mean() / (load * hosts * rate), len(sizes)))
            rates = [rate] * (2 * hosts) + [rate * hosts / leaves / spines] * (2 * leaves * spines)
            world = World(rates)
            sent, alone = [], []
            for size, start in zip(sizes, starts, strict=True):
                a, b = (int(host) for host in rng.choice(hosts, 2, replace=False))
                way, back = route_of(a, b, hosts, leaves, spines), route_of(b, a, hosts, leaves, spines)
                alone.append(delay * len(way) + 1500 / rate * (len(way) - 1))
                world.start(size, way, after=float(start))
                sent.append(Flow(way, back, sender, size, start, ecn=sender == "dctcp"))
            packets = Simulation([PacketLink(capacity, delay, queue) for capacity in rates], sent)
            packets.run(float(starts[-1]) + 10.0)  # a first packet that is lost waits for a second, then two
            ended, ends = world.run()
            fluid = np.empty(len(sizes))
            fluid[ended] = ends
            truth = packets.finished - starts
            if np.isnan(truth).any():
                raise RuntimeError(f"{int(np.isnan(truth).sum())} flows of {sender} do not end in packets")
            error = np.abs((fluid - starts + alone) / truth - 1.0)
            errors += error.tolist()
            large += error[sizes >= 1e6].tolist()
        note = f"{len(errors):,} flows of {hosts} hosts at {load:.0%} load, lognormal sizes of 10 kB to 10 MB"
        for which, off_by in (("", errors), (" from 1 MB", large)):
            parts = {"mean": float(np.mean(off_by))} | {
                f"p{share}": quantile(off_by, share / 100) for share in (90, 99)
            }
            for name, off in parts.items():
                row = f"completion times{which} off {sender} packets', {name}"
                yield figure(row, "", emulated=off, note=note if name == "mean" else "")
