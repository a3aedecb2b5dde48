"""Rates: the published formula by hand, what holds of every decision, and faulty logs of acknowledgements."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.mobilerate import driven
from windtunnel.network.mobilerate.policy import (
    ALIVE,
    POLICIES,
    Ack,
    Observation,
    RateHistory,
    RateSettings,
    decide,
    guarded,
    literal,
    sira,
)
from windtunnel.network.mobilerate.twin import cost

SMALL = RateSettings(delta=0.01, intervals=4, start=600_000)


def acked(
    memory: RateHistory, now: float, trip: float, *numbers: int, policy: str = "sira"
) -> tuple[float, RateHistory]:
    """A decision on acknowledgements of these packets, each of which took ``trip``."""
    acks = tuple(Ack(number, now - trip, now, number + 1) for number in numbers)
    decision = POLICIES[policy](Observation(SMALL, acks, 100, memory))
    return decision.rate, decision.memory


def test_the_published_rate_by_hand() -> None:
    """R_i = (X (M - i + 1) + what was acknowledged before i) / M up to M, then the mean of the last M."""
    rate, memory = acked(RateHistory(), 0.0, 0.05)
    assert rate == 600_000 and memory.window == ()
    expected, numbers = [], [(0, 1), (2,), (), (3, 4, 5), (6,), (7, 8)]
    counts = [1500 * len(batch) / 0.01 for batch in numbers]
    for i in range(1, len(numbers) + 1):
        last = counts[max(0, i - 4) : i]
        expected.append((600_000 * (4 - len(last)) + sum(last)) / 4)
    got = []
    for turn, batch in enumerate(numbers, 1):
        rate, memory = acked(memory, turn * 0.01, 0.05, *batch)
        got.append(rate)
    assert got == pytest.approx(expected)
    for turn in range(7, 12):
        rate, memory = acked(memory, turn * 0.01, 0.05)
    assert rate == 1500 / ALIVE  # a link that stopped is still asked


def test_packets_that_wait_are_answered_by_less_and_what_is_held_back_is_noted() -> None:
    """With D = 50 ms and T = 10 ms a round trip of 120 ms halves the rate."""
    _, memory = acked(RateHistory(), 0.0, 0.05, 0)
    rate, memory = acked(replace(memory, trip=0.12), 0.01, 0.12, 1, policy="sira-h-literal")
    full = (600_000 * 2 + 150_000 + 150_000) / 4
    assert rate == pytest.approx(full / 2) and memory.withheld == pytest.approx(full / 2 * 0.01)
    _, after = acked(memory, 0.02, 0.12, policy="sira-h-literal")
    assert after.owed == ((100, memory.withheld),) and after.unsent == memory.withheld


def test_an_empty_queue_gives_back_what_was_held_back_and_a_busy_one_does_not() -> None:
    times = tuple(0.9 + 0.01 * k for k in range(5))
    memory = RateHistory((0.0,) * 4, 9, 0.05, 0.05, times, ((10, 6000.0), (11, 3000.0)), unsent=9000.0)
    for trip, added in ((0.055, 6000.0), (0.15, 0.0)):
        observation = Observation(SMALL, (Ack(10, 0.951 - trip, 0.951, 10),), 100, replace(memory, trip=0.05))
        for policy in (literal, guarded):
            history = policy(observation).memory
            assert history.window[-1] == 1500 + added, policy
            assert history.owed == ((11, 3000.0),)
        assert literal(observation).memory.unsent == 9000 - added


@pytest.mark.parametrize("seed", range(3))
def test_what_is_held_back_is_made_up_for_or_still_noted(seed: int) -> None:
    """H1 and H2 take from one account, to the byte."""
    before = RateHistory()
    for observation, decision in driven("sira-h-literal", np.random.default_rng(seed), 2000):
        now = decision.memory
        new = (
            max((ack.received for ack in observation.acks), default=before.received) - before.received
        ) * 1500
        given = now.window[-1] - new if now.window else 0.0
        spread = now.extra if now.bonus != before.bonus else 0.0
        assert before.unsent + before.withheld == pytest.approx(given + spread + now.unsent, abs=1e-3)
        assert given >= -1e-6 and all(held >= 0 for _, held in now.owed)
        before = now


@pytest.mark.parametrize("policy", POLICIES)
def test_no_rate_is_above_the_start_and_no_sender_falls_silent(policy: str) -> None:
    for seed in range(3):
        for _, decision in driven(policy, np.random.default_rng(seed), 2000):
            most = RateSettings().start + decision.memory.bonus + 1e-6
            assert 0 < decision.rate <= most if policy != "sira-h" else 1500 / ALIVE <= decision.rate <= most


numbers = st.lists(st.integers(0, 60), max_size=40)


@given(numbers, st.randoms(use_true_random=False), st.sampled_from(sorted(POLICIES)))
def test_doubled_reordered_and_lost_acknowledgements_count_once(
    order: list[int], shuffle: Random, policy: str
) -> None:
    """However the log of an interval is disturbed: bytes are those that the receiver had got, and a decision
    comes of it."""
    log = [Ack(number, number * 1e-3, 0.1 + number * 1e-3, number + 1) for number in order]
    shuffle.shuffle(log)
    memory, most = RateHistory(), 0
    for part in (log[:10], log[10:], log):
        decision = POLICIES[policy](Observation(RateSettings(), tuple(part), 60, memory))
        most = max([most, *(ack.received for ack in part)])
        assert decision.memory.received == most and decision.rate > 0
        memory = decision.memory


def test_the_last_round_trip_and_what_is_on_its_way_bound_the_guarded_rate() -> None:
    memory = RateHistory((3000.0,) * 250, 100, 0.04, 0.04, highest=99)
    observation = Observation(RateSettings(), (Ack(100, 0.0, 0.1, 101),), 101, memory)
    assert decide(observation).rate == pytest.approx(1.5e6 * 0.05 / 0.1, rel=0.01)
    full = decide(replace(observation, last=160))
    assert full.rate == 1500 / ALIVE and full.reason == "as much is on its way as may be"
    assert sira(observation).rate == sira(replace(observation, last=160)).rate


@pytest.mark.parametrize("policy", POLICIES)
def test_a_long_outage_is_not_remembered_interval_by_interval(policy: str) -> None:
    *_, (_, decision) = driven(policy, np.random.default_rng(0), 300)
    for _ in range(3000):
        decision = POLICIES[policy](Observation(RateSettings(), (), 150, decision.memory))
    assert decision.rate == 1500 / ALIVE and len(decision.memory.owed) <= 150 - decision.memory.highest


def test_a_decision_has_a_price() -> None:
    memory = RateHistory((2000.0,) * 250, 100, 0.09, 0.04, highest=99)
    observation = Observation(RateSettings(), (), 100, memory)
    sent = cost(observation, sira(observation))
    assert sent["seconds in the queue"] == pytest.approx(0.05) and sent["unused bytes/s"] == 0
    assert cost(observation, literal(observation))["unused bytes/s"] > 0
