"""How many wavelengths plans need, before and after failures, and what it takes to make them."""

from __future__ import annotations

import statistics
import time
import tracemalloc
from collections.abc import Callable, Iterator
from functools import partial

from benchmarks.harness.measure import in_turn
from benchmarks.harness.rows import Row
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
REPEATS = 5


def checked(seen: Observation) -> Decision:
    """A plan that the checker passes.

    Raises:
        RuntimeError: it does not.
    """
    made = decide(seen)
    if wrong := faults(seen, made):
        raise RuntimeError(wrong[0])
    return made


def wavelength_rows(quick: bool) -> Iterator[Row]:
    """Every shape by its own method and by first-fit."""
    for nodes in QUICK if quick else SHAPES:
        for sides in SHAPES[nodes]:
            made, shape = checked(Observation(sides)), "x".join(map(str, sides))
            plain = made if made.method == "first-fit" else checked(Observation(sides, method="first-fit"))
            exact = set(sides) in ({3}, {2}) or (len(sides) == 1 and nodes % 2 == 1)
            even = len(set(sides)) == 1 and sides[0] > 2
            for one in dict.fromkeys((made, plain)):
                over = one.count / one.bound - 1
                yield Row(
                    "wavelengths", f"{nodes} nodes, {shape}, {one.method}", "wavelengths",
                    emulated=float(one.count), published=paper_bound(sides) if even else None,
                    source=f"bound of {SOURCE}" if even else "",
                    target=f"the bound, {one.bound}" if exact and one is made else "",
                    met=one.count == one.bound if exact and one is made else None,
                    note=f"lower bound {one.bound}" + (f", {over:.0%} above it" if over > 0 else ""),
                )  # fmt: skip


def planning_rows(quick: bool) -> Iterator[Row]:
    """Seconds and peak memory of plans on 3^n, and of their check."""
    for n in range(3, 6 if quick else 7):
        seen = Observation((3,) * n)
        made, pairs = decide(seen), f"{9**n - 3**n:,} paths"
        arms: dict[str, Callable[[], object]] = {
            "closed-form": partial(decide, seen), "check": partial(faults, seen, made),
        }  # fmt: skip
        for arm in arms.values():
            arm()  # what Numba compiles is not what is measured
        found = in_turn({name: partial(_seconds, arm) for name, arm in arms.items()}, REPEATS)
        for name, taken in found.items():
            median, judged = statistics.median(taken), name == "closed-form"
            yield Row(
                "planning", f"3^{n} ({pairs}), {name}", "s", measured=median,
                target="at most 2 s" if judged else "", met=median <= 2.0 if judged else None,
                note=f"{min(taken) * 1e3:.0f} to {max(taken) * 1e3:.0f} ms in {len(taken)}",
            )  # fmt: skip
        tracemalloc.start()
        decide(seen)
        yield Row(
            "planning", f"3^{n} ({pairs}), closed-form, peak memory", "bytes",
            measured=float(tracemalloc.get_traced_memory()[1]),
        )  # fmt: skip
        tracemalloc.stop()


def _seconds(work: Callable[[], object]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def failure_rows(quick: bool) -> Iterator[Row]:
    """Backup wavelengths of what fails, beside the bounds."""
    for n in range(2, 5 if quick else 7):
        sides = (3,) * n
        near = heads(sides)[: 2 * n].tolist()
        for links in range(1, 2 * n):
            if n < 5 or links in (1, 2, 2 * n - 1):
                cut = tuple((0, other) for other in near[:links])
                yield _failure(Observation(sides, cut), f"{links} of the {2 * n} links that leave a node")
        yield _failure(Observation(sides, ((0, near[0]), (near[0], 0))), "a cable")
        yield _failure(Observation(sides, (), (0,)), "a node")


def _failure(seen: Observation, what: str) -> Row:
    made = checked(seen)
    bound = made.paper_backup_bound
    return Row(
        "failures", f"{'x'.join(map(str, seen.sides))}: {what}", "backup wavelengths",
        emulated=float(made.backups), published=None if bound is None else float(bound),
        source="" if bound is None else f"bound of {SOURCE}, its sign set right",
        note=f"{len(made.rerouted)} paths rerouted; any rerouting needs at least {made.backup_bound}",
    )  # fmt: skip
