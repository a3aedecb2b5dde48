"""The same policies on the real engine: a small model with random weights on one core of this host.

How long its steps take is measured in waves of requests first, and then, since requests of all lengths and
branches at once take longer, in steps of the workload itself. The promised pace follows from that, and for
each policy and seed the load that the twin says it can just serve with such steps. Around that load the
highest rung of a ladder is sought at which the live engine keeps more than `goodput.ATTAINED` of what was
promised: each policy has its own knee, and ratios are of goodput, with the twin's beside them. Policies take
turns; as many processes as there are cores share the seeds, each with a model of its own.

Time is the processor time of the engine's thread, so that what else runs on the host does not decide who is
late; where there is nothing to do it leaps to the next arrival. How fast a core is changes within a second
with what its neighbours do: every few steps the same short prompt is read aside, and the clock, which stands
meanwhile, runs by how long that took of late.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import inf
from statistics import median
from typing import Any

import numpy as np
import torch

from benchmarks.harness.measure import process_pool, ratios
from benchmarks.harness.rows import Row, figure
from benchmarks.serving.branching.goodput import ATTAINED, LIMITS, Workload, goodput, in_time
from windtunnel.serving.engine.calibrate import measure
from windtunnel.serving.engine.live.families import load
from windtunnel.serving.engine.live.loop import Branches, EngineJob, Over, ServingEngine, Token
from windtunnel.serving.engine.live.prefixes import Prefixes
from windtunnel.serving.engine.model import InferenceRequest, Serial, StepTime
from windtunnel.serving.engine.profile import Point, fit

MODEL = "tiny-attention"
ROWS, CHUNK, CONTEXTS = 256, 256, 24
WAVES = ((1, 16, 0), (24, 16, 0), (4, 16, 16), (1, 320, 0), (8, 320, 0), (24, 320, 0), (8, 320, 8))
"""Requests, tokens of their prompts, branches: the steps that are measured first."""
ARMS = ("off", "eager", "taper")
WORK = Workload(branches=(6, 16), tokens=24, prompt=16, cached=150, serial=66, intro=8, outro=12)
"""As the twin's in its proportions, but for shorter contexts and answers. What is cached are `CONTEXTS`
prompts which requests use in turn."""
PACE = 5.0
"""What is promised for a token, in steps of one row."""
SEEDS = (1, 2, 3, 4, 5, 6)
RUNG = 1.12
"""The ratio of two rungs of the ladder."""
LEARNED = 0.45
"""The load from which steps are learned, as a share of what the twin says by those of waves, which are
shorter."""
ASIDE, EVERY, LATELY = 16, 3, 5
"""Tokens read aside after so many steps, and of how many such readings the median is taken."""
ENOUGH = 140.0
"""Seconds after which no other seed is begun."""


@dataclass
class Live:
    """The engine's model, how long its steps take, and the contexts that it has read. ``usual``: processor
    seconds of a reading aside when ``times`` was measured, and ``slow``: how often as long they take now.
    ``steps``: what was measured of the last trials; ``summaries``: of each policy's trials, shares of steps
    that deciding took, and the predictor's margins of one step and of the most in a row."""

    executor: Any
    times: StepTime
    contexts: Sequence[tuple[int, ...]]
    prefixes: Any
    usual: float = 0.0
    slow: float = 1.0
    leapt: float = 0.0
    began: float = 0.0
    aside: deque[float] = field(default_factory=lambda: deque(maxlen=LATELY))
    steps: list[tuple[Point, float]] = field(default_factory=list)
    summaries: dict[str, list[tuple[float, float, float]]] = field(default_factory=dict)

    def now(self) -> float:
        """Seconds."""
        return (time.thread_time() - self.began) / self.slow + self.leapt

    def pause(self, times: int = 1) -> None:
        """Measures how fast the core is; the clock stands meanwhile."""
        self.leapt = self.now()
        for _ in range(times):
            began, sequence = time.thread_time(), self.executor.new()
            self.executor.prefill(sequence, range(3, 3 + ASIDE))
            self.executor.free(sequence)
            self.aside.append(time.thread_time() - began)
        self.usual = self.usual or median(self.aside)
        self.slow, self.began = median(self.aside) / self.usual, time.thread_time()

    def learn(self, work: Workload, rate: float) -> None:
        """How long steps of such requests take."""
        self.steps.clear()
        for policy in ARMS:
            self.attained(work, policy, rate, 9)
        self.times = fit([point for point, _ in self.steps], [seconds for _, seconds in self.steps])[0]
        self.summaries.clear()

    def attained(self, work: Workload, policy: str, rate: float, seed: int) -> float:
        """The share of the requests that got what they were promised, of those after the first seconds; 0
        as soon as it is sure to be `ATTAINED` at most."""
        self.pause(LATELY)
        engine = ServingEngine(
            self.executor, self.times, rows=ROWS, kv=1 << 30, chunk=CHUNK, prefixes=self.prefixes,
            clock=self.now, branching=policy, admission="wait",
        )  # fmt: skip
        requests, random, jobs = work.requests(seed, rate), np.random.default_rng(5), []
        for request in requests:
            drawn = job(request, lambda: int(random.integers(3, 250)))
            context = self.contexts[request.id % len(self.contexts)][: request.cached]
            jobs.append(replace(drawn, prompt=context + drawn.prompt[len(context) :]))
        count, counted = len(jobs), sum(request.arrival >= work.warm for request in requests)
        first, last, tokens = [inf] * count, [inf] * count, [0] * count
        begin, coming, missed = self.now(), 0, 0
        while (engine.busy or coming < count) and missed <= (1 - ATTAINED) * counted:
            if engine.steps % EVERY == 0:
                self.pause()
            if not engine.busy:
                self.leapt += max(0.0, begin + jobs[coming].arrival - self.now())
            while coming < count and begin + jobs[coming].arrival <= self.now():
                engine.add(replace(jobs[coming], arrival=begin + jobs[coming].arrival))
                coming += 1
            before = engine.seconds
            events = engine.step()
            if (step := engine.last_step) is not None and engine.seconds > before:
                self.steps.append(((len(step.rows), step.read, step.chunks), engine.seconds - before))
            now = self.now() - begin
            for number in (event.job for event in events if isinstance(event, Token)):
                first[number], last[number] = min(first[number], now), now
                tokens[number] += 1
            for event in events:
                if not isinstance(event, Over):
                    continue
                assert not event.failed and not event.refused
                request = requests[event.job]
                paid = tokens[request.id] - 1
                good = in_time(request.objective, request.arrival, first[request.id], last[request.id], paid)
                missed += request.arrival >= work.warm and not good
        margins = engine.scheduler.predictor.margins
        summary = engine.deciding / max(engine.seconds, 1e-9), margins[0], margins[-1]
        self.summaries.setdefault(policy, []).append(summary)
        for number in range(coming):
            engine.cancel(number)
        share = 1 - missed / counted
        return share if share > ATTAINED else 0.0


