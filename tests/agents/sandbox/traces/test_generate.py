"""Generated sessions: valid for any seed, with the shares that their weights say."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from support.sessions.generate import Mix, generate
from windtunnel.agents.sandbox.model import TurnClass

WEIGHT = st.floats(0, 10)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 60), st.tuples(WEIGHT, WEIGHT, WEIGHT, WEIGHT))
def test_any_seed_gives_one_trace_of_the_classes_that_have_weight(
    seed: int, turns: int, weights: tuple[float, float, float, float]
) -> None:
    if not any(weights):
        weights = (1, 0, 0, 0)
    trace = generate(turns, seed, Mix(*weights))
    assert trace == generate(turns, seed, Mix(*weights))
    assert len(trace.turns) == turns
    weighted = {one for one, weight in zip(TurnClass, weights, strict=True) if weight}
    assert {turn.true_class for turn in trace.turns} <= weighted
    assert trace.turns[-1].think == 0.0
    assert all(0 < turn.think <= 600 for turn in trace.turns[:-1])


def test_weights_rule_the_shares() -> None:
    classes = [turn.true_class for turn in generate(2000, 7).turns]
    assert 0.70 < classes.count(TurnClass.NONE) / 2000 < 0.80
