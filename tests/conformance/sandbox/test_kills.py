"""The arithmetic of random kills: the plan, and what is told of the ends; the kills are the bench's."""

from __future__ import annotations

from collections import Counter

from conformance.sandbox.kills import CHEAP, PAIRS, KillEnd, judged_rows, plan
from conformance.sandbox.matrix.run import ROWS

CHEAPS = [row for row in ROWS if row.name.startswith(CHEAP)]


def test_a_plan_has_every_pair_as_often_and_is_the_same_for_a_seed() -> None:
    assert len(CHEAPS) == len(CHEAP)
    kills = plan(CHEAPS, 5 * len(PAIRS))
    assert Counter((kill.when, kill.what) for kill in kills) == dict.fromkeys(PAIRS, 5)
    assert len({kill.row.name for kill in kills}) > len(CHEAPS) / 2
    assert all(0 <= kill.share < 1 for kill in kills)
    assert plan(CHEAPS, 60) == kills and plan(CHEAPS, 60, seed=2) != kills


def test_one_wrong_kill_misses_the_target_and_is_named() -> None:
    planned = plan(CHEAPS, 12)
    ends = [KillEnd(kill, landed=True) for kill in planned]
    assert [(row.measured, row.passed) for row in judged_rows(planned, ends)] == [(0, True), (0, True)]
    ends[3] = KillEnd(planned[3], True, "the mark is another")
    loud = list(judged_rows(planned, ends))
    assert [(row.measured, row.passed) for row in loud] == [(1, False), (0, True)]
    assert f"WRONG {planned[3].words}: the mark is another" in loud[0].note
    ends[3] = KillEnd(planned[3], True, "the mark is another", silent=True)
    assert [(row.measured, row.passed) for row in judged_rows(planned, ends)] == [(1, False), (1, False)]


def test_kills_that_were_not_begun_in_time_are_no_success() -> None:
    planned = plan(CHEAPS, 12)
    rows = list(judged_rows(planned, [KillEnd(kill, landed=False) for kill in planned[:5]]))
    assert [(row.measured, row.passed) for row in rows] == [(0, False), (0, False)]
    assert "7 of 12 were not begun" in rows[0].note and "of 5 random kills" in rows[0].name
    (row,) = judged_rows([], [])
    assert row.measured is None and row.passed is None