def job(request: InferenceRequest, token: Callable[[], int]) -> EngineJob:
    """``request`` for the live engine, each of its tokens drawn by ``token``."""

    def some(count: int) -> tuple[int, ...]:
        return tuple(token() for _ in range(count))

    stages = tuple(
        stage.tokens
        if isinstance(stage, Serial)
        else Branches(tuple(map(some, stage.heads)), stage.tokens, some(stage.join))
        for stage in request.stages
    )
    return EngineJob(request.id, request.arrival, some(request.prompt), stages, objective=request.objective)


def ready() -> Live:
    """The model for one thread, how long its steps take here by the thread's time, and all contexts in the
    prefix cache."""
    torch.set_num_threads(1)
    executor = load(MODEL)
    times = fit(*measure(executor, WAVES, CHUNK, clock=time.thread_time))[0]
    random = np.random.default_rng(7)
    contexts = [tuple(map(int, random.integers(3, 250, WORK.cached + 1))) for _ in range(CONTEXTS)]
    live = Live(executor, times, contexts, Prefixes(executor, "density", 1 << 30))
    engine = ServingEngine(executor, times, rows=ROWS, kv=1 << 30, prefixes=live.prefixes)
    for at, context in enumerate(contexts):
        engine.add(EngineJob(at, 0.0, context, (1,)))
    while engine.busy:
        engine.step()
    return live


