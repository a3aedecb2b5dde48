"""The example job on this host's cores: run for real, as one captured rank, or calibrated for.

    torchrun ... -m benchmarks.training.emulate.jobs SLICE FOLDER SECONDS

is one process of a calibration for a captured job: the job's own operators, while its peers do the same.
Ranks that compute side by side share memory bandwidth, the last cache and the clock budget of the processor,
so an operator is measured with as many cores equally busy as the job has ranks. Each rank writes
``FOLDER/RANK.json``, a profile. Nothing here has seen the time of a real step of the job.
"""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import ROOT
from windtunnel.base.errors import ScriptError
from windtunnel.cluster.load import load_cluster
from windtunnel.training.emulate.graph import EventKind, Slice
from windtunnel.training.emulate.live.session import Session
from windtunnel.training.emulate.program import Script
from windtunnel.training.emulate.twin.costs.collectives import full_bytes

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


def launch(world: int, module: str, *arguments: str, package: str = PACKAGE) -> None:
    """Run ``module`` of a ``package`` as ``world`` processes under torchrun, one thread each.

    Raises `ScriptError` with the output when it fails or takes longer than `TIMEOUT` seconds.
    """
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world),
        "-m", f"{package}.{module}", *arguments,
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


def read_figures(folder: Path, world: int) -> list[list[Any]]:
    """What each rank of a tracked run wrote: a figure (mode ``cuda``: three) for each step."""
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(world)]


def capture_one(job: BenchJob) -> Slice:
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
    import torch.distributed as dist

    from benchmarks.training.emulate.beside import measure_calls, measure_sharding
    from windtunnel.training.emulate.calibrate import measure_operators, measure_overhead
    from windtunnel.training.emulate.twin.costs.profile import save_profile

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


if __name__ == "__main__":
    main()
