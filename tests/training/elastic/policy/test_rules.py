"""Who goes on after a change: one line a rule."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from windtunnel.training.elastic.policy.rules import (
    Change,
    Decision,
    Fail,
    Form,
    Keep,
    Rules,
    Wait,
    after_change,
)

REPLACE = Rules()
SHRINK, RESTART = Rules("shrink", minimum=2), Rules("restart")
LOST = Change(REPLACE, target=3, places=(0, None, 2), hit=True, cause="host 1 is lost")
WHOLE = replace(LOST, places=(0, 1, 2), hit=False)
ENDED = replace(WHOLE, broken=(1,), own=True)


@pytest.mark.parametrize(
    ("given", "changed", "expected"),
    [
        # the first generation
        (LOST, {"places": (), "spares": (0, 1)}, Wait()),
        (LOST, {"places": (), "spares": (0, 1, 2, 3)}, Form((0, 1, 2))),
        # the job keeps its size: the oldest spare first, each lost place for itself
        (LOST, {"spares": (4, 3)}, Form((0, 4, 2))),
        (LOST, {"places": (None, 1, None), "spares": (5, 7, 9)}, Form((5, 1, 7))),
        (LOST, {"rules": RESTART, "spares": (3,)}, Form((0, 3, 2), restart_all=True)),
        # what is lacking is ordered, once
        (LOST, {}, Wait(order=1)),
        (LOST, {"places": (None, None, 2), "spares": (3,)}, Wait(order=1)),
        (LOST, {"places": (None, None, 2)}, Wait(order=2)),
        (LOST, {"places": (None, None, 2), "coming": 1}, Wait(order=1)),
        (LOST, {"coming": 1}, Wait(order=0)),
        (LOST, {"coming": 2}, Wait(order=0)),
        # or those that are left go on, and take in who comes
        (LOST, {"rules": SHRINK}, Form((0, 2))),
        (LOST, {"rules": SHRINK, "spares": (3, 4)}, Form((0, 2, 3))),
        (LOST, {"rules": SHRINK, "places": (None, None, 2)}, Fail("")),
        (LOST, {"rules": SHRINK, "places": (None, None, 2), "coming": 1}, Wait()),
        # nobody is gone
        (WHOLE, {}, Keep()),
        (WHOLE, {"spares": (3,)}, Keep()),
        (WHOLE, {"places": (0, 2), "rules": SHRINK, "spares": (3,)}, Form((0, 2, 3))),
        (WHOLE, {"forced": True}, Form((0, 1, 2))),
        (WHOLE, {"broken": (1,)}, Form((0, 1, 2))),
        # ends of the program's own making are counted, others are not
        (ENDED, {}, Form((0, 1, 2), own_failures=1)),
        (ENDED, {"hit": True, "own_failures": 1}, Form((0, 1, 2), own_failures=1)),
        (LOST, {"own": True, "hit": False, "spares": (3,)}, Form((0, 3, 2))),
        (ENDED, {"own_failures": 3}, Fail("")),
        # generations without a step are counted, too
        (LOST, {"spares": (3,), "progress": False}, Form((0, 3, 2), fruitless=1)),
        (LOST, {"spares": (3,), "progress": False, "lived": 61.0, "fruitless": 4}, Form((0, 3, 2))),
        (LOST, {"spares": (3,), "progress": True, "fruitless": 4}, Form((0, 3, 2))),
        (LOST, {"spares": (3,), "progress": False, "fruitless": 30}, Fail("")),
    ],
)  # fmt: skip
def test_after_a_change(given: Change, changed: dict[str, Any], expected: Decision) -> None:
    decision = after_change(replace(given, **changed))
    assert (decision if isinstance(decision, Keep) else replace(decision, reason="")) == expected
