"""Which ranks are checked: every fault that running all ranks finds is found, at bounded cost."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from slice_worlds import Tracer, capture_of, mesh_groups

from windtunnel.base.plain import from_plain, to_plain
from windtunnel.training.emulate.graph import Slice
from windtunnel.training.emulate.policy import (
    Check,
    CheckedCells,
    Condition,
    Decision,
    Observation,
    RankSource,
    decide,
)
from windtunnel.training.emulate.policy.checks import CHECK_LIMIT
from windtunnel.training.emulate.policy.classes import Classes, slice_world
from windtunnel.training.emulate.policy.groups import Deadlock
from windtunnel.training.emulate.policy.stitch import stitch

INVOLVED = (Condition("train.py:1"),)
"""The program does something with the rank that cannot be worked out."""


def runs(
    calls: list[tuple[int, ...]], conditions: tuple[Condition, ...] = INVOLVED, ranks: str = "auto",
    order: int = 1,
) -> tuple[Classes, list[Observation], list[int]]:  # fmt: skip
    """Ranks that make these calls, each told by its number of bytes: the classes, what the policy saw, and
    the ranks that were checked. ``order``: the ranks of a request come back in their order, or (-1) not."""
    size = len(calls)

    def script(t: Tracer) -> None:
        t.op(1.0)
        for nbytes in calls[t.rank]:
            t.call("all_reduce", "world", nbytes)
        t.step()

    capture = capture_of(script, mesh_groups({"dp": size}))
    observations: list[Observation] = []
    checked: list[int] = []

    def choose(observation: Observation) -> Decision:
        values = {rank: rank for rank in observation.captured}
        observations.append(
            replace(observation, conditions=conditions, sources=(RankSource("train.py:1", values),))
        )
        return decide(observations[-1])

    def check(ranks: list[int]) -> list[Slice]:
        checked.extend(ranks)
        return [slice_.outline() for slice_ in capture(ranks)]

    classes = slice_world(
        lambda ranks: capture(ranks)[::order], size, ranks, choose=choose, check=check
    )  # fmt: skip
    return classes, observations, checked


def hangs(classes: Classes) -> bool:
    try:
        stitch(classes)
    except Deadlock:
        return True
    return False


programs = st.integers(2, 16).flatmap(
    lambda size: st.lists(
        st.sampled_from([(4, 8), (4, 8), (4, 8), (8, 4), (4,), (4, 8, 8)]), min_size=size, max_size=size
    )
)


@settings(max_examples=60, deadline=None)
@given(programs)
def test_what_running_all_ranks_finds_is_found(calls: list[tuple[int, ...]]) -> None:
    classes, _, _ = runs(calls)
    whole, _, _ = runs(calls, ranks="all")
    assert hangs(classes) == hangs(whole)
    assert classes.unseen == []


@settings(max_examples=40, deadline=None)
@given(st.integers(2, 200), st.data())
def test_every_rank_is_captured_checked_or_assumed(size: int, data: st.DataObject) -> None:
    odd = data.draw(st.sets(st.integers(0, size - 1), max_size=3))
    classes, observations, checked = runs([(8, 4) if rank in odd else (4, 8) for rank in range(size)])
    assert sorted((*classes.captured, *classes.checked, *classes.unseen)) == list(range(size))
    assert len(checked) == len(set(checked)) <= max(CHECK_LIMIT, len(classes.captured) // 2)
    assert set(classes.captured) | set(checked) >= odd or len(checked) >= CHECK_LIMIT
    for observation in observations:
        assert from_plain(Observation, to_plain(observation)) == observation
        assert decide(observation) == decide(from_plain(Observation, to_plain(observation)))


@pytest.mark.parametrize(
    ("text", "odd"),
    [
        ("v0 == 100", {100}),
        ("v0 in (3, 90)", {3, 90}),
        ("v0 % 50 == 49", {49, 99, 149}),
        ("str(v0) == '77'", {77}),
        ("{5: 'quiet'}.get(v0) == 'quiet'", {5}),
        ("hash(v0) % 64 == 2", {2, 66, 130}),
    ],
)
def test_one_rank_of_a_case_finds_them_all(text: str, odd: set[int]) -> None:
    """A condition that can be worked out costs a run or two, however large the world is."""
    calls = [(8, 4) if rank in odd else (4, 8) for rank in range(160)]
    classes, _, checked = runs(calls, (Condition("train.py:1", text, (0,)),))
    assert len(checked) <= 2
    assert sorted(members for c in classes.classes for members in c.members if len(c.members) < 80) == sorted(
        odd
    )
    assert hangs(classes)


def test_nothing_is_checked_where_no_condition_is() -> None:
    classes, observations, checked = runs([(4, 8)] * 160, ())
    assert checked == [] and len(classes.unseen) == 157
    assert not any(isinstance(decide(observation), Check) for observation in observations)


def test_a_place_on_the_host_is_told_from_the_rank() -> None:
    """What captured ranks were told shows what is asked for."""
    source = RankSource("train.py:1", {0: 0, 15: 7, 8: 0})
    observation = Observation(
        16, captured={0: 0, 15: 0, 8: 0}, checks=CHECK_LIMIT, calls=(0,), devices_per_host=8,
        conditions=(Condition("train.py:2", "v0 == 3", (0,)),), sources=(source,),
    )  # fmt: skip
    assert decide(observation) == Check((3,), "one of each case that the conditions on the rank make")
    decision = decide(replace(observation, checked={3: 0}))
    assert decision == CheckedCells(((0,),), {})
