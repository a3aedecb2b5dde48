"""A small real job for the tests of whole runs: everything that a continuation can get wrong is in it.

Sharded (FSDP2), replicated (DDP) or plain parameters, AdamW, a schedule, dropout, and data with a cursor. The
batch of a step is the same whatever the number of ranks. At a *gate* (before a step) all ranks wait for a
file, with everything committed, so that a test can strike at a moment that it chooses.
"""

import argparse
import hashlib
import time
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from windtunnel.training.checkpoint import PeerCheckpointer
from windtunnel.training.elastic import Job, run

WIDTH, BATCH = 12, 12
PATIENCE = 150.0


class Samples:
    """Indices in an order that each epoch draws anew. Global: each rank takes its part."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(12)
        self.order, self.at = torch.randperm(60, generator=self.generator), 0

    def next(self) -> torch.Tensor:
        if self.at == len(self.order):
            self.order, self.at = torch.randperm(60, generator=self.generator), 0
        self.at += BATCH
        return self.order[self.at - BATCH : self.at]

    def state_dict(self) -> dict[str, Any]:
        return {"order": self.order, "at": self.at, "generator": self.generator.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.order, self.at = state["order"], state["at"]
        self.generator.set_state(state["generator"])


def build(drop: float) -> nn.Sequential:
    torch.manual_seed(7)
    hidden = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.ReLU(), nn.Dropout(drop))
    return nn.Sequential(hidden, nn.Linear(4 * WIDTH, 3))


def data() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(11)
    return torch.randn(60, WIDTH, generator=generator), torch.randint(3, (60,), generator=generator)


def train(job: Job, args: argparse.Namespace) -> dict[str, Any]:
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True, warn_only=True)
    network = build(args.drop)
    model: nn.Module = network
    if args.kind == "fsdp":
        mesh = init_device_mesh("cpu", (job.world,))
        fully_shard(network[0], mesh=mesh)
        fully_shard(network, mesh=mesh)
    elif args.kind == "ddp":
        model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    schedule = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 5)
    samples = Samples()
    x, y = data()
    torch.manual_seed(100 + job.rank)  # dropout differs from rank to rank
    state = {"model": model, "optimizer": optimizer, "schedule": schedule, "samples": samples}
    keeper, first = None, 0
    if not args.bare:
        keeper = PeerCheckpointer(job)
        first = keeper.restore(state)
    for step in range(first, args.steps):
        if step in args.gates:
            wait_at_gate(job, keeper, step)
        batch = samples.next()
        mine = batch[job.rank * BATCH // job.world : (job.rank + 1) * BATCH // job.world]
        loss = nn.functional.cross_entropy(model(x[mine]), y[mine])
        loss.backward()
        if args.kind == "plain":
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad, op=dist.ReduceOp.AVG)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        total = loss.detach() / job.world
        dist.all_reduce(total)
        if keeper is not None:
            keeper.step(step, state)
        job.step(step, loss=float(total).hex())
    if keeper is not None:
        keeper.close()
    return {"digest": digest(state), "weights": whole(model)}


def wait_at_gate(job: Job, keeper: PeerCheckpointer | None, step: int) -> None:
    """All is committed; go on when the file is there."""
    if keeper is not None:
        keeper.flush()
    job.event("gate", step=step)
    last = time.monotonic() + PATIENCE
    while not (job.folder / f"go{step}").exists():
        assert time.monotonic() < last
        job.check()
        time.sleep(0.01)


def digest(state: dict[str, Any]) -> str:
    """Of all that this rank holds: parameters, moments, schedule, cursor and the generator."""
    hasher = hashlib.blake2b(digest_size=16)
    for value in leaves([part.state_dict() for part in state.values()]):
        if isinstance(value, DTensor):
            value = value.to_local()
        if isinstance(value, torch.Tensor):
            value = value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        hasher.update(value if isinstance(value, bytes) else repr(value).encode())
    hasher.update(torch.get_rng_state().numpy().tobytes())
    return hasher.hexdigest()


def leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        for name in value:
            yield str(name)
            yield from leaves(value[name])
    elif isinstance(value, list | tuple):
        for part in value:
            yield from leaves(part)
    else:
        yield value


def whole(model: nn.Module) -> list[float]:
    """All parameters, gathered."""
    numbers = []
    for parameter in model.parameters():
        tensor = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
        numbers += tensor.detach().reshape(-1).tolist()
    return numbers


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kind", choices=("fsdp", "ddp", "plain"), default="fsdp")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--drop", type=float, default=0.1)
    parser.add_argument("--gates", type=int, nargs="*", default=[])
    parser.add_argument("--bare", action="store_true", help="keep no checkpoints")
    return parser.parse_args()


if __name__ == "__main__":
    run(lambda job: train(job, arguments()))