def paced(times: StepTime, work: Workload = WORK) -> Workload:
    """With the pace that such steps allow, and waves as long as two serial requests."""
    pace = PACE * times.of(1, work.cached)
    wave = 2 * work.serial * pace
    return replace(work, tpot=pace, ttft=60 * pace, wave=wave, seconds=4 * wave, warm=wave)


@dataclass(frozen=True)
class SeedResults:
    """Of some seeds: the promised pace, and by policy goodput live and by the twin, and `Live.summaries`."""

    tpot: float
    live: dict[str, list[float]]
    twin: dict[str, list[float]]
    summaries: dict[str, list[tuple[float, float, float]]]


def measure_seeds(seeds: Sequence[int], quick: bool) -> SeedResults:
    """With a model of its own, whose steps are learned first."""
    live = ready()
    work = paced(live.times)
    live.learn(replace(work, seconds=2 * work.wave), LEARNED * _twin(work, live.times, "eager", 9))
    work = paced(live.times)
    work = replace(work, seconds=3 * work.wave) if quick else work
    out = SeedResults(work.tpot, {name: [] for name in ARMS}, {name: [] for name in ARMS}, live.summaries)
    near, began = dict.fromkeys(ARMS, 0.8), time.monotonic()
    for at, seed in enumerate(seeds):
        if at and time.monotonic() - began > ENOUGH:
            break
        for name in ARMS[at % 3 :] + ARMS[: at % 3]:
            forecast = _twin(work, live.times, name, seed)
            rate = knee(partial(live.attained, work, name, seed=seed), near[name] * forecast)
            out.live[name].append(rate)
            out.twin[name].append(forecast)
            near[name] = rate / forecast  # there the next seed's begins
    return out


def live_rows(quick: bool) -> Iterator[Row]:
    """Goodput by policy, live and as the twin says it of such steps, and their ratios seed by seed."""
    seeds = SEEDS[: 1 if quick else None]
    workers = min(len(seeds), os.cpu_count() or 1)
    with process_pool(workers) as pool:  # each of its threads has a core
        parts = list(
            pool.map(partial(measure_seeds, quick=quick), [seeds[at::workers] for at in range(workers)])
        )
    live, twin, summaries = (
        {name: [value for part in parts for value in getattr(part, quantity)[name]] for name in ARMS}
        for quantity in ("live", "twin", "summaries")
    )
    about = f"{MODEL}, {1e3 * median(part.tpot for part in parts):.1f} ms a token promised"
    for name, some in live.items():
        deciding, single, many = (median(each) for each in zip(*summaries[name], strict=True))
        note = f"{about}; deciding {deciding:.1%} of a step, margin {single:.0%} of one, {many:.0%} of many"
        yield figure(f"{name}: goodput", "requests/s", some, emulated=twin[name], note=note)
    for name in ("off", "eager"):
        over, forecast = (ratios(some["taper"], some[name]) for some in (live, twin))
        yield figure(f"taper over {name}", "x", over, "> 1 x", emulated=forecast)


def knee(share: Callable[[float], float], rate: float) -> float:
    """Requests a second that got what they were promised, at the highest rung at which more than `ATTAINED`
    did, with the next one above tried in vain; from ``rate`` on up or down, by one rung, two, and so on, and
    then between."""
    low, high, rung, step, best = -inf, inf, 0, 1, 0.0
    while high - low > 1:
        if good := share(rate * RUNG**rung):
            low, best = rung, rate * RUNG**rung * good
        else:
            high = rung
        if low > -inf and high < inf:
            rung = int(low + high) // 2
        else:
            rung, step = rung + (step if low > -inf else -step), step + 1
    return best


def _twin(work: Workload, times: StepTime, policy: str, seed: int) -> float:
    limits = replace(LIMITS, rows=ROWS, chunk=CHUNK, kv=1 << 30)
    low, high = (share / work.tpot for share in (0.06, 0.8))
    return goodput(work, policy, seed, limits, times, low=low, high=high, halvings=6)
