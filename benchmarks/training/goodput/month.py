"""The twin at scale: 8,192 hosts for a month and 65,536 for 54 days, every scheme of the advice, each in a
process of its own: ``python -m benchmarks.training.goodput.month HOSTS DAYS MTBF``.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.harness.rows import Row, figure
from windtunnel.traces.failures import poisson
from windtunnel.training.goodput.advise import advise
from windtunnel.training.goodput.model import Question
from windtunnel.training.goodput.twin.model import JobModel, PhaseCosts

STAGES, LAYERS = 8, 96
STATE_BYTES = 8e12
STEP_TIME = 10.0  # seconds
LOST_A_DAY = 0.015  # of the hosts (GEMINI, Wang et al., SOSP 2023, after the log of OPT-175B)


@dataclass(frozen=True)
class Size:
    """``lost_a_day``: part of the hosts. ``target``: seconds. ``source``: of the rate, in words."""

    hosts: int
    days: float
    lost_a_day: float
    target: float
    source: str

    @property
    def mtbf(self) -> float:
        """Seconds between losses of the whole job."""
        return 86_400.0 / (self.hosts * self.lost_a_day)


MONTH = Size(8192, 30.0, LOST_A_DAY, 15.0, "GEMINI's figure")
LARGE = Size(65_536, 54.0, 419 / 54 / 2048, 60.0, "Llama 3's, 419 in 54 days of 2,048 hosts")
QUICK = Size(512, 30.0, LOST_A_DAY, 15.0, "GEMINI's figure")


def twin_rows(quick: bool) -> Iterator[Row]:
    """Rows of the section."""
    for size in (QUICK,) if quick else (MONTH, LARGE):
        yield from _rows(size, quick)


def _rows(size: Size, quick: bool) -> Iterator[Row]:
    start = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-m", __name__, str(size.hosts), str(size.days), str(size.mtbf)],
        capture_output=True, text=True, timeout=600, check=True,
    )  # fmt: skip
    seconds = time.perf_counter() - start
    told = json.loads(done.stdout)
    name = f"{size.hosts:,} hosts x {size.days:g} days"
    rate = (
        f"{told['failures']} failures, one every {size.mtbf:.0f} s ({size.lost_a_day:.2%} of the hosts a"
        f" day, {size.source})"
    )
    yield figure(
        f"{name}, all schemes", "s", seconds, f"≤ {size.target:g} s", judged=not quick,
        note=f"a process from its start to its end, with the advice on copies and intervals; {rate}",
    )  # fmt: skip
    yield figure(f"{name}, memory", "bytes", told["memory"], note="most that was resident")
    for scheme, goodput in told["goodput"].items():
        yield figure(f"{name}, goodput: {scheme}", "", emulated=goodput)


def main(hosts: int, days: float, mtbf: float) -> None:
    """Print the goodput of every scheme, the failures, and the memory that this process took."""
    job = JobModel(hosts, STEP_TIME, STATE_BYTES, STAGES, 4 * hosts, LAYERS)
    horizon = days * 86_400
    domains = tuple(f"leaf {host // 16}" for host in range(hosts))
    question = Question(job, PhaseCosts(), mtbf, horizon, 1e12, domains)
    trace = poisson(hosts, question.mtbf, horizon, np.random.default_rng(0))
    advice = advise(question, trace)
    told = {
        "failures": len(trace),
        "goodput": {result.scheme: result.goodput for result in advice.results},
        "memory": _most_resident(),
    }
    print(json.dumps(told))


def _most_resident() -> int:
    """Bytes; not from getrusage, which remembers what the process that started this one had."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3]))
