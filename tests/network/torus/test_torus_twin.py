"""Traffic over lightpaths and over electrical links against sums on paper."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from windtunnel.base.errors import UserError
from windtunnel.cluster.load import load_cluster
from windtunnel.network.torus.policy import Observation, decide
from windtunnel.network.torus.twin import (
    alternative,
    electrical_best,
    electrical_fair,
    moe_traffic,
    optical,
    uniform_traffic,
)
from windtunnel.training.emulate.graph import Collective, Group

RATE = 9e9


@pytest.mark.parametrize("sides", [(3,), (3, 3), (3, 3, 3), (2, 2, 2), (11,)])
def test_equal_bytes_tie_wherever_the_plan_is_at_its_bound(sides: tuple[int, ...]) -> None:
    plan = decide(Observation(sides))
    traffic = uniform_traffic(int(np.prod(sides)), 1e6)
    assert optical(plan, traffic, RATE) == pytest.approx(plan.bound * 1e6 / RATE)
    assert electrical_best(plan, traffic, RATE) == pytest.approx(plan.bound * 1e6 / RATE)


@settings(max_examples=20, deadline=None)
@given(st.sampled_from([(3, 3), (4, 4), (5,), (2, 3)]), st.integers(0, 99), st.floats(0.0, 2.0))
def test_lightpaths_never_beat_shared_links(sides: tuple[int, ...], seed: int, skew: float) -> None:
    plan, nodes = decide(Observation(sides)), int(np.prod(sides))
    traffic = moe_traffic(nodes, 512, 1024.0, skew, np.random.default_rng(seed))
    assert traffic.sum() <= nodes * 512 * 2 * 1024 and not traffic.diagonal().any()
    assert optical(plan, traffic, RATE) >= electrical_best(plan, traffic, RATE) * (1 - 1e-12)


def test_fair_flows_end_no_sooner_than_their_fullest_link() -> None:
    plan = decide(Observation((3, 3)))
    assert electrical_fair(plan, uniform_traffic(9, 3e6), RATE) == pytest.approx(plan.bound * 3e6 / RATE)
    skewed = moe_traffic(9, 512, 1024.0, 1.0, np.random.default_rng(1), own=True)
    fair = electrical_fair(plan, skewed, RATE)
    assert electrical_best(plan, skewed, RATE) * (1 - 1e-9) <= fair < optical(plan, skewed, RATE)


def test_one_busy_pair_has_one_wavelength_of_nine() -> None:
    plan, traffic = decide(Observation((3, 3, 3))), np.zeros((27, 27))
    traffic[0, 1] = 9e9
    assert optical(plan, traffic, RATE) == pytest.approx(9.0)
    assert electrical_best(plan, traffic, RATE) == pytest.approx(1.0)


def test_traffic_to_a_dead_node_is_refused() -> None:
    plan = decide(Observation((3, 3), (), (4,)))
    with pytest.raises(UserError, match="from or to a node that failed"):
        optical(plan, uniform_traffic(9, 1.0), RATE)


def test_an_all_to_all_of_a_job_is_that_of_its_hosts() -> None:
    cluster = load_cluster("v100:27x8,topology=optical-torus,dims=3x3x3")
    host, way = cluster.host, alternative(cluster)
    everyone = Group("", tuple(range(27 * 8)))
    seconds = way.seconds(Collective("all_to_all", 0, 27 * 8 << 20, 0), everyone)
    link = host.nics * host.nic_bandwidth * host.nic.efficiency / 6
    expected = optical(decide(Observation((3, 3, 3))), uniform_traffic(27, 64 << 20), link)
    assert seconds == pytest.approx(host.nic.latency + expected)
    # Groups of one rank a host share the lightpaths of their hosts with the seven others.
    one_each = Group("", tuple(range(0, 27 * 8, 8)))
    assert way.seconds(Collective("all_to_all", 0, 27 << 20, 0), one_each) == pytest.approx(
        host.nic.latency + expected / 8
    )
    assert way.seconds(Collective("all_to_all", 0, 1 << 20, 0), Group("", tuple(range(8)))) is None
    assert way.seconds(Collective("all_reduce", 0, 1 << 20, 1 << 20), everyone) is None
