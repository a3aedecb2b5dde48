"""How a job is waited for, and told to end, on one that does nothing."""

from __future__ import annotations

import types
from pathlib import Path

import pytest

from benchmarks.harness import jobs
from conformance.training.followed import count, end_soon, generation, newest, until
from windtunnel.training.elastic.events import Event
from windtunnel.training.elastic.policy.state import Outcome


class FakeJob:
    """Its log grows by an event each time it is read; the job ends with the last one."""

    def __init__(self, folder: Path, events: list[Event], outcome: Outcome | None) -> None:
        self.folder, self._events, self._ended, self._read = folder, events, outcome, 0

    @property
    def outcome(self) -> Outcome | None:
        return self._ended if self._read > len(self._events) else None

    def events(self) -> list[Event]:
        self._read += 1
        return self._events[: self._read]

    def wait(self, timeout: float | None = None) -> Outcome | None:
        return self._ended


LOG: list[Event] = [
    {"kind": "decided", "generation": 1, "t": 0.0},
    {"kind": "step", "generation": 1, "step": 4, "t": 1.0, "loss": "a"},
    {"kind": "step", "generation": 1, "step": 5, "t": 1.5, "loss": "b"},
    {"kind": "decided", "generation": 2, "t": 2.0},
    {"kind": "step", "generation": 2, "step": 5, "t": 9.0, "loss": "c"},
]


def test_what_a_log_says_of_steps_and_generations() -> None:
    assert (count(LOG, "step"), newest(LOG, "step"), newest(LOG, "committed")) == (
        3,
        5,
        0,
    )
    assert (generation(LOG[:4]), generation([])) == (2, 0)


def test_a_job_is_waited_for_until_it_did_something_or_ended(tmp_path: Path) -> None:
    job = FakeJob(tmp_path, LOG, Outcome(1, "out of memory", {}))
    assert until(job, lambda events: generation(events) > 1 and events[-1]["t"], "loss") == 2.0
    with pytest.raises(jobs.Failed, match=r"ended \(out of memory\) before commit"):
        until(job, lambda events: newest(events, "committed"), "commit")
    with pytest.raises(jobs.Failed, match="no commit within 0 s"):
        until(FakeJob(tmp_path, LOG, None), lambda events: None, "commit", 0.0)


def test_a_job_ends_some_steps_after_it_was_told_to(tmp_path: Path) -> None:
    job = FakeJob(tmp_path, LOG, Outcome(0, "", {0: "done"}))
    job._read = len(LOG)
    assert end_soon(job) == {0: "done"}
    last = int((tmp_path / jobs.LAST).read_text())
    trained = types.SimpleNamespace(folder=tmp_path)
    assert last > 5 and not jobs.over(trained, last) and jobs.over(trained, last + 1)  # type: ignore[arg-type]
    with pytest.raises(jobs.Failed, match="did not end well: it still runs"):
        end_soon(FakeJob(tmp_path, LOG, None))
