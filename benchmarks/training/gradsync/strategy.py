"""The search for a plan against all choices, and how long a decision takes.

All of it is emulated but the time of deciding: iterations are priced by the timeline. Jobs are drawn so that
choices matter: what is sent takes from a fifth to three times as long as backward, and codecs delay
backward, or take a resource of their own.

What fusion alone is worth: the papers' jobs on a cluster that is not there, one codec in its best groups,
in single layers, and in DDP's buckets.
"""

from __future__ import annotations

from collections.abc import Iterator
from statistics import fmean
from timeit import repeat

import numpy as np
from numpy.typing import NDArray

from benchmarks.harness.rows import Row, figure
from benchmarks.training.gradsync.jobs import JOBS as PAPERS
from benchmarks.training.gradsync.jobs import paper_profile
from windtunnel.base.compiled import jit
from windtunnel.cluster.load import load_cluster
from windtunnel.training.gradsync.policy.options import BETWEEN, COMPUTE, INSIDE, Task
from windtunnel.training.gradsync.policy.plan import BUCKETS, make_plan, uniform_plan
from windtunnel.training.gradsync.policy.strategy import search
from windtunnel.training.gradsync.policy.timeline import Costs, taken

Ints = NDArray[np.int64]
JOBS = 300
DECISIONS = 9
CLUSTER = "v100:8x8,nic=ethernet-25"


def strategy_rows(quick: bool) -> Iterator[Row]:
    """Gaps to the optimum; milliseconds of a decision."""
    random = np.random.default_rng(12)
    found, swept, uniform = [], [], []
    for _ in range(150 if quick else JOBS):
        numels, costs = small_job(random)
        starts = [np.full(len(numels), option) for option in range(int(costs.options.min()))]
        best = costs.iteration(exact(costs))
        found.append(costs.iteration(search(costs, numels, starts)) / best - 1)
        swept.append(costs.iteration(sweep(costs, numels)) / best - 1)
        uniform.append(min(map(costs.iteration, starts)) / best - 1)
    about = f"{len(found)} random jobs of 6 to 8 groups and 4 to 5 options, against all choices"
    exactly = f"{about}; exact in {sum(one <= 1e-9 for one in found)}"
    for name, gap, most, note in (
        ("search: mean gap to the optimum", fmean(found), 0.5, exactly),
        ("search: worst gap", max(found), 5, ""),
        ("one greedy sweep: mean gap", fmean(swept), None, f"worst {max(swept):.1%}"),
        ("best uniform choice: mean gap", fmean(uniform), None, f"worst {max(uniform):.1%}"),
    ):
        yield figure(name, "%", goal=f"<= {most} %" if most else "", emulated=100 * gap, note=note)
    yield _decision()


def _decision() -> Row:
    profile = paper_profile("ResNet-101", load_cluster(CLUSTER))
    plan = make_plan(profile)  # the first call compiles
    found = repeat(lambda: make_plan(profile), number=1, repeat=DECISIONS)
    gain = min(one.seconds for one in plan.forecasts if one.choice.startswith("none "))
    return figure(
        f"a plan for {len(profile.tensors)} gradients", "s", found, "<= 100 ms", published=0.179,
        source="Espresso (EuroSys '23), ResNet101 on 64 GPUs",
        note=f"cuts, options and reasons; {len(profile.codecs)} codecs on {CLUSTER}; emulated gain over no"
        f" compression {gain / plan.forecasts[0].seconds:.2f} x",
    )  # fmt: skip


def exact(costs: Costs, most: int = 3_000_000) -> Ints:
    """The optimum, by trying everything: for small jobs only.

    Raises:
        ValueError: more than ``most`` choices.
    """
    total = int(np.prod(costs.options.astype(float)))
    if total > most:
        raise ValueError(f"{total} choices are too many to try")
    return _all(costs, total)


@jit
def _all(costs: Costs, total: int) -> Ints:
    """The best of all choices, counted up like the digits of a number."""
    choice = np.zeros(len(costs.options), np.int64)
    found = choice.copy()
    best = np.inf
    for _ in range(total):
        seconds = taken(costs, choice)
        if seconds < best:
            best, found = seconds, choice.copy()
        for g in range(len(choice)):
            choice[g] += 1
            if choice[g] < costs.options[g]:
                break
            choice[g] = 0
    return found


def small_job(random: np.random.Generator) -> tuple[list[int], Costs]:
    """Groups' sizes and tasks: no codec, and three or four that are drawn with their costs."""
    codecs = int(random.integers(3, 5))
    groups = int(random.integers(6, 12 - codecs))  # of which all choices can be tried
    numels = [int(one) for one in random.choice([1 << 14, 1 << 17, 1 << 20, 1 << 22], groups)]
    backward = random.uniform(0.2, 1.0, groups) * 0.02
    rate = sum(numels) / sum(backward) / random.uniform(0.2, 3.0)  # elements a second
    call = random.uniform(0.0, 0.1) * 0.02
    drawn = [
        (
            random.choice([0.5, 0.25, 1 / 32, 0.02]), random.uniform(0.02, 1.0) / rate,
            random.uniform(0.0, 1e-3), INSIDE if random.random() < 0.3 else COMPUTE,
        )
        for _ in range(codecs)
    ]  # fmt: skip

    def ways(numel: int) -> list[list[Task]]:
        found = [[Task("allreduce", BETWEEN, call + numel / rate)]]
        for ratio, each, fixed, processor in drawn:
            encode = Task("encode", processor, fixed + numel * each)
            sent = Task("allgather", BETWEEN, call + 2 * ratio * numel / rate)
            found.append([encode, sent, Task("decode", processor, fixed + numel * each / 2)])
        return found

    return numels, Costs.of([ways(one) for one in numels], backward.tolist(), 0.02, 0.0)


def sweep(costs: Costs, numels: list[int]) -> NDArray[np.int64]:
    """Espresso's algorithm 1 in one go: from no compression, large groups first, of equal ones those that are
    nearest to the output, each gets what is best for it as the others are then."""
    choice = np.zeros(len(numels), np.int64)
    for group in sorted(range(len(numels)), key=lambda one: (-numels[one], one)):
        taken = []
        for option in range(int(costs.options[group])):
            choice[group] = option
            taken.append(costs.iteration(choice))
        choice[group] = int(np.argmin(taken))
    return choice


HOSTS = "v100:8x1,nic=ethernet-25"


def fusion_rows(quick: bool) -> Iterator[Row]:
    """One codec in its best groups, in single layers, and in DDP's buckets."""
    for name in [*PAPERS][:2] if quick else PAPERS:
        profile = paper_profile(name, load_cluster(HOSTS))
        for codec in ("dragonn:0.01", "sign"):
            fused, layers, buckets = (
                uniform_plan(profile, codec, most).forecasts[0].seconds for most in (None, 1, BUCKETS)
            )
            for seconds, words in ((layers, "single layers"), (buckets, "DDP's buckets")):
                row, note = (
                    f"{name}, {codec}: {words} / best groups",
                    f"{len(profile.tensors)} gradients on {HOSTS}",
                )
                yield figure(row, "x", emulated=seconds / fused, note=note)
