"""What a checkpoint of every step costs a training, arm by arm in one job, in turns.

Argument: JSON with ``width`` of the model, ``replicas`` (DDP; else FSDP2), ``arms``: name to the options of
the `PeerCheckpointer`, null for none; ``rounds``, and ``steps`` of each turn of an arm, of which the first
``settle`` do not count (memory is made, plans too). All arms meet what the host does meanwhile alike.
Result: by arm the ``seconds`` of each step that counts, ``stalls`` (what of them the call of the checkpointer
took); ``used``: bytes. Beside them ``floors``: seconds that are taken, by all ranks at once, to read the
state, to copy it, and to send it to the next rank over a bare connection.
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

from benchmarks.training.checkpoint.programs.fsdp_trainer import Training, made
from windtunnel.training.checkpoint import PeerCheckpointer
from windtunnel.training.checkpoint.live.memory import LocalMemory
from windtunnel.training.checkpoint.live.slot import BLOCK, Slot
from windtunnel.training.checkpoint.live.state import local, walk
from windtunnel.training.elastic import Job, run

PLAN: dict[str, Any] = json.loads(sys.argv[1])
REPEATS = 9  # of what the floors are the median of


def used(checkpointer: PeerCheckpointer) -> dict[str, int]:
    """Bytes of this host: ``held`` in its slots, ``own`` in one save of its rank, ``sent`` to peers for one
    checkpoint."""
    job, plan = checkpointer.job, checkpointer._plan
    assert plan is not None
    memory = LocalMemory(job.memory, job.rank, job.generation)
    try:
        sent = [sent for sent, _ in memory.traffic().values() if sent]
    finally:
        memory.close()
    own = sum(layout.nbytes for layout in plan.layouts.values())
    return {"held": checkpointer.health().nbytes, "own": own, "sent": max(sent, default=0)}


def train(job: Job) -> dict[str, Any]:
    """All arms in turn."""
    training = made(job, PLAN["width"], replicas=PLAN["replicas"])
    found: dict[str, Any] = {name: {"seconds": [], "stalls": []} for name in PLAN["arms"]}
    step = 0
    for _ in range(PLAN["rounds"]):
        for name, options in PLAN["arms"].items():
            turn(job, training, step, options, found[name])
            step += PLAN["steps"]
    return {"arms": found, "floors": floors(job, training)}


def turn(job: Job, training: Training, first: int, options: Any, found: dict[str, Any]) -> None:
    """One turn of an arm. Nobody goes back at its begin, so its slots are new ones: by their size."""
    saver = None if options is None else PeerCheckpointer(job, **options)
    state = training.state
    state["alike"] = nn.ParameterList([nn.Parameter(torch.zeros(16 * first + 16), requires_grad=False)])
    state["own"] = torch.full((16 * first + 16,), float(job.rank))
    dist.barrier()
    for number in range(PLAN["steps"]):
        begin = time.perf_counter()
        training.step(job)
        done = time.perf_counter()
        if saver is not None:
            saver.step(first + number, state)
        end = time.perf_counter()
        if number >= PLAN["settle"]:
            found["seconds"].append(end - begin)
            found["stalls"].append(end - done)
        job.step(first + number)
    if saver is not None:
        saver.flush()
        found["used"] = used(saver)
        saver.close()
    dist.barrier()


def floors(job: Job, training: Training) -> dict[str, float]:
    """Medians, seconds, all ranks at once: nothing of a checkpoint can take less that does the same."""
    tensors, _ = walk(training.state)
    sources = [here for _, tensor in tensors if (here := local(tensor)).numel()]
    nbytes = sum(source.nbytes for source in sources)
    path = Path("/dev/shm") / f"floor-{os.getpid()}"
    slot = Slot.create(path, "floor", 1, nbytes)
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
        begin = time.perf_counter()
        what()
        taken.append(time.perf_counter() - begin)
    return median(taken)


if __name__ == "__main__":
    run(train)
