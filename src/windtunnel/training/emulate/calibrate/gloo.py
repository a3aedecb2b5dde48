"""Times of gloo collectives between processes of this machine, over loopback."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from datetime import timedelta
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist

from windtunnel.base.errors import ScriptError

PATIENCE = timedelta(seconds=120)
"""With the others, of which one may have failed."""
SIZES = (1 << 10, 1 << 13, 1 << 16, 1 << 18, 1 << 20, 1 << 22, 1 << 24)
Row = tuple[str, int, int, float]


def measure_gloo(world: int = 2, threads: int = 1, *, quick: bool = False) -> list[Row]:
    """(kind, world, bytes, seconds) of each collective among ``world`` processes of ``threads`` each.

    Bytes are as in `windtunnel.training.emulate.twin.costs.collectives`. Raises `ScriptError` when gloo fails
    here.
    """
    sizes = SIZES[:-1] if quick else SIZES
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", __name__, os.path.join(folder, "store"), str(world), str(threads)]
        processes = [
            subprocess.Popen(
                [*command, str(rank), *map(str, sizes)],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(world)
        ]
        outputs = [process.communicate() for process in processes]
    for process, (_, errors) in zip(processes, outputs, strict=True):
        if process.returncode:
            raise ScriptError(f"gloo among {world} processes of this machine failed", errors)
    return [(str(k), int(w), int(b), float(s)) for k, w, b, s in json.loads(outputs[0][0])]


def _work(store: str, world: int, threads: int, rank: int, sizes: list[int]) -> list[Row]:
    """What each process does; all of them return the same kinds and sizes, each with its own times."""
    torch.set_num_threads(threads)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=world, timeout=PATIENCE
    )
    rows: list[Row] = []
    for nbytes in sizes:
        for kind, call in calls_of(nbytes, world, rank).items():
            rows.append((kind, world, nbytes, median_seconds(call, 12 if nbytes < 1 << 22 else 5)))
    rows.append(("barrier", world, 0, median_seconds(dist.barrier, 20)))
    dist.barrier()
    dist.destroy_process_group()
    return rows


def calls_of(nbytes: int, world: int, rank: int) -> dict[str, Callable[[], Any]]:
    """One call of each kind over ``nbytes``; a maximum, so that repeated reductions stay the same numbers."""
    whole = torch.ones(nbytes // 4)
    piece = torch.ones(max(1, nbytes // 4 // world))
    full = torch.ones(piece.numel() * world)
    scratch = torch.ones_like(full)

    def message() -> None:
        if rank == 0:
            dist.send(whole, 1)
        elif rank == 1:
            dist.recv(whole, 0)

    return {
        "all_reduce": lambda: dist.all_reduce(whole, op=dist.ReduceOp.MAX),
        "all_gather": lambda: dist.all_gather_into_tensor(full, piece),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(piece, full, op=dist.ReduceOp.MAX),
        "broadcast": lambda: dist.broadcast(whole, 0),
        "all_to_all": lambda: dist.all_to_all_single(scratch, full),
        "send": message,
    }


def median_seconds(call: Callable[[], Any], repeats: int, before: Callable[[], Any] | None = None) -> float:
    """Median seconds of ``call`` made by all ranks at about the same time, each after ``before``."""
    samples = []
    for _ in range(repeats):
        if before is not None:
            before()
        dist.barrier()
        begin = perf_counter()
        call()
        samples.append(perf_counter() - begin)
    return statistics.median(samples[1:])


if __name__ == "__main__":
    _store, _world, _threads, _rank, *_sizes = sys.argv[1:]
    print(json.dumps(_work(_store, int(_world), int(_threads), int(_rank), [int(size) for size in _sizes])))
