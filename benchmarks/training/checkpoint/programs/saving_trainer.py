"""A job whose state is large and whose computing is a wait, kept by the saver that is asked for.

The wait stands for a forward and a backward pass on an accelerator, which leave the host's cores free. The
state is real: parameters of this rank's own, as a pipeline stage or a shard has them, and AdamW's moments,
changed at every step. An all-reduce keeps the ranks in step. It ends with the step in the file "last".

Each saver (the baselines and `PeerCheckpointer`, behind one face) is told of every step that is done and
saves as often as it can. What saves in the background begins anew when all ranks have come to the end of the
save before; what blocks saves after every step. Every rank tells the run's events when its save was whole
(``saved``), and when it has its state back (``restored``).
"""

import argparse
import contextlib
import fcntl
import io
import itertools
import mmap
import os
import secrets
import shutil
import struct
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import async_save as dcp_async_save
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from benchmarks.training.checkpoint.harness import over
from windtunnel.base import atomic
from windtunnel.training.checkpoint import PeerCheckpointer
from windtunnel.training.elastic import Job, determinism, run

PIECE = 1 << 20
KEPT = 2  # saves that stay: the newest whole one is never removed
State = dict[str, torch.Tensor]


class Saver(Protocol):
    """``restore``: put the newest state that all ranks have into the tensors, and return the next step.
    ``free``: nothing is being written. ``save``: begin to, or do it."""

    def restore(self) -> int: ...

    def free(self) -> bool: ...

    def save(self, step: int) -> None: ...


class Bucket:
    """A store that all ranks share: ``rate`` bytes/s for all together, counted in a file. None: no limit."""

    _AT = struct.Struct("<d")

    def __init__(self, path: Path, rate: float | None) -> None:
        self._rate = rate
        if rate is not None:
            self._file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
            os.ftruncate(self._file, self._AT.size)
            self._map = mmap.mmap(self._file, self._AT.size)

    def take(self, nbytes: int) -> None:
        """Wait until the store has moved so many bytes more."""
        if self._rate is None:
            return
        fcntl.flock(self._file, fcntl.LOCK_EX)
        try:
            (idle_at,) = self._AT.unpack(self._map)
            done = max(idle_at, time.monotonic()) + nbytes / self._rate
            self._map[:] = self._AT.pack(done)
        finally:
            fcntl.flock(self._file, fcntl.LOCK_UN)
        time.sleep(max(0.0, done - time.monotonic()))


class InFiles:
    """torch.save: the state is serialised at once, and a thread writes it, with fsync, to storage."""

    def __init__(self, job: Any, state: State, folder: Path, rate: float | None) -> None:
        self._job, self._state, self._folder = job, state, folder
        folder.mkdir(parents=True, exist_ok=True)
        self._bucket = Bucket(folder / "bucket", rate)
        self._pool = ThreadPoolExecutor(1)
        self._pending: Future[None] | None = None

    def restore(self) -> int:
        step = newest(self._job, steps_in(self._folder, f"rank{self._job.rank}.*.pt"))
        begin = time.monotonic()
        if step < 0:
            return 0
        found = read(self._path(step), self._bucket)
        put(self._state, torch.load(io.BytesIO(found)))
        restored(self._job, step, "storage", begin)
        return step + 1

    def free(self) -> bool:
        return self._pending is None or self._pending.done()

    def save(self, step: int) -> None:
        if self._pending is not None:
            self._pending.result()
        data = io.BytesIO()
        torch.save(self._state, data)
        self._pending = self._pool.submit(self._write, step, data)

    def _write(self, step: int, data: io.BytesIO) -> None:
        write(self._path(step), data.getbuffer(), self._bucket)
        self._job.event("saved", step=step)
        keep_newest(self._folder, f"rank{self._job.rank}.*.pt")

    def _path(self, step: int) -> Path:
        return self._folder / f"rank{self._job.rank}.{step}.pt"


class InDcp:
    """torch.distributed.checkpoint, to the disk: ``save``, or ``async_save`` (``later``)."""

    def __init__(self, job: Any, state: State, folder: Path, later: bool) -> None:
        self._job, self._folder, self._later = job, folder, later
        # Each rank has tensors of its own: equal names would be taken for replicas, and be written once.
        self._state = {f"rank{job.rank}.{name}": tensor for name, tensor in state.items()}
        self._group = dist.new_group(backend="gloo")
        self._pending: Future[Any] | None = None

    def restore(self) -> int:
        whole = [int(path.parent.name) for path in self._folder.glob("*/.metadata")]
        step, begin = newest(self._job, whole), time.monotonic()
        if step < 0:
            return 0
        dcp_load(self._state, checkpoint_id=self._folder / str(step), process_group=self._group)
        restored(self._job, step, "storage", begin)
        return step + 1

    def free(self) -> bool:
        return self._pending is None or self._pending.done()

    def save(self, step: int) -> None:
        folder = self._folder / str(step)
        if self._job.rank == 0:
            threading.Thread(target=self._prune, daemon=True).start()
        if not self._later:
            dcp_save(self._state, checkpoint_id=folder, process_group=self._group)
            self._job.event("saved", step=step)
            return
        if self._pending is not None:
            self._pending.result()
        pending = dcp_async_save(self._state, checkpoint_id=folder, process_group=self._group)
        assert isinstance(pending, Future)
        pending.add_done_callback(lambda done: done.exception() or self._job.event("saved", step=step))
        self._pending = pending

    def _prune(self) -> None:
        whole = sorted(int(path.parent.name) for path in self._folder.glob("*/.metadata"))
        for step in whole[:-KEPT]:
            shutil.rmtree(self._folder / str(step), ignore_errors=True)


