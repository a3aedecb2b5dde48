"""Training jobs of a bench: launched on emulated hosts, struck while they run, read from the log of the run.

    with running(PROGRAM, ["--mode", "none"], folder, hosts=4) as job:  # options of `JobSpec`
        until(job, lambda events: count(events, "committed") > 3, "commits")
        job.kill_host(2)
        returned = end_soon(job)  # what each rank's program returned

What a program is told while it runs is a file in the run's folder: the step to end with (`over`).
`finished` is a job that needs nobody beside it.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from windtunnel.base import atomic
from windtunnel.training.elastic.events import Event, Recovery, recoveries

if TYPE_CHECKING:
    from windtunnel.training.elastic import Job
    from windtunnel.training.elastic.policy.state import Outcome
    from windtunnel.training.launch import Launched

T = TypeVar("T")
LAST = "last"
"""A file in the run's folder: the number of the step to end with. Without one the programs go on."""
_PAUSE = 0.01
_MARGIN = 12  # steps: more than ranks are ever apart, and than pass while the file is written


class Failed(RuntimeError):
    """A job of a bench did not do what it was to do."""


class Running(Protocol):
    """A job that this process launched, or another."""

    @property
    def folder(self) -> Path: ...

    @property
    def outcome(self) -> Outcome | None: ...

    def events(self) -> list[Event]: ...

    def wait(self, timeout: float | None = None) -> Outcome | None: ...


@contextlib.contextmanager
def running(program: Path, arguments: Sequence[object], folder: Path, **options: Any) -> Iterator[Launched]:
    """A job of ``program``; everything of it ends with the block. ``options``: of `JobSpec`, and
    ``on_event``; what the trainers print goes to ``folder``."""
    from windtunnel.linux.system import adopt_orphans
    from windtunnel.training.launch import launch

    adopt_orphans()
    folder.mkdir(parents=True, exist_ok=True)
    words = [str(argument) for argument in arguments]
    with (
        (folder / "output").open("wb") as output,
        launch(program, words, folder=folder, output=output.fileno(), **options) as launched,
    ):
        yield launched


def finished(
    program: Path, arguments: Sequence[object], folder: Path, timeout: float = 300.0, **options: Any
) -> tuple[dict[int, Any], list[Event]]:
    """A job that comes to its end by itself: the ranks' results, and the run's events.

    Raises:
        Failed: it did not end well, or not in time.
    """
    with running(program, arguments, folder, **options) as launched:
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


def until(job: Running, what: Callable[[list[Event]], T | None], wanted: str, timeout: float = 60.0) -> T:
    """The first true value of ``what`` of the events so far.

    Raises:
        Failed: the job ended before, or ``timeout`` seconds passed; with ``wanted``, in words.
    """
    end = time.monotonic() + timeout
    while True:
        value = what(job.events())
        if value:
            return value
        if job.outcome is not None:
            raise Failed(f"the job ended ({job.outcome.reason[:200]}) before {wanted}")
        if time.monotonic() > end:
            raise Failed(f"no {wanted} within {timeout:g} s")
        time.sleep(_PAUSE)


def end_soon(job: Running, timeout: float = 120.0) -> dict[int, Any]:
    """Have the job end a few steps from now: the ranks' results.

    Raises:
        Failed: it did not end well.
    """
    end_at(job.folder, newest(job.events(), "step") + _MARGIN)
    return results(job, timeout)


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


def count(events: Sequence[Event], kind: str) -> int:
    return sum(event["kind"] == kind for event in events)


def newest(events: Sequence[Event], kind: str) -> int:
    """The newest step that events of this kind name; 0 where there are none."""
    return max((event["step"] for event in events if event["kind"] == kind), default=0)


def generation(events: Sequence[Event]) -> int:
    """The newest that was decided; 0 before the first."""
    return max((event["generation"] for event in events if event["kind"] == "decided"), default=0)


def losses(events: Sequence[Event]) -> dict[int, Any]:
    """By step, as rank 0 told them; of one that was done again the last."""
    return {event["step"]: event["loss"] for event in events if event["kind"] == "step"}


def paces(events: Sequence[Event]) -> list[tuple[Event, float]]:
    """Each step that followed another one of its generation, and its seconds."""
    steps = [event for event in events if event["kind"] == "step"]
    return [(b, b["t"] - a["t"]) for a, b in pairwise(steps) if a["generation"] == b["generation"]]


def complete(events: Sequence[Event]) -> list[Recovery]:
    """The recoveries from losses that came to a new step."""
    return [recovery for recovery in recoveries(events) if recovery.kind == "loss" and recovery.complete]
