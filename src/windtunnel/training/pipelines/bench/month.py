"""A month of failures on many hosts: ``python -m windtunnel.training.pipelines.bench.month HOSTS``."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np

from windtunnel.traces.failures import poisson
from windtunnel.training.goodput.advise import Question, advise
from windtunnel.training.goodput.twin.model import Costs, Job
from windtunnel.training.pipelines.bench.twin import (
    DAYS,
    LAYERS,
    STAGES,
    STATE_BYTES,
    STEP_TIME,
    mtbf,
)  # fmt: skip


def main(hosts: int) -> None:
    """Print the goodput of every scheme, the failures, and the memory that this process took."""
    job = Job(hosts, STEP_TIME, STATE_BYTES, STAGES, 4 * hosts, LAYERS)
    horizon = DAYS * 86_400
    domains = tuple(f"leaf {host // 16}" for host in range(hosts))
    question = Question(job, Costs(), mtbf(hosts), horizon, 1e12, domains)
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
