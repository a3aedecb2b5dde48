"""What a checkpoint of every step costs a training: ways to save take turns in one job.

Argument: JSON with ``turns``, each with the ``options`` of the `PeerCheckpointer` (null for none), ``steps``,
and how many of these, at the beginning, do not count (``settle``: memory is made, plans and profiles too).
Either ``width`` of a real model is given (FSDP2, or DDP with ``replicas``), or ``message``: then a step is
``layers`` all-reduces of so many bytes with a pause of ``compute`` seconds after each, where a device would
compute, and each turn says how many bytes a rank's state has (``nbytes``).

Result: by turn the ``seconds`` of each step that counts, and ``stalls``, what of them the call of the
checkpointer took; ``every``: steps between two checkpoints; bytes: ``held`` in this host's slots, ``own`` in
one save of its rank, ``sent`` to peers for each checkpoint that counts and ``inside`` of predicted spans.
Beside them of a real model ``floors``: seconds that are taken, by all ranks at once, to read the state, to
copy it, and to send it to the next rank over a bare connection.
"""

import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import xxhash
from torch import nn

from benchmarks.harness.measure import seconds_of
from benchmarks.training.checkpoint.programs.fsdp_trainer import made
from windtunnel.training.checkpoint import PeerCheckpointer
from windtunnel.training.checkpoint.live.memory import LocalMemory
from windtunnel.training.checkpoint.live.slot import BLOCK, SlotFile
from windtunnel.training.checkpoint.live.state import State, local, walk
from windtunnel.training.elastic import Job, run

PLAN: dict[str, Any] = json.loads(sys.argv[1])
REPEATS = 9  # of what the floors are the median of


class Model:
    """A real one, whose state grows a little with every turn: nobody goes back at the begin of one, so its
    slots are new ones, by their size."""

    def __init__(self, job: Job) -> None:
        self.job, self.training = job, made(job, PLAN["width"], replicas=PLAN["replicas"])

    def begun(self, turn: dict[str, Any], first: int) -> State:
        alike = nn.Parameter(torch.zeros(16 * first + 16), requires_grad=False)
        own = torch.full((16 * first + 16,), float(self.job.rank))
        return {**self.training.state, "alike": nn.ParameterList([alike]), "own": own}

    def step(self) -> None:
        self.training.step(self.job)


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
    found, step = [], 0
    for turn in PLAN["turns"]:
        found.append(measured(job, work, turn, step))
        step += turn["steps"]
    return {"turns": found, "floors": floors(job, work.training.state) if isinstance(work, Model) else {}}


def measured(job: Job, work: Model | Network, turn: dict[str, Any], first: int) -> dict[str, Any]:
    state, settle = work.begun(turn, first), turn["settle"]
    saver = None if turn["options"] is None else PeerCheckpointer(job, **turn["options"])
    taken, stalls = [], []
    dist.barrier()
    for step in range(first, first + turn["steps"]):
        training = seconds_of(work.step)
        stalls.append(seconds_of(lambda step=step: saver.step(step, state)) if saver else 0.0)  # type: ignore[misc]
        taken.append(training + stalls[-1])
        job.step(step)
    found: dict[str, Any] = {"seconds": taken[settle:], "stalls": stalls[settle:]}
    if saver is not None:
        saver.flush()
        found |= used(saver, first + settle)
        saver.close()
    dist.barrier()
    return found


def used(saver: PeerCheckpointer, first: int) -> dict[str, Any]:
    job, plan, idle = saver.job, saver._plan, saver._idle
    assert plan is not None
    memory = LocalMemory(job.memory or "", job.rank, job.generation)
    try:
        traffic = [told for step, told in memory.traffic().items() if step >= first and told[0]]
    finally:
        memory.close()
    own = sum(layout.nbytes for layout in plan.layouts.values())
    sent, inside = ([told[n] for told in traffic] for n in (0, 1))
    access = saver._access
    assert access is not None
    folder = next(slots[0].path.parent for slots in access._slots.values())
    held = sum(path.stat().st_size for path in folder.glob("*.slot"))
    every = saver.settings.every * (idle.every if idle is not None else 1)
    return {"held": held, "own": own, "sent": sent, "inside": inside, "every": every}


def floors(job: Job, state: State) -> dict[str, float]:
    """Medians, seconds, all ranks at once: nothing of a checkpoint can take less that does the same."""
    tensors, _ = walk(state)
    sources = [here for _, tensor in tensors if (here := local(tensor)).numel()]
    path = Path("/dev/shm") / f"floor-{os.getpid()}"
    slot = SlotFile.create(path, "floor", 1, sum(source.nbytes for source in sources))
    path.unlink()
    targets, at = [], 0
    for source in sources:
        piece = torch.frombuffer(slot.data, dtype=torch.uint8, count=source.nbytes, offset=at)
        targets.append(piece.view(source.dtype).view(source.shape))
        at += source.nbytes
    views: list[Any] = [source.reshape(-1).view(torch.uint8).numpy() for source in sources]

    def read() -> None:
        whole = xxhash.xxh3_128()
        for view in views:
            whole.update(view)

    with torch.no_grad():
        return {
            "read": _median(read),
            "copy": _median(lambda: torch._foreach_copy_(targets, sources)),
            "send": _sending(job, slot.data),
        }


def _sending(job: Job, data: memoryview) -> float:
    """Every rank sends ``data`` to the next one, and gets as much."""
    into = memoryview(bytearray(len(data)))
    with socket.create_server(("127.0.0.1", 0)) as server:
        ports = job.agree("floors", server.getsockname()[1])
        out = socket.create_connection(("127.0.0.1", ports[(job.rank + 1) % job.world]))
        back, _ = server.accept()

    def receive() -> None:
        at = 0
        while at < len(into):
            at += back.recv_into(into[at : at + BLOCK])

    def both() -> None:
        thread = threading.Thread(target=receive)
        thread.start()
        out.sendall(data)
        thread.join()

    with out, back:
        return _median(both)


def _median(what: Callable[[], None]) -> float:
    taken = []
    for _ in range(REPEATS):
        dist.barrier()
        taken.append(seconds_of(what))
    return median(taken)


if __name__ == "__main__":
    run(train)
