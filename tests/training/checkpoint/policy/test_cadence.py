"""How often is saved where a bound is set: as often as the bound allows, and alike on all ranks."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from windtunnel.base.errors import UserError
from windtunnel.training.checkpoint.live.cadence import SAVED, WARM, WITHOUT, Learner
from windtunnel.training.checkpoint.policy import Cadence
from windtunnel.training.checkpoint.policy.cadence import MOST, every_for
from windtunnel.training.checkpoint.settings import settings

SECONDS = st.floats(1e-3, 10.0)


@given(SECONDS, st.floats(0.0, 5.0), st.floats(0.001, 1.0))
def test_the_bound_is_kept_and_no_step_is_given_away(plain: float, more: float, share: float) -> None:
    every = every_for(share, [plain] * 3, [plain + more] * 3)
    assert 1 <= every <= MOST
    if every < MOST:
        assert more / every <= share * plain * (1 + 1e-6)
    if every > 1:
        assert more / (every - 1) > share * plain * (1 - 1e-6)


class Job:
    """A rank whose peer has learnt ``known`` before it came, and finds ``found``."""

    def __init__(self, known: int | None = None, found: int = 1) -> None:
        self.rank, self.known, self.found = 0, known, found
        self.kept: dict[str, Any] = {}
        self.events: list[tuple[str, dict[str, Any]]] = []

    def keep(self, name: str, make: Any) -> Any:
        return self.kept.setdefault(name, make())

    def agree(self, key: str, value: Any = None) -> dict[int, Any]:
        return {0: value, 1: self.known if key.startswith("cadence/") else self.found}

    def event(self, kind: str, **fields: Any) -> None:
        self.events.append((kind, fields))


def taught(job: Any, plain: float, saving: float) -> tuple[Learner, list[bool]]:
    """A learner after as many steps as it needs, which take ``saving`` seconds after one that was saved."""
    now = 0.0
    learner = Learner(job, 0.03, "0", lambda: now)
    passed: list[bool] = []
    while learner.every == 1 and len(passed) < 99:
        now += plain if passed and passed[-1] else saving
        passed.append(learner.passes())
    return learner, passed


def test_what_a_save_takes_is_found_and_the_slowest_rank_decides() -> None:
    job = Job(found=4)
    learner, passed = taught(job, 0.1, 0.115)
    assert passed == [False] * WARM + [True] * WITHOUT + [False] * (SAVED + 2)
    assert learner.every == 5
    assert not learner.passes()
    (decision, about), (_, note) = job.events
    assert decision == "decision"
    assert about["decision"]["is"] == Cadence.__name__
    assert "every 5 steps" in note["text"]
    assert "a failure takes up to 6 steps" in note["text"]
    assert Learner(job, 0.03, "1").every == 5  # the next generation goes on with that

    assert taught(Job(found=9), 0.1, 0.115)[0].every == 9


def test_who_comes_later_takes_over_what_the_others_found() -> None:
    learner = Learner(Job(known=7), 0.03, "0")
    assert learner.every == 7
    assert not any(learner.passes() for _ in range(40))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"budget": 0}, "budget is 0; a share above 0, of 1 at the most"),
        ({"budget": 1.5}, "budget is 1.5"),
        ({"budget": True}, "budget is True"),
        ({"rng": 1}, "rng is 1, which is not accepted"),
        ({"budget": 0.03, "mode": "idle"}, "mode idle finds by itself how often it saves"),
    ],
)
def test_a_bound_that_cannot_be_kept_is_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        settings(options)
