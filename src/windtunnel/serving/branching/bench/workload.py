"""Requests of which some branch, drawn from a few numbers, and the highest rate at which all goes well.

The sizes and branches of a seed are the same at every rate and for all policies, and so are the arrivals but
for a factor of time: a bisection compares like with like.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from windtunnel import serving
from windtunnel.serving.engine.model import Objective, Parallel, Request, Serial, StepTime
from windtunnel.serving.engine.policy.step import Limits

QWEN3_32B = StepTime(base=14e-3, row=0.075e-3, kv=4e-8, token=0.033e-3, pair=0.0)
"""Assumed for two large GPUs, not measured."""
LIMITS = Limits(rows=1024, kv=340_000, chunk=1024, admission="wait")
"""340,000 tokens: what 64 layers of 8 heads of 128 leave of two devices of 80 GB."""
NOISE = 0.05
"""Standard deviation of a step's duration, as a share of it."""
Floats = NDArray[np.float64]
ATTAINED = 0.95
SECONDS, WARM = 150.0, 50.0
"""Of arrivals; those after the first `WARM` count."""


@dataclass(frozen=True)
class Workload:
    """``share`` of the requests have ``branches`` (from, to) of some ``tokens`` each, between ``intro`` and
    ``outro`` serial tokens; the others decode ``serial``. Lengths are log-normal around the given medians.
    Prompts have ``prompt`` tokens behind ``cached`` ones that a prefix cache holds. For half of every
    ``wave`` seconds there arrive by the share ``burst`` more requests than on average, then as many fewer;
    within that arrivals are Poisson's. Promises in seconds; ``pace`` as in `branching.policy.Observation`."""

    share: float = 0.6
    branches: tuple[int, int] = (3, 10)
    tokens: int = 90
    prompt: int = 500
    cached: int = 1500
    serial: int = 300
    intro: int = 40
    outro: int = 60
    ttft: float = 2.0
    tpot: float = 0.05
    pace: str = "token"
    burst: float = 0.8
    wave: float = 30.0

    def requests(self, seed: int, rate: float) -> list[Request]:
        """``rate`` a second, for `SECONDS`."""
        random = np.random.default_rng(seed)

        def length(median: int, sigma: float) -> int:
            return max(1, round(median * float(np.exp(sigma * random.standard_normal()))))

        at, made = 0.0, list[Request]()
        half = self.wave / 2
        while (at := at + float(random.exponential()) / rate) < SECONDS:  # now stretched to waves
            whole, rest = divmod(at, self.wave)
            crest = (1 + self.burst) * half
            late = rest / (1 + self.burst) if rest < crest else half + (rest - crest) / (1 - self.burst)
            drawn = random.random()
            many = int(random.integers(self.branches[0], self.branches[1] + 1))
            prompt, serial = length(self.prompt, 0.7), length(self.serial, 0.6)
            sizes = tuple(length(self.tokens, 0.4) for _ in range(many))
            before, after = length(self.intro, 0.3), length(self.outro, 0.3)
            stages: tuple[Serial | Parallel, ...] = (Serial(serial),)
            if drawn < self.share:
                stages = (Serial(before), Parallel((8,) * many, sizes, 8), Serial(after))
            asked = Objective(self.ttft, self.tpot)
            made.append(
                Request(len(made), whole * self.wave + late, self.cached + prompt, stages, asked, self.cached)
            )
        return made


def attainment(
    work: Workload, policy: str, rate: float, seed: int, limits: Limits = LIMITS, time: StepTime = QWEN3_32B
) -> float:
    """The share of requests that got what they were promised, on the twin."""
    requests = work.requests(seed, rate)
    served = serving.emulated(
        requests, replace(limits, branching=policy, pace=work.pace), time,
        jitter=NOISE, random=np.random.default_rng(seed),
    )  # fmt: skip
    paid = served.tokens - 1 if work.pace == "token" else served.steps
    good = kept(Objective(work.ttft, work.tpot), served.arrival, served.first, served.end, paid)
    return float(good[served.arrival >= WARM].mean())


def kept(
    asked: Objective, arrival: Floats, first: Floats, end: Floats, paid: NDArray[np.int64]
) -> NDArray[np.bool_]:
    """Which requests got their first token in time, and the others in the time of the ``paid`` ones."""
    return (first - arrival <= asked.ttft) & (end - first <= paid * asked.tpot)


def goodput(
    work: Workload, policy: str, seed: int, limits: Limits = LIMITS, time: StepTime = QWEN3_32B,
    *, low: float = 0.5, high: float = 24.0, halvings: int = 7,
) -> float:  # fmt: skip
    """Requests a second that got what they were promised, at the highest rate found at which more than
    `ATTAINED` did; 0 for none."""
    found = 0.0
    for _ in range(halvings):
        rate = float(np.sqrt(low * high))
        share = attainment(work, policy, rate, seed, limits, time)
        if share > ATTAINED:
            low, found = rate, rate * share
        else:
            high = rate
    return found
