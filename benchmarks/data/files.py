"""Writes of 16 KiB with their fsync in each mode, what they cost the cores of applications, and a frozen
host.

*Throughput*: a file of 64 MiB is written in blocks and synced at its end, by ``linefs`` and ``serial`` in
turn, from random bytes and from bytes of which half are zeros. *CPU*: of the processes that run on the cores
of the applications (in ``host`` all of them), for each byte written. *Frozen*: the longest fsync while one
host's processes (but not those that stand for its SmartNIC) stand still.

The cores that stand for the SmartNIC are the last one of this computer, so the others are the applications'.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random

import psutil

from benchmarks.harness.measure import quantile, ratios, scratch
from benchmarks.harness.rows import Row, figure
from windtunnel.data.files.live import host as live
from windtunnel.data.files.live.client import FileClient
from windtunnel.data.files.live.demo import demo
from windtunnel.data.files.live.host import HostProcesses
from windtunnel.data.files.model import FilesHostSpec, Mode, OperationKind
from windtunnel.data.files.twin import PipelineProfile, emulate

SOURCE = "LineFS, Kim et al., SOSP 2021"
BLOCK, MIB = 16 << 10, 1 << 20
TOTAL, QUICK_TOTAL = 64 * MIB, 16 * MIB
REPEATS, QUICK_REPEATS = 5, 2
NIC = (max(os.sched_getaffinity(0)),)


def write_rows(quick: bool) -> Iterator[Row]:
    total, repeats = (QUICK_TOTAL, QUICK_REPEATS) if quick else (TOTAL, REPEATS)
    for words, half in (("random bytes", False), ("half-compressible bytes", True)):
        rates: dict[Mode, list[float]] = {"linefs": [], "serial": []}
        profile: dict[Mode, PipelineProfile] = {}
        for number in range(repeats):
            for mode, mode_rates in rates.items():
                with running(mode) as (hosts, files):
                    seconds = written(files, total, half, number)
                    mode_rates.append(total / seconds)
                    profile[mode] = measured_profile(files, hosts, total, half)
        for mode, mode_rates in rates.items():
            forecast = emulate(profile[mode], mode, total)
            note = f"{total >> 20} MiB in blocks of 16 KiB and an fsync, 3 hosts"
            yield figure(f"{words}: {mode}", "bytes/s", mode_rates, emulated=forecast.rate, note=note)
        target, over = f"≥ {1.7 if half else 1.4}", ratios(*rates.values())
        yield figure(f"{words}: linefs over serial", "x", over, target, judged=not quick)
    with running("linefs") as (_, files):
        pauses = synced(files, 100 if quick else 1000)
    yield figure("a block and its fsync: median", "s", pauses)
    name, source = "a block and its fsync: 99th percentile", f"{SOURCE} (a run of the authors' artifact)"
    yield figure(name, "s", quantile(pauses, 0.99), published=186e-6, source=source)


def cpu_rows(quick: bool) -> Iterator[Row]:
    total = QUICK_TOTAL if quick else TOTAL
    costs: dict[Mode, list[float]] = {"linefs": [], "host": []}
    for number in range(QUICK_REPEATS if quick else REPEATS):
        for mode, mode_costs in costs.items():
            with running(mode) as (hosts, files):
                before = host_cpu(hosts, mode)
                written(files, total, True, number)
                mode_costs.append((host_cpu(hosts, mode) - before) / total * 1e9)
    for mode, mode_costs in costs.items():
        yield figure(f"{mode}: CPU of the applications' cores", "s/GB", mode_costs)
    over, note = ratios(*costs.values()), "the client's own is in neither"
    yield figure("linefs over host", "x", over, "≤ 0.5", judged=not quick, note=note)


def frozen_rows(quick: bool) -> Iterator[Row]:
    modes: Sequence[Mode] = ("linefs",) if quick else ("linefs", "host")
    for mode in modes:
        report = demo(3, freeze=2, mode=mode)
        yield figure(
            f"{mode}: longest fsync, one host frozen for 10 s", "s", report["fsync_longest_s"],
            note=f"{report['writes']} writes, {report['lost_bytes']} bytes lost, {report['copies']} hosts"
            " at the end",
        )  # fmt: skip


@contextlib.contextmanager
def running(mode: Mode) -> Iterator[tuple[list[HostProcesses], FileClient]]:
    """Three hosts with a file to write to."""
    with (
        scratch() as folder,
        live.hosts(folder, 3, FilesHostSpec("", "", "", "", mode=mode, cores=NIC)) as hosts,
    ):
        files = live.client(Path(folder))
        live.complete(files, 3)
        files.perform(OperationKind.CREATE, "/file")
        files.sync()
        yield hosts, files
        files.close()


def written(files: FileClient, total: int, half: bool, seed: int) -> float:
    """Seconds until so many bytes are on all disks."""
    random = Random(seed)
    rest = (lambda: bytes(BLOCK // 2)) if half else (lambda: random.randbytes(BLOCK // 2))
    blocks = [random.randbytes(BLOCK // 2) + rest() for _ in range(64)]
    begun = time.perf_counter()
    for number in range(total // BLOCK):
        files.write("/file", number * BLOCK, blocks[number % len(blocks)])
    files.sync()
    return time.perf_counter() - begun


def synced(files: FileClient, count: int) -> list[float]:
    """Seconds of each write of a block with its fsync."""
    block, seconds = Random(1).randbytes(BLOCK), []
    for number in range(count):
        begun = time.perf_counter()
        files.write("/file", number * BLOCK, block)
        files.sync()
        seconds.append(time.perf_counter() - begun)
    return seconds


def measured_profile(
    files: FileClient, hosts: Sequence[HostProcesses], total: int, half: bool
) -> PipelineProfile:
    """What each stage took here, for the twin."""
    leads = next(row for row in files.status() if not isinstance(row, str) and row.leads)
    primary = next(host for host in hosts if host.spec.name == leads.name)
    stages = {stage: seconds / total for stage, seconds in leads.seconds.items() if stage != "acknowledge"}
    server = psutil.Process(primary.processes["server"].pid).cpu_times()
    stages["write"] = 2 * (server.user + server.system) / total  # the client's half is as long
    return PipelineProfile(stages, packed=0.55 if half else 1.0, flush=leads.seconds["acknowledge"])


def host_cpu(hosts: Sequence[HostProcesses], mode: Mode) -> float:
    """CPU seconds of what runs on the cores of applications."""
    total = 0.0
    for host in hosts:
        for pid in host.pids(None if mode == "host" else "server"):
            times = psutil.Process(pid).cpu_times()
            total += times.user + times.system
    return total
