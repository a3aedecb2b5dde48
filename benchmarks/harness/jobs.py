"""Training jobs of a bench: launched on emulated hosts, struck while they run, read from the log of the run.

    results, events = finished(PROGRAM, ["--mode", "none"], folder, hosts=4, faults=["kill:host=2,step=7"])

What a program is told is a file in the run's folder: the step to end with (`over`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from benchmarks.harness.rows import Row, figure
from windtunnel.base import atomic
from windtunnel.training.elastic.events import PHASES, Event, Recovery, recoveries

if TYPE_CHECKING:
    from windtunnel.training.elastic import Job
    from windtunnel.training.elastic.policy.state import Outcome

LAST = "last"
"""A file in the run's folder: the number of the step to end with. Without one the programs go on."""


class Failed(RuntimeError):
    """A job of a bench did not do what it was to do."""


class Running(Protocol):
    """A job that this process launched, or another."""

    def wait(self, timeout: float | None = None) -> Outcome | None: ...


def finished(
    program: Path, arguments: Sequence[object], folder: Path, timeout: float = 300.0, **options: Any
) -> tuple[dict[int, Any], list[Event]]:
    """A job of ``program`` that comes to its end by itself: the ranks' results, and the run's events.
    ``options``: of `JobSpec`; what the trainers print goes to ``folder``. Nothing of it stays.

    Raises:
        Failed: it did not end well, or not in time.
    """
    from windtunnel.linux.system import adopt_orphans
    from windtunnel.training.launch import launch

    adopt_orphans()
    folder.mkdir(parents=True, exist_ok=True)
    words = [str(argument) for argument in arguments]
    with (
        (folder / "output").open("wb") as output,
        launch(program, words, folder=folder, output=output.fileno(), **options) as launched,
    ):
        return results(launched, timeout), launched.events()


def results(job: Running, timeout: float = 120.0) -> dict[int, Any]:
    """What each rank's program returned, once the job ended.

    Raises:
        Failed: it did not end well, or not in time.
    """
    outcome = job.wait(timeout)
    if outcome is None or outcome.status:
        why = f"it still runs after {timeout:g} s" if outcome is None else outcome.reason
        raise Failed(f"the job did not end well: {why[-300:]}")
    return outcome.results


def end_at(folder: Path, step: int) -> None:
    """Have the job of ``folder`` end with ``step``."""
    folder.mkdir(parents=True, exist_ok=True)
    atomic.replace(folder / LAST, str(step))


def over(job: Job, step: int) -> bool:
    """Whether the job was told to end before ``step``. For programs."""
    try:
        return step > int((job.folder / LAST).read_text())
    except FileNotFoundError:
        return False


def losses(events: Sequence[Event]) -> dict[int, Any]:
    """By step, as rank 0 told them; of one that was done again the last."""
    return {event["step"]: event["loss"] for event in events if event["kind"] == "step"}


def paces(events: Sequence[Event]) -> list[tuple[Event, float]]:
    """Each step that followed another one of its generation, and its seconds."""
    steps = [event for event in events if event["kind"] == "step"]
    return [(b, b["t"] - a["t"]) for a, b in pairwise(steps) if a["generation"] == b["generation"]]


def recovery_rows(total: str, phase: str, recovered: Sequence[Recovery], note: str = "") -> Iterator[Row]:
    """From the loss to the first step after it (the row ``total``), and each part of it (``phase``)."""
    yield figure(total, "s", (recovery.seconds for recovery in recovered), note=note)
    for part in PHASES:
        yield figure(
            f"{phase}{part.replace('_', ' ')}", "s", (recovery.phases[part] for recovery in recovered)
        )


def complete(events: Sequence[Event]) -> list[Recovery]:
    """The recoveries from losses that came to a new step."""
    return [
        recovery
        for recovery in recoveries(events)
        if recovery.complete and any(event["evidence"] != "suspect" for event in recovery.lost)
    ]
