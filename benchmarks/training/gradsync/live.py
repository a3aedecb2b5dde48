"""Plans against every single choice, in real processes whose links are limited, and their predictions.

Processes are ranks of DDP in network namespaces, with tc-tbf on both ends of each one's link. *Replayed
compute*: the job's layers sleep (`replay`). All else is real: DDP and its hooks, codecs with error feedback,
gloo, the links, and the profile that the plan is made on. Times are of the slowest rank; bytes, with headers,
of the rank that sends most.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from statistics import fmean, median
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from benchmarks.harness.measure import in_turn
from benchmarks.harness.ranks import MBIT, interface_bytes, ranks
from benchmarks.harness.rows import Row, figure
from windtunnel.training.gradsync.live.hook import Handle, apply
from windtunnel.training.gradsync.live.profile import profile
from windtunnel.training.gradsync.live.replay import GradientReplay, replay
from windtunnel.training.gradsync.model import NONE, Plan, Profile
from windtunnel.training.gradsync.policy.plan import make_plan, uniform_plan

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
LIMIT = 200.0


def live_rows(quick: bool) -> Iterator[Row]:
    """By fabric: each choice, and what the plan is to it."""
    with ranks("windtunnel.training.gradsync.live.sparse") as run:
        for world, rate in FABRICS[1:2] if quick else FABRICS:
            codecs = ["fp16", "sign", FUSED] if quick else list(CODECS)
            given = {"codecs": codecs, "repeats": 3 if quick else REPEATS}
            told = run(f"{__name__}:main", given, world, rate * MBIT, LIMIT)
            yield from rows_of(f"{world} ranks at {rate} Mbit/s", told)


def rows_of(fabric: str, told: list[dict[str, Any]]) -> Iterator[Row]:
    """The rows of one fabric, from what its ranks found."""
    from scipy.stats import spearmanr  # which ranks need not load

    seconds, predicted = {}, {}
    for name, arm in told[0]["arms"].items():
        arms = [one["arms"][name] for one in told]
        slowest = [max(each) for each in zip(*(one["seconds"] for one in arms), strict=True)]
        seconds[name], predicted[name] = median(slowest), arm["predicted"]
        note = f"{max(one['nbytes'] for one in arms) / 2**20:.2f} MiB, {arm['groups']} groups"
        note += ": " * (name == "plan") + "; ".join(arm["used"] * (name == "plan"))
        yield figure(f"{fabric}: {name}", "s", slowest, emulated=predicted[name], note=note)
    best = min((name for name in seconds if name in (NONE, HOOK, *CODECS)), key=lambda name: seconds[name])
    errors = {name: 100 * abs(predicted[name] / seconds[name] - 1) for name in seconds}
    worst = max(errors, key=lambda name: errors[name])
    about = (
        f"largest {errors[worst]:.1f} % ({worst}); lines of collectives fit to {told[0]['error']:.1%}, "
        f"handing a group over takes {told[0]['handing'] * 1e3:.2f} ms"
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
    numels = [1 << one for one in SIZES]
    whole = sum(one**0.5 for one in numels)
    backward = [BACKWARD * one**0.5 / whole for one in numels]
    return DistributedDataParallel(GradientReplay(numels, backward, FORWARD, torch.device("cpu")))


def main(arguments: dict[str, Any]) -> dict[str, Any]:
    """Of each choice the seconds of its iterations here, bytes sent in one, and the prediction."""
    ddp = job()
    measured = profile(ddp, partial(replay, ddp), codecs=arguments["codecs"])
    made: list[Any] = [choices(measured, arguments["codecs"]) if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(made)
    plans: dict[str, Plan] = made[0]
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
    found = in_turn(arms, arguments["repeats"])
    for handle in handles:
        handle.close()
    return {
        "error": max(one.error for one in measured.network.collectives), "handing": measured.handing,
        "arms": {
            name: {
                "seconds": [seconds for seconds, _ in found[name]],
                "nbytes": max(nbytes for _, nbytes in found[name]),
                "groups": len(plan.groups),
                "used": sorted({group.option.words() for group in plan.groups}),
                "predicted": plans["fp16" if name == HOOK else name].forecasts[0].seconds,
            }
            for name, plan in plans.items()
        },
    }  # fmt: skip


def choices(measured: Profile, codecs: list[str]) -> dict[str, Plan]:
    """The plan, every codec alone in DDP's buckets, PyTorch's own hook, and one codec without fusion and in
    its best groups."""
    found = {"plan": make_plan(measured)}
    found |= {codec: uniform_plan(measured, codec, BUCKET) for codec in (NONE, *codecs)}
    found[HOOK] = found[NONE]
    found[f"{FUSED} by layers"] = uniform_plan(measured, FUSED, 1)
    found[f"{FUSED} in its best groups"] = uniform_plan(measured, FUSED)
    return found


def _timed(ddp: DistributedDataParallel) -> tuple[float, int]:
    dist.barrier()
    before, begin = interface_bytes(), time.perf_counter()
    replay(ddp)
    return time.perf_counter() - begin, interface_bytes() - before
