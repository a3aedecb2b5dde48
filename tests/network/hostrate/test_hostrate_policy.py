"""Windows: what holds of every decision, the published formula by hand, and weights in the twin."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from windtunnel.base.errors import UserError
from windtunnel.network.hostrate.policy import (
    LEAST,
    PACED,
    POLICIES,
    Decision,
    Observation,
    WindowSettings,
    WindowShare,
    WindowTenant,
    decide,
    published,
)
from windtunnel.network.hostrate.policy.meter import WindowMeter
from windtunnel.network.hostrate.spec import check, read_spec
from windtunnel.network.hostrate.twin import BulkTenant, cost, emulate

KNOWN = WindowSettings(25e6, 2e-3, upper=25, lower=12)  # 33 packets on the line
entities = st.builds(
    WindowTenant, st.just("e"), st.floats(0.1, 10), st.just(0.0) | st.floats(1, 3e4), st.integers(0, 100),
    st.integers(0, 200),
)  # fmt: skip
observations = st.builds(
    Observation, st.just(KNOWN), st.floats(0, 1000), st.integers(0, 500),
    st.lists(entities, min_size=1, max_size=6).map(tuple),
)  # fmt: skip


@given(observations, st.sampled_from(sorted(POLICIES)))
def test_windows_sum_to_no_more_than_the_whole_and_are_given_out_to_the_packet(
    observation: Observation, name: str
) -> None:
    decision = POLICIES[name](observation)
    assert sum(share.window for share in decision.shares) <= decision.total
    for tenant, share in zip(observation.entities, decision.shares, strict=True):
        if share.free:
            continue
        assert tenant.sent > 0  # who sends nothing is not held back
        parts = [share.of_flow(number) for number in range(share.flows)]
        if share.pace is None:
            assert sum(parts) == share.window and max(parts) - min(parts) <= 1
        else:
            assert set(parts) == {PACED} and share.window < LEAST * share.flows
            assert share.flows * share.pace <= 1.13 * KNOWN.line
    if (
        name == "weights"
        and observation.backlog > KNOWN.upper
        and any(tenant.sent for tenant in observation.entities)
    ):
        assert decision.total >= KNOWN.least


def test_the_published_window_by_hand() -> None:
    """W = 2 ms · 25 MB/s / 1500 B + 12 = 33 + 12; parts by weight times what was sent."""
    two = (
        WindowTenant("a", 2.0, 1000.0, 4),
        WindowTenant("b", 1.0, 3000.0, 4),
        WindowTenant("c", 1.0, 0.0, 0),
    )
    decision = published(Observation(KNOWN, 26.0, 0, two))
    assert (decision.total, [share.window for share in decision.shares]) == (45, [18, 27, 0])
    assert published(Observation(KNOWN, 25.0, 45, two)).total == 0


def test_a_window_follows_the_queue_that_it_leaves_and_ends_when_nobody_sends() -> None:
    def total(backlog: float, before: int, sent: float = 1e4) -> int:
        return decide(Observation(KNOWN, backlog, before, (WindowTenant("a", 1.0, sent, 2),))).total

    assert total(20.0, 0) == 0 and total(26.0, 0) == 45
    assert total(40.0, 100) == 72  # of 100 packets 60 are on the line
    assert total(40.0, 50) == 45
    assert total(15.0, 60) == 60
    assert total(0.0, 60) == 63
    assert total(0.0, 60, sent=0.0) == 0


def test_who_takes_less_than_half_of_his_share_is_free_and_the_rest_goes_by_weights() -> None:
    three = (
        WindowTenant("a", 3.0, 1e4, 2),
        WindowTenant("b", 1.0, 6e3, 2),
        WindowTenant("little", 1.0, 100.0, 4),
    )
    first, second, little = decide(Observation(KNOWN, 30.0, 45, three)).shares
    assert little.free
    assert first.window == pytest.approx(3 * second.window, abs=3) and first.window + second.window >= 42


def test_what_is_left_over_goes_round() -> None:
    """Over as many turns as there are flows everyone has had the same, also after some came and went."""
    meter = WindowMeter(KNOWN, [("a", 1.0)])
    for flows in (7, 5):
        had = np.zeros(flows)
        for _ in range(flows):
            turn = meter.look(0.0, 0.0, np.array([0]), np.array([0])).entities[0].turn
            decision = Decision(45, (WindowShare(45, flows, turn % flows),))
            meter.took(decision)
            had += [decision.shares[0].of_flow(number) for number in range(flows)]
        assert set(had) == {45}


def test_flows_are_counted_once_in_every_round_and_what_was_sent_over_ten_turns() -> None:
    meter, flows = WindowMeter(KNOWN, [("a", 1.0)]), 0
    for turn in range(120):
        if turn % 25 == 5:
            flows += 6  # each flow once
        last = meter.look(turn * 0.002, 0.0, np.array([turn * 20]), np.array([flows])).entities[0]
    assert (last.flows, last.sent) == (6, pytest.approx(10_000.0))


def test_in_the_twin_the_queue_is_short_the_line_full_and_weights_hold() -> None:
    """CUBIC fills the queue; windows keep the queue at its marks, and weights hold."""
    cubic, held = (emulate([BulkTenant("bulk", 8)], arm, 0.5, 1) for arm in ("cubic", "weights"))
    assert held.latency < cubic.latency / 15 and held.goodput[0] > 0.95 * cubic.goodput[0]
    both = [BulkTenant("three", 4, 3.0), BulkTenant("one", 8)]
    three, single = emulate(both, "weights", 1.0, 1).goodput
    assert three / single == pytest.approx(3.0, rel=0.1)
    assert held == emulate([BulkTenant("bulk", 8)], "weights", 0.5, 1)
    short = emulate([BulkTenant("bulk", 24)], "weights", 0.5, 1)
    assert short.latency < 0.8e-3 and short.goodput[0] > 0.93 * 25e6  # paced, and never empty for long
    with pytest.raises(ValueError, match="arm 'red'; accepted are cubic"):
        emulate(both, "red", 1.0, 1)


def test_a_decision_has_a_price() -> None:
    observation = Observation(KNOWN, 100.0, 0, (WindowTenant("a", 1.0, 1e4, 2),))
    assert cost(observation, decide(observation))["seconds in the queue"] == pytest.approx(
        (45 - 100 / 3) * 1500 / 25e6
    )
    assert cost(observation, POLICIES["free"](observation))["seconds in the queue"] == pytest.approx(0.006)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"line": "1 kb/s"}, r"senders.yaml: field line is '1 kb/s', accepted is 1 Mb/s to 1 Tb/s"),
        ({"by": "mark"}, r"field by is 'mark', accepted is source or cgroup"),
        ({"lower": 30}, r"senders.yaml: lower is 30, accepted is less than upper, which is 8"),
        ({"upper": 2.5}, r"field upper is 2.5, accepted is a whole number of packets"),
        ({"period": "0 s"}, r"field period is .*accepted is 0.5 ms to 1 s"),
        ({"lowest": 3}, r"field lowest is unknown"),
        ({"entities": {}}, r"field entities is {}, accepted is a mapping"),
        ({"entities": {"a": {}}}, r"field entities.a.match is missing, accepted is a prefix"),
        ({"entities": {"a": {"match": "10.0.0.1/8"}}}, r"entities.a.match is '10.0.0.1/8', accepted is a p"),
        ({"entities": {"a": {"match": "::1", "weight": 0}}}, r"entities.a.weight is 0, accepted is a number"),
        (
            {"entities": {"a": {"match": "::1"}, "b": {"match": ["::1/128"]}}},
            r"entities.b.match is '::1/128', which is of a, too",
        ),
    ],
)  # fmt: skip
def test_what_is_wrong_in_a_file_is_said_in_one_sentence(changed: dict, words: str, tmp_path: Path) -> None:  # type: ignore[type-arg]
    given = {"line": "1 Gb/s", "by": "source", "entities": {"a": {"match": "10.0.1.0/24"}}}
    assert check(given, "x").weights == [("a", 1.0)]
    (tmp_path / "senders.yaml").write_text(json.dumps(given | changed))
    with pytest.raises(UserError, match=words):
        read_spec(tmp_path / "senders.yaml")
