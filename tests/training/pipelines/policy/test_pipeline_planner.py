"""The planner finds what trying every plan finds, within memory."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pipeline_oracles import brute_force, check_template, layers

from windtunnel.base.errors import UserError
from windtunnel.training.pipelines.model import LayerProfile
from windtunnel.training.pipelines.policy.planner import fits, plan


def profiles(most: int) -> st.SearchStrategy[list[LayerProfile]]:
    whole = st.sampled_from([0.0, 1.0, 1.0, 2.0, 3.0, 5.0, 8.0, 13.0, 20.0])
    few = st.sampled_from([0.0, 1.0, 2.0, 3.0, 4.0])
    return st.lists(st.builds(LayerProfile, st.just("l"), whole, whole, few, few), min_size=1, max_size=most)


def agrees(profile: list[LayerProfile], hosts: int, memory: float) -> None:
    template = plan(profile, hosts, memory)
    best = brute_force(profile, hosts, memory)
    assert fits(profile, hosts, memory) == (best is not None)
    if template is None or best is None:
        assert template is None and best is None
        return
    check_template(template, profile, memory)
    assert template.time == pytest.approx(best, rel=1e-9, abs=1e-9)
    assert template == plan(profile, hosts, memory)


@given(profiles(9), st.integers(1, 6), st.sampled_from([1e9, 60.0, 30.0, 20.0]))
@settings(max_examples=300, deadline=None, derandomize=True)
def test_one_device_a_host_is_optimal(profile: list[LayerProfile], hosts: int, memory: float) -> None:
    agrees(profile, hosts, memory)


@pytest.mark.parametrize("count", [10, 11, 12])
def test_twelve_layers_and_every_number_of_stages(count: int) -> None:
    draw = random.Random(count)
    for hosts in range(1, count + 1):
        agrees(layers([draw.choice([1, 2, 3, 5, 8, 13, 20]) for _ in range(count)], 3, 1), hosts, 30.0)


def test_many_layers_and_stages() -> None:
    draw = random.Random(1)
    profile = layers([draw.random() for _ in range(96)], state=1.0, activation=0.01)
    template = plan(profile, 32, 8.0)
    assert template is not None
    check_template(template, profile, 8.0)


def test_memory_moves_the_cut() -> None:
    # Equal layers: the first stage holds three microbatches, so it gets fewer than the time alone would give.
    profile = layers([1.0] * 9, state=1.0, activation=1.0)
    free, tight = plan(profile, 3, 1e9), plan(profile, 3, 10.0)
    assert free is not None and tight is not None
    assert [s.last - s.first for s in free.stages] == [3, 3, 3]
    assert tight.stages[0].last == 2


@pytest.mark.parametrize(
    ("hosts", "memory", "says"),
    [(0, 1.0, "hosts is 0"), (1, -1.0, "memory is -1"), (1, float("nan"), "memory is nan")],
)
def test_bad_input(hosts: int, memory: float, says: str) -> None:
    with pytest.raises(UserError, match=says):
        plan(layers([1.0, 2.0]), hosts, memory)


def test_no_layers() -> None:
    with pytest.raises(UserError, match="no layers"):
        plan([], 1, 1.0)
