"""Live ranks' notes against a replay of one virtual rank: clocks, calls that the graph has not, and hangs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from windtunnel.base.errors import HangError, ScriptError
from windtunnel.engines.replay import Program, ReplayJob
from windtunnel.training.emulate.coordinate import ALONE, Coordinator
from windtunnel.training.emulate.twin.hybrid import Expected, HybridCall, Virtual

COMPUTE, REDUCE, COPIES = 1.0, 0.5, 3
RANKS = (0, 1, 2)
SUM = HybridCall("all_reduce", RANKS, 64, -1)


def world(live: tuple[int, ...]) -> Any:
    """Three ranks that compute a second and add for half a second, as a job of which rank 2 is virtual."""
    program = Program(
        queue=np.zeros(2 * COPIES, np.int32),
        duration=np.tile([COMPUTE, 0.0], COPIES),
        issue=np.zeros(2 * COPIES),
        dep_ptr=np.zeros(2 * COPIES + 1, np.int32),
        dep=np.zeros(0, np.int32),
        join=np.ravel([[-1, n] for n in range(COPIES)]).astype(np.int32),
    )
    replay = ReplayJob(
        programs=[program],
        rank_program=np.zeros(3, np.int32),
        compute_scale=np.ones(3),
        issue_scale=np.ones(3),
        rank_join_ptr=np.arange(4) * COPIES,
        rank_join=np.tile(np.arange(COPIES), 3),
        join_size=np.full(COPIES, 3, np.int32),
        join_duration=np.full(COPIES, REDUCE),
    )
    return SimpleNamespace(colour=np.arange(3), replay=replay, programs=[SimpleNamespace(copies=COPIES)])


def coordinator(live: tuple[int, ...] = (0,), period: int = 1, **options: Any) -> Coordinator:
    graph = {rank: Expected([SUM], ["all_reduce at job.py:9"], [COPIES - 1], COMPUTE) for rank in live}
    virtual = Virtual(world(live), {rank: expected.joins for rank, expected in graph.items()})
    given = {"factors": dict.fromkeys(live, 1.0), "first": 1, "blocking": False} | options
    return Coordinator(virtual, graph, period=period, **given)


class Rank:
    """Writes a live rank's notes. ``own``: what it has run so far."""

    def __init__(self, to: Coordinator, rank: int = 0, member: tuple[int, ...] = RANKS) -> None:
        self.to, self.rank, self.member, self.own, self.calls = to, rank, member, 0.0, 0

    def reduce(self, seconds: float, nbytes: int = 64) -> None:
        self.own += seconds
        self.say("call", "all_reduce", self.member, nbytes, -1)
        self.say("wait", self.calls)
        self.calls += 1

    def step(self, seconds: float = COMPUTE) -> None:
        self.reduce(seconds)
        self.end_step()

    def end_step(self) -> None:
        self.say("step", self.own, 0.0, self.calls, 1.5, 100)

    def say(self, name: str, *content: Any) -> None:
        self.to.take(self.rank, [(name, self.own, *content)])

    def alone(self) -> None:
        for _ in range(ALONE):
            self.step()


def seconds(to: Coordinator, rank: int = 0) -> list[float]:
    return [step.seconds for step in to.ranks[rank].steps if step.hybrid]


def test_who_is_late_delays_the_other() -> None:
    to = coordinator()
    rank = Rank(to)
    rank.alone()
    assert [step.seconds for step in to.ranks[0].steps] == [COMPUTE] * ALONE
    for _ in range(4):
        rank.step(COMPUTE)  # so that one slow step makes no other pace
    rank.step(2.0)  # the live rank is late: the call begins with it
    rank.step(0.25)  # the virtual one, which went on when the call before had ended
    rank.step(COMPUTE)  # neither
    assert seconds(to)[4:] == pytest.approx([2.5, 1.5, 1.5])
    assert [step.waited_s for step in to.ranks[0].steps[-3:]] == pytest.approx([0.5, 1.25, 0.5])


