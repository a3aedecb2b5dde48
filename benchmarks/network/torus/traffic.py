"""An all-to-all over lightpaths, beside an ideal electrical torus of the same links (max-min fair flows)."""

from __future__ import annotations

import statistics
from collections.abc import Iterator

import numpy as np

from benchmarks.harness.rows import Row
from benchmarks.network.torus.plans import checked
from windtunnel.network.torus.policy import Decision, Observation
from windtunnel.network.torus.policy.shape import nodes_of
from windtunnel.network.torus.twin import (
    Floats,
    electrical_best,
    electrical_fair,
    moe_traffic,
    optical,
    uniform_traffic,
)

LINK_RATE = 50e9  # bytes/s of a directed link: 400 Gb/s, whatever the number of wavelengths it is split into
PAIR_BYTES = 4e6
TOKENS, TOKEN_BYTES = 4096, 7168 * 2  # of a node in a step; hidden size 7,168 in bf16 (arXiv:2412.19437)
SKEWS = (0.0, 0.5, 1.0, 1.5)
SEEDS = 5


def traffic_rows(quick: bool) -> Iterator[Row]:
    """Equal parts on several shapes, then a mixture of experts whose router is more and more skewed."""
    for sides in ((3, 3, 3), (9,), (4, 4), (9, 9), *(() if quick else ((3,) * 4, (3,) * 5, (8, 8)))):
        plan = checked(Observation(sides))
        tie = plan.count == plan.bound
        yield from _arms(
            f"{_shape(sides)}, 4 MB a pair", plan, [uniform_traffic(nodes_of(sides), PAIR_BYTES)],
            "a tie" if tie else "", f"{plan.count} wavelengths, lower bound {plan.bound}",
        )  # fmt: skip
    for sides in ((3, 3, 3), *(() if quick else ((3,) * 4,))):
        plan = checked(Observation(sides))
        for skew, own in [*((skew, False) for skew in SKEWS), *((skew, True) for skew in SKEWS[1:])]:
            drawn = [
                moe_traffic(nodes_of(sides), TOKENS, TOKEN_BYTES, skew, np.random.default_rng(seed), own=own)
                for seed in range(SEEDS)
            ]
            who = (
                f"Zipf {skew:g}, {'each node its own' if own else 'the same for all'}" if skew else "balanced"
            )
            yield from _arms(f"{_shape(sides)}, experts {who}", plan, drawn, "never below 1", "")


def _arms(of: str, plan: Decision, traffic: list[Floats], target: str, note: str) -> Iterator[Row]:
    """The arms on the same traffic, medians over seeds where there are several."""
    ways = {"optical": optical, "electrical, max-min fair flows": electrical_fair}
    ends = {name: [way(plan, one, LINK_RATE) for one in traffic] for name, way in ways.items()}
    best = [electrical_best(plan, one, LINK_RATE) for one in traffic]
    several = f" over {len(traffic)} seeds" if len(traffic) > 1 else ""
    for name, found in ends.items():
        spread = f"{min(found) * 1e3:.2f} to {max(found) * 1e3:.2f} ms{several}" if several else ""
        yield Row("alltoall", f"{of}: {name}", "s", emulated=statistics.median(found), note=spread)
    optical_ends, fair = ends.values()
    ratios = [one / other for one, other in zip(optical_ends, fair, strict=True)]
    over = max(0.0, max(one / other for one, other in zip(fair, best, strict=True)) - 1)
    tie = target == "a tie"
    told = [note, f"{min(ratios):.2f} to {max(ratios):.2f}{several}" if several else ""]
    told.append(f"the flows end {over:.2%} after what their fullest link needs")
    yield Row(
        "alltoall", f"{of}: optical over electrical", "times", emulated=statistics.median(ratios),
        target=target,
        met=(abs(ratios[0] - 1) < 1e-6 if tie else min(ratios) >= 1 - 1e-6) if target else None,
        note="; ".join(part for part in told if part),
    )  # fmt: skip


def _shape(sides: tuple[int, ...]) -> str:
    return "x".join(map(str, sides))
