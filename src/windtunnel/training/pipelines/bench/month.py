"""A month of failures on many machines: ``python -m windtunnel.training.pipelines.bench.month MACHINES``."""

from __future__ import annotations

import json
import resource
import sys

import numpy as np

from windtunnel.training.pipelines.bench.twin import (
    DAYS,
    LAYERS,
    STAGES,
    STATE_BYTES,
    STEP_TIME,
    mtbf,
)  # fmt: skip
from windtunnel.training.survive.failures import poisson
from windtunnel.training.survive.twin.advise import Question, advise
from windtunnel.training.survive.twin.model import Costs, Job


def main(machines: int) -> None:
    """Print the goodput of every scheme, the failures, and the memory that this process took."""
    job = Job(machines, STEP_TIME, STATE_BYTES, STAGES, 4 * machines, LAYERS)
    horizon = DAYS * 86_400
    domains = tuple(f"leaf {machine // 16}" for machine in range(machines))
    question = Question(job, Costs(), mtbf(machines), horizon, 1e12, domains)
    trace = poisson(machines, question.mtbf, horizon, np.random.default_rng(0))
    advice = advise(question, trace)
    told = {
        "failures": len(trace),
        "goodput": {flight.scheme: flight.goodput for flight in advice.flights},
        "memory": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }
    print(json.dumps(told))


if __name__ == "__main__":
    main(int(sys.argv[1]))
