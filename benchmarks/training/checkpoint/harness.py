"""What the sections stand on: jobs that end with their block, and with the step that they are told."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

from windtunnel.base import atomic
from windtunnel.training.elastic import Job
from windtunnel.training.elastic.events import Event
from windtunnel.training.elastic.policy.state import Outcome
from windtunnel.training.launch import Launched, launch

T = TypeVar("T")

PROGRAMS = Path(__file__).parent / "programs"
LAST = "last"
"""A file in the run's folder: the number of the step to end with. Without one the programs go on."""

SOURCE = "GEMINI, Wang et al., SOSP 2023"
FAULT = "fault-{rank}"
"""A file in the run's folder: what befalls the program on that rank at its next step, "raise" or "hang"."""
_HANG = 3600.0
_PAUSE = 0.01
_MARGIN = 12  # steps: more than ranks are ever apart, and than pass while the file is written


class Failed(RuntimeError):
    """A run of the comparison did not do what it was to do."""


class Seen(Protocol):
    """A job that runs: one that this process launched, or another."""

    @property
    def folder(self) -> Path: ...

    @property
    def outcome(self) -> Outcome | None: ...

    def events(self) -> list[Event]: ...

    def wait(self, timeout: float | None = None) -> Outcome | None: ...


@contextlib.contextmanager
def running(program: str, arguments: Sequence[object], folder: Path, **options: Any) -> Iterator[Launched]:
    """A job of one of the `PROGRAMS`; everything of it ends with the block. ``options``: of `launch.Job`."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "output").open("wb") as output:
        launched = launch(
            PROGRAMS / f"{program}.py",
            [str(argument) for argument in arguments],
            folder=folder,
            output=output.fileno(),
            **options,
        )
        with launched:
            yield launched


def until(launched: Seen, what: Callable[[list[Event]], T | None], wanted: str, timeout: float = 60.0) -> T:
    """The first true value of ``what`` of the events so far.

    Raises:
        Failed: the job ended before, or ``timeout`` seconds passed; with ``wanted``, in words.
    """
    end = time.monotonic() + timeout
    while True:
        found = what(launched.events())
        if found:
            return found
        if launched.outcome is not None:
            raise Failed(f"the job ended ({launched.outcome.reason[:200]}) before {wanted}")
        if time.monotonic() > end:
            raise Failed(f"no {wanted} within {timeout:g} s")
        time.sleep(_PAUSE)


def end_soon(launched: Seen, timeout: float = 120.0) -> dict[int, Any]:
    """Have the job end a few steps from now: the ranks' results.

    Raises:
        Failed: it did not end well.
    """
    newest = max((event["step"] for event in launched.events() if event["kind"] == "step"), default=0)
    end_at(launched.folder, newest + _MARGIN)
    return ended(launched, timeout)


def end_at(folder: Path, step: int) -> None:
    """Have the job of ``folder`` end with ``step``."""
    folder.mkdir(parents=True, exist_ok=True)
    atomic.replace(folder / LAST, str(step))


def over(job: Job, step: int) -> bool:
    """Whether the job was told to end before ``step``. For the programs."""
    try:
        return step > int((job.folder / LAST).read_text())
    except FileNotFoundError:
        return False


def suffer(job: Job) -> None:
    """What this rank was told to (`FAULT`), once. For the programs."""
    path = job.folder / FAULT.format(rank=job.rank)
    try:
        what = path.read_text()
        path.unlink()
    except FileNotFoundError:
        return
    if what == "raise":
        raise RuntimeError("a mistake of the program's own")
    time.sleep(_HANG)


def ended(launched: Seen, timeout: float = 120.0) -> dict[int, Any]:
    """The ranks' results once the job ended.

    Raises:
        Failed: it did not end well, or not in time.
    """
    outcome = launched.wait(timeout)
    if outcome is None or outcome.status:
        told = "it still runs" if outcome is None else outcome.reason
        raise Failed(f"the job did not end well: {told[-300:]}")
    return outcome.results
