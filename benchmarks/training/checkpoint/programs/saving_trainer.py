"""A job whose state is large and whose computing is a wait, kept by the saver that is asked for.

The wait stands for a forward and a backward pass on an accelerator, which leave the host's cores free. The
state is real: parameters of this rank's own, as a pipeline stage or a shard has them, and AdamW's moments,
changed at every step. An all-reduce keeps the ranks in step. It ends with the step in the file "last".

Each saver (the baseline and `PeerCheckpointer`, behind one face) is told of every step that is done and
saves as often as it can: it begins anew when all ranks have come to the end of the save before (``free``).
``restore`` puts the newest state that all ranks have into the tensors, and returns the next step. Every rank
tells the run's events when its save was whole (``saved``), and when it has its state back (``restored``).
"""

import argparse
import io
import itertools
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.harness.jobs import over
from windtunnel.base import atomic
from windtunnel.training.checkpoint import PeerCheckpointer
from windtunnel.training.elastic import Job, run

KEPT = 2  # saves that stay: the newest whole one is never removed
PARTS = 8
PER_PARAMETER = 12  # bytes: the parameter and two moments, in float32
State = dict[str, torch.Tensor]


class InFiles:
    """torch.save: the state is serialised at once; a thread writes it, with fsync, to storage, whole under
    its name or not at all. The store moves ``rate`` bytes/s for all ranks, which save and load at the same
    time, each as much. The system's cache saves nothing, since the store's time is waited for."""

    def __init__(self, job: Job, state: State, folder: Path, rate: float) -> None:
        self._job, self._state, self._folder = job, state, folder
        folder.mkdir(parents=True, exist_ok=True)
        self._rate, self._pool = rate / job.world, ThreadPoolExecutor(1)
        self._pending: Future[None] | None = None

    def restore(self) -> int:
        """Go on from the newest step that all ranks have."""
        steps = self._job.agree("held", self._steps())
        step, begin = max(set.intersection(*map(set, steps.values())), default=-1), time.monotonic()
        if step < 0:
            return 0
        time.sleep(self._path(step).stat().st_size / self._rate)
        saved = torch.load(self._path(step))
        with torch.no_grad():
            for name, tensor in self._state.items():
                tensor.copy_(saved[name])
        self._job.agree("restored")  # the job goes on when the last has its state
        self._job.event("restored", step=step, tier="storage", seconds=time.monotonic() - begin)
        return step + 1

    def free(self) -> bool:
        return self._pending is None or self._pending.done()

    def save(self, step: int) -> None:
        if self._pending is not None:
            self._pending.result()
        data = io.BytesIO()
        torch.save(self._state, data)
        self._pending = self._pool.submit(self._write, step, data.getvalue())

    def _write(self, step: int, data: bytes) -> None:
        time.sleep(len(data) / self._rate)
        atomic.replace(self._path(step), data, durable=True)
        self._job.event("saved", step=step)
        # the last but one is whole in all ranks when any begins another
        for old in self._steps()[:-KEPT]:
            self._path(old).unlink(missing_ok=True)

    def _steps(self) -> list[int]:
        return sorted(
            int(path.name.split(".")[1]) for path in self._folder.glob(f"rank{self._job.rank}.*.pt")
        )

    def _path(self, step: int) -> Path:
        return self._folder / f"rank{self._job.rank}.{step}.pt"


class InPeers:
    """`PeerCheckpointer`; its commits are in the run's events by themselves."""

    def __init__(self, job: Job, program: dict[str, Any]) -> None:
        self._program, self._checkpointer = program, PeerCheckpointer(job, copies=2)

    def restore(self) -> int:
        return self._checkpointer.restore(self._program)

    def free(self) -> bool:
        return True

    def save(self, step: int) -> None:
        self._checkpointer.step(step, self._program)


def train(job: Job, args: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True, warn_only=True)
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
    saver: InFiles | InPeers = InPeers(job, {"model": model, "optimizer": optimizer})
    if args.saver == "store":
        saver = InFiles(job, state, args.store, args.rate)
    for step in itertools.count(saver.restore()):
        if over(job, step):
            break
        time.sleep(args.compute)
        optimizer.step()
        busy = torch.tensor([float(not saver.free())])
        dist.all_reduce(busy)
        ended = time.time()
        if not busy.item():
            saver.save(step)
        job.step(step, ended=ended, stall=time.time() - ended)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--saver", choices=("store", "peer"), required=True)
    parser.add_argument("--mib", type=float, required=True)
    parser.add_argument("--compute", type=float, required=True)
    parser.add_argument("--store", type=Path, required=True)
    parser.add_argument("--rate", type=float, required=True)
    arguments = parser.parse_args()
    run(lambda job: train(job, arguments))
