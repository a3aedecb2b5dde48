"""The jobs that the papers measured, as far as their shapes are public: gradients, their order and times.

Parameters are those of the models as published (He et al. '15; Simonyan and Zisserman '14; Devlin et al. '18;
Radford et al. '19; Kim et al. '19 for UGATIT; PyTorch's word language model of two layers of 1,500). Seconds
are inference: the operations of a batch, a third of them forward, over what the device sustains in float32
with `REACHED` of its peak. Tables of DeepFM, NMT and the LSTM of ZEN (OSDI '25) have the densities that it
gives; their numbers of rows and growth over ranks are inference, too.

The search for a plan against all choices, and how long a decision takes.

All of it is emulated but the time of deciding: iterations are priced by the timeline. Jobs are drawn so that
choices matter: what is sent takes from a fifth to three times as long as backward, and codecs delay
backward, or take a resource of their own.

What fusion alone is worth: the papers' jobs on a cluster that is not there, one codec in its best groups,
in single layers, and in DDP's buckets.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
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
from windtunnel.training.gradsync.policy.plan import BUCKETS, make_plan, uniform_plan
from windtunnel.training.gradsync.policy.strategy import search
from windtunnel.training.gradsync.policy.timeline import Costs, iteration_seconds
from windtunnel.training.gradsync.twin.costs import codecs_of, network_of

REACHED = 0.5


@dataclass(frozen=True)
class Layer:
    """Parameters in the order of forward; ``flops``: of forward for one sample. ``width``, ``density``: of a
    table of which a batch touches rows."""

    name: str
    numels: tuple[int, ...]
    flops: float
    width: int = 0
    density: float = 1.0


def _linear(name: str, inputs: int, outputs: int, times: float = 1.0) -> Layer:
    return Layer(name, (inputs * outputs, outputs), 2.0 * inputs * outputs * times)


def _conv(name: str, inputs: int, outputs: int, size: int, pixels: int, norm: bool = False) -> Layer:
    weights = inputs * outputs * size * size
    extra = (outputs, outputs) if norm else (outputs,)
    return Layer(name, (weights, *extra), 2.0 * weights * pixels)


def vgg16() -> Iterator[Layer]:
    inputs, side = 3, 224
    for block, (outputs, layers) in enumerate(((64, 2), (128, 2), (256, 3), (512, 3), (512, 3))):
        for layer in range(layers):
            yield _conv(f"conv{block}.{layer}", inputs, outputs, 3, side * side)
            inputs = outputs
        side //= 2
    for place, (ins, outs) in enumerate(((25088, 4096), (4096, 4096), (4096, 1000))):
        yield _linear(f"fc{place}", ins, outs)


def resnet101() -> Iterator[Layer]:
    yield _conv("stem", 3, 64, 7, 112 * 112, norm=True)
    inputs, side = 64, 56
    for stage, blocks in enumerate((3, 4, 23, 3)):
        width = 64 << stage
        for block in range(blocks):
            pixels = side * side
            at = f"stage{stage}.{block}"
            yield _conv(f"{at}.a", inputs, width, 1, pixels, norm=True)
            yield _conv(f"{at}.b", width, width, 3, pixels, norm=True)
            yield _conv(f"{at}.c", width, 4 * width, 1, pixels, norm=True)
            if block == 0:
                yield _conv(f"{at}.shortcut", inputs, 4 * width, 1, pixels, norm=True)
            inputs = 4 * width
        side //= 2
    yield _linear("fc", 2048, 1000)


def transformer(layers: int, width: int, tokens: int, words: int, places: int, head: bool) -> Iterator[Layer]:
    yield Layer("embedding", (words * width, places * width), 0.0)
    for layer in range(layers):
        for name, ins, outs in (
            ("q", width, width), ("k", width, width), ("v", width, width), ("out", width, width),
            ("up", width, 4 * width), ("down", 4 * width, width),
        ):  # fmt: skip
            yield _linear(f"{layer}.{name}", ins, outs, tokens)
        yield Layer(f"{layer}.norms", (width,) * 4, 0.0)
    if head:
        yield _linear("head", width, width, tokens)


def lstm() -> Iterator[Layer]:
    tokens, width, words = 35, 1500, 33_278
    yield Layer("embedding", (words * width,), 2.0 * words * width * tokens)
    for layer in range(2):
        yield Layer(
            f"lstm{layer}", (4 * width * width,) * 2 + (4 * width,) * 2, 16.0 * width * width * tokens
        )


def ugatit() -> Iterator[Layer]:
    for generator in range(2):
        at, side = f"generator{generator}", 256
        yield _conv(f"{at}.in", 3, 64, 7, side * side)
        yield _conv(f"{at}.down0", 64, 128, 3, side * side // 4)
        yield _conv(f"{at}.down1", 128, 256, 3, side * side // 16)
        for block in range(8):
            for half in "ab":
                yield _conv(f"{at}.block{block}{half}", 256, 256, 3, side * side // 16)
        yield _linear(f"{at}.fc", 64 * 64 * 256, 256)
        yield _conv(f"{at}.up0", 256, 128, 3, side * side // 4)
        yield _conv(f"{at}.up1", 128, 64, 3, side * side)
    for critic in range(4):
        inputs = 3
        for layer, outputs in enumerate((64, 128, 256, 512, 1024)[: 5 if critic % 2 else 4]):
            yield _conv(f"critic{critic}.{layer}", inputs, outputs, 4, (128 >> layer) ** 2)
            inputs = outputs


def tables(rows: int, width: int, density: float, dense: int, flops: float) -> Iterator[Layer]:
    yield Layer("tables", (rows * width,), 0.0, width, density)
    for layer in range(4):
        yield Layer(f"mlp{layer}", (dense // 4,), flops / 4)


JOBS: dict[str, tuple[Callable[[], Iterator[Layer]], int]] = {
    "VGG-16": (vgg16, 32), "ResNet-101": (resnet101, 32), "UGATIT": (ugatit, 2), "LSTM": (lstm, 80),
    "BERT-base": (partial(transformer, 12, 768, 128, 30_522, 514, True), 32),
    "GPT-2": (partial(transformer, 12, 768, 1024, 50_257, 1024, False), 4),
    "DeepFM": (partial(tables, 13_375_000, 16, 0.028, 68_000_000, 2 * 68e6), 1024),
    "NMT": (partial(tables, 112_000, 1000, 0.0247, 31_000_000, 2 * 31e6 * 50), 64),
    "LSTM, billion words": (partial(tables, 793_000, 512, 0.0113, 20_000_000, 2 * 20e6 * 20), 128),
}  # fmt: skip
"""With the samples of a rank's batch."""


