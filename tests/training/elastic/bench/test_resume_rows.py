"""The bench of launchers that are followed from another host: how it judges what the log says."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.training.elastic import resume


def event(kind: str, t: float, **fields: Any) -> dict[str, Any]:
    return {"kind": kind, "t": t, **fields}


STARTED, LED = event("started", 1.0), event("started", 8.0)
SAVED = [event("committed", 2.0 + step, step=step) for step in range(3)]
DECIDED = event("decided", 1.5, generation=1)
STEPS = [event("step", 2.0 + step, step=step) for step in range(3)]


def test_the_first_new_step_is_one_that_was_not_committed_before() -> None:
    events = [STARTED, *SAVED, LED]
    assert resume._after([STARTED, *SAVED], 1) is None
    assert resume._after([*events, event("committed", 8.5, step=2)], 1) is None
    assert resume._after([*events, event("committed", 9.0, step=3)], 1) == (8.0, 9.0, 6)


@pytest.mark.parametrize(("more", "again"), [([], 0), ([STEPS[2]], 0), ([event("step", 9.0, step=2)], 1)])
def test_a_step_that_is_told_twice_was_done_once(more: list[dict[str, Any]], again: int) -> None:
    found = [resume.Resumed(2.0, seconds, 40) for seconds in (3.0, 9.0, 4.0)]
    first, leads, repeated = resume.rows(found, [DECIDED, *STEPS, *more], False, "load")
    assert (first.measured, first.met, leads.measured) == (4.0, True, 2.0)
    assert (repeated.measured, repeated.met) == (again, again == 0)
    slow = next(resume.rows(found[1:], [DECIDED, *STEPS], True, "load"))
    assert slow.met is False and "standby" in slow.name
