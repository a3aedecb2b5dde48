"""What a checkpoint of every step costs a training: ways to save take turns in one job.

Argument: JSON with ``turns``, each with the ``options`` of the `PeerCheckpointer` (null for none), ``steps``,
and how many of these, at the beginning, do not count (``settle``: memory is made, plans and profiles too).
Either ``width`` of a real model is given (FSDP2, or DDP with ``replicas``), or ``message``: then a step is
``layers`` all-reduces of so many bytes with a pause of ``compute`` seconds after each, where a device would
compute, and each turn says how many bytes a rank's state has (``nbytes``).

Result: by turn the ``seconds`` of each step that counts, and ``stalls``, what of them the call of the
checkpointer took; ``every``: steps between two checkpoints; bytes: ``slots`` on this host, ``own`` in
one save of its rank, ``sent`` to peers for each checkpoint that counts and ``inside`` of predicted spans.
"""

import json
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from benchmarks.harness.measure import seconds_of
from windtunnel.training.checkpoint import PeerCheckpointer
from windtunnel.training.checkpoint.live.state import State
from windtunnel.training.elastic import Job, run

PLAN: dict[str, Any] = json.loads(sys.argv[1])
BATCH, CLASSES, LAYERS = 16, 10, 4


class Model:
    """A real one, whose state grows a little with every turn: nobody goes back at the begin of one, so its
    slots are new ones, by their size."""

    def __init__(self, job: Job) -> None:
        self.job, width = job, PLAN["width"]
        torch.manual_seed(7)
        blocks = [
            nn.Sequential(nn.Linear(width, 2 * width), nn.ReLU(), nn.Linear(2 * width, width))
            for _ in range(LAYERS)
        ]
        self.model: nn.Module = nn.Sequential(*blocks, nn.Linear(width, CLASSES))
        if PLAN["replicas"]:
            self.model = nn.parallel.DistributedDataParallel(self.model)
        else:
            mesh = init_device_mesh("cpu", (job.world,))
            for block in (*blocks, self.model):
                fully_shard(block, mesh=mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.inputs, self.labels = torch.randn(BATCH, width), torch.randint(CLASSES, (BATCH,))

    def begun(self, turn: dict[str, Any], first: int) -> State:
        alike = nn.Parameter(torch.zeros(16 * first + 16), requires_grad=False)
        own = torch.full((16 * first + 16,), float(self.job.rank))
        state: State = {"model": self.model, "optimizer": self.optimizer}
        return {**state, "alike": nn.ParameterList([alike]), "own": own}

    def step(self) -> None:
        nn.functional.cross_entropy(self.model(self.inputs), self.labels).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


class Network:
    """All-reduces, and parameters that differ from rank to rank: shards, as with FSDP."""

    def __init__(self, job: Job) -> None:
        torch.set_num_threads(1)
        self.job, self.gradient, self.weights = job, torch.ones(PLAN["message"] // 4), nn.Parameter()

    def begun(self, turn: dict[str, Any], first: int) -> State:
        self.weights = nn.Parameter(torch.full((turn["nbytes"] // 4,), float(self.job.rank + 1)))
        return {"model": nn.ParameterList([self.weights])}

    def step(self) -> None:
        for _ in range(PLAN["layers"]):
            dist.all_reduce(self.gradient)
            time.sleep(PLAN["compute"])
        self.gradient.fill_(1.0)
        with torch.no_grad():
            self.weights[:1024] += 1.0


def train(job: Job) -> dict[str, Any]:
    """All turns."""
    work = Network(job) if "message" in PLAN else Model(job)
    turns, step = [], 0
    for turn in PLAN["turns"]:
        turns.append(measured(job, work, turn, step))
        step += turn["steps"]
    return {"turns": turns}


def measured(job: Job, work: Model | Network, turn: dict[str, Any], first: int) -> dict[str, Any]:
    state, settle = work.begun(turn, first), turn["settle"]
    saver = None if turn["options"] is None else PeerCheckpointer(job, **turn["options"])
    seconds, stalls = [], []
    dist.barrier()
    for step in range(first, first + turn["steps"]):
        training = seconds_of(work.step)
        stalls.append(seconds_of(lambda step=step: saver.step(step, state)) if saver else 0.0)  # type: ignore[misc]
        seconds.append(training + stalls[-1])
        job.step(step)
    figures: dict[str, Any] = {"seconds": seconds[settle:], "stalls": stalls[settle:]}
    if saver is not None:
        saver.flush()
        figures |= used(saver, first + settle)
        saver.close()
    dist.barrier()
    return figures


def used(saver: PeerCheckpointer, first: int) -> dict[str, Any]:
    access, plan, idle = saver._access, saver._plan, saver._idle
    assert access is not None and plan is not None
    traffic = [counts for step, counts in access.memory.traffic().items() if step >= first and counts[0]]
    own = sum(layout.nbytes for layout in plan.layouts.values())
    sent, inside = ([counts[n] for counts in traffic] for n in (0, 1))
    every = saver.settings.every * (idle.every if idle is not None else 1)
    folder = next(slots[0].path.parent for slots in access._slots.values())
    nbytes = sum(path.stat().st_size for path in folder.glob("*.slot"))
    return {"slots": nbytes, "own": own, "sent": sent, "inside": inside, "every": every}


if __name__ == "__main__":
    run(train)
