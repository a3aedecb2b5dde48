"""An all-to-all over lightpaths, beside an ideal electrical torus of the same links (max-min fair flows)."""

from __future__ import annotations

import statistics
from collections.abc import Iterator

import numpy as np

from benchmarks.harness.rows import Row, figure
from benchmarks.network.torus.plans import checked
from windtunnel.network.torus.policy import Decision, Observation
from windtunnel.network.torus.policy.shape import nodes_of
from windtunnel.network.torus.twin import (
    Floats,
    electrical_fair,
    moe_traffic,
    optical,
    uniform_traffic,
)

LINK_RATE = 50e9  # bytes/s of a directed link: 400 Gb/s, whatever the number of wavelengths it is split into
PAIR_BYTES = 4e6
TOKENS, TOKEN_BYTES = 4096, 7168 * 2  # of a node in a step; hidden size 7,168 in bf16 (arXiv:2412.19437)
SEEDS = 5


def alltoall_rows(quick: bool) -> Iterator[Row]:
    """Equal parts on several shapes, then a mixture of experts whose router is more and more skewed."""
    for sides in ((3, 3, 3), (9, 9), *(() if quick else ((3,) * 4, (3,) * 5, (8, 8)))):
        plan = checked(Observation(sides))
        note = f"{plan.count} wavelengths, lower bound {plan.bound}"
        uniform = [uniform_traffic(nodes_of(sides), PAIR_BYTES)]
        yield from _arms(f"{_shape(sides)}, 4 MB a pair", plan, uniform, plan.count == plan.bound, note)
    for sides in ((3, 3, 3), *(() if quick else ((3,) * 4,))):
        plan = checked(Observation(sides))
        for skew, own in ((0.0, False), (1.0, False), (1.0, True)):
            drawn = [
                moe_traffic(nodes_of(sides), TOKENS, TOKEN_BYTES, skew, np.random.default_rng(seed), own=own)
                for seed in range(SEEDS)
            ]
            who = f"Zipf {skew:g}, {'each node its own' if own else 'the same for all'}"
            yield from _arms(f"{_shape(sides)}, experts {who if skew else 'balanced'}", plan, drawn)


def _arms(of: str, plan: Decision, traffic: list[Floats], tie: bool = False, note: str = "") -> Iterator[Row]:
    """Both on the same traffic, medians over seeds where there are several; ``tie``: they must be equal."""
    lit = [optical(plan, one, LINK_RATE) for one in traffic]
    fair = [electrical_fair(plan, one, LINK_RATE) for one in traffic]
    for name, ends in (("optical", lit), ("electrical, max-min fair flows", fair)):
        span = f"{min(ends) * 1e3:.2f} to {max(ends) * 1e3:.2f} ms over {len(ends)} seeds"
        yield figure(f"{of}: {name}", "s", emulated=statistics.median(ends), note=span)
    ratios = [one / other for one, other in zip(lit, fair, strict=True)]
    met = abs(ratios[0] - 1) < 1e-6 if tie else min(ratios) >= 1 - 1e-6
    yield figure(
        f"{of}: optical over electrical", "times", emulated=statistics.median(ratios),
        goal="a tie" if tie else "never below 1", met=met,
        note=f"{min(ratios):.2f} to {max(ratios):.2f} in {len(ratios)} seeds{note and '; '}{note}",
    )  # fmt: skip


def _shape(sides: tuple[int, ...]) -> str:
    return "x".join(map(str, sides))
