"""Requests of which some branch, drawn from a few numbers, and the highest rate at which all goes well.

The sizes and branches of a seed are the same at every rate and for all policies, and so are the arrivals but
for a factor of time: a bisection compares like with like.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from windtunnel.serving.engine.model import Objective, Parallel, Request, Serial, StepTime
from windtunnel.serving.engine.policy.step import Finished, StepLimits
from windtunnel.serving.engine.twin.world import serve

QWEN3_32B = StepTime(base=14e-3, row=0.075e-3, kv=4e-8, token=0.033e-3, pair=0.0)
"""Assumed for two large GPUs, not measured."""
LIMITS = StepLimits(rows=1024, kv=340_000, chunk=1024, admission="wait")
"""340,000 tokens: what 64 layers of 8 heads of 128 leave of two devices of 80 GB."""
NOISE = 0.05
"""Standard deviation of a step's duration, as a share of it."""
ATTAINED = 0.95


@dataclass(frozen=True)
class Workload:
    """``share`` of the requests have ``branches`` (from, to) of some ``tokens`` each, between ``intro`` and
    ``outro`` serial tokens; the others decode ``serial``. Lengths are log-normal around the given medians.
    Prompts have ``prompt`` tokens behind ``cached`` ones that a prefix cache holds. For half of every
    ``wave`` seconds there arrive by the share ``burst`` more requests than on average, then as many fewer;
    within that arrivals are Poisson's. Promises in seconds; ``pace`` as in `branching.policy.Observation`.
    Requests come for ``seconds``; those after the first ``warm`` count."""

    share: float = 0.6
    branches: tuple[int, int] = (6, 16)
    tokens: int = 90
    prompt: int = 500
    cached: int = 2000
    serial: int = 300
    intro: int = 40
    outro: int = 60
    ttft: float = 2.0
    tpot: float = 0.05
    pace: str = "token"
    burst: float = 0.8
    wave: float = 30.0
    seconds: float = 150.0
    warm: float = 50.0

    def requests(self, seed: int, rate: float) -> list[Request]:
        """``rate`` a second, on average."""
        random = np.random.default_rng(seed)

        def length(median: int, sigma: float) -> int:
            return max(1, round(median * float(np.exp(sigma * random.standard_normal()))))

        at, made = 0.0, list[Request]()
        half = self.wave / 2
        while (at := at + float(random.exponential()) / rate) < self.seconds:  # now stretched to waves
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
    work: Workload, policy: str, rate: float, seed: int, limits: StepLimits = LIMITS,
    time: StepTime = QWEN3_32B, *, least: float = 0.0,
) -> float:  # fmt: skip
    """The share of requests that got what they were promised, on the twin; 0 as soon as it is sure to be
    ``least`` at most."""
    requests = work.requests(seed, rate)
    counted = sum(one.arrival >= work.warm for one in requests)
    good = missed = 0

    def hopeless(done: Finished) -> bool:
        nonlocal good, missed
        one, paid = done.request, done.tokens - 1 if work.pace == "token" else done.steps
        if one.arrival >= work.warm:
            ok = kept(one.objective, one.arrival, done.first, done.end, paid)
            good, missed = good + ok, missed + (not ok)
        return counted - missed <= least * counted

    serve(
        requests, replace(limits, branching=policy, pace=work.pace), time,
        jitter=NOISE, random=np.random.default_rng(seed), enough=hopeless,
    )  # fmt: skip
    return good / counted if good > least * counted else 0.0


def kept(asked: Objective, arrival: float, first: float, end: float, paid: int) -> bool:
    """Whether a request got its first token in time, and the others in the time of the ``paid`` ones."""
    return first - arrival <= asked.ttft and end - first <= paid * asked.tpot


def goodput(
    work: Workload, policy: str, seed: int, limits: StepLimits = LIMITS, time: StepTime = QWEN3_32B,
    *, low: float = 2.0, high: float = 8.0, halvings: int = 5,
) -> float:  # fmt: skip
    """Requests a second that got what they were promised, at the highest rate found at which more than
    `ATTAINED` did; 0 for none."""
    found = 0.0
    for _ in range(halvings):
        rate = float(np.sqrt(low * high))
        if share := attainment(work, policy, rate, seed, limits, time, least=ATTAINED):
            low, found = rate, rate * share
        else:
            high = rate
    return found
