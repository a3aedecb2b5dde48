"""What a checkpoint of every step costs a training, arm by arm in one job, in turns.

Argument: JSON with ``width`` of the model, ``replicas`` (DDP; else FSDP2), ``arms``: name to the options of
the `PeerCheckpointer`, null for none, "dcp" for DCP's ``async_save``; ``rounds``, and ``steps`` of each turn
of an arm, of which the first ``settle`` do not count (memory is made, plans too); ``learns``: arms that
have a turn before, which does not count, to learn how often they save. All arms meet what the host
does meanwhile alike. Result: by arm the ``seconds`` of each step that counts, ``spent`` (see
`TimedCheckpointer`), and ``cpu``: seconds of processor time that this process and its host's agent took for
a step; ``used``: bytes. Beside them ``floors``: seconds that are taken, by all ranks at once, to read the
state, to copy it, and to send it to the next rank over a bare connection.
"""

import json
import os
import shutil
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import psutil
import torch
import torch.distributed as dist
import xxhash
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.checkpoint.state_dict_saver import async_save

from benchmarks.training.checkpoint.programs.fsdp_trainer import Training, made
from windtunnel.training.checkpoint import PeerCheckpointer
from windtunnel.training.checkpoint.live.cadence import SAVED, WARM, WITHOUT
from windtunnel.training.checkpoint.live.memory import LocalMemory
from windtunnel.training.checkpoint.live.slot import BLOCK, Slot
from windtunnel.training.checkpoint.live.state import State, local, walk
from windtunnel.training.elastic import Job, run

PLAN: dict[str, Any] = json.loads(sys.argv[1])
PARTS = ("stall", "copy", "settle", "wait")
LEARNING = WARM + WITHOUT + SAVED + 4  # steps
REPEATS = 9  # of what the floors are the median of


class TimedCheckpointer(PeerCheckpointer):
    """Of every `step`: ``stall`` (s that the program waits in it) and of that ``copy`` (into the slot),
    ``settle`` (until the save before, in blocking mode this one, is complete at home), ``wait`` (until a slot
    may be overwritten, in blocking mode until this save is committed)."""

    def __init__(self, job: Any, **options: Any) -> None:
        super().__init__(job, **options)
        self.spent: dict[str, float] = {}

    def step(self, step: int, state: State) -> None:
        self.spent = dict.fromkeys(PARTS, 0.0)
        with self._timed("stall"):
            super().step(step, state)

    def used(self) -> dict[str, int]:
        """Bytes of this host: ``held`` in its slots, ``own`` in one save of its rank, ``sent`` to peers
        for one checkpoint."""
        assert self._plan is not None
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
            self.spent[name] = self.spent.get(name, 0.0) + time.perf_counter() - begin

    def _copy(self, *arguments: Any) -> dict[str, str]:
        with self._timed("copy"):
            return super()._copy(*arguments)

    def _settle(self) -> None:
        with self._timed("settle"):
            super()._settle()

    def _ready(self, step: int) -> bool:
        with self._timed("wait"):
            return super()._ready(step)

    def _wait_committed(self, step: int) -> bool:
        with self._timed("wait"):
            return super()._wait_committed(step)


class Dcp:
    """``async_save`` of the same state at every step, to memory (tmpfs) as the slots are."""

    def __init__(self, job: Job, training: Training) -> None:
        self._job, self._training = job, training
        self._folder = Path("/dev/shm") / f"dcp-{os.getppid()}-{job.folder.name}"
        self._group = dist.new_group(backend="gloo")
        self._pending: Future[Any] | None = None
        self.spent = dict.fromkeys(PARTS, 0.0)

    def step(self, step: int, state: State) -> None:
        begin = time.perf_counter()
        if self._pending is not None:
            self._pending.result()
        self.spent["settle"] = time.perf_counter() - begin
        model, optimizer = get_state_dict(self._training.model, self._training.optimizer)
        pending = async_save(
            {"model": model, "optimizer": optimizer},
            checkpoint_id=self._folder / str(step % 2),
            process_group=self._group,
        )
        assert isinstance(pending, Future)
        self._pending = pending
        self.spent["stall"] = time.perf_counter() - begin

    def close(self) -> None:
        if self._pending is not None:
            self._pending.result()
        dist.barrier()
        shutil.rmtree(self._folder, ignore_errors=True)


def train(job: Job) -> dict[str, Any]:
    """All arms in turn."""
    training = made(job, PLAN["width"], replicas=PLAN["replicas"])
    found: dict[str, Any] = {name: {"seconds": [], "spent": [], "cpu": []} for name in PLAN["arms"]}
    step = 0
    for name in PLAN["learns"]:
        turn(job, training, step, PLAN["arms"][name], {"seconds": [], "spent": [], "cpu": []}, LEARNING)
        step += LEARNING
    for _ in range(PLAN["rounds"]):
        for name, options in PLAN["arms"].items():
            turn(job, training, step, options, found[name], PLAN["steps"])
            step += PLAN["steps"]
    return {"arms": found, "floors": floors(job, training)}


def turn(job: Job, training: Training, first: int, options: Any, found: dict[str, Any], steps: int) -> None:
    """One turn of an arm. Nobody goes back at its begin, so its slots are new ones: by their size."""
    saver: Any = None
    if options is not None:
        saver = Dcp(job, training) if options == "dcp" else TimedCheckpointer(job, **options)
    agent = _agent(job)
    state = training.state
    state["alike"] = nn.ParameterList([nn.Parameter(torch.zeros(16 * first + 16), requires_grad=False)])
    state["own"] = torch.full((16 * first + 16,), float(job.rank))
    dist.barrier()
    begun = (0.0, 0.0)
    for number in range(steps):
        if number == PLAN["settle"]:
            begun = time.process_time(), _spent(agent)
        begin = time.perf_counter()
        training.step(job)
        if saver is not None:
            saver.step(first + number, state)
        seconds = time.perf_counter() - begin
        if number >= PLAN["settle"]:
            found["seconds"].append(seconds)
            found["spent"].append(dict(saver.spent) if saver is not None else {})
        job.step(first + number)
    if isinstance(saver, TimedCheckpointer):
        saver.flush()
    count = steps - PLAN["settle"]
    found["cpu"].append([(time.process_time() - begun[0]) / count, (_spent(agent) - begun[1]) / count])
    if isinstance(saver, TimedCheckpointer):
        found["used"], found["every"] = saver.used(), saver._interval()
    if saver is not None:
        saver.close()
    dist.barrier()


def _agent(job: Job) -> psutil.Process:
    """This host's agent: whoever listens where its memory is reached."""
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect((job.memory or "").removeprefix("unix:"))
        pid, _, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return psutil.Process(pid)


def _spent(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


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
