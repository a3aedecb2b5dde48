"""Chunks in idle spans: every byte once, no span overfull."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from windtunnel.training.checkpoint.policy.spans import ChunkPlan, plan_chunks


def check(
    plan: ChunkPlan, spans: list[float], nbytes: int, copies: int, part: int, cost: tuple[float, float, float]
) -> None:
    bandwidth, startup, safety = cost
    at = dict.fromkeys(range(1, copies), 0)
    for chunk in plan.chunks:
        assert chunk.offset == at[chunk.copy]
        assert 0 < chunk.nbytes <= part
        at[chunk.copy] += chunk.nbytes
    assert all(end == nbytes for end in at.values())
    assert [c.span for c in plan.chunks] == sorted(c.span for c in plan.chunks)
    for span, seconds in enumerate(spans):
        used = sum(startup + c.nbytes / bandwidth for c in plan.chunks if c.span == span)
        assert used <= safety * seconds * (1 + 1e-9) + 1e-12
    assert plan.spilled == sum(c.nbytes for c in plan.chunks if c.span == len(spans))


@given(
    spans=st.lists(st.floats(0, 0.2), max_size=8),
    nbytes=st.integers(0, 3_000_000),
    copies=st.integers(1, 4),
    parts=st.integers(1, 8),
    bandwidth=st.floats(1e6, 1e9),
    startup=st.floats(0, 5e-3),
    safety=st.floats(0.1, 1),
)
def test_all_bytes_once_and_no_span_overfull(
    spans: list[float], nbytes: int, copies: int, parts: int, bandwidth: float, startup: float, safety: float
) -> None:
    buffer = 800_000
    plan = plan_chunks(spans, nbytes, copies, buffer, parts, bandwidth, startup, safety)
    check(plan, spans, nbytes, copies, buffer // parts, (bandwidth, startup, safety))
    if plan.every == 1:
        assert plan.spilled == 0
    elif 2 <= plan.every <= 50:
        longer = plan_chunks(spans * plan.every, nbytes, copies, buffer, parts, bandwidth, startup, safety)
        assert longer.spilled == 0
        shorter = plan_chunks(
            spans * (plan.every - 1), nbytes, copies, buffer, parts, bandwidth, startup, safety
        )
        assert shorter.spilled > 0
    elif plan.every == 0:
        assert plan.spilled == nbytes * (copies - 1) > 0


def test_an_example_by_hand() -> None:
    """100 bytes/s, 0.1 s a chunk: a span of 1 s takes chunks of 40 and 40, cut to 40 of 60 with the rest."""
    plan = plan_chunks([1.0, 0.05, 1.0], 100, 2, 120, 3, 100.0, 0.1, 1.0)
    assert [(c.span, c.copy, c.offset, c.nbytes) for c in plan.chunks] == [
        (0, 1, 0, 40),
        (0, 1, 40, 40),
        (2, 1, 80, 20),
    ]
    assert (plan.spilled, plan.every) == (0, 1)


def test_what_does_not_fit_goes_last() -> None:
    plan = plan_chunks([0.5], 100, 3, 40, 1, 100.0, 0.0, 1.0)
    assert plan.spilled == 150
    assert plan.every == 4
    assert {c.span for c in plan.chunks} == {0, 1}


def test_little_room_is_told_without_counting_it_out() -> None:
    plan = plan_chunks([1e-3], 10**9, 2, 10**8, 4, 1e6, 0.0, 1.0)
    assert plan.every == 1_000_000


def test_no_room_at_all() -> None:
    assert plan_chunks([0.01] * 4, 100, 2, 40, 1, 100.0, 0.1, 1.0).every == 0
    assert plan_chunks([], 0, 2, 40, 1, 100.0, 0.1, 1.0).every == 1


@pytest.mark.parametrize("safety", [0.0, 1.5])
def test_refused(safety: float) -> None:
    with pytest.raises(ValueError, match="safety"):
        plan_chunks([1.0], 1, 2, 4, 1, 1.0, 0.0, safety)
    with pytest.raises(ValueError, match="parts=8"):
        plan_chunks([1.0], 1, 2, 4, 8, 1.0, 0.0, 1.0)
