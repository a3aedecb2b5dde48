"""Serving: an engine around Transformers' own models, its policies, and model variants."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from windtunnel.serving.engine.emulation import Emulated
    from windtunnel.serving.engine.live.executor import Executor
    from windtunnel.serving.engine.live.loop import Engine, Job
    from windtunnel.serving.engine.live.prefixes import Prefixes
    from windtunnel.serving.engine.model import Request, StepTime
    from windtunnel.serving.engine.profile import Point
    from windtunnel.serving.engine.twin.world import Served


def simulate(**options: Any) -> Emulated:
    """A trace of requests on a cluster that is not there, kept as a run; the arguments are the fields of
    `windtunnel.serving.engine.emulation.Emulation`.

    Raises:
        UserError: something that was asked for is wrong.
    """
    from windtunnel.serving.engine.emulation import Emulation, emulate

    return emulate(Emulation(**options))


def emulated(*given: Any, **options: Any) -> Served:
    """Requests through the engine's scheduler on a virtual clock: `engine.twin.world.serve`."""
    from windtunnel.serving.engine.twin.world import serve

    return serve(*given, **options)


def loaded(
    model: str, waves: Sequence[tuple[int, int, int]], chunk: int, clock: Callable[[], float]
) -> tuple[Executor, StepTime]:
    """A model as ``windtunnel serve`` loads it, for one thread, and how long its steps take here by
    ``clock``, from those of such `engine.live.timing.Wave`."""
    import torch

    from windtunnel.serving.engine.live.families import load
    from windtunnel.serving.engine.live.timing import measure
    from windtunnel.serving.engine.profile import fit

    torch.set_num_threads(1)
    executor = load(model)
    return executor, fit(*measure(executor, waves, chunk, clock=clock))[0]


def steps(*given: Any, **options: Any) -> tuple[list[Point], list[float]]:
    """Steps of waves, and their seconds: `engine.live.timing.measure`."""
    from windtunnel.serving.engine.live.timing import measure

    return measure(*given, **options)


def live_engine(executor: Executor, time_of: StepTime, **settings: Any) -> Engine:
    """`windtunnel.serving.engine.live.loop.Engine`."""
    from windtunnel.serving.engine.live.loop import Engine

    return Engine(executor, time_of, **settings)


def prefixes(executor: Executor, rules: str, capacity: int) -> Prefixes:
    """`windtunnel.serving.engine.live.prefixes.Prefixes`."""
    from windtunnel.serving.engine.live.prefixes import Prefixes

    return Prefixes(executor, rules, capacity)


def job(request: Request, token: Callable[[], int]) -> Job:
    """``request`` for a live engine, each of its tokens drawn by ``token``."""
    from windtunnel.serving.engine.live.loop import Branches, Job
    from windtunnel.serving.engine.model import Serial

    def some(count: int) -> tuple[int, ...]:
        return tuple(token() for _ in range(count))

    stages = tuple(
        stage.tokens
        if isinstance(stage, Serial)
        else Branches(tuple(map(some, stage.heads)), stage.tokens, some(stage.join))
        for stage in request.stages
    )
    return Job(request.id, request.arrival, some(request.prompt), stages, objective=request.objective)
