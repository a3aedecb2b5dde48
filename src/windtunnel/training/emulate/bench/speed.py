"""How long windtunnel itself takes from command to report, and how much memory, on large jobs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from windtunnel.base.errors import ScriptError
from windtunnel.bench.rows import Row, left_out
from windtunnel.training.emulate.bench.jobs import example

SECTION = "speed"
SAMPLE_SECONDS = 0.1
GIB = float(1 << 30)


@dataclass(frozen=True)
class LargeJob:
    """A job of the issue's figures: what it is given, and the most seconds and bytes it may take."""

    name: str
    cluster: str
    arguments: str
    seconds: float
    gib: float


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
            yield left_out(SECTION, job.name, "left out by --quick")
            continue
        wall, peak, _ = emulate_in_process(job)
        yield Row(
            SECTION, f"{job.name}: command to report", "s", measured=wall,
            target=f"<= {job.seconds:.0f} s", met=wall <= job.seconds,
        )  # fmt: skip
        yield Row(
            SECTION, f"{job.name}: peak memory", "bytes", measured=peak,
            source="resident memory of the command and its children, summed, at 10 Hz",
            target=f"<= {job.gib:.0f} GiB", met=peak <= job.gib * GIB,
        )  # fmt: skip


def emulate_in_process(job: LargeJob) -> tuple[float, float, dict[str, Any]]:
    """Run the command as a user would. Returns its seconds, its peak bytes, and the summary it printed.

    Raises `ScriptError` with its last lines when the command fails.
    """
    command = [
        sys.executable, "-c", "from windtunnel.cli.main import main; main()",
        "emulate", "--cluster", job.cluster, "--json", str(example()), *job.arguments.split(),
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
