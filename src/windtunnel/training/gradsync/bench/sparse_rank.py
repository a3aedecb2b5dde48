"""One rank of the bench of sparse sums: draws its gradients, sums them by every scheme, and times that.

Gradients are of one density on all ranks. Of *elements* and *rows*, indices are drawn with the chances of
Zipf's law, the frequent ones first: ranks have much in common, and contiguous parts are uneven. Those of
*apart* are drawn evenly.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from windtunnel.training.gradsync.bench.ranks import interface_bytes
from windtunnel.training.gradsync.live.exchange import Peers
from windtunnel.training.gradsync.live.sparse import all_reduce
from windtunnel.training.gradsync.live.sparsity import measure
from windtunnel.training.gradsync.live.units import Units
from windtunnel.training.gradsync.model import CollectiveCost, Network
from windtunnel.training.gradsync.policy.sparse import SCHEMES, choose

KINDS = {"elements": (1, 1.6), "rows": (8, 1.2), "apart": (8, 0.0)}
"""Width of a unit, and the power of Zipf's law that it is drawn by."""
WARM = 3
REPEATED = 1.0
"""Seconds for which a short sum is repeated, at most `MOST` times: its least time counts."""
MOST = 8
LONG = 4.0
"""Seconds up to which one is done a second time: now and then a connection waits for a retransmission."""


def indices(rank: int, units: int, density: float, power: float) -> NDArray[np.int64]:
    """The units of a rank, ascending: drawn without replacement by adding Gumbel's noise to the logarithm of
    their chances."""
    rng = np.random.default_rng([rank, units, round(density * 1e6)])
    keys = -power * np.log(np.arange(1, units + 1)) + rng.gumbel(size=units)
    count = max(1, round(units * density))
    return np.sort(np.argpartition(keys, units - count)[units - count :]).astype(np.int64)


def main(arguments: dict[str, Any]) -> list[dict[str, Any]]:
    """For each case its kind and density, what was chosen, and of each scheme the seconds and bytes."""
    rank, world = dist.get_rank(), dist.get_world_size()
    network = _measured(arguments["rate"])
    found = []
    whole: dict[str, tuple[float, int]] = {}
    for kind, density in arguments["cases"]:
        width, power = KINDS[kind]
        units = arguments["elements"] // width
        mine = torch.from_numpy(indices(rank, units, density, power))
        values = torch.randn(len(mine), width, generator=torch.Generator().manual_seed(rank))
        gradient = torch.sparse_coo_tensor(
            mine[None], values, (units, width), is_coalesced=True, check_invariants=False
        )
        chosen = choose(measure(Peers(), Units(mine, values, units), sample=4096), network, world)
        told: dict[str, tuple[float, int]] = {}
        for scheme in SCHEMES:
            if scheme == "dense" and kind in whole:  # as long whatever is zero
                told[scheme] = whole[kind]
            else:
                told[scheme] = _timed(partial(all_reduce, gradient, scheme=scheme))
        whole[kind] = told["dense"]
        found.append({"kind": kind, "density": density, "chosen": chosen, "schemes": told})
    return found


def _timed(work: Callable[[], object]) -> tuple[float, int]:
    """The least seconds that ``work`` took, of the slowest rank each time, and bytes sent in it."""
    best, spent, nbytes, times = float("inf"), 0.0, 0, 0
    while times < MOST and (spent < REPEATED or (times == 1 and spent < LONG)):
        dist.barrier()
        before, begin = interface_bytes(), time.perf_counter()
        work()
        seconds, nbytes = time.perf_counter() - begin, interface_bytes() - before
        slowest = torch.tensor(seconds)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        best, spent, times = min(best, slowest.item()), spent + slowest.item(), times + 1
    return best, nbytes


def _measured(rate: float) -> Network:
    """The network as messages find it that have next to no bytes; its rate is known."""
    world = dist.get_world_size()
    few = torch.zeros(world, dtype=torch.uint8)
    for _ in range(WARM):
        Peers().gather(few)
        dist.all_reduce(torch.zeros(world))
    swap, _ = _timed(lambda: Peers().gather(few))
    ring, _ = _timed(lambda: dist.all_reduce(torch.zeros(world)))
    per_byte = (world - 1) / world / rate
    return Network(
        world, 1,
        (
            CollectiveCost("flat", "alltoall", swap, per_byte),
            CollectiveCost("flat", "allreduce", ring, 2 * per_byte),
        ),
    )  # fmt: skip
