"""The twin at scale: 8,192 hosts for a month, every scheme of the advice, in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator

from windtunnel.bench.rows import Row

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
        [sys.executable, "-m", "windtunnel.training.pipelines.bench.month", str(hosts)],
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
