"""The twin's engine: a job that nobody wants any more."""

from __future__ import annotations

from windtunnel.agents.sandbox.twin.world import CheckpointJob, TwinScheduler
from windtunnel.engines.events import Environment, ProcessGenerator


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
