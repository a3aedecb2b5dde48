"""gWRITE of 1 KiB on three replicas of this host, while burners (each a session of its own) want its CPUs.

The arms differ in the priority of the engines alone: the coordinator has real-time priority in both. The twin
is given what chains of one member took: quiet ones say what service costs, busy ones how long an engine waits
to run. What it then says of three members is emulated; nothing of their busy runs went into it.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from statistics import median

from benchmarks.harness.measure import in_turn, quantile, ratios, scratch
from benchmarks.harness.rows import Row, figure, need
from windtunnel.data.group import EngineProcess, Member, ReplicationGroup, start_engine
from windtunnel.data.group.twin import EngineProfile, latencies

SECRET, SIZE, PAYLOAD = b"of this benchmark alone", 1 << 20, 1024
BURNERS, REPEATS, OPERATIONS, BOUND = (0, 4, 16), 5, 1000, 15.0
"""``BOUND``: seconds of one round at most."""
BURN = """
import os, time
end, parent = time.monotonic() + 300, os.getppid()
while time.monotonic() < end and os.getppid() == parent:
    pass
"""
PAPER = "Kim et al., HyperLoop, SIGCOMM 2018, abstract: about 800 times at the 99th percentile"
QUANTILES = {"p50": 0.5, "p99": 0.99}
Round = tuple[list[float], float]
"""Seconds of each operation, and of an engine's CPU by operation."""


@contextmanager
def burning(count: int) -> Iterator[None]:
    """So many processes that only compute, until the end, or for five minutes."""
    command = [sys.executable, "-c", BURN]
    burners = [subprocess.Popen(command, start_new_session=True) for _ in range(count)]
    try:
        yield
    finally:
        for burner in burners:
            burner.kill()
            burner.wait()


def cpu_of(engines: Sequence[EngineProcess]) -> float:
    stats = (Path(f"/proc/{engine.pid}/schedstat").read_text() for engine in engines)
    return sum(int(each.split()[0]) for each in stats) / 1e9 / len(engines)


def measured(engines: Sequence[EngineProcess], operations: int) -> Round:
    """In a thread that has real-time priority, and so have those that the group makes."""

    def work() -> Round:
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(40))
        members = [Member(f"m{number}", engine.address) for number, engine in enumerate(engines)]
        took, data = list[float](), os.urandom(PAYLOAD)
        with ReplicationGroup(members, epoch=time.monotonic_ns(), secret=SECRET, patience=30.0) as group:
            for _ in range(50):
                group.write(0, data).result()
            before, end = cpu_of(engines), time.monotonic() + BOUND
            while len(took) < operations and time.monotonic() < end:
                began = time.perf_counter()
                group.write(len(took) % 1000 * PAYLOAD, data).result()
                took.append(time.perf_counter() - began)
            return took, (cpu_of(engines) - before) / len(took)

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(work).result()


def tail_rows(quick: bool) -> Iterator[Row]:
    """Both arms in turn, quiet and busy; chains of one member beside those of three."""
    repeats, operations = (2, 300) if quick else (REPEATS, OPERATIONS)
    chains: dict[str, list[EngineProcess]] = {}
    with scratch(Path("/dev/shm")) as folder, ExitStack() as stack:
        for arm in ("engine", "ordinary"):
            for count in (1, 3):
                chains[f"{arm} {count}"] = engines = []
                for number in range(count):
                    path, listen = folder / f"{arm}{count}-{number}", f"unix:{folder}/{arm}{count}-{number}.s"
                    real = arm == "engine"
                    engines.append(start_engine(path, SIZE, listen=listen, secret=SECRET, realtime=real))
                    stack.callback(engines[-1].stop)
        need(next((engine.refused for each in chains.values() for engine in each if engine.refused), ""))
        quiet: dict[str, list[float]] = {}
        for burners in BURNERS:
            with burning(burners):
                arms = {name: partial(measured, each, operations) for name, each in chains.items()}
                rounds = in_turn(arms, repeats)
            took = {
                name: [seconds for each, _ in each_round for seconds in each]
                for name, each_round in rounds.items()
            }
            quiet = quiet or took
            yield from _rows(burners, quiet, took, rounds)


def _rows(
    burners: int, quiet: dict[str, list[float]], took: dict[str, list[float]],
    rounds: dict[str, list[Round]],
) -> Iterator[Row]:  # fmt: skip
    ends: dict[str, tuple[float, float]] = {}
    for arm in ("ordinary", "engine"):
        # the slope from one member to three is an engine's service, what is left is the coordinator's
        single, three = (median(quiet[f"{arm} {count}"]) for count in (1, 3))
        waits = tuple(max(0.0, each - single) for each in took[f"{arm} 1"])
        service = max(0.0, (three - single) / 2)  # on a busy host three are now and then as quick
        profile = EngineProfile(service, max(0.0, single - service), waits)
        emulated = latencies(3, 20_000, profile, 1, payload=PAYLOAD).tolist()
        runs = rounds[f"{arm} 3"]
        for name, share in QUANTILES.items():
            each, twin = [quantile(some, share) for some, _ in runs], quantile(emulated, share)
            yield figure(f"{burners} burners, {arm}: {name}", "s", each, emulated=twin)
        cpu = [each for _, each in runs]
        yield figure(f"{burners} burners, {arm}: CPU of an engine, an operation", "s", cpu)
        ends[arm] = quantile(took[f"{arm} 3"], 0.99), quantile(emulated, 0.99)
    measured, twin = ratios(ends["ordinary"], ends["engine"])
    goal, published = (">= 20 times", 800.0) if burners == BURNERS[-1] else ("", None)
    name = f"{burners} burners: ordinary / engine, p99"
    yield figure(name, "times", measured, goal, emulated=twin, published=published, source=PAPER)
