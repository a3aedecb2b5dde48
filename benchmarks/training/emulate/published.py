"""Published figures of real jobs on hardware that is not here, beside the emulation of the same jobs.

``published.json`` has the rows of public tables that programs of the repository express: all of llm-foundry's
in bfloat16 (`mpt`), and those of torchtitan and torchao (`titan`). What of a program was read in its
project's code stands there. They were measured on PyTorch 2.1 to 2.9 and are emulated on what is installed.

The factors ``in_job``, ``in_job_matmul`` and ``beside_collectives`` of the cost model and the rates of
Triton's attention were fitted to llm-foundry's rows, one value for all of them; nothing to the others. A job
with ``"open": false`` is no row of the collection, and no part of the statistics.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.harness.rows import Row, figure, left_out, published
from benchmarks.training.emulate.speed import LargeJob, emulate_in_process
from windtunnel.base.errors import WindtunnelError

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
        yield all_errors(f"time, median error {of}", statistics.median(times), 0.05)
        yield all_errors(f"time, mean error {of}", statistics.mean(times), 0.07)
        yield all_errors(f"time, 90th percentile {of}", sorted(times)[int(0.9 * len(times))], 0.15)
        yield all_errors(
            f"reserved memory, largest error of {len(memory)} rows", max(memory, default=0), 0.01
        )
    for other in data["left_out"]:
        yield left_out(other["name"], other["why"])


def all_errors(name: str, error: float, within: float) -> Row:
    """A figure of all rows together."""
    return figure(name, "", goal=f"<= {within:.0%}", emulated=error)


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
    large = LargeJob(job["name"], job["cluster"], job["arguments"], 0.0, 0.0, program, options)
    _, _, found = emulate_in_process(large)
    rate = found["tokens_per_second_per_device"]
    figures = [("tokens/s per device", "tokens/s", rate, job["tokens_per_s"])]
    if "reserved_gib" in job:
        reserved = max(one["peak_reserved_bytes"] for one in found["ranks"])
        figures.append(("reserved memory", "bytes", reserved, job["reserved_gib"] * GIB))
    for what, unit, emulated, truth in figures:
        yield figure(
            f"{job['name']}: {what}", unit, emulated=emulated, published=truth, source=job["source"],
            note=job.get("note", ""),
        )  # fmt: skip
