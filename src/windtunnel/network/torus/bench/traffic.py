"""The time of an all-to-all over lightpaths, beside an ideal electrical torus of the same links."""

from __future__ import annotations

import statistics
from collections.abc import Iterator

import numpy as np

from windtunnel.bench.rows import Row
from windtunnel.network.torus.bench.plans import checked
from windtunnel.network.torus.policy import Observation
from windtunnel.network.torus.policy.shape import nodes_of
from windtunnel.network.torus.twin import electrical_best, moe_traffic, optical, uniform_traffic

LINK_RATE = 50e9  # bytes/s of a directed link: 400 Gb/s, whatever the number of wavelengths it is split into
PAIR_BYTES = 4e6
TOKENS, TOKEN_BYTES = 4096, 7168 * 2  # of a node in a step; hidden size 7,168 in bf16 (arXiv:2412.19437)
SKEWS = (0.0, 0.5, 1.0, 1.5)
SEEDS = 5


def traffic_rows(quick: bool) -> Iterator[Row]:
    """Equal parts on several shapes, then a mixture of experts whose router is more and more skewed."""
    for sides in ((3, 3, 3), (9,), (4, 4), (9, 9), *(() if quick else ((3,) * 4, (3,) * 5, (8, 8)))):
        plan, shape = checked(Observation(sides)), "x".join(map(str, sides))
        traffic = uniform_traffic(nodes_of(sides), PAIR_BYTES)
        ends = optical(plan, traffic, LINK_RATE), electrical_best(plan, traffic, LINK_RATE)
        tie = plan.count == plan.bound
        yield Row("alltoall", f"{shape}, 4 MB a pair: optical", "s", emulated=ends[0])
        yield Row("alltoall", f"{shape}, 4 MB a pair: electrical at best", "s", emulated=ends[1])
        ratio = ends[0] / ends[1]
        yield Row(
            "alltoall", f"{shape}, 4 MB a pair: optical over electrical", "times", emulated=ratio,
            target="a tie" if tie else "", met=abs(ratio - 1) < 1e-9 if tie else None,
            note="" if tie else f"{plan.count} wavelengths where {plan.bound} is the bound",
        )  # fmt: skip
    for sides in ((3, 3, 3), *(() if quick else ((3,) * 4,))):
        for own in (False, True):
            for skew in SKEWS[own:]:
                yield from _skewed(sides, skew, own)


def _skewed(sides: tuple[int, ...], skew: float, own: bool) -> Iterator[Row]:
    plan, both = checked(Observation(sides)), []
    for seed in range(SEEDS):
        rng = np.random.default_rng(seed)
        traffic = moe_traffic(nodes_of(sides), TOKENS, TOKEN_BYTES, skew, rng, own=own)
        both.append((optical(plan, traffic, LINK_RATE), electrical_best(plan, traffic, LINK_RATE)))
    favourites = (
        "balanced" if not skew else f"Zipf {skew:g}, {'each node its own' if own else 'the same for all'}"
    )
    of = f"{'x'.join(map(str, sides))}, experts {favourites}"
    for name, ends in zip(("optical", "electrical at best"), zip(*both, strict=True), strict=True):
        yield Row(
            "alltoall", f"{of}: {name}", "s", emulated=statistics.median(ends),
            note=f"{min(ends) * 1e3:.2f} to {max(ends) * 1e3:.2f} ms over {SEEDS} seeds",
        )  # fmt: skip
    ratios = [one / other for one, other in both]
    yield Row(
        "alltoall", f"{of}: optical over electrical", "times", emulated=statistics.median(ratios),
        target="never below 1", met=min(ratios) >= 1 - 1e-9,
        note=f"{min(ratios):.2f} to {max(ratios):.2f} over {SEEDS} seeds",
    )  # fmt: skip
