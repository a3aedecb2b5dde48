"""The engine's threads run jobs in the order that the queues give, and never lose one."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from windtunnel.agents.sandbox.context import JobEngine, Pending, SandboxLog
from windtunnel.agents.sandbox.model import TurnClass, TurnRecord
from windtunnel.agents.sandbox.policy.queues import Pick, Queued


def line(number: int) -> TurnRecord:
    return TurnRecord(number, TurnClass.FULL, TurnClass.FULL, (), "", 0.0, 0.0, 0.0, 0)


def logs(folder: Path) -> Callable[[str], SandboxLog]:
    return lambda box: SandboxLog(box, "semantic", folder / box, print)


class Held:
    """An engine of one worker that stands in its first job until told to go on."""

    def __init__(self, folder: Path) -> None:
        self.engine = JobEngine(1, logs(folder))
        self.go = threading.Event()
        self.order: list[str] = []
        begun = threading.Event()

        def block() -> TurnRecord:
            begun.set()
            self.go.wait(60)
            return line(0)

        self.first = self.engine.submit("first", block)
        assert begun.wait(60)

    def submit(self, box: str, *, urgent: bool = False) -> Pending[TurnRecord]:
        def work() -> TurnRecord:
            self.order.append(box)
            return line(1)

        return self.engine.submit(box, work, urgent=urgent)

    def finish(self) -> list[str]:
        self.go.set()
        self.engine.close()
        return self.order


def test_a_choice_is_told_and_one_job_alone_is_none(tmp_path: Path) -> None:
    held = Held(tmp_path)
    for name in "ab":
        held.submit(name)
    held.submit("c", urgent=True)
    assert held.finish() == ["c", "a", "b"]
    a, b, c = (logs(tmp_path)(name).decisions() for name in "abc")
    assert c == [(Queued(("c/4",), ("a/2", "b/3"), 0, 4), Pick("c/4"))]
    assert a == [(Queued((), ("a/2", "b/3"), 1, 4), Pick("a/2"))]
    assert b == []


def test_a_fault_belongs_to_whoever_waits_and_the_worker_goes_on(tmp_path: Path) -> None:
    engine = JobEngine(1, logs(tmp_path))

    def fail() -> TurnRecord:
        raise OSError("disk full")

    failed, fine = engine.submit("a", fail), engine.submit("b", lambda: line(2))
    with pytest.raises(OSError, match="disk full"):
        failed.wait(60)
    assert fine.wait(60).number == 2
    engine.close()
    with pytest.raises(RuntimeError, match="shutdown"):
        engine.submit("a", lambda: line(3))


def test_waiting_is_bounded_and_a_settled_turn_is_done(tmp_path: Path) -> None:
    held = Held(tmp_path)
    with pytest.raises(TimeoutError, match="first"):
        held.first.wait(0.01)
    assert held.finish() == []
    assert held.first.wait(60).number == 0
    assert Pending("x", lambda: line(5)).run().wait(0).number == 5
