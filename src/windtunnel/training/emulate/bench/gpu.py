"""The same comparison on a machine with GPUs: PyTorch's own counters of a real run against the emulation."""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch

from windtunnel.bench.rows import Row, left_out
from windtunnel.cluster.catalogue import device, device_names
from windtunnel.cluster.load import load_cluster
from windtunnel.training.emulate.bench.jobs import example, launch, read_figures
from windtunnel.training.emulate.emulation import Options, simulate
from windtunnel.training.emulate.live.session import Script

SECTION = "gpu"
STEPS = 18
WARM_UP = 3
ARGUMENTS = "--size 1b --parallel fsdp --seq 4096 --batch 2 --ac selective"


def gpu_rows(quick: bool) -> Iterator[Row]:
    """Iteration time, allocated and reserved bytes of a job on all GPUs of this machine."""
    if not torch.cuda.is_available():
        yield left_out(SECTION, "real GPU run", "no CUDA device: left out")
        return
    name = catalogue_name(torch.cuda.get_device_name())
    if name is None:
        yield left_out(SECTION, "real GPU run", f"{torch.cuda.get_device_name()} is not in the catalogue")
        return
    world = torch.cuda.device_count()
    arguments = [*ARGUMENTS.split(), "--steps", str(STEPS)]
    with tempfile.TemporaryDirectory() as folder:
        launch(world, "tracked", "cuda", folder, str(example()), *arguments)
        figures = read_figures(Path(folder), world)
    result = simulate(Script(example(), tuple(arguments)), load_cluster(f"{name}:1x{world}"), Options())
    job, source = f"1B, FSDP2, {world} x {name}", "torch.cuda.max_memory_*, all ranks, steady steps"
    settled = [step for rank in figures for step in rank[WARM_UP:]]
    seconds = statistics.median(step[0] for step in settled)
    yield Row(
        SECTION, f"{job}: iteration", "s", seconds, result.timing.iteration_time_s,
        source=f"median of {len(settled)} steps",
    )  # fmt: skip
    yield Row(
        SECTION, f"{job}: peak allocated", "bytes", max(step[1] for step in settled),
        max(profile.peak_allocated_bytes for profile in result.memory), source=source,
    )  # fmt: skip
    yield Row(
        SECTION, f"{job}: peak reserved", "bytes", max(step[2] for step in settled),
        max(profile.whole.reserved_bytes for profile in result.memory), source=source,
    )  # fmt: skip


def catalogue_name(torch_name: str) -> str | None:
    """The device of the catalogue that PyTorch calls ``torch_name``, or None."""
    names = (name for name in device_names() if name != "cpu")
    return next((name for name in names if device(name).torch_name == torch_name), None)
