"""What `idle` trains: a step is some all-reduces with a pause after each, where a device would compute.

Argument: JSON with ``layers``, ``message`` (bytes of one all-reduce), ``compute`` (s after each), and
``phases``, each with ``options`` of the `PeerCheckpointer` (null for no checkpoints), ``nbytes`` of one
rank's state, ``steps``, and ``settle``: how many of them, at the beginning, do not count. Result: by phase
the ``seconds`` of every step that counts; ``every``: steps between two checkpoints; ``sent`` and ``inside``:
bytes sent, and those within windows.
"""

import json
import sys
import time
from typing import Any

import torch
import torch.distributed as dist

from windtunnel.training.checkpoint import PeerCheckpointer
from windtunnel.training.checkpoint.live.memory import LocalMemory
from windtunnel.training.elastic import Job, run

PLAN = json.loads(sys.argv[1])


def train(job: Job) -> list[dict[str, Any]]:
    """One phase after the other."""
    torch.set_num_threads(1)
    gradient = torch.ones(PLAN["message"] // 4)
    step = 0
    results = []
    for phase in PLAN["phases"]:
        found = measure(job, gradient, phase, step)
        step += phase["steps"]
        results.append(found)
    return results


def measure(job: Job, gradient: torch.Tensor, phase: dict[str, Any], first: int) -> dict[str, Any]:
    """``steps`` steps from number ``first`` on."""
    # Parameters, and other ones on each rank: shards, as with FSDP.
    model = torch.nn.Module()
    model.weights = torch.nn.Parameter(torch.full((phase["nbytes"] // 4,), float(job.rank + 1)))
    saver = None if phase["options"] is None else PeerCheckpointer(job, **phase["options"])
    seconds = []
    dist.barrier()
    for step in range(first, first + phase["steps"]):
        begin = time.perf_counter()
        for _ in range(PLAN["layers"]):
            dist.all_reduce(gradient)
            time.sleep(PLAN["compute"])
        gradient.fill_(1.0)
        with torch.no_grad():
            model.weights[:1024] += 1.0
        if saver is not None:
            saver.step(step, {"model": model})
        seconds.append(time.perf_counter() - begin)
        job.step(step)
    settled = phase["settle"]
    found: dict[str, Any] = {"seconds": seconds[settled:]}
    if saver is not None:
        idle = saver._idle
        found["every"] = saver.settings.every * (idle.every if idle is not None else 1)
        memory = LocalMemory(job.memory or "", job.rank, job.generation)
        counted = [told for at, told in memory.traffic().items() if at >= first + settled]
        memory.close()
        found["sent"], found["inside"] = (sum(told[n] for told in counted) for n in (0, 1))
        saver.close()
    dist.barrier()
    return found


if __name__ == "__main__":
    run(train)
