"""The search for a plan against all choices, and how long a decision takes.

All of it is emulated but the time of deciding: iterations are priced by the timeline. Jobs are drawn so that
choices matter: what is sent takes from a fifth to three times as long as backward, and codecs delay
backward, or take a resource of their own.

The decision is for ResNet-101 (He et al. '15). Its seconds are inference: the operations of a batch, a third
of them forward, over what the device sustains in float32 with `REACHED` of its peak.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from statistics import fmean
from timeit import repeat

import numpy as np
from numpy.typing import NDArray

from benchmarks.harness.rows import Row, figure
from windtunnel.base.compiled import jit
from windtunnel.cluster.load import load_cluster
from windtunnel.cluster.model import Cluster
from windtunnel.training.gradsync.model import GradientTensor, SyncProfile
from windtunnel.training.gradsync.policy.options import BETWEEN, COMPUTE, INSIDE, GroupTask
from windtunnel.training.gradsync.policy.plan import make_plan
from windtunnel.training.gradsync.policy.strategy import search
from windtunnel.training.gradsync.policy.timeline import Costs, iteration_seconds
from windtunnel.training.gradsync.twin import codecs_of, network_of

REACHED = 0.5


@dataclass(frozen=True)
class Layer:
    """Parameters in the order of forward; ``flops``: of forward for one sample."""

    name: str
    numels: tuple[int, ...]
    flops: float


def _convolution(name: str, inputs: int, outputs: int, size: int, pixels: int) -> Layer:
    """With its batch norm."""
    weights = inputs * outputs * size * size
    return Layer(name, (weights, outputs, outputs), 2.0 * weights * pixels)


def resnet101() -> Iterator[Layer]:
    yield _convolution("stem", 3, 64, 7, 112 * 112)
    inputs, side = 64, 56
    for stage, blocks in enumerate((3, 4, 23, 3)):
        width = 64 << stage
        for block in range(blocks):
            pixels = side * side
            at = f"stage{stage}.{block}"
            yield _convolution(f"{at}.a", inputs, width, 1, pixels)
            yield _convolution(f"{at}.b", width, width, 3, pixels)
            yield _convolution(f"{at}.c", width, 4 * width, 1, pixels)
            if block == 0:
                yield _convolution(f"{at}.shortcut", inputs, 4 * width, 1, pixels)
            inputs = 4 * width
        side //= 2
    yield Layer("fc", (2048 * 1000, 1000), 2.0 * 2048 * 1000)


def resnet101_profile(cluster: Cluster, batch: int = 32) -> SyncProfile:
    """The job on a cluster, ``batch`` samples on each rank."""
    device = cluster.host.device
    rate = device.peak("float32") * device.sustained * REACHED
    tensors, forward = [], 0.0
    for layer in resnet101():
        seconds = batch * layer.flops / rate
        forward += seconds
        total = sum(layer.numels)  # backward takes twice as long as forward
        for place, numel in enumerate(layer.numels):
            tensors.append(GradientTensor(f"{layer.name}.{place}", numel, 2 * seconds * numel / total))
    return SyncProfile(
        tuple(tensors[::-1]), codecs_of(cluster), network_of(cluster), forward,
        emulated=f"ResNet-101 on {cluster.name}",
    )  # fmt: skip


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
    profile = resnet101_profile(load_cluster(CLUSTER))
    plan = make_plan(profile)  # the first call compiles
    times = repeat(lambda: make_plan(profile), number=1, repeat=DECISIONS)
    gain = min(forecast.seconds for forecast in plan.forecasts if forecast.choice.startswith("none "))
    return figure(
        f"a plan for {len(profile.tensors)} gradients", "s", times, "<= 100 ms", published=0.179,
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
    cheapest = choice.copy()
    best = np.inf
    for _ in range(total):
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
