"""The twin against what can be worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest

from windtunnel.data.group.policy import MemberState, Observation, as_given, decide
from windtunnel.data.group.twin import EngineProfile, cost, latencies, lives

QUIET = EngineProfile(service=2e-5, issue=1e-5)


def test_an_operation_takes_what_its_parts_take() -> None:
    assert latencies(3, 5, QUIET, 0) == pytest.approx(1e-5 + 3 * 2e-5 + 2 * 1024e-9)
    far = EngineProfile(2e-5, 0.0, (3e-5,), wire=1e-4, bandwidth=1e6)
    assert latencies(2, 3, far, 0, payload=1000) == pytest.approx(2 * 5e-5 + 1e-4 + 1e-3)


def test_a_window_fills_the_chain() -> None:
    """As many as there are members are served at once; the busiest engine sets the rate."""
    took = latencies(3, 300, QUIET, 0, window=16)
    assert took.sum() / 16 == pytest.approx(300 * 2e-5, rel=0.1)


def test_waits_are_drawn_from_the_table_by_the_seed() -> None:
    waits = EngineProfile(1e-5, 0.0, (0.0,) * 9 + (1e-2,))
    first, again, other = (latencies(3, 2000, waits, seed) for seed in (1, 1, 2))
    assert np.array_equal(first, again) and not np.array_equal(first, other)
    assert (first > 1e-2).mean() == pytest.approx(1 - 0.9**3, abs=0.03)


def test_the_policy_is_asked_after_each_loss() -> None:
    members = [MemberState(name, domain, size=4096) for name, domain in zip("abc", "xxy", strict=True)]
    first, second, third = lives(members, {3: "a", 9: "b"}, 20)
    assert (first.chain, first.epoch, first.sequence) == (("a", "c", "b"), 1, 0)
    assert (second.chain, second.epoch, second.source, second.compare) == (("c", "b"), 2, "c", ())
    assert (third.chain, third.epoch, third.sequence) == (("c",), 3, 9)
    assert lives(members, {30: "a"}, 20) == [first]
    assert not lives(members[:1], {1: "a"}, 20)[-1].chain


def test_what_a_chain_costs() -> None:
    members = [MemberState(name, domain, size=4096) for name, domain in zip("abcd", "xxyy", strict=True)]
    observation = Observation(1, tuple(members), "y")
    assert cost(observation, decide(observation)) == {
        "copies between domains": 3.0, "copies until two domains": 2.0, "bytes compared": 0.0,
    }  # fmt: skip
    assert cost(observation, as_given(observation))["copies until two domains"] == 3.0
    torn = Observation(2, (*members[:3], MemberState("d", "y", True, 1, torn=True, size=4096)))
    assert cost(torn, decide(torn))["bytes compared"] == 4096.0
