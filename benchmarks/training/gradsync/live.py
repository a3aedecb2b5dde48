"""Plans against every single choice, in real processes whose links are limited, and their predictions.

Processes are ranks of DDP in network namespaces, with tc-tbf on both ends of each one's link. *Replayed
compute*: the job's layers sleep (`replay`). All else is real: DDP and its hooks, codecs with error feedback,
gloo, the links, and the profile that the plan is made on. Times are of the slowest rank; bytes, with headers,
of the rank that sends most.

ZEN's sum against five others, timed between namespaces with limited links.

Beside windtunnel's schemes two of others: the sparse parameter server with a contiguous part at each rank
(*server*; Parallax, EuroSys '19), and the same with blocks of 256 elements, sent if any of them is not zero
(*blocks*; OmniReduce, SIGCOMM '21). Every scheme sums the same gradients in the same processes, in pairwise
rounds, over links whose rate the processors of this host can follow with that many ranks.

Gradients are of one density on all ranks. Of *elements* and *rows*, indices are drawn with the chances of
Zipf's law, the frequent ones first: ranks have much in common, and contiguous parts are uneven. Those of
*apart* are drawn evenly.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import product
from statistics import fmean, median
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from benchmarks.harness.measure import in_turn
from benchmarks.harness.ranks import MBIT, interface_bytes, ranks
from benchmarks.harness.rows import Row, figure, need
from windtunnel.training.gradsync.live.exchange import Peers
from windtunnel.training.gradsync.live.hook import Handle, apply
from windtunnel.training.gradsync.live.profile import GradientReplay, profile, replay
from windtunnel.training.gradsync.live.sparse import Units, all_reduce, least_times, measure, push_pull, tried
from windtunnel.training.gradsync.model import NONE, CollectiveFit, JobNetwork, SyncPlan, SyncProfile
from windtunnel.training.gradsync.policy.plan import make_plan, uniform_plan
from windtunnel.training.gradsync.policy.sparse import SCHEMES

FABRICS = ((2, 50), (2, 100), (4, 50), (4, 100))
"""Ranks, and Mbit/s of each one's link."""
CODECS = ("fp16", "int8", "sign", "dragonn:0.01")
SIZES = (12, 14, 14, 14, 15, 15, 15, 15, 16, 16, 16, 16, 17, 17, 17, 18)
"""Elements of each layer's gradient, in the order of forward, as powers of two: 4.4 MB together."""
FORWARD, BACKWARD = 0.05, 0.2
"""Seconds; of backward, layers take shares that grow with the root of their size."""
BUCKET = 1 << 18
"""Elements of DDP's buckets: 1 MiB is to this job as 25 MiB are to one that is 25 times as large."""
FUSED = "dragonn:0.01"
HOOK = "PyTorch's fp16 hook"
REPEATS, WARM = 6, 2
"""Iterations that count, and those before them: DDP has its final buckets in the second."""
LIMIT, LONGEST = 200.0, 400.0
"""Seconds that the ranks of one fabric may take, to train and to sum."""


def live_rows(quick: bool) -> Iterator[Row]:
    """By fabric: each choice, and what the plan is to it."""
    with ranks("windtunnel.training.gradsync.live.sparse") as run:
        for world, rate in FABRICS[1:2] if quick else FABRICS:
            codecs = ["fp16", "sign", FUSED] if quick else list(CODECS)
            arguments = {"codecs": codecs, "repeats": 3 if quick else REPEATS}
            results = run(f"{__name__}:choices_on_rank", arguments, world, rate * MBIT, LIMIT)
            yield from rows_of(f"{world} ranks at {rate} Mbit/s", results)


def rows_of(fabric: str, results: list[dict[str, Any]]) -> Iterator[Row]:
    """The rows of one fabric, from what its ranks found."""
    from scipy.stats import spearmanr  # which ranks need not load

    seconds, predicted = {}, {}
    for name, arm in results[0]["arms"].items():
        arms = [rank["arms"][name] for rank in results]
        slowest = [max(each) for each in zip(*(rank["seconds"] for rank in arms), strict=True)]
        seconds[name], predicted[name] = median(slowest), arm["predicted"]
        note = f"{max(rank['nbytes'] for rank in arms) / 2**20:.2f} MiB, {arm['groups']} groups"
        note += ": " * (name == "plan") + "; ".join(arm["used"] * (name == "plan"))
        yield figure(f"{fabric}: {name}", "s", slowest, emulated=predicted[name], note=note)
    best = min((name for name in seconds if name in (NONE, HOOK, *CODECS)), key=lambda name: seconds[name])
    errors = {name: 100 * abs(predicted[name] / seconds[name] - 1) for name in seconds}
    worst = max(errors, key=lambda name: errors[name])
    about = (
        f"largest {errors[worst]:.1f} % ({worst}); lines of collectives fit to {results[0]['error']:.1%}, "
        f"handing a group over takes {results[0]['handing'] * 1e3:.2f} ms"
    )
    for words, unit, value, most, note in (
        (f"plan / best single choice ({best})", "x", seconds["plan"] / seconds[best], 1.02, ""),
        ("plan / none", "x", seconds["plan"] / seconds[NONE], 1.01, ""),
        ("mean error of predictions", "%", fmean(errors.values()), 10, about),
    ):
        yield figure(f"{fabric}: {words}", unit, value, f"<= {most} {unit}", note=note)
    order = float(spearmanr([*seconds.values()], [*predicted.values()]).statistic)
    note = f"over {len(seconds)} choices"
    yield figure(f"{fabric}: Spearman, predicted and measured", "", order, ">= 0.9", note=note)


