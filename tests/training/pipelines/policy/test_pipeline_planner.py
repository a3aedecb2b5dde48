"""The planner finds what trying every plan finds, within memory."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pipeline_oracles import brute_force, check_template, layers

from windtunnel.base.errors import UserError
from windtunnel.training.pipelines.model import LayerProfile
from windtunnel.training.pipelines.policy import planner
from windtunnel.training.pipelines.policy.planner import fits, plan, why_not


def profiles(most: int, powers: tuple[int, ...] = ()) -> st.SearchStrategy[list[LayerProfile]]:
    whole = st.sampled_from([0, 1, 1, 2, 3, 5, 8, 13, 20])
    layer = st.builds(
        lambda f, b, s, a, r: LayerProfile(
            "l", float(f), float(b), float(s), float(a), 0.0, tuple((d, float(r * d)) for d in powers)
        ),
        whole,
        whole,
        whole,
        st.integers(0, 4),
        st.sampled_from([0, 0.25, 0.5, 2]),
    )
    return st.lists(layer, min_size=1, max_size=most)


def agrees(profile: list[LayerProfile], hosts: int, per_host: int, memory: float, n: int | None) -> None:
    found = plan(profile, hosts, per_host, memory, microbatches=n)
    best = brute_force(profile, hosts, per_host, memory, n)
    assert fits(profile, hosts, per_host, memory, microbatches=n) == (best is not None)
    reason = why_not(profile, hosts, per_host, memory, microbatches=n)
    assert (reason is None) == (best is not None)
    if found is None or best is None:
        assert found is None and best is None
        return
    check_template(found, profile, per_host, memory)
    assert found.time / found.microbatches == pytest.approx(best, rel=1e-9, abs=1e-9)
    assert found == plan(profile, hosts, per_host, memory, microbatches=n)


@given(
    profiles(9),
    st.integers(1, 6),
    st.sampled_from([1e9, 60.0, 30.0, 20.0]),
    st.sampled_from([None, 1, 3, 8, 40]),
)
@settings(max_examples=300, deadline=None, derandomize=True)
def test_one_device_a_host_is_optimal(
    profile: list[LayerProfile], hosts: int, memory: float, microbatches: int | None
) -> None:
    agrees(profile, hosts, 1, memory, microbatches)


@given(
    profiles(7, (2, 4)),
    st.integers(1, 3),
    st.sampled_from([2, 3, 4]),
    st.sampled_from([1e9, 30.0, 12.0]),
    st.sampled_from([None, 2, 16]),
)
@settings(max_examples=150, deadline=None, derandomize=True)
def test_several_devices_a_host_are_optimal(
    profile: list[LayerProfile], hosts: int, per_host: int, memory: float, microbatches: int | None
) -> None:
    agrees(profile, hosts, per_host, memory, microbatches)


@pytest.mark.parametrize("count", [10, 11, 12])
def test_twelve_layers_and_every_number_of_stages(count: int) -> None:
    draw = random.Random(count)
    for hosts in range(1, count + 1):
        agrees(
            layers([draw.choice([1, 2, 3, 5, 8, 13, 20]) for _ in range(count)], 3, 1), hosts, 1, 30.0, None
        )


def test_compiled_and_plain_search_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    draw = random.Random(5)
    profile = [
        LayerProfile("l", draw.random(), draw.random(), draw.random() * 99, draw.random() * 9, 0, ((2, 0.1),))
        for _ in range(14)
    ]
    cases = [(5, 1, 400.0), (3, 2, 200.0), (7, 1, 300.0)]
    plain = [plan(profile, *case) for case in cases]
    monkeypatch.setattr(planner, "_SMALL", 0)
    assert [plan(profile, *case) for case in cases] == plain
    assert None not in plain


def test_many_layers_and_stages() -> None:
    draw = random.Random(1)
    profile = layers([draw.random() for _ in range(96)], state=1.0, activation=0.01)
    found = plan(profile, 32, 1, 8.0)
    assert found is not None
    check_template(found, profile, 1, 8.0)


def test_memory_moves_the_cut() -> None:
    # Equal layers: the first stage holds three microbatches, so it gets fewer than the time alone would give.
    profile = layers([1.0] * 9, state=1.0, activation=1.0)
    free, tight = plan(profile, 3, 1, 1e9), plan(profile, 3, 1, 10.0)
    assert free is not None and tight is not None
    assert [s.last - s.first for s in free.stages] == [3, 3, 3]
    assert tight.stages[0].last == 2


def test_reasons() -> None:
    profile = layers([1.0, 1.0], state=6.0, activation=2.0)
    assert "no 3 stages" in str(why_not(profile, 3, 1, 1e9))
    assert "layer0 needs 8 bytes" in str(why_not(profile, 2, 1, 7.0))
    assert "16 bytes" in str(why_not(profile, 1, 1, 15.0))
    assert "no cut fits" in str(why_not(profile, 2, 1, 8.0))
    assert why_not(profile, 2, 1, 10.0) is None


@pytest.mark.parametrize(
    ("hosts", "per_host", "memory", "n", "says"),
    [
        (0, 1, 1.0, None, "hosts is 0"),
        (1, 0, 1.0, None, "devices_per_host is 0"),
        (1, 1, -1.0, None, "memory is -1"),
        (1, 1, float("nan"), None, "memory is nan"),
        (1, 1, 1.0, 0, "microbatches is 0"),
        (1, 2, 1.0, None, "no all-reduce time for 2 devices"),
    ],
)
def test_bad_input(hosts: int, per_host: int, memory: float, n: int | None, says: str) -> None:
    with pytest.raises(UserError, match=says):
        plan(layers([1.0, 2.0]), hosts, per_host, memory, microbatches=n)


def test_no_layers() -> None:
    with pytest.raises(UserError, match="no layers"):
        plan([], 1, 1, 1.0)
