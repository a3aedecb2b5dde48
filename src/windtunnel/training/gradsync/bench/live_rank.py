"""One rank of the bench of plans: DDP trains a job by one choice after the other.

*Replayed compute*: the job's layers sleep (`replay`). All else is real: DDP and its hooks, codecs with error
feedback, gloo, the links with their limited rate, and the profile that the plan is made on.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from windtunnel.bench.measure import in_turn
from windtunnel.training.gradsync.bench.ranks import interface_bytes
from windtunnel.training.gradsync.live.hook import Handle, apply
from windtunnel.training.gradsync.live.profile import profile
from windtunnel.training.gradsync.live.replay import Replay, replay
from windtunnel.training.gradsync.model import NONE, Plan, Profile
from windtunnel.training.gradsync.policy.plan import make_plan, uniform_plan

SIZES = (12, 14, 14, 14, 15, 15, 15, 15, 16, 16, 16, 16, 17, 17, 17, 18)
"""Elements of each layer's gradient, in the order of forward, as powers of two: 4.4 MB together."""
FORWARD, BACKWARD = 0.05, 0.2
"""Seconds; of backward, layers take shares that grow with the root of their size."""
BUCKET = 1 << 18
"""Elements of DDP's buckets: 1 MiB is to this job as 25 MiB are to one that is 25 times as large."""
FUSED = "dragonn:0.01"
HOOK = "PyTorch's fp16 hook"
WARM = 2
"""Iterations before those that count; DDP has its final buckets in the second."""


def job() -> DistributedDataParallel:
    numels = [1 << one for one in SIZES]
    whole = sum(one**0.5 for one in numels)
    backward = [BACKWARD * one**0.5 / whole for one in numels]
    return DistributedDataParallel(Replay(numels, backward, FORWARD, torch.device("cpu")))


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