# -- on each rank


def job() -> DistributedDataParallel:
    numels = [1 << power for power in SIZES]
    whole = sum(numel**0.5 for numel in numels)
    backward = [BACKWARD * numel**0.5 / whole for numel in numels]
    return DistributedDataParallel(GradientReplay(numels, backward, FORWARD, torch.device("cpu")))


def choices_on_rank(arguments: dict[str, Any]) -> dict[str, Any]:
    """Of each choice the seconds of its iterations here, bytes sent in one, and the prediction."""
    ddp = job()
    measured = profile(ddp, partial(replay, ddp), codecs=arguments["codecs"])
    shared: list[Any] = [choices(measured, arguments["codecs"]) if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(shared)
    plans: dict[str, SyncPlan] = shared[0]
    handles: list[Handle] = []
    arms: dict[str, Callable[[], tuple[float, int]]] = {}
    for name, plan in plans.items():
        model = job()
        handles.append(apply(model, plan))
        if name == HOOK:
            model.register_comm_hook(None, fp16_compress_hook)
        arms[name] = partial(_timed, model)
        for _ in range(WARM):
            arms[name]()
    samples = in_turn(arms, arguments["repeats"])
    for handle in handles:
        handle.close()
    return {
        "error": max(fit.error for fit in measured.network.collectives), "handing": measured.handing,
        "arms": {
            name: {
                "seconds": [seconds for seconds, _ in samples[name]],
                "nbytes": max(nbytes for _, nbytes in samples[name]),
                "groups": len(plan.groups),
                "used": sorted({group.option.words() for group in plan.groups}),
                "predicted": plans["fp16" if name == HOOK else name].forecasts[0].seconds,
            }
            for name, plan in plans.items()
        },
    }  # fmt: skip


def choices(measured: SyncProfile, codecs: list[str]) -> dict[str, SyncPlan]:
    """The plan, every codec alone in DDP's buckets, PyTorch's own hook, and one codec without fusion and in
    its best groups."""
    plans = {"plan": make_plan(measured)}
    plans |= {codec: uniform_plan(measured, codec, BUCKET) for codec in (NONE, *codecs)}
    plans[HOOK] = plans[NONE]
    plans[f"{FUSED} by layers"] = uniform_plan(measured, FUSED, 1)
    plans[f"{FUSED} in its best groups"] = uniform_plan(measured, FUSED)
    return plans


def _timed(ddp: DistributedDataParallel) -> tuple[float, int]:
    dist.barrier()
    before, begin = interface_bytes(), time.perf_counter()
    replay(ddp)
    return time.perf_counter() - begin, interface_bytes() - before


KINDS = {"elements": (1, 1.6), "rows": (8, 1.2), "apart": (8, 0.0)}
"""Width of a unit, and the power of Zipf's law that it is drawn by."""
ELEMENTS = 2**19
FEW = (8, 20, ELEMENTS, (*KINDS,))
MANY = (16, 5, ELEMENTS // 2, ("elements", "apart"))
"""Ranks, Mbit/s of each one's link, elements of the gradients, and their kinds."""
DENSITIES = (0.001, 0.01, 0.05, 0.2)
SHORT = 0.02
"""Seconds below which rounds and the turns of processes decide how long a sum takes, not bytes."""
BLOCK = 256
ALL = (*SCHEMES, "blocks", "server")
OTHERS = tuple(name for name in ALL if name not in ("zen", "dense"))
REPEATED = 0.5
"""Seconds for which a short sum is repeated: its least time counts."""


def indices(rank: int, units: int, density: float, power: float) -> NDArray[np.int64]:
    """The units of a rank, ascending: drawn without replacement by adding Gumbel's noise to the logarithm of
    their chances."""
    rng = np.random.default_rng([rank, units, round(density * 1e6)])
    keys = -power * np.log(np.arange(1, units + 1)) + rng.gumbel(size=units)
    count = max(1, round(units * density))
    return np.sort(np.argpartition(keys, units - count)[units - count :]).astype(np.int64)


def blocks_of(units: Units) -> Units:
    """The same elements in blocks of `BLOCK`, without those that are all zero."""
    row, column = units.values.nonzero(as_tuple=True)
    elements = units.indices[row] * units.width + column
    there, where = torch.unique_consecutive(elements // BLOCK, return_inverse=True)
    values = units.values.new_zeros(len(there), BLOCK)
    values[where, elements % BLOCK] = units.values[row, column]
    return Units(there, values, -(-units.total * units.width // BLOCK))


def sums_on_rank(arguments: dict[str, Any]) -> list[dict[str, Any]]:
    """On each rank: of each case its kind and density, what was chosen, and of each scheme the
    seconds and bytes."""
    rank, world = dist.get_rank(), dist.get_world_size()
    each = (world - 1) / world / arguments["rate"]
    lines = CollectiveFit("flat", "alltoall", 0.0, each), CollectiveFit("flat", "allreduce", 0.0, 2 * each)
    links = JobNetwork(world, 1, lines)
    cases = []
    whole: dict[str, tuple[float, int]] = {}
    for kind, density in arguments["cases"]:
        width, power = KINDS[kind]
        units = arguments["elements"] // width
        mine = torch.from_numpy(indices(rank, units, density, power))
        values = torch.randn(len(mine), width, generator=torch.Generator().manual_seed(rank))
        gradient = torch.sparse_coo_tensor(
            mine[None], values, (units, width), is_coalesced=True, check_invariants=False
        )
        sparse = Units(mine, values, units)
        measured = measure(Peers(), sparse, sample=4096)
        sent: dict[str, int] = {}

        def summed(
            scheme: str, gradient: torch.Tensor = gradient, sparse: Units = sparse,
            sent: dict[str, int] = sent,
        ) -> None:  # fmt: skip
            before = interface_bytes()
            if scheme in SCHEMES:
                all_reduce(gradient, scheme=scheme)
            else:
                push_pull(Peers(), blocks_of(sparse) if scheme == "blocks" else sparse, None)
            sent[scheme] = interface_bytes() - before

        trial = tried(gradient, measured, links)
        # all is as long whatever is zero
        timed = [name for name in ALL if name != "dense" or kind not in whole]
        times = least_times({name: partial(summed, name) for name in timed}, REPEATED)
        whole[kind] = whole.get(kind) or (times["dense"], sent["dense"])
        figures = {name: (times[name], sent[name]) if name in times else whole[kind] for name in ALL}
        cases.append(
            {
                "kind": kind, "density": density, "chosen": min(trial, key=trial.__getitem__),
                "schemes": figures,
            }
        )  # fmt: skip
    return cases


def sparse_rows(quick: bool) -> Iterator[Row]:
    """Times, bytes and choices between 8 ranks, and between 16, which takes minutes; there ZEN against the
    best of the others."""
    yield from _live(FEW, DENSITIES[1:3] if quick else DENSITIES)
    need("16 ranks are not in a quick run" * quick)
    gains = []
    for row in _live(MANY, DENSITIES):
        yield row
        if "elements" in row.name and "0.1%" not in row.name and row.measured is not None:
            gains.append(row.measured)
    if gains:
        yield figure(
            "high overlap: time of best other sparse scheme / zen's", "x", max(gains), ">= 2 x",
            published=5.09, source="ZEN (OSDI '25): up to 5.09x over the state of the art",
            note="elements by Zipf's law, from 1 % on; the largest",
        )  # fmt: skip


def _live(fabric: tuple[int, int, int, tuple[str, ...]], densities: Sequence[float]) -> Iterator[Row]:
    worst: list[tuple[float, float, str]] = []
    with ranks("windtunnel.training.gradsync.live.sparse") as run:
        world, rate, elements, kinds = fabric
        arguments = {"rate": rate * MBIT, "elements": elements, "cases": [*product(kinds, densities)]}
        results = run(f"{__name__}:sums_on_rank", arguments, world, rate * MBIT, LONGEST)
        for cases in zip(*results, strict=True):
            case, chosen = cases[0], cases[0]["chosen"]
            times = {name: seconds for name, (seconds, _) in case["schemes"].items()}
            best, rival = min(times.values()), min(times[name] for name in OTHERS)
            name = f"{world} ranks at {rate} Mbit/s, {case['kind']} {case['density']:.1%}"
            words = ", ".join(
                f"{scheme} {seconds * 1e3:.0f} ms"
                f" {max(each['schemes'][scheme][1] for each in cases) / 2**20:.2f} MiB"
                for scheme, seconds in times.items()
            )
            yield figure(
                f"{name}: best other sparse scheme / zen", "x", rival / times["zen"],
                note=f"{words}; chosen: {chosen}, {times[chosen] / best:.2f} x the best",
            )  # fmt: skip
            worst.append((times[chosen] / best, best, name))
    for words, judged in (
        (f"sums of {SHORT:g} s and more", [each for each in worst if each[1] >= SHORT]),
        ("shorter sums", [each for each in worst if each[1] < SHORT]),
    ):
        if judged:
            ratio, _, name = max(judged)
            right = sum(each[0] <= 1.05 for each in judged)
            yield figure(
                f"chosen scheme's time / best scheme's, worst case, {words}", "x", ratio, "<= 1.05 x",
                note=f"{name}; met in {right} of {len(judged)} cases",
            )  # fmt: skip