def test_the_pace_of_virtual_ranks_is_that_of_live_ones() -> None:
    to = coordinator()
    rank = Rank(to)
    for _ in range(ALONE):
        rank.step(3.0)
    assert to.pace == 3.0
    rank.step(0.0)
    assert seconds(to) == pytest.approx([3.0 + REDUCE])


def test_between_calls_virtual_ranks_of_the_same_class_take_what_the_live_one_takes_there() -> None:
    to = coordinator()
    live_rank = to.ranks[0]
    live_rank.expected = Expected([SUM], ["all_reduce"], [COPIES - 1], 2.0, [0.5])
    to.places = {COPIES - 1: (0, 0)}
    rank = Rank(to)
    for _ in range(ALONE):
        rank.reduce(1.0)
        rank.own += 0.5  # after the call
        rank.end_step()
    assert live_rank.units == [pytest.approx([1.0, 1.5])]
    assert to._between(COPIES - 1, COPIES - 1, 1) == pytest.approx(1.5 / 2.0)
    assert to._between(-1, COPIES - 1, 0) == to.pace == pytest.approx(0.75)


def test_a_slower_device_takes_longer_by_its_factor() -> None:
    to = coordinator(factors={0: 2.0})
    rank = Rank(to)
    rank.alone()
    rank.step()
    assert seconds(to) == pytest.approx([2.0 + REDUCE])


def test_the_replay_joins_in_where_the_steps_that_repeat_begin() -> None:
    assert coordinator(first=1, period=4).joins_after == 5
    assert coordinator(first=3, period=4).joins_after == 3


def test_live_ranks_meet_each_other_and_the_virtual_one() -> None:
    to = coordinator((0, 1))
    first, second = Rank(to, 0), Rank(to, 1)
    for _ in range(ALONE):
        first.step(1.0)
        second.step(1.0)
    first.step(1.0)
    assert not seconds(to, 0), "the other has not come"
    second.step(4.0)
    assert seconds(to, 0) == seconds(to, 1) == pytest.approx([4.0 + REDUCE])


def test_a_rank_that_calls_something_else_and_goes_on_has_left_the_job() -> None:
    to = coordinator()
    rank = Rank(to)
    rank.alone()
    rank.reduce(1.0, nbytes=32)
    with pytest.raises(ScriptError, match=r"left the job in its step 4: it called all_reduce of 32 bytes"):
        rank.end_step()


def test_a_rank_that_leaves_a_call_out_has_left_the_job() -> None:
    to = coordinator()
    rank = Rank(to)
    rank.alone()
    with pytest.raises(ScriptError, match=r"ended without all_reduce at job.py:9"):
        rank.end_step()


def test_what_follows_the_last_step_is_not_in_the_graph() -> None:
    to = coordinator()
    rank = Rank(to)
    rank.alone()
    rank.step()
    rank.say("call", "barrier", RANKS, 0, -1)
    rank.say("end", 0)
    to.finish()
    assert to.ranks[0].status == 0


def test_who_waits_for_a_live_rank_that_has_ended_hangs() -> None:
    to = coordinator((0, 1))
    first, second = Rank(to, 0), Rank(to, 1)
    for _ in range(ALONE):
        first.step()
        second.step()
    first.reduce(1.0)
    with pytest.raises(HangError, match=r"rank 0 waits in all_reduce of 64 bytes .* for rank 1, which ended"):
        second.say("end", 0)


def test_live_ranks_that_wait_in_a_circle_hang() -> None:
    to = coordinator((0, 1))
    for rank, pairs in ((0, ((0, 1), (1, 0))), (1, ((1, 0), (0, 1)))):
        writer = Rank(to, rank)
        for pair in pairs:
            writer.member = pair
            writer.reduce(1.0)
    with pytest.raises(HangError, match="ranks 0-1 would wait for each other"):
        to.finish()
