"""The example job for real, against its emulation: time, tensor memory, and the counters of a GPU.

*Time*: the real job and the calibration alternate, so that both see the machine as it is; neither knows the
other's figures. What is emulated is the time between the ends of two consecutive steps, as it is measured.
*Memory*: bytes of real storages in a real run against those of one captured rank, to be equal. *GPU*: the
same on a machine with GPUs, by PyTorch's own counters.
"""

from __future__ import annotations

import os
import pickle
import statistics
from collections.abc import Iterator

import torch

from benchmarks.harness.measure import scratch
from benchmarks.harness.rows import Row, figure, left_out, need
from benchmarks.training.emulate.jobs import (
    BenchJob,
    capture_first,
    example,
    launch,
    peak_bytes,
    read_figures,
    real_peak,
    run_for_real,
)
from windtunnel.cluster.catalogue import device, device_names
from windtunnel.cluster.load import load_cluster
from windtunnel.training.emulate.emulation import costs_of, simulate
from windtunnel.training.emulate.graph import Slice
from windtunnel.training.emulate.options import Options
from windtunnel.training.emulate.policy.classes import slice_world
from windtunnel.training.emulate.policy.stitch import stitch
from windtunnel.training.emulate.program import Script
from windtunnel.training.emulate.twin.costs.profile import read_profile
from windtunnel.training.emulate.twin.emulate import Timing, replay_world

WARM_UP = 3  # steps that are not counted: allocation, DDP's buckets, caches


def time_rows(quick: bool) -> Iterator[Row]:
    """Measured and emulated seconds of an iteration of each job, and the mean error of all."""
    repeats, steps, seconds = (1, 18, 4.0) if quick else (3, 18, 6.0)
    errors = []
    for job in (BenchJob("none", 1), BenchJob("ddp", 1), BenchJob("fsdp", 1), *pairs()):
        if job.world > (os.cpu_count() or 1):
            yield left_out(
                f"iteration, {job.name}", f"{job.world} ranks need as many cores, here are {os.cpu_count()}"
            )
            continue
        measured, emulated, words = compare(job, repeats, steps, seconds)
        note = f"real steps; calibration between them; {words}"
        row = figure(f"iteration, {job.name}", "s", measured, emulated=emulated, note=note)
        errors.append(row.error or 0.0)
        yield row
    yield figure("iteration, mean error", "", goal="<= 5%", emulated=statistics.mean(errors))


def pairs() -> list[BenchJob]:
    """The jobs of more than one rank."""
    return [BenchJob(parallel, world) for world in (2, 4) for parallel in ("ddp", "fsdp")]


def compare(job: BenchJob, repeats: int, steps: int, seconds: float) -> tuple[list[float], float, str]:
    """Seconds of each iteration, emulated ones, and in words where the emulated time goes."""
    slice_ = capture_first(job)
    real: list[float] = []
    timings: list[Timing] = []
    for _ in range(repeats):
        real += run_for_real(job, "time", steps)[0][WARM_UP:]
        timings.append(calibrated(job, slice_, seconds))
    timings.sort(key=lambda timing: timing.iteration_time_s)
    timing = timings[len(timings) // 2]
    parts = (
        f"{kind} {seconds_of_kind * 1e3:.1f} ms" for kind, seconds_of_kind in timing.critical_path.items()
    )
    return real, timing.iteration_time_s, ", ".join(parts)


def calibrated(job: BenchJob, slice_: Slice, seconds: float) -> Timing:
    """The job replayed from its one captured rank on what its calls take here, with ``job.world`` cores
    busy."""
    with scratch() as folder:
        (folder / "slice.pkl").write_bytes(pickle.dumps(slice_, protocol=pickle.HIGHEST_PROTOCOL))
        launch(job.world, "jobs", f"{folder}/slice.pkl", str(folder), str(seconds))
        profile = read_profile(folder / "0.json")
    cluster = load_cluster(f"cpu:1x{job.world}")
    classes = slice_world(lambda ranks: [slice_], job.world, [slice_.rank])
    return replay_world(stitch(classes), cluster, costs_of(classes, cluster, profile))


def memory_rows(quick: bool) -> Iterator[Row]:
    """Peak bytes of a step from the second on: what most steps of the real ranks have, and the emulated."""
    worlds = (1, 2) if quick else (1, 2, 4)
    for world in worlds:
        for parallel in ("ddp", "fsdp"):
            # Memory needs no long steps.
            job = BenchJob(parallel, world, seq=64, batch=2)
            emulated, (measured, note) = peak_bytes(capture_first(job)), real_peak(job)
            name = f"peak tensor bytes, {job.name}"
            yield figure(name, "bytes", measured, "equal", emulated=emulated, note=note)


GPU_STEPS = 18
GPU_ARGUMENTS = "--size 1b --parallel fsdp --seq 4096 --batch 2 --ac selective"


def gpu_rows(quick: bool) -> Iterator[Row]:
    """Iteration time, allocated and reserved bytes of a job on all GPUs of this machine."""
    need("no CUDA device: left out" * (not torch.cuda.is_available()))
    name = catalogue_name(torch.cuda.get_device_name())
    need(f"{torch.cuda.get_device_name()} is not in the catalogue" * (name is None))
    world = torch.cuda.device_count()
    arguments = [*GPU_ARGUMENTS.split(), "--steps", str(GPU_STEPS)]
    with scratch() as folder:
        launch(world, "tracked", "cuda", str(folder), str(example()), *arguments)
        figures = read_figures(folder, world)
    result = simulate(Script(example(), tuple(arguments)), load_cluster(f"{name}:1x{world}"), Options())
    job, source = f"1B, FSDP2, {world} x {name}", "torch.cuda.max_memory_*, all ranks, steady steps"
    seconds, allocated, reserved = zip(*(step for rank in figures for step in rank[WARM_UP:]), strict=True)
    yield figure(f"{job}: iteration", "s", seconds, emulated=result.timing.iteration_time_s)
    twin = max(profile.steady.allocated_bytes for profile in result.memory)
    yield figure(f"{job}: peak allocated", "bytes", max(allocated), emulated=twin, note=source)
    twin = max(profile.whole.reserved_bytes for profile in result.memory)
    yield figure(f"{job}: peak reserved", "bytes", max(reserved), emulated=twin, note=source)


def catalogue_name(torch_name: str) -> str | None:
    """The device of the catalogue that PyTorch calls ``torch_name``, or None."""
    names = (name for name in device_names() if name != "cpu")
    return next((name for name in names if device(name).torch_name == torch_name), None)
