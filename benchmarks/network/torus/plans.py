"""How many wavelengths plans need, before and after failures, and what it takes to make them."""

from __future__ import annotations

import statistics
import time
import tracemalloc
from collections.abc import Callable, Iterator
from functools import partial

from benchmarks.harness.measure import in_turn
from benchmarks.harness.rows import Row, figure
from windtunnel.network.torus.policy import Decision, Observation, decide
from windtunnel.network.torus.policy.check import faults
from windtunnel.network.torus.policy.shape import heads, paper_bound

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


def checked(seen: Observation) -> Decision:
    """A plan that the checker passes.

    Raises:
        RuntimeError: it does not.
    """
    made = decide(seen)
    if wrong := faults(seen, made):
        raise RuntimeError(wrong[0])
    return made


def wavelengths_rows(quick: bool) -> Iterator[Row]:
    """Every shape by its own method and by first-fit."""
    for nodes in QUICK if quick else SHAPES:
        for sides in SHAPES[nodes]:
            made, shape = checked(Observation(sides)), "x".join(map(str, sides))
            plain = made if made.method == "first-fit" else checked(Observation(sides, method="first-fit"))
            exact = set(sides) in ({3}, {2}) or (len(sides) == 1 and nodes % 2 == 1)
            even = len(set(sides)) == 1 and sides[0] > 2
            for one in dict.fromkeys((made, plain)):
                goal = f"the bound, {one.bound}" if exact and one is made else ""
                yield figure(
                    f"{nodes} nodes, {shape}, {one.method}", "wavelengths", goal=goal,
                    emulated=float(one.count), met=one.count == one.bound,
                    published=paper_bound(sides) if even else None, source=f"bound of {SOURCE}",
                    note=f"lower bound {one.bound}, {one.count / one.bound - 1:.0%} above it",
                )  # fmt: skip


def planning_rows(quick: bool) -> Iterator[Row]:
    """Seconds and peak memory of plans on 3^n, and of their check."""
    for n in range(3, 6 if quick else 7):
        seen = Observation((3,) * n)
        made, name = decide(seen), f"3^{n} ({9**n - 3**n:,} paths)"
        faults(seen, made)  # what Numba compiles is not what is measured
        work: dict[str, Callable[[], object]] = {
            "planned": partial(decide, seen), "checked": partial(faults, seen, made),
        }  # fmt: skip
        for what, taken in in_turn({what: partial(_seconds, one) for what, one in work.items()}, 5).items():
            goal = "<= 2 s" if what == "planned" else ""
            yield figure(f"{name}, {what}", "s", statistics.median(taken), goal)
        tracemalloc.start()
        decide(seen)
        peak = float(tracemalloc.get_traced_memory()[1])
        yield figure(f"{name}, planned: peak memory", "bytes", peak)
        tracemalloc.stop()


def _seconds(work: Callable[[], object]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


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


def _failure(seen: Observation, what: str) -> Row:
    made = checked(seen)
    bound = made.paper_backup_bound
    return figure(
        f"{'x'.join(map(str, seen.sides))}: {what}", "backup wavelengths", emulated=float(made.backups),
        published=None if bound is None else float(bound), source=f"bound of {SOURCE}, its sign set right",
        note=f"{len(made.rerouted)} paths rerouted; any rerouting needs at least {made.backup_bound}",
    )  # fmt: skip
