"""The same policies on the real engine: a small model with random weights on one core of this host.

How long its steps take is measured in waves of requests first, and then, since requests of all lengths and
branches at once take longer, in steps of the workload itself. The promised pace follows from that, and for
each policy and seed the load that the twin says it can just serve with such steps. Around that load the
highest rung of a ladder is sought at which the live engine keeps more than `workload.ATTAINED` of what was
promised: each policy has its own knee, and ratios are of goodput, with the twin's beside them.

Time is the processor time of the engine's thread, so that what else runs on the host does not decide who is
late; where there is nothing to do it leaps to the next arrival. How fast a core is changes with what its
neighbours do: now and then some steps are measured again, and the clock runs by them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from math import inf
from statistics import median
from typing import Any

import numpy as np

from windtunnel import serving
from windtunnel.bench.measure import in_turn
from windtunnel.bench.rows import Row
from windtunnel.serving.branching.bench.workload import ATTAINED, LIMITS, Workload, goodput, kept
from windtunnel.serving.engine.model import Request, Serial, StepTime
from windtunnel.serving.engine.profile import Point, fit

MODEL = "tiny-attention"
ROWS, CHUNK, CONTEXTS = 256, 256, 24
WAVES = ((1, 16, 0), (24, 16, 0), (4, 16, 16), (1, 320, 0), (8, 320, 0), (24, 320, 0), (8, 320, 8))
"""Requests, tokens of their prompts, branches: the steps that are measured first."""
AGAIN = WAVES[1:3]
ARMS = ("off", "eager", "taper")
WORK = Workload(branches=(6, 16), tokens=24, prompt=16, cached=150, serial=66, intro=8, outro=12)
"""As the twin's in its proportions, but for shorter contexts and answers. What is cached are `CONTEXTS`
prompts which requests use in turn."""
PACE = 5.0
"""What is promised for a token, in steps of one row."""
SEEDS = (1, 2, 3)
RUNG, TRIES = 1.12, 3
"""The ratio of two rungs of the ladder, and how many are tried for each policy and seed, but for those that
are needed to find one that holds."""
ENOUGH = 120.0
"""Seconds after which no other seed is begun."""


@dataclass
class Live:
    """The engine's model, how long its steps take, and the contexts that it has read. ``usual``: processor
    seconds of some steps when ``times`` was measured, and ``slow``: how often as long they take now.
    ``steps``: what was measured of the last trials; ``told``: of each policy's trials, shares of steps that
    deciding took, and the predictor's margins."""

    executor: Any
    times: StepTime
    contexts: Sequence[tuple[int, ...]]
    prefixes: Any
    usual: float = 0.0
    slow: float = 1.0
    leapt: float = 0.0
    began: float = 0.0
    steps: list[tuple[Point, float]] = field(default_factory=list)
    told: dict[str, list[tuple[float, float]]] = field(default_factory=dict)

    def now(self) -> float:
        """Seconds."""
        return (time.thread_time() - self.began) / self.slow + self.leapt

    def pause(self) -> None:
        """Measures how fast the core is; the clock stands meanwhile."""
        self.leapt = self.now()
        _, seconds = serving.steps(self.executor, AGAIN, CHUNK, repeats=2, clock=time.thread_time)
        self.usual = self.usual or sum(seconds)
        self.slow, self.began = sum(seconds) / self.usual, time.thread_time()

    def learn(self, work: Workload, rate: float) -> None:
        """How long steps of such requests take."""
        self.steps.clear()
        for policy in ARMS:
            self.attained(work, policy, rate, 9)
        self.times = fit([one for one, _ in self.steps], [seconds for _, seconds in self.steps])[0]
        self.told.clear()

    def attained(self, work: Workload, policy: str, rate: float, seed: int) -> float:
        """The share of the requests that got what they were promised, of those after the first seconds; 0
        as soon as it is sure to be `ATTAINED` at most."""
        self.pause()
        engine = serving.live_engine(
            self.executor, self.times, rows=ROWS, kv=1 << 30, chunk=CHUNK, prefixes=self.prefixes,
            clock=self.now, branching=policy, admission="wait",
        )  # fmt: skip
        requests, random, jobs = work.requests(seed, rate), np.random.default_rng(5), []
        for one in requests:
            job = serving.job(one, lambda: int(random.integers(3, 250)))
            context = self.contexts[one.id % len(self.contexts)][: one.cached]
            jobs.append(replace(job, prompt=context + job.prompt[len(context) :]))
        count, counted = len(jobs), sum(one.arrival >= work.warm for one in requests)
        first, last, tokens = [inf] * count, [inf] * count, [0] * count
        begin, coming, missed = self.now(), 0, 0
        since = begin
        while (engine.busy or coming < count) and missed <= (1 - ATTAINED) * counted:
            if self.now() - since > work.wave / 4:
                self.pause()
                since = self.now()
            if not engine.busy:
                self.leapt += max(0.0, begin + jobs[coming].arrival - self.now())
            while coming < count and begin + jobs[coming].arrival <= self.now():
                engine.add(replace(jobs[coming], arrival=begin + jobs[coming].arrival))
                coming += 1
            before = engine.seconds
            report = engine.step()
            if (step := engine.taken) is not None and engine.seconds > before:
                self.steps.append(((len(step.rows), step.read, step.chunks), engine.seconds - before))
            assert report is not None and not report.failed and not report.refused
            now = self.now() - begin
            for number, _, _ in report.tokens:
                first[number], last[number] = min(first[number], now), now
                tokens[number] += 1
            for one in map(requests.__getitem__, report.finished):
                paid = tokens[one.id] - 1
                good = kept(one.objective, one.arrival, first[one.id], last[one.id], paid)
                missed += one.arrival >= work.warm and not good
        told = engine.deciding / max(engine.seconds, 1e-9), engine.scheduler.predictor.margin
        self.told.setdefault(policy, []).append(told)
        for number in range(coming):
            engine.cancel(number)
        share = 1 - missed / counted
        return share if share > ATTAINED else 0.0


