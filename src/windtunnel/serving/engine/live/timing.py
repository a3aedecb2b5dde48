"""How long steps of a model take here: waves of requests through the very engine that serves, and the step
model that fits their steps.

A wave is some requests that come at once: their prompts are prefilled in chunks, beside the rows of those
that are done with theirs, and then all decode. The same waves make the same steps each time, so that each
step is timed several times.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from itertools import count
from statistics import median

from windtunnel.base.errors import UserError
from windtunnel.serving.engine.live.executor import Executor
from windtunnel.serving.engine.live.loop import Branches, EngineJob, Over, ServingEngine
from windtunnel.serving.engine.model import StepTime
from windtunnel.serving.engine.profile import Point, fit

DECODED = 4  # tokens of each answer
Wave = tuple[int, int, int]
"""Requests, tokens of each one's prompt, and branches of each."""


def step_time(executor: Executor, rows: int, chunk: int) -> StepTime:
    """Of decoding up to ``rows`` rows and prefilling up to ``chunk`` tokens, from few steps."""
    short = [(number, 4, 0) for number in sorted({1, min(rows, 6), min(rows, 16)})]
    points, seconds = measure(executor, short, chunk)
    more = measure(executor, [(1, 2 * min(chunk, 256), 0)], min(chunk, 256), repeats=1)
    return fit(points + more[0], seconds + more[1])[0]


def measure(
    executor: Executor, waves: Sequence[Wave], chunk: int, *, repeats: int = 3,
    progress: Callable[[float], None] = lambda share: None,
    clock: Callable[[], float] = time.monotonic,
) -> tuple[list[Point], list[float]]:  # fmt: skip
    """The steps of ``waves``, at most ``chunk`` tokens prefilled in each, and their seconds: the
    median of ``repeats``. What is longer than the model can read is cut."""
    rows = max(requests * max(1, branches) for requests, _, branches in waves)
    engine = ServingEngine(
        executor, StepTime(1.0, 0.0, 0.0, 0.0, 0.0), rows=rows, kv=1 << 60, chunk=chunk, admission="wait",
        branching="eager", clock=clock,
    )  # fmt: skip
    points: list[Point] = []
    seconds: list[list[float]] = []
    numbers = count()
    for turn in range(repeats):
        place = 0
        for wave in waves:
            progress((turn + place / max(1, len(points))) / repeats if turn else 0.0)
            for job in _jobs(executor, wave, numbers):
                engine.add(job)
            while engine.busy:
                before = engine.seconds
                for event in engine.step():
                    if isinstance(event, Over) and event.failed:
                        raise UserError(f"a step to be timed failed: {event.failed}")
                step = engine.last_step
                assert step is not None
                if not turn:
                    points.append((len(step.rows), step.read, step.chunks))
                    seconds.append([])
                seconds[place].append(engine.seconds - before)
                place += 1
    return points, [median(each) for each in seconds]


def _jobs(executor: Executor, wave: Wave, numbers: count[int]) -> list[EngineJob]:
    requests, prompt, branches = wave
    prompt = min(prompt, (executor.limit or 1 << 30) - 4 * DECODED)
    stages: tuple[int | Branches, ...] = (DECODED,)
    if branches:
        stages = (Branches(((),) * branches, (DECODED,) * branches),)
    return [EngineJob(next(numbers), 0.0, (0,) * prompt, stages) for _ in range(requests)]
