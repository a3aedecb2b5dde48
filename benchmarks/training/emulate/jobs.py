"""The example job on this host's cores: run for real, as one captured rank, or calibrated for.

    torchrun ... -m benchmarks.training.emulate.jobs SLICE FOLDER SECONDS

is one process of a calibration for a captured job: the job's own operators, while its peers do the same.
Ranks that compute side by side share memory bandwidth, the last cache and the clock budget of the processor,
so an operator is measured with as many cores equally busy as the job has ranks. Each rank writes
``FOLDER/RANK.json``, a profile. Nothing here has seen the time of a real step of the job.

What a job on this machine costs beside its operators, for `truth`: sharding, and its own collectives.

Sharding a model with FSDP2 costs the host thread hooks around groups, and parameters as DTensors. Two equal
small transformers are trained, one of them sharded over the process group at hand. What a step of the sharded
one takes longer, less what its own operators take longer by themselves, is divided by the tensors that pass
through FSDP's operators. Times are those of the rank's own thread, so that waiting for peers does not count.
"""

from __future__ import annotations

import json
import os
import pickle
import statistics
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from time import thread_time
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from benchmarks import ROOT
from windtunnel.base.errors import ScriptError
from windtunnel.cluster.load import load_cluster
from windtunnel.training.emulate.calibrate.gloo import Row, calls_of, median_seconds
from windtunnel.training.emulate.calibrate.measure import (
    ROWS,
    WIDTH,
    measure_operators,
    measure_overhead,
    on_threads,
    small_model,
)
from windtunnel.training.emulate.calibrate.operators import OperatorRecorder
from windtunnel.training.emulate.graph import EventKind, Slice
from windtunnel.training.emulate.live.session import Session
from windtunnel.training.emulate.program import Script
from windtunnel.training.emulate.twin.costs.collectives import full_bytes
from windtunnel.training.emulate.twin.costs.profile import save_profile
from windtunnel.training.emulate.twin.costs.work import kind_of

PACKAGE = "benchmarks.training.emulate"
TIMEOUT = 900.0


@dataclass(frozen=True)
class BenchJob:
    """``world`` ranks of train_llama.py, each on one core with one thread."""

    parallel: str
    world: int
    seq: int = 256
    batch: int = 4

    @property
    def name(self) -> str:
        return f"{self.parallel} x{self.world}"

    def arguments(self, steps: int) -> list[str]:
        """What the script is given."""
        return [
            "--size", "debug", "--parallel", self.parallel, "--ac", "none", "--dtype", "fp32",
            "--seq", str(self.seq), "--batch", str(self.batch), "--steps", str(steps),
        ]  # fmt: skip


def example(name: str = "train_llama.py") -> Path:
    return ROOT / "examples" / name


def launch(world: int, module: str, *arguments: str) -> None:
    """Run ``module`` of `PACKAGE` as ``world`` processes under torchrun, one thread each.

    Raises `ScriptError` with the output when it fails or takes longer than `TIMEOUT` seconds.
    """
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world),
        "-m", f"{PACKAGE}.{module}", *arguments,
    ]  # fmt: skip
    environment = os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    try:
        done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=TIMEOUT)
    except subprocess.TimeoutExpired as error:
        raise ScriptError(f"{module}: no end after {TIMEOUT:.0f} s") from error
    if done.returncode:
        raise ScriptError(
            f"{module}: exit status {done.returncode}", done.stdout[-2000:] + done.stderr[-4000:]
        )


def run_for_real(job: BenchJob, mode: str, steps: int) -> list[list[float]]:
    """Figures of each rank's steps: `tracked`'s ``time`` or ``memory``; [world, steps]."""
    with tempfile.TemporaryDirectory() as folder:
        launch(job.world, "tracked", mode, folder, str(example()), *job.arguments(steps))
        return read_figures(Path(folder), job.world)


def real_peak(job: BenchJob) -> tuple[int, str]:
    """The most bytes of a step's storages in a real run, and in words in how many steps so. The first step of
    each rank does not count; and a thread of gloo may hold a buffer for a moment longer, so that now and then
    a step stands out: what most have is meant."""
    settled = [int(peak) for rank in run_for_real(job, "memory", 5) for peak in rank[1:]]
    measured, times = Counter(settled).most_common(1)[0]
    return measured, f"storages of all ranks in a real run: so in {times} of {len(settled)} steps"


def read_figures(folder: Path, world: int) -> list[list[Any]]:
    """What each rank of a tracked run wrote: a figure (mode ``cuda``: three) for each step."""
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(world)]


def capture_first(job: BenchJob) -> Slice:
    """Rank 0 of the job, captured with pretended peers."""
    script = Script(example(), tuple(job.arguments(5)))
    with Session(script, load_cluster(f"cpu:1x{job.world}"), jobs=1) as session:
        return session.capture([0])[0]


