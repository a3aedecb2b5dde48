"""Iteration time: the example job for real on this machine's cores, and emulated from one captured rank.

The real job and the calibration alternate, so that both see the machine as it is; neither knows the other's
figures. What is emulated is the time between the ends of two consecutive steps, as it is measured.
"""

from __future__ import annotations

import os
import statistics
import tempfile
from collections.abc import Iterator
from pathlib import Path

from windtunnel.bench.rows import Row, left_out
from windtunnel.cluster.load import load_cluster
from windtunnel.training.emulate.bench.jobs import BenchJob, capture_one, launch, run_for_real, save
from windtunnel.training.emulate.emulation import costs_of
from windtunnel.training.emulate.graph import Slice
from windtunnel.training.emulate.policy.classes import slice_world
from windtunnel.training.emulate.policy.stitch import stitch
from windtunnel.training.emulate.twin.costs.profile import DeviceProfile, read_profile
from windtunnel.training.emulate.twin.emulate import Timing, replay_world

SECTION = "time"
WARM_UP = 3  # steps that are not counted: allocation, DDP's buckets, caches
TARGET = 0.05


def time_rows(quick: bool) -> Iterator[Row]:
    """Measured and emulated seconds of an iteration of each job, and the mean error of all."""
    repeats, steps, seconds = (1, 18, 4.0) if quick else (3, 18, 6.0)
    errors = []
    for job in (BenchJob("none", 1), BenchJob("ddp", 1), BenchJob("fsdp", 1), *pairs()):
        if job.world > (os.cpu_count() or 1):
            yield left_out(
                SECTION,
                f"iteration, {job.name}",
                f"{job.world} ranks need as many cores, here are {os.cpu_count()}",
            )
            continue
        measured, emulated, note = compare(job, repeats, steps, seconds)
        row = Row(
            SECTION, f"iteration, {job.name}", "s", measured, emulated, note=note,
            source=f"median of {repeats * (steps - WARM_UP)} real steps; calibration between them",
        )  # fmt: skip
        errors.append(row.error or 0.0)
        yield row
    mean = statistics.mean(errors)
    yield Row(
        SECTION, "iteration, mean error", "", emulated=mean, target=f"<= {TARGET:.0%}", met=mean <= TARGET,
        note=f"load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores; other work adds to it",
    )  # fmt: skip


def pairs() -> list[BenchJob]:
    """The jobs of more than one rank."""
    return [BenchJob(parallel, world) for world in (2, 4) for parallel in ("ddp", "fsdp")]


def compare(job: BenchJob, repeats: int, steps: int, seconds: float) -> tuple[float, float, str]:
    """Measured and emulated seconds of an iteration, and in words where the emulated time goes."""
    slice_ = capture_one(job)
    real: list[float] = []
    timings: list[Timing] = []
    for _ in range(repeats):
        real += run_for_real(job, "time", steps)[0][WARM_UP:]
        timings.append(emulated_timing(job, slice_, calibrated(job, slice_, seconds)))
    timings.sort(key=lambda timing: timing.iteration_time_s)
    timing = timings[len(timings) // 2]
    return statistics.median(real), timing.iteration_time_s, parts(timing)


def calibrated(job: BenchJob, slice_: Slice, seconds: float) -> DeviceProfile:
    """A profile of this machine for the calls of ``slice_``, with ``job.world`` cores busy."""
    with tempfile.TemporaryDirectory() as folder:
        save(slice_, Path(folder, "slice.pkl"))
        launch(job.world, "calibration", f"{folder}/slice.pkl", folder, str(seconds))
        return read_profile(Path(folder, "0.json"))


def emulated_timing(job: BenchJob, slice_: Slice, profile: DeviceProfile) -> Timing:
    """The job replayed from its one captured rank on the costs of ``profile``."""
    cluster = load_cluster(f"cpu:1x{job.world}")
    classes = slice_world(lambda ranks: [slice_], job.world, [slice_.rank])
    return replay_world(stitch(classes), cluster, costs_of(classes, cluster, profile))


def parts(timing: Timing) -> str:
    """The emulated iteration by kind of time."""
    return ", ".join(f"{kind} {seconds * 1e3:.1f} ms" for kind, seconds in timing.critical_path.items())
