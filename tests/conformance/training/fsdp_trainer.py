"""A real training job, small: FSDP2 (or DDP), AdamW, a schedule, dropout, and data that have a cursor.

Everything that a continuation can get wrong is in it: sharded parameters and moments, the generators' states,
the schedule, the order of the samples. It ends with the step in the file "last" of the run's folder.
"""

import argparse
import hashlib
import itertools
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from benchmarks.harness.jobs import over
from windtunnel.training.checkpoint import PeerCheckpointer
from windtunnel.training.checkpoint.live.state import State
from windtunnel.training.elastic import Job, run

SAMPLES, BATCH, CLASSES, LAYERS = 512, 16, 10, 4
FAULT = "fault-{rank}"
"""A file in the run's folder: what befalls the program on that rank at its next step, "raise" or "hang"."""


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.drop(self.down(torch.relu(self.up(x))))


class Samples:
    """Samples in an order that each epoch draws anew; the generator, the order and the cursor are state."""

    def __init__(self, width: int) -> None:
        generator = torch.Generator().manual_seed(11)
        self.x = torch.randn(SAMPLES, width, generator=generator)
        self.y = torch.randint(CLASSES, (SAMPLES,), generator=generator)
        self.generator = torch.Generator().manual_seed(12)
        self.order, self.at = torch.randperm(SAMPLES, generator=self.generator), 0

    def next(self, rank: int, world: int) -> tuple[torch.Tensor, torch.Tensor]:
        if self.at + BATCH * world > SAMPLES:
            self.order, self.at = torch.randperm(SAMPLES, generator=self.generator), 0
        mine = self.order[self.at + rank * BATCH : self.at + (rank + 1) * BATCH]
        self.at += BATCH * world
        return self.x[mine], self.y[mine]

    def state_dict(self) -> dict[str, Any]:
        return {"order": self.order, "at": self.at, "generator": self.generator.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.order, self.at = state["order"], state["at"]
        self.generator.set_state(state["generator"])


@dataclass
class Training:
    """What is trained, and ``state`` to be saved of it."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    schedule: torch.optim.lr_scheduler.LRScheduler
    samples: Samples

    @property
    def state(self) -> State:
        return dict(vars(self))

    def step(self, job: Job) -> torch.Tensor:
        """One step; the sum of the ranks' losses."""
        x, y = self.samples.next(job.rank, job.world)
        loss = nn.functional.cross_entropy(self.model(x), y)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.schedule.step()
        total = loss.detach().clone()
        dist.all_reduce(total)
        return total


def new_training(job: Job, width: int, *, replicas: bool = False) -> Training:
    """A training at its beginning."""
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.manual_seed(7)
    blocks = [Block(width) for _ in range(LAYERS)]
    model: nn.Module = nn.Sequential(*blocks, nn.Linear(width, CLASSES))
    if replicas:
        model = nn.parallel.DistributedDataParallel(model)
    else:
        mesh = init_device_mesh("cpu", (job.world,))
        for block in blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 37)
    torch.manual_seed(100 + job.rank)  # dropout differs from rank to rank
    return Training(model, optimizer, schedule, Samples(width))


def suffer(job: Job) -> None:
    """What this rank was told to (`FAULT`), once."""
    path = job.folder / FAULT.format(rank=job.rank)
    try:
        what = path.read_text()
        path.unlink()
    except FileNotFoundError:
        return
    if what == "raise":
        raise RuntimeError("a mistake of the program's own")
    time.sleep(3600.0)


def train(job: Job, args: argparse.Namespace) -> dict[str, Any]:
    training = new_training(job, 64)
    state = training.state
    checkpointer, first = None, 0
    if args.mode != "none":
        checkpointer = PeerCheckpointer(job, mode=args.mode)
        first = checkpointer.restore(state)

    hashes = {}
    for step in itertools.count(first):
        if over(job, step):
            break
        suffer(job)
        begin = time.perf_counter()
        total = training.step(job)
        if checkpointer is not None:
            checkpointer.step(step, state)
        job.step(step, seconds=time.perf_counter() - begin, loss=float(total.item()).hex())
        if step in args.hashes or over(job, step + 1):
            hashes[str(step)] = digest(state)
    if checkpointer is not None:
        checkpointer.close()
    return {"hashes": hashes, "nbytes": sum(part.nbytes for part in tensors(state))}


def tensors(state: dict[str, Any]) -> Iterator[torch.Tensor]:
    """This rank's part of them."""
    for value in leaves([part.state_dict() for part in state.values()]):
        if isinstance(value, torch.Tensor):
            yield value.to_local() if isinstance(value, DTensor) else value


def digest(state: dict[str, Any]) -> str:
    """Of all that this rank holds: shards, moments, schedule, cursor and the generator."""
    hasher = hashlib.blake2b()
    for value in leaves([part.state_dict() for part in state.values()]):
        if isinstance(value, DTensor):
            value = value.to_local()
        if isinstance(value, torch.Tensor):
            value = value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        hasher.update(value if isinstance(value, bytes) else repr(value).encode())
    hasher.update(torch.get_rng_state().numpy().tobytes())
    return hasher.hexdigest()


def leaves(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        for name in value:
            yield str(name)
            yield from leaves(value[name])
    elif isinstance(value, list | tuple):
        for part in value:
            yield from leaves(part)
    else:
        yield value


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--mode", choices=("none", "concurrent"), default="concurrent")
    parser.add_argument("--hashes", type=int, nargs="*", default=[])
    arguments = parser.parse_args()
    run(lambda job: train(job, arguments))
