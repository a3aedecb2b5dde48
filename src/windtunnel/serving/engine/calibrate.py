"""How long steps of a model take here: waves of requests through the very engine that serves, and the step
model that fits their steps. ``windtunnel calibrate serving.engine`` keeps that of a small model for the twin,
with its error: of one thread.

A wave is some requests that come at once: their prompts are prefilled in chunks, beside the rows of those
that are done with theirs, and then all decode. The same waves make the same steps each time, so that each
step is timed several times.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from itertools import count
from statistics import median

import torch

from windtunnel.base.errors import UserError
from windtunnel.calibration.profiles import Calibrated, Progress, own, today
from windtunnel.cluster.catalogue import processor_name
from windtunnel.serving.engine import profile
from windtunnel.serving.engine.live import families
from windtunnel.serving.engine.live.executor import Executor
from windtunnel.serving.engine.live.loop import Branches, EngineJob, Over, ServingEngine
from windtunnel.serving.engine.model import StepTime

MODEL = "small-attention"
CHUNK = 512
DECODED = 4  # tokens of each answer
Wave = tuple[int, int, int]
"""Requests, tokens of each one's prompt, and branches of each."""
QUICK: tuple[Wave, ...] = ((1, 16, 0), (6, 16, 0), (16, 16, 0), (1, 640, 0), (4, 256, 0), (1, 128, 8))
FULL: tuple[Wave, ...] = (
    *((rows, 16, 0) for rows in (1, 2, 4, 8, 16, 32, 64)), *((rows, 256, 0) for rows in (1, 4, 16, 32)),
    (1, 2048, 0), (4, 1024, 0), (1, 512, 16), (2, 256, 32),
)  # fmt: skip


def calibrate_here(*, quick: bool, progress: Progress) -> Calibrated:
    """Measure and keep the profile; ``quick``: fewer and smaller steps."""
    progress("model", 0.0)
    torch.set_num_threads(1)
    executor = families.load(MODEL)
    waves = QUICK if quick else FULL
    points, seconds = measure(executor, waves, CHUNK, progress=lambda share: progress("steps", share))
    step, error = profile.fit(points, seconds)
    path = own(profile.NAME)
    profile.save(
        path, step, executor.token_bytes, model=f"{MODEL} on a core of {processor_name()}",
        error=error, date=today(),
        points=[[*point, spent] for point, spent in zip(points, seconds, strict=True)],
    )  # fmt: skip
    return Calibrated(path, f"{len(points)} steps of {MODEL}, {error:.1%} from the step model on average")


def step_time(executor: Executor, rows: int, chunk: int) -> StepTime:
    """Of decoding up to ``rows`` rows and prefilling up to ``chunk`` tokens, from few steps."""
    short = [(number, 4, 0) for number in sorted({1, min(rows, 6), min(rows, 16)})]
    points, seconds = measure(executor, short, chunk)
    more = measure(executor, [(1, 2 * min(chunk, 256), 0)], min(chunk, 256), repeats=1)
    return profile.fit(points + more[0], seconds + more[1])[0]


def measure(
    executor: Executor, waves: Sequence[Wave], chunk: int, *, repeats: int = 3,
    progress: Callable[[float], None] = lambda share: None,
    clock: Callable[[], float] = time.monotonic,
) -> tuple[list[profile.Point], list[float]]:  # fmt: skip
    """The steps of ``waves``, at most ``chunk`` tokens prefilled in each, and their seconds: the
    median of ``repeats``. What is longer than the model can read is cut."""
    rows = max(requests * max(1, branches) for requests, _, branches in waves)
    engine = ServingEngine(
        executor, StepTime(1.0, 0.0, 0.0, 0.0, 0.0), rows=rows, kv=1 << 60, chunk=chunk, admission="wait",
        branching="eager", clock=clock,
    )  # fmt: skip
    turns: list[list[tuple[profile.Point, float]]] = [[] for _ in range(repeats)]
    numbers = count()
    for turn, steps in enumerate(turns):
        for place, wave in enumerate(waves):
            progress((turn + place / len(waves)) / repeats)
            for job in _jobs(executor, wave, numbers):
                engine.add(job)
            while engine.busy:
                before = engine.seconds
                for event in engine.step():
                    if isinstance(event, Over) and event.failed:
                        raise UserError(f"a step to be timed failed: {event.failed}")
                step = engine.last_step
                assert step is not None
                steps.append(((len(step.rows), step.read, step.chunks), engine.seconds - before))
    alike = list(zip(*turns, strict=True))
    return [each[0][0] for each in alike], [median(seconds for _, seconds in each) for each in alike]


def _jobs(executor: Executor, wave: Wave, numbers: count[int]) -> list[EngineJob]:
    requests, prompt, branches = wave
    prompt = min(prompt, (executor.limit or 1 << 30) - 4 * DECODED)
    stages: tuple[int | Branches, ...] = (DECODED,)
    if branches:
        stages = (Branches(((),) * branches, (DECODED,) * branches),)
    return [EngineJob(next(numbers), 0.0, (0,) * prompt, stages) for _ in range(requests)]
