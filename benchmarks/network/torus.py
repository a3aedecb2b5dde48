"""How many wavelengths plans need, before and after failures, and what it takes to make them.

An all-to-all over lightpaths, beside an ideal electrical torus of the same links (max-min fair flows).
"""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np

from benchmarks.harness.measure import in_turn, ratios, seconds_of
from benchmarks.harness.rows import Row, figure
from windtunnel.network.torus.policy import Decision, Observation, decide
from windtunnel.network.torus.policy.check import faults
from windtunnel.network.torus.policy.shape import heads, nodes_of, paper_bound
from windtunnel.network.torus.twin import (
    Floats,
    electrical_fair,
    moe_traffic,
    optical,
    uniform_traffic,
)

SOURCE = "CF'16 (doi 10.1145/2903150.2903173)"
SHAPES: dict[int, tuple[tuple[int, ...], ...]] = {
    27: ((27,), (3, 9), (3, 3, 3)),
    64: ((64,), (8, 8), (4, 4, 4), (2,) * 6),
    81: ((81,), (9, 9), (3, 27), (3, 3, 9), (3,) * 4),
    243: ((243,), (9, 27), (3,) * 5),
    256: ((256,), (16, 16), (4,) * 4, (2,) * 8),
    729: ((27, 27), (9, 9, 9), (3,) * 6),
}
QUICK = (27, 64, 81)


def checked(observation: Observation) -> Decision:
    """A plan that the checker passes.

    Raises:
        RuntimeError: it does not.
    """
    plan = decide(observation)
    if wrong := faults(observation, plan):
        raise RuntimeError(wrong[0])
    return plan


def wavelengths_rows(quick: bool) -> Iterator[Row]:
    """Every shape by its own method and by first-fit."""
    for nodes in QUICK if quick else SHAPES:
        for sides in SHAPES[nodes]:
            plan, shape = checked(Observation(sides)), "x".join(map(str, sides))
            plain = plan if plan.method == "first-fit" else checked(Observation(sides, method="first-fit"))
            exact = set(sides) in ({3}, {2}) or (len(sides) == 1 and nodes % 2 == 1)
            even = len(set(sides)) == 1 and sides[0] > 2
            for candidate in dict.fromkeys((plan, plain)):
                goal = f"the bound, {candidate.bound}" if exact and candidate is plan else ""
                yield figure(
                    f"{nodes} nodes, {shape}, {candidate.method}", "wavelengths", goal=goal,
                    emulated=float(candidate.count), passed=candidate.count == candidate.bound,
                    published=paper_bound(sides) if even else None, source=f"bound of {SOURCE}",
                    note=f"lower bound {candidate.bound}, {candidate.count / candidate.bound:.2f} times that",
                )  # fmt: skip


def planning_rows(quick: bool) -> Iterator[Row]:
    """Seconds and peak memory of plans on 3^n, and of their check."""
    for n in range(3, 6 if quick else 7):
        observation = Observation((3,) * n)
        plan, name = decide(observation), f"3^{n} ({9**n - 3**n:,} paths)"
        faults(observation, plan)  # what Numba compiles is not what is measured
        work: dict[str, Callable[[], object]] = {
            "planned": partial(decide, observation), "checked": partial(faults, observation, plan),
        }  # fmt: skip
        for stage, seconds in in_turn(
            {stage: partial(seconds_of, job) for stage, job in work.items()}, 5
        ).items():
            yield figure(f"{name}, {stage}", "s", seconds, "<= 2 s" if stage == "planned" else "")
        tracemalloc.start()
        decide(observation)
        peak = float(tracemalloc.get_traced_memory()[1])
        yield figure(f"{name}, planned: peak memory", "bytes", peak)
        tracemalloc.stop()


def failures_rows(quick: bool) -> Iterator[Row]:
    """Backup wavelengths of what fails, beside the bounds."""
    for n in range(2, 5 if quick else 7):
        sides = (3,) * n
        near = heads(sides)[: 2 * n].tolist()
        for links in (1, 2 * n - 1):
            cut = tuple((0, other) for other in near[:links])
            yield _failure(Observation(sides, cut), f"{links} of the {2 * n} links that leave a node")
        yield _failure(Observation(sides, ((0, near[0]), (near[0], 0))), "a cable")
        yield _failure(Observation(sides, (), (0,)), "a node")


def _failure(observation: Observation, title: str) -> Row:
    plan = checked(observation)
    bound = plan.paper_backup_bound
    return figure(
        f"{'x'.join(map(str, observation.sides))}: {title}", "backup wavelengths",
        emulated=float(plan.backups),
        published=None if bound is None else float(bound), source=f"bound of {SOURCE}, its sign set right",
        note=f"{len(plan.rerouted)} paths rerouted; any rerouting needs at least {plan.backup_bound}",
    )  # fmt: skip


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
            router = f"Zipf {skew:g}, {'each node its own' if own else 'the same for all'}"
            yield from _arms(f"{_shape(sides)}, experts {router if skew else 'balanced'}", plan, drawn)


def _arms(of: str, plan: Decision, traffic: list[Floats], tie: bool = False, note: str = "") -> Iterator[Row]:
    """Both on the same traffic, medians over seeds where there are several; ``tie``: they must be equal."""
    lit = [optical(plan, matrix, LINK_RATE) for matrix in traffic]
    fair = [electrical_fair(plan, matrix, LINK_RATE) for matrix in traffic]
    for name, ends in (("optical", lit), ("electrical, max-min fair flows", fair)):
        yield figure(f"{of}: {name}", "s", emulated=ends)
    over = ratios(lit, fair)
    goal, equal = ("a tie", abs(over[0] - 1) < 1e-6) if tie else ("never below 1", min(over) >= 1 - 1e-6)
    yield figure(f"{of}: optical over electrical", "times", goal=goal, emulated=over, passed=equal, note=note)


def _shape(sides: tuple[int, ...]) -> str:
    return "x".join(map(str, sides))
