"""How long windtunnel itself takes on large jobs, and events a second of its engine.

*Speed*: from command to report, in seconds and those of CPUs, and how much memory. *Engine*: a synthetic job
of ranks that all differ, on one core.

Published figures of real jobs on hardware that is not here, beside the emulation of the same jobs.

``published.json`` has the rows of public tables that programs of the repository express: all of llm-foundry's
in bfloat16 (`mpt`), and those of torchtitan and torchao (`titan`). What of a program was read in its
project's code stands there. They were measured on PyTorch 2.1 to 2.9 and are emulated on what is installed.

The factors ``in_job``, ``in_job_matmul`` and ``beside_collectives`` of the cost model and the rates of
Triton's attention were fitted to llm-foundry's rows, one value for all of them; nothing to the others. A job
with ``"open": false`` is no row of the collection, and no part of the statistics.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from benchmarks.harness.measure import scratch, seconds_of
from benchmarks.harness.rows import Row, figure, left_out, published
from benchmarks.training.emulate.jobs import example
from windtunnel.base.errors import ScriptError, WindtunnelError
from windtunnel.engines.replay.engine import replay
from windtunnel.engines.replay.layout import Program, ReplayJob

SAMPLE_SECONDS = 0.1


@dataclass(frozen=True)
class LargeJob:
    """A job, and what it is given. ``goals``: for its seconds, those of CPUs, and its bytes; ``program``: the
    example where None; ``options``: of `windtunnel emulate`."""

    name: str
    cluster: str
    arguments: str
    goals: tuple[str, str, str] = ("", "", "")
    program: Path | None = None
    options: str = ""


LARGE_JOBS = (
    LargeJob(
        "8B, FSDP2, 128 x h100-96", "h100-96:16x8",
        "--size 8b --parallel fsdp --seq 8192 --batch 2 --ac selective", ("<= 60 s", "", "<= 4 GiB"),
    ),
    LargeJob(
        "405B, TP8 x PP16 x DP64, 8192 x h100-sxm", "h100-sxm:1024x8",
        "--size 405b --tp 8 --pp 16 --seq 8192", ("", "<= 120 s", "<= 2 GiB"),
    ),
    LargeJob(
        "405B, TP8 x PP16 x DP512, 65536 x h100-sxm", "h100-sxm:8192x8",
        "--size 405b --tp 8 --pp 16 --seq 8192", ("", "<= 300 s", ""),
    ),
)  # fmt: skip


def speed_rows(quick: bool) -> Iterator[Row]:
    """Seconds and memory of each job; none of them where ``quick``."""
    note = "resident memory of the command and its children, summed, at 10 Hz"
    for job in LARGE_JOBS:
        if quick:
            yield left_out(job.name, "left out by --quick")
            continue
        (wall, cpu, peak), _ = emulate_in_process(job)
        yield figure(f"{job.name}: command to report", "s", wall, job.goals[0])
        yield figure(f"{job.name}: CPU time", "s", cpu, job.goals[1])
        yield figure(f"{job.name}: peak memory", "bytes", peak, job.goals[2], note=note)


def emulate_in_process(job: LargeJob) -> tuple[tuple[float, float, float], dict[str, Any]]:
    """Run the command as a user would. Returns its seconds, those of CPUs, its peak bytes, and the summary it
    printed.

    Raises `ScriptError` with its last lines when the command fails.
    """
    command = [
        sys.executable, "-c", "from windtunnel.cli.main import main; main()",
        "emulate", "--cluster", job.cluster, "--json", *job.options.split(),
        str(job.program or example()), *job.arguments.split(),
    ]  # fmt: skip
    with scratch() as folder:
        environment = os.environ | {"WINDTUNNEL_HOME": str(folder)}
        output, errors = folder / "output", folder / "errors"
        with output.open("w") as out, errors.open("w") as err:
            begin, before = time.perf_counter(), cpu_of_children()
            process = subprocess.Popen(command, stdout=out, stderr=err, env=environment)
            peak = 0.0
            while process.poll() is None:
                peak = max(peak, resident_bytes(process.pid))
                time.sleep(SAMPLE_SECONDS)
            took = time.perf_counter() - begin, cpu_of_children() - before, peak
        if process.returncode:
            raise ScriptError(f"{job.name}: exit status {process.returncode}", errors.read_text()[-4000:])
        summary: dict[str, Any] = json.loads(output.read_text())
    return took, summary


def cpu_of_children() -> float:
    """CPU seconds of processes that have ended, of this one and those beneath it."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def resident_bytes(pid: int) -> float:
    """Resident memory of a process and all its descendants now; pages that they share count for each."""
    total = 0.0
    with contextlib.suppress(psutil.NoSuchProcess):
        root = psutil.Process(pid)
        for process in [root, *root.children(recursive=True)]:
            with contextlib.suppress(psutil.NoSuchProcess):  # ended since it was listed
                total += process.memory_info().rss
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