def paper_profile(name: str, cluster: Cluster) -> SyncProfile:
    """The job of that name on a cluster."""
    layers, batch = JOBS[name]
    device = cluster.host.device
    rate = device.peak("float32") * device.sustained * REACHED
    found, forward = [], 0.0
    for layer in layers():
        seconds = batch * layer.flops / rate
        forward += seconds
        total = sum(layer.numels)  # backward takes twice as long as forward
        for place, numel in enumerate(layer.numels):
            growth = tuple(2.0**level * 0.8**level for level in range(1, 8)) if layer.width else ()
            found.append(
                GradientTensor(
                    f"{layer.name}.{place}", numel, 2 * seconds * numel / total, width=layer.width,
                    density=layer.density, growth=growth,
                )
            )  # fmt: skip
    return SyncProfile(
        tuple(found[::-1]), codecs_of(cluster), network_of(cluster), forward,
        emulated=f"{name} on {cluster.name}",
    )  # fmt: skip


Ints = NDArray[np.int64]
DRAWN = 300
DECISIONS = 9
CLUSTER = "v100:8x8,nic=ethernet-25"


def strategy_rows(quick: bool) -> Iterator[Row]:
    """Gaps to the optimum; milliseconds of a decision."""
    random = np.random.default_rng(12)
    found, swept, uniform = [], [], []
    for _ in range(150 if quick else DRAWN):
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
        seconds = iteration_seconds(costs, choice)
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

    def ways(numel: int) -> list[list[GroupTask]]:
        found = [[GroupTask("allreduce", BETWEEN, call + numel / rate)]]
        for ratio, each, fixed, processor in drawn:
            encode = GroupTask("encode", processor, fixed + numel * each)
            sent = GroupTask("allgather", BETWEEN, call + 2 * ratio * numel / rate)
            found.append([encode, sent, GroupTask("decode", processor, fixed + numel * each / 2)])
        return found

    return numels, Costs.of([ways(one) for one in numels], backward.tolist(), 0.02, 0.0)


def sweep(costs: Costs, numels: list[int]) -> NDArray[np.int64]:
    """Espresso's algorithm 1 in one go: from no compression, large groups first, of equal ones those that are
    nearest to the output, each gets what is best for it as the others are then."""
    choice = np.zeros(len(numels), np.int64)
    for group in sorted(range(len(numels)), key=lambda one: (-numels[one], one)):
        times = []
        for option in range(int(costs.options[group])):
            choice[group] = option
            times.append(costs.iteration(choice))
        choice[group] = int(np.argmin(times))
    return choice


HOSTS = "v100:8x1,nic=ethernet-25"


def fusion_rows(quick: bool) -> Iterator[Row]:
    """One codec in its best groups, in single layers, and in DDP's buckets."""
    for name in [*JOBS][:2] if quick else JOBS:
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
