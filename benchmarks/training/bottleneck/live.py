"""Measured over predicted: real ranks in namespaces, gloo over links of a stated rate, buckets by the
paper's rules. The prediction gets the gradients of a rank, measured while all compute and none sends, and the
rate."""

from __future__ import annotations

import time
from collections.abc import Iterator
from itertools import accumulate
from typing import Any

from benchmarks.figures import figure
from benchmarks.harness.measure import conditions, median
from benchmarks.harness.ranks import ranks
from benchmarks.harness.rows import Row, left_out
from windtunnel.linux import network
from windtunnel.training.bottleneck import Workload, netai20
from windtunnel.training.bottleneck.run import GBIT
from windtunnel.training.bottleneck.twin import buckets

RATES = (0.1, 0.25, 0.5, 1.0)
"""Gb/s."""
WIDTH, LAYERS, ROWS = 512, 8, 256


def live_rows(quick: bool) -> Iterator[Row]:
    """Two to four ranks at four rates."""
    if why := network.missing():
        yield left_out("live", "scaling factor", why)
        return
    with ranks(__name__) as run:
        for world in (2,) if quick else (2, 3, 4):
            for rate in RATES[::3] if quick else RATES:
                load = conditions()
                found = run(f"{__name__}:job", {"steps": 5 if quick else 15}, world, rate * GBIT, 200.0)
                measured = median(rank["alone"] / rank["whole"] for rank in found) or 0.0
                slowest = max(found, key=lambda rank: float(rank["alone"]))
                job = Workload("job", slowest["alone"], tuple(map(tuple, slowest["gradients"])))
                factor = netai20(job, world, rate * GBIT)
                yield figure(
                    "live", f"{world} ranks, {rate:g} Gb/s: scaling factor", "%", 100 * measured,
                    "within 5 points of what is emulated", emulated=100 * factor,
                    met=abs(measured - factor) <= 0.05, note=load,
                )  # fmt: skip


def last_of_buckets(gradients: list[tuple[float, int]]) -> set[int]:
    """The numbers, from 1, of the gradients with which a bucket is sent."""
    ends = set(accumulate(size for _, size in buckets(gradients)))
    return {n for n, total in enumerate(accumulate(size for _, size in gradients), 1) if total in ends}


def job(arguments: dict[str, Any]) -> dict[str, Any]:
    """On a rank: seconds of a step alone and with its all-reduces, and when which gradient is there."""
    import torch
    import torch.distributed as dist
    from torch import nn

    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
    batch = torch.randn(ROWS, WIDTH)
    arrived: list[tuple[float, Any]] = []
    pending: list[Any] = []
    sends = False
    waiting: list[Any] = []
    ends: set[int] = set()

    def flush() -> None:
        whole = torch.cat([gradient.flatten() for gradient in waiting])
        pending.append(dist.all_reduce(whole, async_op=True))
        waiting.clear()

    def ready(parameter: Any) -> None:
        arrived.append((time.perf_counter(), parameter.grad))
        if not sends:
            return
        waiting.append(parameter.grad)
        if len(arrived) in ends:
            flush()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(ready)

    def step() -> tuple[float, list[tuple[float, int]]]:
        dist.barrier()
        arrived.clear()
        began = time.perf_counter()
        loss = model(batch).square().mean()
        before = time.perf_counter()
        loss.backward()
        for work in pending:
            work.wait()
        pending.clear()
        seconds, waits = time.perf_counter() - began, []
        for moment, gradient in arrived:
            waits.append((moment - before, gradient.nbytes))
            before = moment
        model.zero_grad()
        return seconds, waits

    alone = [step() for _ in range(arguments["steps"] + 2)][2:]
    typical = sorted(alone)[len(alone) // 2]
    agreed = [last_of_buckets(typical[1])]  # by the first rank: all have to send the same
    dist.broadcast_object_list(agreed)
    ends, sends = agreed[0], True
    whole = [step()[0] for _ in range(arguments["steps"] + 2)][2:]
    return {"alone": typical[0], "whole": median(whole), "gradients": typical[1]}
