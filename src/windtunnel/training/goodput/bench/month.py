"""The twin at scale: 8,192 hosts for a month, every scheme of the advice, in a process of its own.

That process is ``python -m windtunnel.training.goodput.bench.month HOSTS``.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from windtunnel.bench.rows import Row
from windtunnel.traces.failures import poisson
from windtunnel.training.goodput.advise import advise
from windtunnel.training.goodput.model import Question
from windtunnel.training.goodput.twin.model import JobModel, PhaseCosts

HOSTS, QUICK_HOSTS = 8192, 512
DAYS = 30.0
LOST_A_DAY = 0.015  # of the hosts (GEMINI, Wang et al., SOSP 2023, after the log of OPT-175B)
STAGES, LAYERS = 8, 96
STATE_BYTES = 8e12
STEP_TIME = 10.0  # seconds
TARGET = 30.0  # seconds


def mtbf(hosts: int) -> float:
    """Seconds between losses of the whole job."""
    return 86_400.0 / (hosts * LOST_A_DAY)


def twin_rows(quick: bool) -> Iterator[Row]:
    """Rows of the section."""
    hosts = QUICK_HOSTS if quick else HOSTS
    start = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-m", __name__, str(hosts)],
        capture_output=True, text=True, timeout=600, check=True,
    )  # fmt: skip
    seconds = time.perf_counter() - start
    told = json.loads(done.stdout)
    size = f"{hosts:,} hosts x {DAYS:g} days"
    rate = (
        f"{told['failures']} failures, one every {mtbf(hosts):.0f} s ({LOST_A_DAY:.1%} of the hosts a"
        " day, GEMINI's figure)"
    )
    yield Row(
        "twin", f"{size}, all schemes", "s", measured=seconds, target=f"≤ {TARGET:g} s",
        met=None if quick else seconds <= TARGET,
        note=f"a process from its start to its end, with the advice on copies and intervals; {rate}",
    )  # fmt: skip
    yield Row("twin", f"{size}, memory", "bytes", measured=told["memory"], note="most that was resident")
    for name, goodput in told["goodput"].items():
        yield Row("twin", f"{size}, goodput: {name}", "", emulated=goodput)


def main(hosts: int) -> None:
    """Print the goodput of every scheme, the failures, and the memory that this process took."""
    job = JobModel(hosts, STEP_TIME, STATE_BYTES, STAGES, 4 * hosts, LAYERS)
    horizon = DAYS * 86_400
    domains = tuple(f"leaf {host // 16}" for host in range(hosts))
    question = Question(job, PhaseCosts(), mtbf(hosts), horizon, 1e12, domains)
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
    main(int(sys.argv[1]))
