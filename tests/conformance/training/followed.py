"""A job that is struck from outside: what is waited for in its log, and how it is told to end."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

from benchmarks.harness import jobs
from windtunnel.training.elastic.events import Event
from windtunnel.training.elastic.policy.state import Outcome

T = TypeVar("T")
_PAUSE = 0.01
_MARGIN = 12  # steps: more than ranks are ever apart, and than pass while the file is written


class Followed(jobs.Running, Protocol):
    """A job of another process, or of this one."""

    @property
    def folder(self) -> Path: ...

    @property
    def outcome(self) -> Outcome | None: ...

    def events(self) -> list[Event]: ...


def until(job: Followed, what: Callable[[list[Event]], T | None], wanted: str, timeout: float = 60.0) -> T:
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
            raise jobs.Failed(f"the job ended ({job.outcome.reason[:200]}) before {wanted}")
        if time.monotonic() > end:
            raise jobs.Failed(f"no {wanted} within {timeout:g} s")
        time.sleep(_PAUSE)


def end_soon(job: Followed, timeout: float = 120.0) -> dict[int, Any]:
    """Have the job end a few steps from now: the ranks' results.

    Raises:
        Failed: it did not end well.
    """
    jobs.end_at(job.folder, newest(job.events(), "step") + _MARGIN)
    return jobs.results(job, timeout)


def count(events: Sequence[Event], kind: str) -> int:
    return sum(event["kind"] == kind for event in events)


def newest(events: Sequence[Event], kind: str) -> int:
    """The newest step that events of this kind name; 0 where there are none."""
    return max((event["step"] for event in events if event["kind"] == kind), default=0)


def generation(events: Sequence[Event]) -> int:
    """The newest that was decided; 0 before the first."""
    return max((event["generation"] for event in events if event["kind"] == "decided"), default=0)