def step_order(slice_: Slice) -> list[int]:
    """Rows of the operator table in the order of the steady step."""
    events = slice_.events[slice(*slice_.steady)]
    rows: list[int] = events["ref"][events["kind"] == EventKind.OP].tolist()
    return rows


def step_calls(slice_: Slice) -> list[tuple[str, int]]:
    """The distinct collectives of the steady step: kind, and bytes as costs count them."""
    events = slice_.events[slice(*slice_.steady)]
    rows = np.unique(events["ref"][events["kind"] == EventKind.COLLECTIVE])
    calls = [slice_.collectives[row] for row in rows.tolist()]
    return sorted({(c.kind, full_bytes(c, len(slice_.groups[c.group].ranks))) for c in calls})


def peak_bytes(slice_: Slice) -> int:
    """The most bytes that the storages of the steady step held at one time, without any rounding.

    A CPU has no caching allocator, so this and not an allocator's view is what a real run is held against.
    """
    events = slice_.events
    kind, value = events["kind"], events["value"]
    size = np.zeros(int(events["ref"].max(initial=0)) + 1, np.int64)
    born = kind == EventKind.ALLOC
    size[events["ref"][born]] = value[born]
    change = np.where(born, value, 0)
    gone = kind == EventKind.FREE
    change[gone] = -size[events["ref"][gone]]
    begin, end = slice_.steady
    return int(np.cumsum(change)[max(begin - 1, 0) : end].max())


def main() -> None:
    """The program: see the module."""
    path, folder, seconds = sys.argv[1:]
    slice_ = pickle.loads(Path(path).read_bytes())
    dist.init_process_group("gloo")
    dist.barrier()
    overhead = measure_overhead(1)
    dist.barrier()
    overhead["fsdp_tensor"] = measure_sharding(1)
    dist.barrier()
    profile = measure_operators(slice_.operators, "cpu", 1, order=step_order(slice_), seconds=float(seconds))
    profile.host_overhead = overhead
    if dist.get_world_size() > 1:
        dist.barrier()
        profile.collectives = measure_calls(step_calls(slice_))
    save_profile(profile, Path(folder, f"{os.environ['RANK']}.json"))
    dist.barrier()
    os._exit(0)  # without gloo's destructors, which can deadlock: see `tracked`


COLD_BYTES = 16 << 20


def measure_calls(calls: list[tuple[str, int]], repeats: int = 25) -> list[Row]:
    """(kind, world, bytes, seconds) of each (kind, bytes) of ``calls`` among the ranks of the default group.

    To be called by all of them, which are otherwise busy as in the job: between two samples each walks
    through memory larger than its cache, so that buffers are as cold as a job's. Kinds unknown here are left
    out.
    """
    world, rank = dist.get_world_size(), dist.get_rank()
    other_work = torch.ones(COLD_BYTES // 4)
    rows: list[Row] = []
    for kind, nbytes in calls:
        call = dist.barrier if kind == "barrier" else calls_of(max(4 * world, nbytes), world, rank).get(kind)
        if call is not None:
            rows.append((kind, world, nbytes, median_seconds(call, repeats, lambda: other_work.add_(1.0))))
    return rows


class _LocalRecorder(OperatorRecorder):
    """Lets DTensors pass, whose operators come again on their local tensors."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented
        return super().__torch_dispatch__(func, types, args, kwargs)


def measure_sharding(threads: int = 1, repeats: int = 20) -> float:
    """Host seconds that FSDP2 adds for each tensor that is an argument of one of its operators.

    All ranks of the default process group (gloo) call this together.
    """
    with on_threads(threads):
        plain, _ = _beyond_operators(small_model(), threads, repeats)
        model = small_model()
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for block in model:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        sharded, tensors = _beyond_operators(model, threads, repeats)
    return max(0.0, sharded - plain) / max(1, tensors)


def _beyond_operators(model: nn.Module, threads: int, repeats: int) -> tuple[float, int]:
    """Thread seconds of a step beyond its operators, and the tensors that are arguments of FSDP's."""
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    x = torch.rand(1, ROWS, WIDTH)

    def step() -> None:
        optimizer.zero_grad()
        model(x).sum().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    seconds = []
    for repeat in range(repeats):
        begin = thread_time()
        step()
        if repeat > 2:
            seconds.append(thread_time() - begin)
    with _LocalRecorder() as recorder:
        step()
    ops = [
        op for op in recorder.operators
        if kind_of(op) != "view" and op.name.partition(".")[0] in ("aten", "fsdp")
    ]  # fmt: skip
    profile = measure_operators(ops, "cpu", threads, seconds=1.0)
    alone = sum(profile.exact(op) or 0.0 for op in ops)
    tensors = sum(len(op.tensors()) for op in ops if op.name.startswith("fsdp."))
    return statistics.median(seconds) - alone, tensors


if __name__ == "__main__":
    main()