def events_per_second(ranks: int, nodes: int = 20_000, repeats: int = 5) -> list[float]:
    """Of each time that a `synthetic_job` is replayed, after a first run that compiles. Packing the job is
    part of the time."""
    replay(synthetic_job(2, 100))
    job = synthetic_job(ranks, nodes)
    events = replay(job).events
    return [events / seconds_of(lambda: replay(job)) for _ in range(repeats)]


def engine_rows(quick: bool) -> Iterator[Row]:
    """Events a second on a synthetic job of ranks that all differ."""
    ranks = 128 if quick else 1024
    rates = events_per_second(ranks, repeats=3 if quick else 5)
    yield figure(
        f"replay, {ranks} ranks that differ", "events/s", rates, ">= 20 M/s", note="packing included"
    )


GIB = float(1 << 30)
ROWS = 1603  # of the collection of public tables that these were taken from


def published_rows(quick: bool) -> Iterator[Row]:
    """Tokens/s and reserved bytes of each job, the errors of all, and why others are not here. ``quick``
    leaves all out."""
    data = published(__file__)
    jobs = [*data["jobs"], *mpt_jobs(data["mpt"])]
    times, memory = [], []
    for job in jobs:
        try:
            rows = [] if quick else list(job_rows(job))
        except WindtunnelError as error:
            yield left_out(job["name"], str(error).splitlines()[0])
            continue
        yield from rows
        if rows and job.get("open", True):
            times.append(rows[0].error or 0.0)
            memory += [row.error or 0.0 for row in rows[1:]]
    if quick:
        yield left_out(f"{len(jobs)} jobs", "left out by --quick")
    if times:
        of = f"of {len(times)} of {ROWS} open rows"
        for name, off, goal in (
            (f"time, median error {of}", statistics.median(times), "<= 5%"),
            (f"time, mean error {of}", statistics.mean(times), "<= 7%"),
            (f"time, 90th percentile {of}", sorted(times)[int(0.9 * len(times))], "<= 15%"),
            (f"reserved memory, largest error of {len(memory)} rows", max(memory, default=0), "<= 1%"),
        ):
            yield figure(name, "", goal=goal, emulated=off)
    for other in data["left_out"]:
        yield left_out(other["name"], other["why"])


def mpt_jobs(table: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """llm-foundry's rows (devices, sequence, micro-batch x how many, checkpointing, tokens/s) as jobs."""
    for group in table["groups"]:
        device, size = group["device"], group["size"]
        for row in group["rows"]:
            ranks, sequence, batches, checkpointing, *sharding, rate = row.split()
            batch, accumulate = batches.split("x")
            options = f" --sharding {sharding[0]}" if sharding else ""
            recomputed = ", full checkpointing" if checkpointing == "full" else ""
            yield {
                "name": f"MPT {size}, {ranks} x {device}, {sequence}, {batches}{recomputed}",
                "source": table["source"], "program": "mpt.py", "tokens_per_s": float(rate),
                "cluster": f"{device}:{int(ranks) // 8}x8{table['nic'].get(device, '')}",
                "arguments": f"--size {size} --seq {sequence} --batch {batch} --accumulate {accumulate}"
                f" --ac {checkpointing} --mixed {group['mixed']}{options}",
            }  # fmt: skip


def job_rows(job: dict[str, Any]) -> Iterator[Row]:
    """Time and memory of a job. Its first rank runs, whose part all ranks of these jobs do."""
    program = Path(__file__).with_name(job.get("program", "titan.py"))
    options = f"--ranks 0 --no-report --alloc-conf={job.get('allocator', '')}"
    large = LargeJob(job["name"], job["cluster"], job["arguments"], program=program, options=options)
    _, summary = emulate_in_process(large)
    rate = summary["tokens_per_second_per_device"]
    figures = [("tokens/s per device", "tokens/s", rate, job["tokens_per_s"])]
    if "reserved_gib" in job:
        reserved = max(rank["peak_reserved_bytes"] for rank in summary["ranks"])
        figures.append(("reserved memory", "bytes", reserved, job["reserved_gib"] * GIB))
    for quantity, unit, emulated, truth in figures:
        yield figure(
            f"{job['name']}: {quantity}", unit, emulated=emulated, published=truth, source=job["source"],
            note=job.get("note", ""),
        )  # fmt: skip
