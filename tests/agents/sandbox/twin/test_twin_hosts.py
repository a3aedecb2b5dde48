"""The twin's engine hands out jobs in the order of the live one."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import partial

from hypothesis import given, settings
from hypothesis import strategies as st

from windtunnel.agents.sandbox.context import JobEngine, Pending
from windtunnel.agents.sandbox.model import Turn, TurnClass
from windtunnel.agents.sandbox.twin.world import CheckpointJob, TwinScheduler
from windtunnel.engines.events import Environment, ProcessGenerator

TURN = Turn(1, TurnClass.FILES, TurnClass.FILES, (), "", 0.0, 0.0, 0.0, 0)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("submit"), st.booleans()),
        st.tuples(st.just("promote"), st.integers(0, 30)),
    ),
    max_size=30,
)


def live_order(steps: Sequence[tuple[str, int]]) -> list[int]:
    """Jobs in the order in which a live engine of one worker runs them, none before all steps are done."""
    engine = JobEngine(1)
    begun, opened = threading.Event(), threading.Event()
    order: list[int] = []
    pendings: list[Pending] = []

    def first() -> Turn:
        begun.set()
        opened.wait(60)
        return TURN

    def job(number: int) -> Turn:
        order.append(number)
        return TURN

    engine.submit("first", first)
    begun.wait(60)
    try:
        for kind, value in steps:
            if kind == "submit":
                number = len(pendings)
                pendings.append(engine.submit("box", partial(job, number), urgent=bool(value)))
            elif value < len(pendings):
                pendings[value].promote()
    finally:
        opened.set()
        engine.close()
    return order


def twin_order(steps: Sequence[tuple[str, int]]) -> list[int]:
    """The same of the twin's engine."""
    env = Environment()
    scheduler = TwinScheduler(env, 1)
    opened = env.event()
    order: list[int] = []
    jobs: list[CheckpointJob] = []

    def first() -> ProcessGenerator:
        yield opened

    def run(number: int) -> ProcessGenerator:
        order.append(number)
        yield env.timeout(0)

    scheduler.submit(CheckpointJob(env, "first", first()))
    for kind, value in steps:
        if kind == "submit":
            jobs.append(CheckpointJob(env, str(len(jobs)), run(len(jobs))))
            scheduler.submit(jobs[-1], urgent=bool(value))
        elif value < len(jobs):
            scheduler.promote(jobs[value])
    opened.succeed()
    env.run()
    return order


@settings(max_examples=60, deadline=None)
@given(STEPS)
def test_order_is_that_of_the_live_engine(steps: list[tuple[str, int]]) -> None:
    assert twin_order(steps) == live_order(steps)


def test_a_dropped_job_never_runs_and_frees_who_waits() -> None:
    env = Environment()
    scheduler = TwinScheduler(env, 1)
    ran: list[str] = []

    def job(name: str) -> ProcessGenerator:
        yield env.timeout(1.0)
        ran.append(name)

    first, second = (CheckpointJob(env, name, job(name)) for name in ("first", "second"))
    scheduler.submit(first)
    scheduler.submit(second)
    freed: list[float] = []
    second.done.callbacks.append(lambda event: freed.append(env.now))
    assert scheduler.drop(second)
    assert not scheduler.drop(first)
    env.run()
    assert (ran, freed) == (["first"], [0.0])
