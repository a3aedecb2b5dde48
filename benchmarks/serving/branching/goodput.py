"""Requests of which some branch, drawn from a few numbers, and the highest rate at which all goes well.

The sizes and branches of a seed are the same at every rate and for all policies, and so are the arrivals but
for a factor of time: a bisection compares like with like.

How many requests a second keep their promises under each policy, on the twin.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import median

import numpy as np

from benchmarks.harness.measure import on_all_processors, ratios
from benchmarks.harness.rows import Row, figure
from windtunnel.serving.engine.model import InferenceRequest, Objective, Parallel, Serial, StepTime
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
    within that arrivals are Poisson's. Promises in seconds.
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
    burst: float = 0.8
    wave: float = 30.0
    seconds: float = 150.0
    warm: float = 50.0

    def requests(self, seed: int, rate: float) -> list[InferenceRequest]:
        """``rate`` a second, on average."""
        random = np.random.default_rng(seed)

        def length(median: int, sigma: float) -> int:
            return max(1, round(median * float(np.exp(sigma * random.standard_normal()))))

        at, requests = 0.0, list[InferenceRequest]()
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
            objective, arrival = Objective(self.ttft, self.tpot), whole * self.wave + late
            requests.append(
                InferenceRequest(len(requests), arrival, self.cached + prompt, stages, objective, self.cached)
            )
        return requests


def attainment(
    work: Workload, policy: str, rate: float, seed: int, limits: StepLimits = LIMITS,
    time: StepTime = QWEN3_32B, *, least: float = 0.0,
) -> float:  # fmt: skip
    """The share of requests that got what they were promised, on the twin; 0 as soon as it is sure to be
    ``least`` at most."""
    requests = work.requests(seed, rate)
    counted = sum(request.arrival >= work.warm for request in requests)
    good = missed = 0

    def hopeless(done: Finished) -> bool:
        nonlocal good, missed
        request, paid = done.request, done.tokens - 1
        if request.arrival >= work.warm:
            ok = in_time(request.objective, request.arrival, done.first, done.end, paid)
            good, missed = good + ok, missed + (not ok)
        return counted - missed <= least * counted

    serve(
        requests, replace(limits, branching=policy), time,
        jitter=NOISE, random=np.random.default_rng(seed), enough=hopeless,
    )  # fmt: skip
    return good / counted if good > least * counted else 0.0


def in_time(objective: Objective, arrival: float, first: float, end: float, paid: int) -> bool:
    """Whether a request got its first token in time, and the others in the time of the ``paid`` ones."""
    return first - arrival <= objective.ttft and end - first <= paid * objective.tpot


def goodput(
    work: Workload, policy: str, seed: int, limits: StepLimits = LIMITS, time: StepTime = QWEN3_32B,
    *, low: float = 2.0, high: float = 8.0, halvings: int = 5,
) -> float:  # fmt: skip
    """Requests a second that got what they were promised, at the highest rate found at which more than
    `ATTAINED` did; 0 for none."""
    best = 0.0
    for _ in range(halvings):
        rate = float(np.sqrt(low * high))
        if share := attainment(work, policy, rate, seed, limits, time, least=ATTAINED):
            low, best = rate, rate * share
        else:
            high = rate
    return best


SEEDS, FEW = (1, 2, 3), (1,)
PUBLISHED = {"off": (1.77, ">= 1.3 x"), "eager": (1.48, ">= 1.15 x")}
"""Of TAPER over each: the ratio in the paper's abstract, and what is to be reached here."""
SOURCE = "Gandhi et al., arXiv 2605.06914, abstract; Qwen3-32B, other workload"
BASE = Workload()
ARMS = ("off", "eager", "taper")
SHORT = replace(BASE, seconds=75.0, warm=30.0)
MAP: Mapping[str, Workload] = {
    "steady": replace(SHORT, burst=0.0),
    "waves of half the load": replace(SHORT, burst=0.5),
    "35 ms a token": replace(SHORT, tpot=0.035),
    "80 ms a token": replace(SHORT, tpot=0.08),
    "no context in the cache": replace(SHORT, cached=0, prompt=700),
    "4,000 tokens of context": replace(SHORT, cached=4000),
    "2 to 3 branches": replace(SHORT, branches=(2, 3)),
    "12 to 24 branches": replace(SHORT, branches=(12, 24)),
    "3 of 10 requests branch": replace(SHORT, share=0.3),
    "every request branches": replace(SHORT, share=1.0),
}


def goodput_rows(quick: bool) -> Iterator[Row]:
    """Of `taper`, one branch of each request, and all."""
    work = SHORT if quick else BASE
    rates_of = _goodputs(work, ARMS, FEW if quick else SEEDS)
    for name, rates in rates_of.items():
        yield figure(name, "requests/s", emulated=rates)
    for name, (published, goal) in PUBLISHED.items():
        over = ratios(rates_of["taper"], rates_of[name])
        yield figure(f"taper over {name}", "x", goal=goal, emulated=over, published=published, source=SOURCE)


def map_rows(quick: bool) -> Iterator[Row]:
    """One thing of the workload changed at a time."""
    for words, work in list(MAP.items())[:: 9 if quick else 1]:
        rates_of = _goodputs(work, ARMS, FEW)
        for name in ("off", "eager"):
            note = f"{median(rates_of['taper']):.2f} and {median(rates_of[name]):.2f} requests/s, one seed"
            over = ratios(rates_of["taper"], rates_of[name])
            yield figure(f"{words}: taper over {name}", "x", emulated=over, note=note)


def _goodputs(work: Workload, policies: Sequence[str], seeds: Sequence[int]) -> dict[str, list[float]]:
    """Goodput by policy, seed by seed."""
    return on_all_processors(
        partial(_goodput_of, work), {name: [(name, seed) for seed in seeds] for name in policies}
    )


def _goodput_of(work: Workload, job: tuple[str, int]) -> float:
    return goodput(work, *job)
