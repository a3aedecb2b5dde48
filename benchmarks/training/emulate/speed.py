"""How long windtunnel itself takes on large jobs, and events a second of its engine.

*Speed*: from command to report, and how much memory. *Engine*: a synthetic job of ranks that all differ, on
one core.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from benchmarks.harness.rows import Row, figure, left_out
from benchmarks.training.emulate.jobs import example
from windtunnel.base.errors import ScriptError
from windtunnel.engines.replay.engine import replay
from windtunnel.engines.replay.layout import Program, ReplayJob

SAMPLE_SECONDS = 0.1
GIB = float(1 << 30)


@dataclass(frozen=True)
class LargeJob:
    """A job: what it is given, and the most seconds and bytes it may take. ``program``: the example where
    None; ``options``: of `windtunnel emulate`."""

    name: str
    cluster: str
    arguments: str
    seconds: float
    gib: float
    program: Path | None = None
    options: str = ""


LARGE_JOBS = (
    LargeJob(
        "8B, FSDP2, 128 x h100-96", "h100-96:16x8",
        "--size 8b --parallel fsdp --seq 8192 --batch 2 --ac selective", 60.0, 4.0,
    ),
    LargeJob(
        "405B, TP8 x PP16 x DP64, 8192 x h100-sxm", "h100-sxm:1024x8",
        "--size 405b --tp 8 --pp 16 --seq 8192", 300.0, 8.0,
    ),
)  # fmt: skip


def speed_rows(quick: bool) -> Iterator[Row]:
    """Seconds and memory of each job; none of them where ``quick``."""
    for job in LARGE_JOBS:
        if quick:
            yield left_out(job.name, "left out by --quick")
            continue
        wall, peak, _ = emulate_in_process(job)
        yield figure(f"{job.name}: command to report", "s", wall, f"<= {job.seconds:.0f} s")
        yield figure(
            f"{job.name}: peak memory", "bytes", peak, f"<= {job.gib:.0f} GiB",
            note="resident memory of the command and its children, summed, at 10 Hz",
        )  # fmt: skip


def emulate_in_process(job: LargeJob) -> tuple[float, float, dict[str, Any]]:
    """Run the command as a user would. Returns its seconds, its peak bytes, and the summary it printed.

    Raises `ScriptError` with its last lines when the command fails.
    """
    command = [
        sys.executable, "-c", "from windtunnel.cli.main import main; main()",
        "emulate", "--cluster", job.cluster, "--json", *job.options.split(),
        str(job.program or example()), *job.arguments.split(),
    ]  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {"WINDTUNNEL_HOME": folder}
        output, errors = Path(folder, "output"), Path(folder, "errors")
        with output.open("w") as out, errors.open("w") as err:
            begin = time.perf_counter()
            process = subprocess.Popen(command, stdout=out, stderr=err, env=environment)
            peak = 0.0
            while process.poll() is None:
                peak = max(peak, resident_bytes(process.pid))
                time.sleep(SAMPLE_SECONDS)
            wall = time.perf_counter() - begin
        if process.returncode:
            raise ScriptError(f"{job.name}: exit status {process.returncode}", errors.read_text()[-4000:])
        summary: dict[str, Any] = json.loads(output.read_text())
    return wall, peak, summary


def resident_bytes(pid: int) -> float:
    """Resident memory of a process and all its descendants now; pages that they share count for each."""
    try:
        root = psutil.Process(pid)
        family = [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return 0.0
    total = 0.0
    for process in family:
        try:
            total += process.memory_info().rss
        except psutil.NoSuchProcess:
            continue  # ended since it was listed
    return total


def synthetic_job(ranks: int, nodes: int, *, group: int = 8, join_every: int = 20) -> ReplayJob:
    """``ranks`` ranks of ``nodes`` nodes each. Every ``join_every``-th node is a join on queue 2, in turn
    among ``group`` neighbours and among the ranks of the same place in all groups; the compute queue waits
    for it two nodes later, and the host for the compute queue once in 5,000 nodes. Every rank has its
    own speed, so that joins really wait."""
    rng = np.random.default_rng(0)
    queue = np.ones(nodes, np.int32)
    at = np.arange(join_every - 1, nodes, join_every)
    queue[at] = 2
    queue[4999::5000] = 0
    joins = np.flatnonzero(queue == 2)
    join = np.full(nodes, -1, np.int32)
    join[joins] = np.arange(len(joins))
    waits = {int(node) + 2: int(node) for node in joins if node + 2 < nodes}
    waits |= {int(node): int(node) - 3 for node in np.flatnonzero(queue == 0)}
    has_dep = np.zeros(nodes, np.int64)
    has_dep[list(waits)] = 1
    program = Program(
        queue=queue,
        duration=rng.uniform(1e-5, 1e-4, nodes),
        issue=rng.uniform(2e-6, 8e-6, nodes),
        dep_ptr=np.concatenate([[0], np.cumsum(has_dep)]).astype(np.int32),
        dep=np.array([waits[node] for node in sorted(waits)], np.int32),
        join=join,
    )
    rank = np.arange(ranks)[:, None]
    ordinal = np.arange(len(joins))[None, :]
    groups = -(-ranks // group)
    widest = max(groups, group)
    instance = ordinal * widest + np.where(ordinal % 2 == 0, rank // group, rank % group)
    used, rank_join, size = np.unique(instance, return_inverse=True, return_counts=True)
    return ReplayJob(
        programs=[program], rank_program=np.zeros(ranks, np.int32),
        compute_scale=rng.uniform(1.0, 1.1, ranks), issue_scale=np.ones(ranks),
        rank_join_ptr=np.arange(ranks + 1, dtype=np.int64) * len(joins),
        rank_join=rank_join.reshape(-1).astype(np.int64), join_size=size.astype(np.int32),
        join_duration=rng.uniform(1e-5, 1e-3, len(used)),
    )  # fmt: skip


def events_per_second(ranks: int, nodes: int = 20_000, repeats: int = 5) -> tuple[float, int]:
    """Replay a `synthetic_job` ``repeats`` times after a first run that compiles: events a second of the
    median run, and its events. Packing the job is part of the time."""
    replay(synthetic_job(2, 100))
    job = synthetic_job(ranks, nodes)
    seconds = []
    for _ in range(repeats):
        begin = time.perf_counter()
        events = replay(job).events
        seconds.append(time.perf_counter() - begin)
    return events / statistics.median(seconds), events


ENGINE_TARGET = 20e6


def engine_rows(quick: bool) -> Iterator[Row]:
    """Events a second on a synthetic job of ranks that all differ."""
    ranks = 128 if quick else 1024
    rate, events = events_per_second(ranks, repeats=3 if quick else 5)
    yield figure(
        f"replay, {ranks} ranks that differ", "events/s", rate, f">= {ENGINE_TARGET / 1e6:.0f} M/s",
        note=f"median of repeats of {events} events, packing included",
    )  # fmt: skip
