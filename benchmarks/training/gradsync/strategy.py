"""The search for a plan against all choices, and how long a decision takes.

All of it is emulated but the time of deciding: iterations are priced by the timeline. Jobs are drawn so that
choices matter: what is sent takes from a fifth to three times as long as backward, and codecs delay
backward, or take a resource of their own.

The decision is for ResNet-101, whose gradients and seconds are those that were logged on a V100 (Zhang et
al., NetAI 2020; 32 images in float32).
"""

from __future__ import annotations

from collections.abc import Iterator
from statistics import fmean
from timeit import repeat

import numpy as np
from numpy.typing import NDArray

from benchmarks.harness.rows import Row, figure
from windtunnel.base.compiled import jit
from windtunnel.cluster.load import load_cluster
from windtunnel.training.bottleneck import published
from windtunnel.training.gradsync.model import GradientTensor, SyncProfile
from windtunnel.training.gradsync.policy.options import BETWEEN, COMPUTE, INSIDE, GroupTask
from windtunnel.training.gradsync.policy.plan import make_plan
from windtunnel.training.gradsync.policy.strategy import search
from windtunnel.training.gradsync.policy.timeline import Costs, iteration_seconds
from windtunnel.training.gradsync.twin import codecs_of, network_of

Ints = NDArray[np.int64]
DRAWN = 300
DECISIONS = 9
CLUSTER = "v100:8x8,nic=ethernet-25"


def strategy_rows(quick: bool) -> Iterator[Row]:
    """Gaps to the optimum; milliseconds of a decision."""
    random = np.random.default_rng(12)
    gaps, swept, uniform = [], [], []
    for _ in range(150 if quick else DRAWN):
        numels, costs = small_job(random)
        starts = [np.full(len(numels), option) for option in range(int(costs.options.min()))]
        best = costs.iteration(exact(costs))
        gaps.append(costs.iteration(search(costs, numels, starts)) / best - 1)
        swept.append(costs.iteration(sweep(costs, numels)) / best - 1)
        uniform.append(min(map(costs.iteration, starts)) / best - 1)
    about = f"{len(gaps)} random jobs of 6 to 8 groups and 4 to 5 options, against all choices"
    exactly = f"{about}; exact in {sum(gap <= 1e-9 for gap in gaps)}"
    for name, gap, most, note in (
        ("search: mean gap to the optimum", fmean(gaps), 0.5, exactly),
        ("search: worst gap", max(gaps), 5, ""),
        ("one greedy sweep: mean gap", fmean(swept), None, f"worst {max(swept):.1%}"),
        ("best uniform choice: mean gap", fmean(uniform), None, f"worst {max(uniform):.1%}"),
    ):
        yield figure(name, "%", goal=f"<= {most} %" if most else "", emulated=100 * gap, note=note)
    yield _decision()


def _decision() -> Row:
    job, cluster = published()["resnet101"], load_cluster(CLUSTER)
    tensors = tuple(
        GradientTensor(f"gradient {place}", nbytes // 4, backward)
        for place, (backward, nbytes) in enumerate(job.gradients)
    )
    forward = job.batch - sum(tensor.backward for tensor in tensors)
    network = network_of(cluster)
    profile = SyncProfile(tensors, codecs_of(cluster), network, forward, emulated="codecs and network")
    plan = make_plan(profile)  # the first call compiles
    times = repeat(lambda: make_plan(profile), number=1, repeat=DECISIONS)
    gain = min(forecast.seconds for forecast in plan.forecasts if forecast.choice.startswith("none "))
    return figure(
        f"a plan for {len(profile.tensors)} gradients", "s", times, "<= 100 ms", published=0.179,
        source="Espresso (EuroSys '23), ResNet101 on 64 GPUs",
        note=f"cuts, options and reasons; {len(profile.codecs)} codecs on {CLUSTER}; emulated gain over no"
        f" compression {gain / plan.forecasts[0].seconds:.2f} x",
    )  # fmt: skip


@jit
def exact(costs: Costs) -> Ints:
    """The best of all choices, counted up like the digits of a number: for small jobs only."""
    choice = np.zeros(len(costs.options), np.int64)
    cheapest = choice.copy()
    best = np.inf
    for _ in range(np.prod(costs.options)):
        seconds = iteration_seconds(costs, choice)
        if seconds < best:
            best, cheapest = seconds, choice.copy()
        for g in range(len(choice)):
            choice[g] += 1
            if choice[g] < costs.options[g]:
                break
            choice[g] = 0
    return cheapest


def small_job(random: np.random.Generator) -> tuple[list[int], Costs]:
    """Groups' sizes and tasks: no codec, and three or four that are drawn with their costs."""
    codecs = int(random.integers(3, 5))
    groups = int(random.integers(6, 12 - codecs))  # of which all choices can be tried
    numels = [int(numel) for numel in random.choice([1 << 14, 1 << 17, 1 << 20, 1 << 22], groups)]
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

    def ways(numel: int) -> list[list[GroupTask]]:
        options = [[GroupTask("allreduce", BETWEEN, call + numel / rate)]]
        for ratio, each, fixed, processor in drawn:
            encode = GroupTask("encode", processor, fixed + numel * each)
            sent = GroupTask("allgather", BETWEEN, call + 2 * ratio * numel / rate)
            options.append([encode, sent, GroupTask("decode", processor, fixed + numel * each / 2)])
        return options

    return numels, Costs.of([ways(numel) for numel in numels], backward.tolist(), 0.02, 0.0)


def sweep(costs: Costs, numels: list[int]) -> NDArray[np.int64]:
    """Espresso's algorithm 1 in one go: from no compression, large groups first, of equal ones those that are
    nearest to the output, each gets what is best for it as the others are then."""
    choice = np.zeros(len(numels), np.int64)
    for group in sorted(range(len(numels)), key=lambda group: (-numels[group], group)):
        seconds = []
        for option in range(int(costs.options[group])):
            choice[group] = option
            seconds.append(costs.iteration(choice))
        choice[group] = int(np.argmin(seconds))
    return choice
