"""Runs of the live engine in this process, on a real model, with little memory.

Its clock goes on only while a step is computed, for as long as that really takes: so the twin, which spends
no time between steps, can be given the very times.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import inf
from pathlib import Path
from time import perf_counter
from typing import Any

from windtunnel.serving.engine.model import Objective, StepTime
from windtunnel.store.eventlog import EventLog

TIME = StepTime(1e-3, 1e-5, 1e-7, 1e-5, 1e-9, 1e-4, 1e-4)
ROOM = 1.3
"""Times the largest request: two do not always fit."""
TICK = 2**20
"""Ticks a second: sums of such times are exact."""
RUNS = (
    # admission, branching, rules of the prefix cache
    ("refuse", "eager", "density"),
    ("refuse", "taper", "block16"),
    ("wait", "taper", "three-lru"),
    ("wait", "eager", "seglen"),
    ("wait", "off", "every32"),
)


@dataclass
class Stopwatch:
    """Seconds in which steps were computed."""

    now: float = 0.0

    def __call__(self) -> float:
        return self.now

    def timed(self, compute: Callable[..., Any]) -> Callable[..., Any]:

        def computed(*given: Any) -> Any:
            began = perf_counter()
            answer = compute(*given)
            self.now += int((perf_counter() - began) * TICK + 1) / TICK
            return answer

        return computed


def jobs(clock: Stopwatch) -> Iterator[list[Any]]:
    """What comes before each step: prompts that begin alike, branches, promises, and a queue that is full."""
    from windtunnel.serving.engine.live.loop import Branches, EngineJob

    base, number = tuple(3 + 7 * at % 251 for at in range(60)), iter(range(100))

    def job(prompt: int, own: int, *stages: Any, **promised: float) -> Any:
        end = tuple(9 + (own + at) % 200 for at in range(own))
        return EngineJob(next(number), clock(), base[:prompt] + end, stages, objective=Objective(**promised))

    parts = Branches(((5, 6), (7,), ()), (9, 4, 12), (9, 9))
    for at in range(3):
        yield [job(30, at, 3), job(45, 3 * at, 2, ttft=100.0, tpot=9.0)]
    yield [job(50, 9, 3, parts, 2, tpot=1e-9), job(40, 1, parts, ttft=100.0, tpot=9.0)]
    yield from [[]] * 12
    yield [job(1, 0, Branches(((), ()), (4, 2)), 3), job(50, 5, 3, ttft=1e-9), job(50, 6, 4)]
    yield from [[]] * 8
    yield [job(20, 7 + at, 9, ttft=1e-9 if at % 2 else inf) for at in range(9)]
    yield from [[]] * 12
    yield [job(60, 17 * at, 2, parts, 2, tpot=1e-4) for at in range(2)]


def engines(folder: Path) -> Path:
    """The log of all `RUNS`."""
    import torch

    from windtunnel.serving.engine.live.families import load
    from windtunnel.serving.engine.live.loop import ROUNDED, ServingEngine
    from windtunnel.serving.engine.live.prefixes import Prefixes

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    executor, log = load("tiny-hybrid"), EventLog(folder / "engine.jsonl")
    compute, token = executor.step, max(1.0, executor.token_bytes * ROUNDED)
    for late, extend, rules in RUNS:
        clock = Stopwatch(1.0)
        executor.step = clock.timed(compute)  # type: ignore[method-assign]
        largest = 0

        def new_engine(kv: int, note: Any) -> Any:
            kept = Prefixes(executor, rules, 1 << 17, log.decision, note)  # noqa: B023
            policies: dict[str, Any] = {"admission": late, "branching": extend}  # noqa: B023
            return ServingEngine(
                executor, TIME, rows=5, kv=kv, chunk=24, queue=6, prefixes=kept, clock=clock,  # noqa: B023
                log=log.decision, note=note, **policies,
            )  # fmt: skip

        most = new_engine(1 << 30, None).scheduler.most
        largest = max(most(job.request()) for some in jobs(clock) for job in some)
        engine = new_engine(int(ROOM * largest * token), log.append)
        for some in jobs(clock):
            before = clock()
            for job in some:
                engine.add(job)
            engine.step()
            clock.now += 1 / TICK if clock() == before else 0.0  # what comes next comes later
        while engine.busy:
            failed = [event for event in engine.step() if getattr(event, "failed", "")]
            assert not failed, failed
    executor.step = compute  # type: ignore[method-assign]
    torch.set_num_threads(threads)
    log.close()
    return log.path
