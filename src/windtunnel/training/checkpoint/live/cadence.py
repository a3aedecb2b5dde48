"""Learns how often checkpoints to memory may be made where a bound is set on their cost (`policy.cadence`).

After a few saves, in which memory and plans are made, some steps are not saved, and some are, each; what the
latter take more is the cost. The ranks agree on what the slowest finds, and the program goes on with that; a
rank that comes later takes it over.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from windtunnel.store import eventlog
from windtunnel.training.checkpoint.policy import Cadence, StepTimes, decide

WARM = 4
WITHOUT = 8
SAVED = 8


class Learner:
    """``every``: steps from one save to the next, 1 while that is being learnt. ``key``: of its agreements.
    All ranks make one, and ask it at the same steps."""

    def __init__(
        self, job: Any, share: float, key: str, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.every = 1
        self._job, self._share, self._key, self._clock = job, share, key, clock
        self._job_state = job.keep("checkpoint", dict)
        self._calls = 0
        self._last: float | None = None
        self._plain: list[float] = []
        self._saving: list[float] = []
        intervals = [
            value for value in job.agree(f"cadence/{key}", self._job_state.get("every")).values() if value
        ]
        self._learning = not intervals
        if intervals:
            self.every = max(intervals)

    def passes(self) -> bool:
        """Whether the step that ended just now is one of those that are not saved, to learn what that
        takes. Called once at the end of each step."""
        if not self._learning:
            return False
        now, last = self._clock(), self._last
        self._last = now
        number = self._calls
        self._calls += 1
        if last is not None:
            # The first step of each kind still has something of the other in it.
            if WARM + 1 < number <= WARM + WITHOUT:
                self._plain.append(now - last)
            elif number > WARM + WITHOUT + 1:
                self._saving.append(now - last)
        if number == WARM + WITHOUT + SAVED + 1:
            self._decide()
        return WARM <= number < WARM + WITHOUT

    def _decide(self) -> None:
        step_times = StepTimes(self._share, tuple(self._plain), tuple(self._saving))
        decision = decide(step_times)
        assert isinstance(decision, Cadence)
        answers = self._job.agree(f"cadence-found/{self._key}", decision.every)
        self.every = self._job_state["every"] = max(answers.values())
        self._learning = False
        if self._job.rank == 0:
            self._job.event(
                "decision", **eventlog.decided("training.checkpoint", "newest", step_times, decision)
            )
            text = (
                f"a checkpoint lengthens a step of {decision.plain:.3g} s by {decision.more:.3g} s: one is "
                f"made every {self.every} steps, to stay within {self._share:.1%} of the time; a failure "
                f"takes up to {self.every + 1} steps, which are done again"
            )
            self._job.event("note", text=text)