def ready() -> Live:
    """With all contexts in the prefix cache."""
    executor, times = serving.loaded(MODEL, WAVES, CHUNK, time.thread_time)
    random = np.random.default_rng(7)
    contexts = [tuple(map(int, random.integers(3, 250, WORK.cached + 1))) for _ in range(CONTEXTS)]
    live = Live(executor, times, contexts, serving.prefixes(executor, "density", 1 << 30))
    engine = serving.live_engine(executor, times, rows=ROWS, kv=1 << 30, prefixes=live.prefixes)
    for at, context in enumerate(contexts):
        job = serving.job(Request(at, 0.0, len(context), (Serial(1),)), lambda: 3)
        engine.add(replace(job, prompt=context))
    while engine.busy:
        engine.step()
    return live


def paced(times: StepTime, work: Workload = WORK) -> Workload:
    """With the pace that such steps allow, and waves as long as two serial requests."""
    pace = PACE * times.of(1, work.cached)
    wave = 2 * work.serial * pace
    return replace(work, tpot=pace, ttft=60 * pace, wave=wave, seconds=6 * wave, warm=wave)


def live_rows(quick: bool) -> Iterator[Row]:
    """Goodput by policy, live and as the twin says it of such steps, and their ratios seed by seed."""
    live, seeds = ready(), SEEDS[: 1 if quick else None]
    work = paced(live.times)
    live.learn(replace(work, seconds=2 * work.wave), 0.7 * _twin(work, live.times, ("eager", 9)))
    work = paced(live.times)
    work = replace(work, seconds=3 * work.wave) if quick else work
    with ProcessPoolExecutor() as pool:
        rates = list(pool.map(partial(_twin, work, live.times), [(a, s) for a in ARMS for s in seeds]))
    twin = {name: rates[at * len(seeds) : (at + 1) * len(seeds)] for at, name in enumerate(ARMS)}
    found: dict[str, list[float]] = {name: [] for name in ARMS}
    near, began = dict.fromkeys(ARMS, 0.8), time.monotonic()
    for at, seed in enumerate(seeds):
        if time.monotonic() - began > ENOUGH:
            break
        arms = {}
        for name in ARMS:
            share, rate = partial(live.attained, work, name, seed=seed), near[name] * twin[name][at]
            arms[name] = partial(knee, share, rate, 2 if quick else TRIES)
        for name, (rate,) in in_turn(arms, 1).items():
            found[name].append(rate)
            near[name] = rate / twin[name][at]  # there the next seed's begins
    twin = {name: some[: len(found[name])] for name, some in twin.items()}
    about = f"{MODEL}, {1e3 * work.tpot:.1f} ms a token promised, {len(found['taper'])} seeds"
    for name, some in found.items():
        deciding, margin = (median(each) for each in zip(*live.told[name], strict=True))
        yield Row(
            "live", f"{name}: goodput", "requests/s", measured=median(some), emulated=median(twin[name]),
            note=f"{about}: {min(some):.2f} to {max(some):.2f}; deciding {deciding:.1%} of a step, margin"
            f" {margin:.0%}",
        )  # fmt: skip
    for name in ("off", "eager"):
        told, said = (
            [one / other for one, other in zip(some["taper"], some[name], strict=True)]
            for some in (found, twin)
        )
        yield Row(
            "live", f"taper over {name}", "x", measured=median(told), emulated=median(said),
            target="> 1 x", met=median(told) > 1,
            note=f"{min(told):.2f} to {max(told):.2f}, twin {min(said):.2f} to {max(said):.2f}",
        )  # fmt: skip


def knee(share: Callable[[float], float], rate: float, tries: int) -> float:
    """Requests a second that got what they were promised, at the highest rung tried at which more than
    `ATTAINED` did; from ``rate`` on up or down, by one rung, two, and so on, and then between."""
    low, high, rung, step, best = -inf, inf, 0.0, 1.0, 0.0
    while tries > 0 or low == -inf:
        tries -= 1
        if good := share(rate * RUNG**rung):
            low, best = rung, rate * RUNG**rung * good
        else:
            high = rung
        if low > -inf and high < inf:
            if high - low <= 1:
                break
            rung = (low + high) / 2
        else:
            rung, step = rung + (step if low > -inf else -step), step + 1
    return best


def _twin(work: Workload, times: StepTime, job: tuple[str, int]) -> float:
    limits = replace(LIMITS, rows=ROWS, chunk=CHUNK, kv=1 << 30)
    return goodput(work, *job, limits, times, low=0.5, high=80.0, halvings=7)
