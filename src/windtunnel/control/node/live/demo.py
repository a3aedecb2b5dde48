"""A primary load and a batch load on this host, and what lending does to both.

The primary answers requests of about 2 ms of work that come by themselves, in bursts of half a second: one
that comes while another is served waits, and its latency counts from when it came. The batch is a spinning
process a core. Both groups together weigh `WEIGHT` times what others weigh: those disturb the figures less.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections import ChainMap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from windtunnel.base.errors import HostError
from windtunnel.control.node import agents
from windtunnel.control.node.agents import WAITS, HarvestActuator, HarvestModel
from windtunnel.control.node.live.agent import run
from windtunnel.control.node.live.cpu import Groups, folder_of, lent, setting
from windtunnel.control.node.live.memory import Pages
from windtunnel.control.node.policy import Schedule
from windtunnel.linux.cgroup import HostCgroup
from windtunnel.store.eventlog import read

ARMS = ("alone", "harvest", "cpu.idle", "free")
SCHEDULE = Schedule(hold=2.0)
WEIGHT, WARM = 64, 1.0
_BATCH = "import sys\nfor file in sys.argv[2:]: open(file, 'w').write('0')\nwhile True: pass"
_PRIMARY = """
import json, random, sys, time
for file in sys.argv[2:]: open(file, "w").write("0")
def work(turns):
    began = time.process_time()
    for _ in range(turns): pass
    return time.process_time() - began
turns = int(20_000 * 0.002 / min(work(20_000) for _ in range(50)))
draw, seconds, arrival, latencies, start = random.Random(1), float(sys.argv[1]), 0.0, [], time.monotonic()
while arrival < seconds:
    arrival += draw.expovariate(250 if int(arrival * 2) % 2 else 20)
    time.sleep(max(0.0, start + arrival - time.monotonic()))
    work(turns)
    latencies.append([arrival, time.monotonic() - start - arrival])
print(json.dumps(latencies))
"""
_PAGES = """
import json, mmap, os, random, resource, signal, sys, tempfile, time
signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # who reads the result may be killed
seconds, size, file = float(sys.argv[1]), 64 << 20, tempfile.TemporaryFile(dir="/var/tmp")
file.truncate(size)
memory = mmap.mmap(-1, size, mmap.MAP_PRIVATE) if sys.argv[2] == "swap" else mmap.mmap(file.fileno(), size)
for part in range(0, size, 1 << 20):
    memory[part:part + (1 << 20)] = os.urandom(1 << 20)
    if part >> 21 & 1: memory.madvise(mmap.MADV_DONTDUMP, part, 1 << 20)  # makes it a mapping of its own
memory.flush()
state = lambda: (int(open("/proc/self/statm").read().split()[1]), resource.getrusage(0).ru_majflt)
(full, before), draw, accesses = state(), random.Random(1), 0
print(flush=True)
start = time.monotonic()
while time.monotonic() < start + seconds:
    part = draw.randrange(16, 64) << 20 if draw.random() < 0.01 else 0
    accesses += len(memory[:16 << 20:4096]) + len(memory[part:part + (1 << 18):4096])
    time.sleep(0.01)
resident, after = state()
print(json.dumps({"slow": max(0.0, 1 - resident / full), "remote": (after - before) / accesses,
                  "accesses": accesses / seconds}))
"""


@dataclass(frozen=True)
class LoadFigures:
    """``p99``: of requests, seconds; ``waited``: share of its time without a core, of the primary; ``lent``:
    cores that the batch used; ``counts``: of the loops; ``restored``: its quota and weight are as before."""

    p99: float
    waited: float
    lent: float
    counts: dict[str, int]
    restored: bool


def measured(arm: str, seconds: float, log: Path, limit: float = WAITS) -> LoadFigures:
    """One of `ARMS` for so many seconds, after `WARM`: no batch; with an agent, whose primary may wait
    ``limit``; with a batch that the kernel runs when nothing else wants to; with one of the usual weight.

    Raises:
        LinuxError: a control group cannot be made (root can).
        HostError: the load or the agent failed.
    """
    below = Path(f"windtunnel-node-{os.getpid()}")
    names = below / "primary", below / "elastic"
    primary, elastic = groups = [HostCgroup(name) for name in names]
    try:
        for group in groups:
            group.make(None, None, None)
        for name, weight in (("cpu.shares", 1024), ("cpu.weight", 100)):
            with contextlib.suppress(OSError):  # the file of the other version
                (folder_of(below) / name).write_text(str(weight * WEIGHT))
        folder, host, agent = folder_of(names[1]), Groups(*names), None
        if arm == "cpu.idle":
            (folder / "cpu.idle").write_text("1")
        before = setting(folder)
        if arm == "harvest":
            parts = HarvestModel(Groups(*names)), HarvestActuator(Groups(*names), limit)
            agent = run(*parts, SCHEDULE, log=log)
        with agent or contextlib.nullcontext():
            end = time.monotonic() + 30
            while agent and lent(setting(folder)) > host.cores and time.monotonic() < end:
                time.sleep(0.01)
            for _ in range(0 if arm == "alone" else os.cpu_count() or 1):
                subprocess.Popen([sys.executable, "-c", _BATCH, "", *map(str, elastic.procs)])
            command = [sys.executable, "-c", _PRIMARY, str(seconds + WARM), *map(str, primary.procs)]
            began, limited = time.monotonic(), seconds * 3 + 60
            done = subprocess.run(command, capture_output=True, text=True, timeout=limited, check=False)
            share = elastic.usage()[0] / (time.monotonic() - began)
        if done.returncode:
            raise HostError(f"the primary load failed: {(done.stderr.splitlines() or ['no words'])[-1]}")
        latencies = sorted(latency for arrival, latency in json.loads(done.stdout) if arrival >= WARM)
        p99 = latencies[int(len(latencies) * 0.99)]
        counts = dict(ChainMap(*(event["counts"] for event in read(log) if event["kind"] == "counts")))
        return LoadFigures(p99, host.waited(), share, counts, setting(folder) == before)
    finally:
        for group in groups:
            group.kill()
            group.remove()


def paged(agent: bool, seconds: float, log: Path) -> dict[str, Any]:
    """A load of 64 MiB that reads a quarter all the time and a little of the rest each second or so, for so
    many seconds, with an agent or without. ``slow``: the share of its memory in ``tier`` in the end;
    ``remote``: of its accesses, by major faults; ``accesses``: a second. Raises as `measured`."""
    swaps = [row.split()[0] for row in Path("/proc/swaps").read_text().splitlines()[1:]]
    tier = ", ".join(swaps) or "files, as this host has no swap"
    command = [sys.executable, "-c", _PAGES, str(seconds), "swap" if swaps else "files"]
    with contextlib.ExitStack() as stack:
        load = stack.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
        stack.callback(load.kill)
        if load.stdout and load.stdout.readline() and agent:
            pages, rng = Pages(load.pid), np.random.default_rng(0)
            model = agents.MemoryModel(pages, rng, min(15.0, seconds / 4), (0.1, 0.2, 0.4, 0.8))
            stack.enter_context(run(model, agents.MemoryActuator(pages), agents.MEMORY, log=log))
        words, _ = load.communicate(timeout=seconds + 60)
    if load.returncode:
        raise HostError(f"the load ended with status {load.returncode}")
    counts = dict(ChainMap(*(event["counts"] for event in read(log) if event["kind"] == "counts")))
    return {**json.loads(words), "counts": counts, "tier": tier}
