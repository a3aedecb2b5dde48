"""Fluid flows: how fast rates are found, beside SimGrid where it is installed, and how far packets are off.

The network is a leaf-spine of 1,024 hosts with 3,072 directed links; flows between random pairs of hosts, of
random sizes, all begin at 0. SimGrid (Debian's python3-simgrid) runs the same flows over the same links by
its CM02 model, in which flows without latency share links as these do, so both must end at the same moment.
"""

from __future__ import annotations

import json
import subprocess
import time
import tracemalloc
from collections.abc import Iterator

import numpy as np

from benchmarks.harness.measure import conditions, quantile
from benchmarks.harness.rows import Row, left_out, runner
from windtunnel.engines.flows import World
from windtunnel.engines.packets import Flow, Link, Queue, Simulation

HOSTS, LEAVES, SPINES, RATE = 1024, 32, 16, 12.5e9
SIMGRID = "/usr/bin/python3"  # Debian's bindings are those of Debian's Python
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
    found = []
    for _ in range(count):
        source, target = (int(host) for host in rng.choice(HOSTS, 2, replace=False))
        route = route_of(source, target, HOSTS, LEAVES, SPINES)
        found.append((float(rng.integers(1_000_000, 50_000_000)), route))
    return found


def ours(flows: list[Transfer]) -> tuple[float, float, World]:
    """CPU seconds to start and run them, and the time at which the last one ends."""
    began = time.process_time()
    world = World(capacities())
    for size, route in flows:
        world.start(size, route)
    _, ends = world.run()
    return time.process_time() - began, float(ends[-1]), world


def speed_rows(quick: bool) -> Iterator[Row]:
    """CPU seconds, events and solves a second, and memory."""
    ours(transfers(16))  # compiled by now
    for count in (1024, 2048) if quick else (1024, 2048, 8192):
        flows = transfers(count)
        runs = [ours(flows) for _ in range(1 if quick else 3)]
        seconds = min(run[0] for run in runs)
        solves, reached = runs[0][2].solves
        name = f"{count:,} flows over {HOSTS:,} hosts"
        goal = {"target": "<= 13 CPU s", "met": seconds <= 13.0} if count == 8192 else {}
        spread = f"{', '.join(f'{run[0]:.2f}' for run in runs)} CPU s; {conditions()}"
        yield Row("speed", name, "s", measured=seconds, note=spread, **goal)  # type: ignore[arg-type]
        yield Row("speed", f"{name}: events", "1/s", measured=count / seconds)
        note = f"{solves} solves reached {reached / solves:.0f} flows each"
        yield Row("speed", f"{name}: solves", "1/s", measured=solves / seconds, note=note)
        world = World(capacities())
        for size, route in flows:
            world.start(size, route)
        world.solve()
        began, repeats = time.process_time(), 20
        for _ in range(repeats):
            world.solve()
        taken = (time.process_time() - began) / repeats
        yield Row("speed", f"{name}: solved anew", "1/s", measured=1.0 / taken)
        tracemalloc.start()
        ours(flows)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        yield Row("speed", f"{name}: memory", "bytes", measured=float(peak))


PEER = """
import json, sys, time
from simgrid import Comm, Engine, Actor, LinkInRoute, NetZone
given = json.load(sys.stdin)
options = ["network/model:CM02", "network/TCP-gamma:0", "network/weight-S:0", "network/crosstraffic:0",
           "network/bandwidth-factor:1", "network/latency-factor:1", "surf/precision:1e-12"]
engine = Engine(["bench", "--log=root.threshold:critical"] + ["--cfg=" + option for option in options])
zone = NetZone.create_full_zone("zone")
hosts = [zone.create_host("h%d" % i, 1e9) for i in range(given["hosts"])]
links = [zone.create_link("l%d" % i, rate).set_latency(0).seal() for i, rate in enumerate(given["links"])]
known = set()
for size, route in given["flows"]:
    ends = (route[0], route[-1] - given["hosts"])
    if ends not in known:
        known.add(ends)
        path = [LinkInRoute(links[i]) for i in route]
        zone.add_route(hosts[ends[0]].netpoint, hosts[ends[1]].netpoint, None, None, path, False)
zone.seal()
def all_of_them():
    Comm.wait_all([Comm.sendto_async(hosts[route[0]], hosts[route[-1] - given["hosts"]], int(size))
                   for size, route in given["flows"]])
Actor.create("all", hosts[0], all_of_them)
began = time.process_time()
engine.run()
print(json.dumps([time.process_time() - began, engine.clock]))
"""


def peer_rows(quick: bool) -> Iterator[Row]:
    """SimGrid on the same flows: its CPU seconds over ours, and whether both end at the same moment."""
    ours(transfers(16))
    for count in (1024,) if quick else (1024, 2048, 8192):
        flows = transfers(count)
        given = json.dumps({"hosts": HOSTS, "links": capacities(), "flows": flows})
        name = f"{count:,} flows"
        try:
            done = subprocess.run(
                [SIMGRID, "-c", PEER], input=given, capture_output=True, text=True, timeout=1200, check=True
            )
        except (OSError, subprocess.SubprocessError) as error:
            told = getattr(error, "stderr", "") or str(error)
            lines = told.strip().splitlines() or [type(error).__name__]
            why = next((line for line in lines if "Error" in line), lines[-1])
            yield left_out("peer", f"{name}: SimGrid", f"needs Debian's python3-simgrid: {why}")
            return
        theirs, last = json.loads(done.stdout.splitlines()[-1])
        seconds, end, _ = ours(flows)
        yield Row("peer", f"{name}: SimGrid", "s", measured=theirs, note=conditions())
        yield Row("peer", f"{name}: ours", "s", measured=seconds)
        goal = {"target": ">= 10", "met": theirs / seconds >= 10.0} if count == 8192 else {}
        yield Row("peer", f"{name}: faster by", "x", measured=theirs / seconds, **goal)  # type: ignore[arg-type]
        equal = abs(end - last) <= 1e-6 * last
        note = f"ours {end:.9g} s, SimGrid {last:.9g} s"
        yield Row(
            "peer",
            f"{name}: makespan",
            "s",
            measured=last,
            emulated=end,
            target="equal",
            met=equal,
            note=note,
        )


def packet_rows(quick: bool) -> Iterator[Row]:
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
            packets = Simulation([Link(one, delay, queue) for one in rates], sent)
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
        for which, found in (("", errors), (" from 1 MB", large)):
            figures = (
                ("mean", float(np.mean(found))),
                ("p90", quantile(found, 0.9)),
                ("p99", quantile(found, 0.99)),
            )
            for name, figure in figures:
                row = f"completion times{which} off {sender} packets', {name}"
                yield Row("packets", row, "", emulated=figure, note=note if name == "mean" else "")


SECTIONS = {
    "speed": "flows.speed_rows", "peer": "flows.peer_rows", "packets": "flows.packet_rows",
}  # fmt: skip

run = runner("benchmarks.engines", SECTIONS)
