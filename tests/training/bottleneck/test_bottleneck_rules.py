"""The paper's simulator against its own table, and the verdict against a search."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from windtunnel.training.bottleneck import Observation, Workload, decide, netai20, published
from windtunnel.training.bottleneck.twin import BANDWIDTHS, BUFFER, buckets

TABLE = """
resnet50,16,8.0,57.2,97.0,99.8,99.9
resnet50,32,7.7,55.4,94.2,99.7,99.7
resnet50,64,7.6,54.0,91.0,99.4,99.5
resnet101,16,6.9,53.1,95.3,99.9,99.9
resnet101,32,6.7,51.4,92.3,99.8,99.8
resnet101,64,6.6,50.0,89.0,99.7,99.7
vgg16,16,2.3,21.2,46.3,65.9,99.9
vgg16,32,2.2,20.5,44.9,63.9,99.7
vgg16,64,2.2,20.1,43.9,62.2,99.3
"""
"""Model, workers, and % at 1, 10, 25, 40 and 100 Gb/s: the published simulator, without its sleeps."""
COMPRESSED = {
    "resnet50": (54.0, 81.7, 99.4, 99.5, 99.5),
    "resnet101": (50.0, 78.7, 99.7, 99.7, 99.7),
    "vgg16": (20.1, 36.7, 72.3, 99.3, 99.4),
}
"""% of 64 workers at 10 Gb/s with compression by 1, 2, 5, 10 and 100."""


@pytest.mark.parametrize("row", TABLE.split())
def test_a_row_of_the_papers_table(row: str) -> None:
    model, workers, *percent = row.split(",")
    factors = [100 * netai20(published()[model], int(workers), rate) for rate in BANDWIDTHS]
    assert factors == pytest.approx([float(value) for value in percent], abs=0.06)


@pytest.mark.parametrize("model", COMPRESSED)
def test_compression_at_10_gigabits(model: str) -> None:
    factors = [100 * netai20(published()[model], 64, BANDWIDTHS[1], ratio) for ratio in (1, 2, 5, 10, 100)]
    assert factors == pytest.approx(COMPRESSED[model], abs=0.06)


def test_a_bucket_is_sent_by_time_or_by_size_when_a_gradient_arrives() -> None:
    assert [*buckets([(0.002, 10), (0.002, 20), (0.002, 30), (0.001, 5)])] == [(0.006, 60), (0.007, 5)]
    assert [size for _, size in buckets([(0.0, BUFFER), (0.0, 1)])] == [BUFFER, 1]
    assert [*buckets([])] == []


gradients = st.lists(st.tuples(st.floats(0, 0.01), st.integers(1, 1 << 27)), min_size=1, max_size=20)


@given(gradients, st.integers(2, 64), st.floats(1e8, 1e11), st.floats(1, 100))
def test_a_faster_link_or_more_compression_never_scales_worse(
    arrived: list[tuple[float, int]], workers: int, bandwidth: float, ratio: float
) -> None:
    job = Workload("drawn", 0.1 + sum(wait for wait, _ in arrived), tuple(arrived))
    factor = netai20(job, workers, bandwidth)
    assert 0 < factor <= 1
    assert netai20(job, workers, bandwidth * ratio) >= factor - 1e-12
    assert netai20(job, workers, bandwidth, ratio) == pytest.approx(netai20(job, workers, bandwidth * ratio))


curve = st.lists(st.tuples(st.floats(1, 1e12), st.floats(0, 1)), max_size=8).map(tuple)


@given(st.floats(0, 1), st.floats(0, 1), curve, curve, st.floats(0.5, 0.99))
def test_the_network_is_the_bottleneck_where_a_faster_one_gives_back_half_of_what_is_lost(
    scaling: float, endless: float, faster: tuple[tuple[float, float], ...],
    smaller: tuple[tuple[float, float], ...], target: float,
) -> None:  # fmt: skip
    verdict = decide(Observation(1e9, scaling, endless, faster, smaller, target))
    assert verdict.network == (scaling < target and endless - scaling >= (1 - scaling) / 2)
    enough = [value for value, factor in faster if factor >= target]
    assert verdict.bandwidth == min(enough, default=None)
