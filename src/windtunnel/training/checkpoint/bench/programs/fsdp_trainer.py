"""A real training job, small: FSDP2 (or DDP), AdamW, a schedule, dropout, and data that have a cursor.

Everything that a continuation can get wrong is in it: sharded parameters and moments, the generators' states,
the schedule, the order of the samples. It ends with the step in the file "last" of the run's folder.
"""

import argparse
import hashlib
import itertools
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from windtunnel.training.checkpoint.bench.harness import over, suffer
from windtunnel.training.checkpoint.live import snapshot
from windtunnel.training.checkpoint.live.checkpointer import PeerCheckpointer
from windtunnel.training.checkpoint.live.memory import LocalMemory
from windtunnel.training.checkpoint.live.state import State
from windtunnel.training.elastic import Job, determinism, run


class TimedCheckpointer(PeerCheckpointer):
    """Of every `step`: ``stall`` (s that the program waits in it) and of that ``copy`` (into the slot),
    ``settle`` (until the checksum of the save before, in blocking mode of this one, is made), ``wait`` (until
    a slot may be overwritten, in blocking mode until this save is committed)."""

    def __init__(self, job: Any, **options: Any) -> None:
        super().__init__(job, **options)
        self._spent: dict[str, float] = {}

    def step(self, step: int, state: State) -> None:
        self._spent = dict.fromkeys(("stall", "copy", "settle", "wait"), 0.0)
        with self._timed("stall"):
            super().step(step, state)

    def told(self) -> dict[str, float]:
        """The times of the last step."""
        return dict(self._spent)

    def used(self) -> dict[str, int]:
        """Bytes of this host: ``held`` in its slots, ``own`` in one save of its rank, ``sent`` to peers
        for one checkpoint."""
        if self._plan is None or self.job.memory is None:
            return {}
        memory = LocalMemory(self.job.memory, self.job.rank, self.job.generation)
        try:
            sent = [sent for sent, _ in memory.traffic().values() if sent]
        finally:
            memory.close()
        own = sum(layout.nbytes for layout in self._plan.layouts.values())
        return {"held": self.health().nbytes, "own": own, "sent": max(sent, default=0)}

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        begin = time.perf_counter()
        try:
            yield
        finally:
            self._spent[name] = self._spent.get(name, 0.0) + time.perf_counter() - begin

    def _copy(self, tensors: snapshot.Tensors, packed: bytes, slot: int, step: int) -> None:
        with self._timed("copy"):
            super()._copy(tensors, packed, slot, step)

    def _settle(self) -> None:
        with self._timed("settle"):
            super()._settle()

    def _ready(self, step: int) -> bool:
        with self._timed("wait"):
            return super()._ready(step)

    def _wait_committed(self, step: int) -> bool:
        with self._timed("wait"):
            return super()._wait_committed(step)


SAMPLES, BATCH, CLASSES = 512, 16, 10


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
        made = torch.Generator().manual_seed(11)
        self.x = torch.randn(SAMPLES, width, generator=made)
        self.y = torch.randint(CLASSES, (SAMPLES,), generator=made)
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


def train(job: Job, args: argparse.Namespace) -> dict[str, Any]:
    determinism.fix()
    torch.manual_seed(7)
    blocks = [Block(args.width) for _ in range(args.layers)]
    model: nn.Module = nn.Sequential(*blocks, nn.Linear(args.width, CLASSES))
    if args.replicas:
        model = nn.parallel.DistributedDataParallel(model)
    else:
        mesh = init_device_mesh("cpu", (job.world,))
        for block in blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 37)
    samples = Samples(args.width)
    torch.manual_seed(100 + job.rank)  # dropout differs from rank to rank
    state = {"model": model, "optimizer": optimizer, "schedule": schedule, "samples": samples}
    checkpointer, first = None, 0
    if args.mode != "none":
        checkpointer = TimedCheckpointer(job, copies=args.copies, mode=args.mode)
        first = checkpointer.restore(state)

    hashes = {}
    for step in itertools.count(first):
        if over(job, step):
            break
        suffer(job)
        begin = time.perf_counter()
        x, y = samples.next(job.rank, job.world)
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        total = loss.detach().clone()
        dist.all_reduce(total)
        told: dict[str, Any] = {"loss": float(total.item()).hex()}
        if checkpointer is not None:
            checkpointer.step(step, state)
            told |= checkpointer.told()
        job.step(step, seconds=time.perf_counter() - begin, **told)
        if step in args.hashes or over(job, step + 1):
            hashes[str(step)] = digest(state)
    used = {}
    if checkpointer is not None:
        checkpointer.flush()
        used = checkpointer.used()
        checkpointer.close()
    return {"hashes": hashes, "used": used}


def digest(state: dict[str, Any]) -> str:
    """Of all that this rank holds: shards, moments, schedule, cursor and the generator."""
    found = hashlib.blake2b()
    for value in leaves([part.state_dict() for part in state.values()]):
        if isinstance(value, DTensor):
            value = value.to_local()
        if isinstance(value, torch.Tensor):
            value = value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        found.update(value if isinstance(value, bytes) else repr(value).encode())
    found.update(torch.get_rng_state().numpy().tobytes())
    return found.hexdigest()


def leaves(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        for name in value:
            yield str(name)
            yield from leaves(value[name])
    elif isinstance(value, list | tuple):
        for one in value:
            yield from leaves(one)
    else:
        yield value


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--replicas", action="store_true", help="DDP in place of FSDP2")
    parser.add_argument("--copies", type=int)
    parser.add_argument("--mode", choices=("none", "blocking", "concurrent"), default="concurrent")
    parser.add_argument("--hashes", type=int, nargs="*", default=[])
    return parser.parse_args()


if __name__ == "__main__":
    run(lambda job: train(job, arguments()))
