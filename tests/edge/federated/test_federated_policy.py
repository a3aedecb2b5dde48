"""Groups, schedules and the cost of a round, against brute force and the replayed transfers."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from windtunnel.base.errors import UserError
from windtunnel.edge.federated import policy
from windtunnel.edge.federated.twin import cost, replay

DEVICES = tuple(
    policy.EdgeDevice(f"d{place}", 1e6 * (1 + place % 5), 10 + place, place % 3) for place in range(12)
)


def observed(**chosen: object) -> policy.Observation:
    return policy.Observation(3, 0, DEVICES, 1e6, 1e7, policy.Settings(**chosen))  # type: ignore[arg-type]


@given(st.sampled_from(policy.EXCHANGES), st.integers(1, 17), st.integers(1, 40), st.integers(0, 99))
@settings(max_examples=150, deadline=None)
def test_every_place_ends_with_the_exact_sum(exchange: str, size: int, length: int, seed: int) -> None:
    vectors = np.random.default_rng(seed).integers(-1000, 1000, (size, length)).astype(float)
    chunks, steps = policy.schedule(exchange, size)
    parts = [np.array_split(vector.copy(), chunks) for vector in vectors]
    for step in steps:
        carried = [(transfer, parts[transfer.sender][transfer.chunk].copy()) for transfer in step]
        assert (
            len({transfer.sender for transfer in step})
            == len(step)
            == len({transfer.receiver for transfer in step})
        )
        for transfer, data in carried:
            own = parts[transfer.receiver][transfer.chunk]
            own[:] = own + data if transfer.adds else data
    for own in parts:
        assert np.array_equal(np.concatenate(own), vectors.sum(axis=0))


@pytest.mark.parametrize("scheme", policy.SCHEMES)
@pytest.mark.parametrize("grouping", policy.GROUPINGS)
def test_each_device_drawn_is_in_one_group_led_by_its_fastest(scheme: str, grouping: str) -> None:
    links = {device.name: device.link for device in DEVICES}
    decision = policy.decide(observed(scheme=scheme, grouping=grouping, groups=3, devices=10))
    members = [name for group in decision.groups for name in group]
    assert len(members) == len(set(members)) == 10 and set(members) <= links.keys()
    assert all(links[group[0]] == max(links[name] for name in group) for group in decision.groups)
    assert len(decision.groups) == {"fedavg": 10, "gossip": 5}.get(scheme, 3)


def test_like_links_go_together_and_like_labels_apart() -> None:
    by_link = policy.decide(observed(grouping="bandwidth", groups=3))
    links = [sorted(device.link for device in DEVICES if device.name in group) for group in by_link.groups]
    assert all(above[0] >= below[-1] for above, below in pairwise(links))
    by_label = policy.decide(observed(grouping="labels", groups=3))
    for group in by_label.groups:
        labels = [device.label for device in DEVICES if device.name in group]
        assert sorted(np.bincount(labels, minlength=3)) in ([1, 1, 2], [1, 2, 2], [0, 2, 2])


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(UserError, match="`scheme` 'fedsgd'; accepted are fedavg"):
        policy.Settings("fedsgd")
    with pytest.raises(UserError, match="`devices` 13: there are 12"):
        policy.decide(observed(devices=13))
    with pytest.raises(UserError, match="`groups` 9: 8 devices train in a round"):
        policy.decide(observed(devices=8, groups=9))


@pytest.mark.parametrize("scheme", policy.SCHEMES)
@pytest.mark.parametrize("exchange", policy.EXCHANGES)
@pytest.mark.parametrize(("server", "device"), [(1e7, 1e6), (1e6, 1e7)])
def test_the_formula_is_what_the_transfers_take(
    scheme: str, exchange: str, server: float, device: float
) -> None:
    known = policy.Settings(scheme, exchange=exchange, groups=4)
    count = {"fedavg": 16, "gossip": 8}.get(scheme, 4)
    groups = [list(part) for part in np.arange(16).reshape(count, -1)]
    seconds, carried = replay(groups, known, 1e6, [device] * 16, server)
    expected = policy.cost(known, 16, count, 1e6, server, device)
    assert seconds == pytest.approx(expected.seconds, rel=1e-6)
    assert carried == pytest.approx({"server": expected.server_bytes, "all": expected.all_bytes})


def test_a_tenth_of_the_bytes_with_ten_in_a_group_and_the_best_number_is_the_best() -> None:
    known = policy.Settings()
    flat = policy.cost(replace(known, scheme="fedavg"), 50, 50, 4e6, 12.5e6, 2.5e6)
    grouped = policy.cost(known, 50, 5, 4e6, 12.5e6, 2.5e6)
    assert flat.server_bytes / grouped.server_bytes == 10 and grouped.all_bytes > flat.all_bytes
    best = policy.best_groups(known, 50, 4e6, 12.5e6, 2.5e6)
    took = {number: policy.cost(known, 50, number, 4e6, 12.5e6, 2.5e6).seconds for number in range(1, 26)}
    assert took[best] == min(took.values())


def test_a_decision_has_a_price() -> None:
    observation = observed(groups=3)
    priced = cost(observation, policy.decide(observation))
    assert priced["server bytes"] == 6e6 and priced["all bytes"] == 6e6 + 9e6 + 18e6
    assert (
        priced["seconds"] < cost(replace(observation, server_link=1e5), policy.decide(observation))["seconds"]
    )
