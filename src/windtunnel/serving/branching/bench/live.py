"""The same policies on the real engine: a small model with random weights on one core of this host.

How long its steps take is measured first, and the promised pace and the load follow from that: the load is
what the twin says that ``taper`` can just serve with such steps. A first run under that load, which does not
count, tells by how much steps are longer than that; load and pace are set anew by it. Then the policies serve
the same requests one after another, several times over, each time others.

Time is the processor time of the engine's thread, so that what else runs on the host does not decide who is
late; where there is nothing to do it leaps to the next arrival.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from math import inf
from statistics import median
from typing import Any

import numpy as np

from windtunnel import serving
from windtunnel.bench.measure import in_turn
from windtunnel.bench.rows import Row
from windtunnel.serving.branching.bench.workload import LIMITS, Workload, goodput, kept
from windtunnel.serving.engine.model import Request, Serial, StepTime

MODEL = "tiny-attention"
ROWS, CHUNK, CONTEXTS = 128, 256, 24
WAVES = ((1, 16, 0), (24, 16, 0), (4, 16, 16), (1, 320, 0), (8, 320, 0), (24, 320, 0), (8, 320, 8))
"""Requests, tokens of their prompts, branches: the steps that are measured first."""
ARMS = ("off", "eager", "taper")
WORK = Workload(
    branches=(3, 10), tokens=40, prompt=16, cached=300, serial=110, intro=12, outro=20, burst=0.8, wave=3.0,
    seconds=18.0, warm=3.0,
)  # fmt: skip
"""As the twin's in its proportions: waves last as long as two serial requests. What is cached are
`CONTEXTS` prompts which requests use in turn."""


@dataclass
class Live:
    """The engine's model, how long its steps take, and the contexts that it has read."""

    executor: Any
    times: StepTime
    contexts: Sequence[tuple[int, ...]]
    prefixes: Any
    leapt: float = 0.0
    gains: list[float] = field(default_factory=list)

    def now(self) -> float:
        """Seconds."""
        return time.thread_time() + self.leapt

    def served(self, requests: Sequence[Request], policy: str, warm: float = 0.0) -> float:
        """The share of the requests that got what they were promised, of those after ``warm`` seconds."""
        engine = serving.live_engine(
            self.executor, self.times, rows=ROWS, kv=1 << 30, chunk=CHUNK, prefixes=self.prefixes,
            clock=self.now, branching=policy, admission="wait",
        )  # fmt: skip
        random, jobs = np.random.default_rng(5), []
        for one in requests:
            job = serving.job(one, lambda: int(random.integers(3, 250)))
            context = self.contexts[one.id % len(self.contexts)][: one.cached]
            jobs.append(replace(job, prompt=context + job.prompt[len(context) :]))
        count = len(jobs)
        first, last, tokens = [inf] * count, [inf] * count, [0] * count
        begin, coming = self.now(), 0
        while engine.busy or coming < count:
            if not engine.busy:
                self.leapt += max(0.0, begin + jobs[coming].arrival - self.now())
            while coming < count and begin + jobs[coming].arrival <= self.now():
                engine.add(replace(jobs[coming], arrival=begin + jobs[coming].arrival))
                coming += 1
            report = engine.step()
            assert report is not None and not report.failed and not report.refused
            now = self.now() - begin
            for number, _, _ in report.tokens:
                first[number], last[number] = min(first[number], now), now
                tokens[number] += 1
        self.gains.append(engine.scheduler.predictor.gain)
        good = [
            kept(one.objective, one.arrival, first[one.id], last[one.id], tokens[one.id] - 1)
            for one in requests
            if one.arrival >= warm
        ]
        return sum(good) / len(good)


def ready() -> Live:
    """With all contexts in the prefix cache."""
    executor, times = serving.loaded(MODEL, WAVES, CHUNK, time.thread_time)
    random = np.random.default_rng(7)
    contexts = [tuple(map(int, random.integers(3, 250, WORK.cached + 1))) for _ in range(CONTEXTS)]
    live = Live(executor, times, contexts, serving.prefixes(executor, "density", 1 << 30))
    live.served([Request(at, 0.0, WORK.cached + 1, (Serial(1),)) for at in range(CONTEXTS)], "off")
    return live


def load(times: StepTime, work: Workload = WORK) -> tuple[Workload, float]:
    """The workload with the pace that such steps allow, and the rate at which ``taper`` just keeps it."""
    pace = 1.25 * times.of(20, 20 * (WORK.cached + 80))
    work = replace(work, tpot=pace, ttft=40 * pace)
    limits = replace(LIMITS, rows=ROWS, chunk=CHUNK)
    rates = [goodput(work, "taper", seed, limits, times, low=1.0, high=40.0) for seed in (1, 2, 3)]
    return work, median(rates) or 1.0


def live_rows(quick: bool) -> Iterator[Row]:
    """Requests kept, by policy, and the ratios of runs that followed one another."""
    live = ready()
    work, rate = load(live.times, replace(WORK, seconds=6.0) if quick else WORK)
    live.served(work.requests(9, rate), "taper")
    gain = live.gains[-1]
    live.times = StepTime(**{name: gain * value for name, value in asdict(live.times).items()})
    work, rate = load(live.times, work)
    rounds = 1 if quick else 4
    found: dict[str, list[float]] = {name: [] for name in ARMS}
    for seed in range(rounds):
        requests = work.requests(seed, rate)
        arms = {name: partial(live.served, requests, name, work.warm) for name in ARMS}
        for name, shares in in_turn(arms, 1).items():
            found[name] += shares
    about = f"{MODEL}, {rate:.2f} requests/s, {1e3 * work.tpot:.1f} ms a token promised"
    for name, shares in found.items():
        yield Row(
            "live", f"{name}: requests that got what was promised", "", measured=median(shares),
            note=f"{about}; {min(shares):.1%} to {max(shares):.1%} in {len(shares)} runs",
        )  # fmt: skip
    for name in ("off", "eager"):
        ratios = [one / max(other, 1e-3) for one, other in zip(found["taper"], found[name], strict=True)]
        yield Row(
            "live", f"taper over {name}", "x", measured=median(ratios), target="> 1 x",
            met=median(ratios) > 1,
            note=f"{min(ratios):.2f} to {max(ratios):.2f}",
        )  # fmt: skip