class InMemories:
    """As NVIDIA's resiliency extension replicates local checkpoints: the ranks of a clique of two gather each
    other's pickled states, blocking, and each writes all of them to its host's memory (tmpfs)."""

    def __init__(self, job: Any, state: State) -> None:
        self._job, self._state = job, state
        self._folder = Path(job.memory.removeprefix("unix:")).parent / "gathered"
        self._folder.mkdir(exist_ok=True)
        groups = [dist.new_group([rank, rank + 1], backend="gloo") for rank in range(0, job.world, 2)]
        self._group = groups[job.rank // 2]

    def restore(self) -> int:
        rank, other = self._job.rank, self._job.rank ^ 1
        own = steps_in(self._folder, f"rank{rank}.*.pt")
        for_other = steps_in(self._folder, f"rank{other}.*.pt")
        said = self._job.agree("held", {"own": own, "other": for_other})
        begin = time.monotonic()
        per_rank = [set(said[r]["own"]) | set(said[r ^ 1]["other"]) for r in said]
        step = max(set.intersection(*per_rank), default=-1)
        if step < 0:
            return 0
        lacks, other_lacks = step not in own, step not in said[other]["own"]
        data = b"" if lacks else read(self._path(rank, step), None)
        if lacks or other_lacks:
            given = read(self._path(other, step), None) if other_lacks else b""
            out: list[Any] = [None, None]
            dist.all_gather_object(out, given, group=self._group)
            data = out[other % 2] if lacks else data
        put(self._state, torch.load(io.BytesIO(data)))
        restored(self._job, step, "peer" if lacks else "memory", begin)
        return step + 1

    def free(self) -> bool:
        return True

    def save(self, step: int) -> None:
        data = io.BytesIO()
        torch.save(self._state, data)
        gathered: list[Any] = [None, None]
        dist.all_gather_object(gathered, data.getvalue(), group=self._group)
        first = self._job.rank // 2 * 2
        for rank, one in enumerate(gathered, first):
            atomic.replace(self._path(rank, step), one)
            keep_newest(self._folder, f"rank{rank}.*.pt")
        self._job.event("saved", step=step)

    def _path(self, rank: int, step: int) -> Path:
        return self._folder / f"rank{rank}.{step}.pt"


class InPeers:
    """`PeerCheckpointer`; its commits are in the run's events by themselves."""

    def __init__(self, job: Any, program: dict[str, Any], copies: int) -> None:
        self._program = program
        self._checkpointer = PeerCheckpointer(job, copies=copies)

    def restore(self) -> int:
        return self._checkpointer.restore(self._program)

    def free(self) -> bool:
        return True

    def save(self, step: int) -> None:
        self._checkpointer.step(step, self._program)


def write(path: Path, data: memoryview, bucket: Bucket) -> None:
    """Whole under its name or not at all, and on the disk when this returns; out of the system's cache."""
    part = path.with_suffix(f".{secrets.token_hex(4)}.part")  # an earlier generation may still write its own
    with part.open("wb", buffering=0) as file:
        for at in range(0, len(data), PIECE):
            piece = data[at : at + PIECE]
            bucket.take(len(piece))
            file.write(piece)
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    part.replace(path)


def read(path: Path, bucket: Bucket | None) -> bytes:
    parts = []
    with path.open("rb", buffering=0) as file:
        while piece := file.read(PIECE):
            if bucket is not None:
                bucket.take(len(piece))
            parts.append(piece)
    return b"".join(parts)


def put(state: State, saved: State) -> None:
    with torch.no_grad():
        for name, tensor in state.items():
            tensor.copy_(saved[name])


def steps_in(folder: Path, pattern: str) -> list[int]:
    return sorted(int(path.name.split(".")[1]) for path in folder.glob(pattern))


def keep_newest(folder: Path, pattern: str) -> None:
    """All but the newest go: the last but one is whole in all ranks when any begins another."""
    paths = sorted(folder.glob(pattern), key=lambda path: int(path.name.split(".")[1]))
    for path in paths[:-KEPT]:
        with contextlib.suppress(FileNotFoundError):
            path.unlink()


def newest(job: Any, mine: list[int]) -> int:
    """The newest step that all ranks have; -1 for none."""
    said = job.agree("held", mine)
    return max(set.intersection(*(set(steps) for steps in said.values())), default=-1)


def restored(job: Any, step: int, tier: str, begin: float) -> None:
    job.agree("restored")  # the job goes on when the last has its state
    job.event("restored", step=step, tier=tier, seconds=time.monotonic() - begin)


SAVERS: dict[str, Callable[..., Saver]] = {
    "store": lambda job, state, program, args: InFiles(job, state, args.store, args.rate),
    "disk": lambda job, state, program, args: InFiles(job, state, args.store, None),
    "dcp": lambda job, state, program, args: InDcp(job, state, args.store, False),
    "dcp-async": lambda job, state, program, args: InDcp(job, state, args.store, True),
    "gather": lambda job, state, program, args: InMemories(job, state),
    "peer": lambda job, state, program, args: InPeers(job, program, args.copies),
}


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
