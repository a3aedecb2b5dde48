"""What live sandboxes decided is decided again from the log alone, and by the twin."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from recorded import Recorded, recorded

from windtunnel.agents.sandbox.costs import load_costs
from windtunnel.agents.sandbox.live.decisions import Decider
from windtunnel.agents.sandbox.model import TurnClass
from windtunnel.agents.sandbox.policy import (
    POLICIES,
    BringBack,
    Decision,
    Keep,
    Look,
    Notice,
    Observation,
    Occasion,
    Restore,
    SaveOrder,
    decide,
)
from windtunnel.agents.sandbox.twin import cost
from windtunnel.agents.sandbox.twin.observed import emulated
from windtunnel.store import eventlog

pytestmark = pytest.mark.root


@pytest.fixture(scope="module")
def session(lasting: Path, tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    return recorded(lasting, tmp_path_factory.mktemp("recorded"))


def decisions(log: Path) -> list[tuple[Observation, Decision]]:
    return Decider("", "semantic", log.parent, lambda event: None).decided()


def test_the_same_policy_decides_the_same_again(session: Recorded) -> None:
    found = [*decisions(session.log), *decisions(session.host_log)]
    assert [decide(seen) for seen, _ in found] == [answer for _, answer in found]
    # every question was asked, and every class was given
    assert {type(answer) for _, answer in found} == {Keep, SaveOrder, BringBack}
    keeps = [(seen, answer) for seen, answer in found if isinstance(seen, Look) and isinstance(answer, Keep)]
    assert {answer.turn_class for _, answer in keeps} == set(TurnClass)
    assert {Occasion.TURN, Occasion.ASKED, Occasion.NOTICE} <= {seen.occasion for seen, _ in keeps}
    assert {event["policy"] for event in eventlog.decisions(session.log)} == {"semantic"}


def test_another_policy_is_found_out(session: Recorded) -> None:
    def mutated(seen: Observation) -> Decision:
        """Takes no notice of files."""
        if isinstance(seen, Look) and seen.effects is not None:
            return decide(replace(seen, effects=replace(seen.effects, files=(), files_total=0)))
        return decide(seen)

    found = decisions(session.log)
    for other in (mutated, POLICIES["full"], POLICIES["files"], POLICIES["conversation"]):
        assert [other(seen) for seen, _ in found] != [answer for _, answer in found]


def test_the_twin_decides_as_live_did(session: Recorded) -> None:
    outcome = emulated(session.run, load_costs().costs)
    (box,) = session.run.boxes
    assert [keep for *_, keep in outcome.decided] == [turn.keep for turn in box.turns]
    assert [made.turn_class for made in outcome.made] == [
        turn.keep.made for turn in box.turns if turn.keep.made > TurnClass.NONE
    ]


def test_every_decision_has_a_price(session: Recorded) -> None:
    found = decisions(session.log)
    for seen, answer in found:
        price = cost(seen, answer)
        assert price["seconds"] >= 0
        if isinstance(seen, Look):
            assert cost(seen, POLICIES["full"](seen))["seconds"] >= price["seconds"]
    ((notice, order),) = decisions(session.host_log)
    assert isinstance(notice, Notice) and cost(notice, order)["seconds"] > 0
    with pytest.raises(TypeError, match="Keep is no answer to Restore"):
        cost(next(seen for seen, _ in found if isinstance(seen, Restore)), found[0][1])


def test_a_log_that_cannot_be_written_is_told_and_ends_no_turn(host: Any, make: Any) -> None:
    box = make()
    told: list[Any] = []
    before, host._on_event = host._on_event, told.append
    try:
        log = host.home.box(box.name) / eventlog.NAME
        log.unlink()
        log.mkdir()
        box.run("echo kept > /workspace/f")
        assert box.end_turn().wait(60).turn_class is TurnClass.FILES
        log.rmdir()
        box.end_turn().wait(60)
    finally:
        host._on_event = before
    failed = [event.detail for event in told if event.kind == "failed"]
    assert failed and all("a decision is not in the log" in words for words in failed)
    assert len(box.decisions()) == 1


def test_a_notice_without_time_for_processes_saves_the_files(host: Any, make: Any) -> None:
    box = make()
    box.run("echo first > /workspace/f")
    box.end_turn().wait(60)
    whole = box.tip
    box.run("sleep 1000 </dev/null >/dev/null 2>&1 & echo second > /workspace/f")
    saved = box.save(TurnClass.FILES)
    assert saved.image is None and any("no time" in words for words in saved.not_covered)
    box.machine().cgroup.kill()
    box.restore()
    assert box.run("cat /workspace/f").stdout == b"second\n"
    # the next one is whole again
    assert box.end_turn().wait(60).turn_class is TurnClass.FULL
    box.rollback(whole)
    assert box.run("cat /workspace/f").stdout == b"first\n"


def test_a_quiet_turn_takes_some_kilobytes_of_log(make: Any, host: Any) -> None:
    box = make()
    size = os.path.getsize(host.home.box(box.name) / eventlog.NAME)
    box.end_turn().wait(60)
    assert 0 < os.path.getsize(host.home.box(box.name) / eventlog.NAME) - size < 20_000
