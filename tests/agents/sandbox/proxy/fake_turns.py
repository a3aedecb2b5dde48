"""A sandbox for tests of the model proxy: turns end when the test says so."""

from __future__ import annotations

import threading
from dataclasses import dataclass

from windtunnel.agents.sandbox.model import Lack

PATIENCE = 60.0


@dataclass(frozen=True)
class Covered:
    """What a checkpoint has come to."""

    lacks: tuple[Lack, ...] = ()


class FakePending:
    def __init__(self, turn: int) -> None:
        self.turn = turn
        self.promoted = threading.Event()
        self._done = threading.Event()
        self.taken = False
        self._error: Exception | None = None
        self.lacks: tuple[Lack, ...] = ()

    @property
    def done(self) -> bool:
        return self._done.is_set()

    def wait(self, timeout: float | None = None) -> Covered:
        self.taken = True
        if not self._done.wait(timeout):
            raise TimeoutError("not done")
        if self._error is not None:
            raise self._error
        return Covered(self.lacks)

    def promote(self) -> None:
        self.promoted.set()

    def finish(self, error: Exception | None = None) -> None:
        self._error = error
        self._done.set()


class FakeBox:
    """``instant``: checkpoints are done at once. ``blocked``: while it is cleared, ``end_turn`` hangs."""

    def __init__(self, name: str = "one", *, instant: bool = True) -> None:
        self.name = name
        self.instant = instant
        self.turns = 0
        self.requests: list[str] = []
        self.pendings: list[FakePending] = []
        self.checkpoints = 0
        self.checkpoint_error: Exception | None = None
        self.allows = False
        self.error: Exception | None = None
        self.unblocked = threading.Event()
        self.unblocked.set()
        self.changed = threading.Condition()

    def end_turn(self, request: str = "") -> FakePending:
        assert self.unblocked.wait(PATIENCE)
        if self.error is not None:
            raise self.error
        with self.changed:
            self.turns += 1
            pending = FakePending(self.turns)
            if self.instant:
                pending.finish()
            self.requests.append(request)
            self.pendings.append(pending)
            self.changed.notify_all()
        return pending

    def checkpoint(self) -> Covered:
        self.checkpoints += 1
        if self.checkpoint_error is not None:
            raise self.checkpoint_error
        return Covered()

    def passes(self) -> bool:
        return self.allows

    def pending(self, number: int) -> FakePending:
        """The n-th turn's checkpoint, once it has been started."""
        with self.changed:
            assert self.changed.wait_for(lambda: len(self.pendings) >= number, PATIENCE)
            return self.pendings[number - 1]

    def back_to(self, turn: int) -> None:
        self.turns = turn
