"""What `regroup` strikes: ranks that add up a few numbers, again and again.

It ends at the step that the file `jobs.LAST` of the run's folder names.
"""

import time

import torch
import torch.distributed as dist

from benchmarks.harness.jobs import over
from windtunnel.training.elastic import Job, run

PAUSE = 0.01  # seconds of a step, so that many ranks leave the cores to what is measured


def train(job: Job) -> int:
    """Steps are counted on from the farthest rank's."""
    torch.set_num_threads(1)
    kept: dict[str, int] = job.keep("count", lambda: {"step": 0})
    numbers = torch.tensor([float(kept["step"])])
    dist.all_reduce(numbers, op=dist.ReduceOp.MAX)
    step = int(numbers.item())
    work = torch.ones(4096)
    while not over(job, step):
        dist.all_reduce(work)
        work.fill_(1.0)
        time.sleep(PAUSE)
        job.step(step)
        step += 1
        kept["step"] = step
    return step


if __name__ == "__main__":
    run(train)
