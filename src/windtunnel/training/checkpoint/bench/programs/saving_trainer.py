"""A job whose state is large and whose computing is a wait, kept by the saver that is asked for.

The wait stands for a forward and a backward pass on an accelerator, which leave the host's cores free. The
state is real: parameters of this rank's own, as a pipeline stage or a shard has them, and AdamW's moments,
changed at every step. An all-reduce keeps the ranks in step. It ends with the step in the file "last".
"""

import argparse
import itertools
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from windtunnel.training.checkpoint.bench.harness import LAST
from windtunnel.training.checkpoint.bench.savers import SAVERS
from windtunnel.training.elastic import Job, determinism, run

PARTS = 8
PER_PARAMETER = 12  # bytes: the parameter and two moments, in float32


def train(job: Job, args: argparse.Namespace) -> None:
    determinism.fix()
    torch.manual_seed(job.rank)
    count = int(args.mib * 2**20 / PER_PARAMETER / PARTS)
    model = nn.ParameterList([nn.Parameter(torch.randn(count)) for _ in range(PARTS)])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True)
    for parameter in model:
        parameter.grad = torch.randn(count)
    optimizer.step()  # so that the moments are there to be restored into
    state: dict[str, torch.Tensor] = {}
    for number, parameter in enumerate(model):
        state[f"{number}"] = parameter.detach()
        state |= {f"{number}.{name}": value for name, value in optimizer.state[parameter].items()}
    saver = SAVERS[args.saver](job, state, {"model": model, "optimizer": optimizer}, args)
    first = saver.restore()
    for step in itertools.count(first):
        if over(job, step):
            break
        time.sleep(args.compute)
        optimizer.step()
        busy = torch.tensor([float(not saver.free())])
        dist.all_reduce(busy)
        ended = time.time()
        if not busy.item():
            saver.save(step)
        told: dict[str, Any] = {"ended": ended, "stall": time.time() - ended, "saving": not busy.item()}
        job.step(step, **told)


def over(job: Job, step: int) -> bool:
    try:
        return step > int((job.folder / LAST).read_text())
    except FileNotFoundError:
        return False


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--saver", choices=list(SAVERS), required=True)
    parser.add_argument("--mib", type=float, required=True)
    parser.add_argument("--compute", type=float, required=True)
    parser.add_argument("--copies", type=int, default=2)
    parser.add_argument("--store", type=Path)
    parser.add_argument("--rate", type=float)
    return parser.parse_args()


if __name__ == "__main__":
    run(lambda job: train(job, arguments()))
