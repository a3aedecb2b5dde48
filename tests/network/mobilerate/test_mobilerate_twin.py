"""The emulated link, and who sends over it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from windtunnel.network.mobilerate.outcome import MobileWorld
from windtunnel.network.mobilerate.policy import POLICIES
from windtunnel.network.mobilerate.twin import ARMS, emulate
from windtunnel.traces.bandwidth import GENERATORS, BandwidthTrace


def link(name: str, seconds: float, seed: int = 0) -> BandwidthTrace:
    return GENERATORS[name](seconds, np.random.default_rng(seed))


def test_a_packet_leaves_at_an_opportunity_and_at_no_other_time() -> None:
    """Ten opportunities a second: of who sends too much ten packets a second pass, the rest is dropped."""
    slow = BandwidthTrace("slow", np.arange(1, 11) / 10, 1.0)
    report = emulate(slow, "sira", 5.0, world=MobileWorld(0.0, 3))
    assert report.capacity == pytest.approx(10 * 1500, rel=0.03) and report.rate == pytest.approx(
        report.capacity, rel=0.03
    )
    assert report.dropped > 100 and report.p95 <= 0.3 + 1e-6
    assert emulate(slow, "oracle", 5.0, world=MobileWorld(0.0, 3)).p95 <= 2e-3 + 1e-6


def test_on_the_papers_links_the_rate_is_used_and_the_queue_short() -> None:
    trace = link("near-stationary", 30.0)
    cubic, own, published = (emulate(trace, arm, 30.0) for arm in ("cubic", "sira-h", "sira-h-literal"))
    assert own.use >= 0.88 and own.p95 <= cubic.p95 / 9
    assert published.use > 0.8 and published.p95 < cubic.p95 / 9
    assert cubic.use > 0.98
    assert own == emulate(trace, "sira-h", 30.0)


def test_where_rates_move_the_literal_one_collapses_and_the_guarded_does_not() -> None:
    trace = link("driving", 30.0, 1)
    published, own, cubic = (emulate(trace, arm, 30.0) for arm in ("sira-h-literal", "sira-h", "cubic"))
    assert published.use < 0.4 and own.use > 0.8 and own.p95 < cubic.p95 / 9


def test_losses_that_are_no_congestion_do_not_slow_ours() -> None:
    trace = link("lossy", 20.0)
    assert emulate(trace, "sira-h", 20.0).use > 0.88 > 0.7 > emulate(trace, "reno", 20.0).use


@pytest.mark.parametrize("arm", ARMS)
def test_every_sender_goes_on_after_an_outage_of_ten_seconds(arm: str) -> None:
    whole = link("near-stationary", 25.0)
    cut = replace(whole, times=whole.times[(whole.times < 3) | (whole.times > 13)])
    late = whole.times[whole.times > 20]
    packets = [emulate(cut, arm, seconds).rate * seconds / 1500 for seconds in (20.0, 25.0)]
    # smoothed round trips of ten seconds, and timeouts that doubled, take their time
    least = 0.5 * len(late) if arm in ("sira-h", "sira", "sprout", "oracle") else 3
    assert packets[1] - packets[0] >= least


def test_an_unknown_sender_is_refused() -> None:
    with pytest.raises(ValueError, match="policy 'quic'; accepted are sira-h, sira-h-literal, sira, reno"):
        emulate(link("driving", 1.0), "quic", 1.0)
    assert set(POLICIES) < set(ARMS)
