"""Measure what the operations of a sandbox cost on this machine.

Real sandboxes with so many processes and so much memory are checkpointed, restored and forked; each figure is
the lower quartile of its repetitions, since whatever else the machine does only ever adds; and straight lines
with coefficients that are not negative are fitted through them. The memory that is measured is text of
numbers that differ from page to page, neither as empty as zeros nor as dense as random bytes.
"""

from __future__ import annotations

import contextlib
import os
import platform
import resource
import shutil
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from windtunnel.agents.sandbox.costs import NAME, SandboxCosts, SandboxProfile, save_costs
from windtunnel.agents.sandbox.model import CheckpointManifest, SandboxLimits, SandboxSpec, TurnClass
from windtunnel.base.errors import UserError
from windtunnel.calibration import profiles
from windtunnel.calibration.fit import least_squares, quartile
from windtunnel.calibration.profiles import Calibrated, Progress, today
from windtunnel.cluster.catalogue import processor_name

if TYPE_CHECKING:
    from windtunnel.agents.sandbox.box import Box
    from windtunnel.agents.sandbox.host import SandboxHost

MIB = 2**20
FULL_GRID = [(memory * MIB, processes) for memory in (0, 32, 128) for processes in (1, 6, 16)]
QUICK_GRID = [(0, 1), (0, 6), (32 * MIB, 1), (32 * MIB, 6)]
HOLDER = (
    "import sys,time\n"
    "n,salt=map(int,sys.argv[1:])\n"
    "rows=(b'%020d, ' % ((i+salt)*0x9E3779B97F4A7C15 % 2**64) for i in range(n//22+1))\n"
    "held=bytearray(b''.join(rows))\n"
    "print('held',flush=True)\n"
    "time.sleep(100000)\n"
)
"""A process that holds so many bytes of changing numbers; another salt gives numbers that no page store has
seen."""
TOGETHER = 6
"""So many full checkpoints at once show how many disk parts go on beside each other."""

Samples = dict[str, list[float]]
"""Measured seconds and bytes by name, one for each repetition; ``…_share``: the part of an operation that was
CPU."""
Sizes = dict[tuple[int, int], Samples]
"""By bytes of memory and number of processes."""


def calibrate_here(
    quick: bool, progress: Progress, *, path: Path | None = None, home: Path | None = None
) -> Calibrated:
    """Measure, fit, and write the profile to ``path`` (default: the user's own). About a minute, or ten
    seconds with ``quick``. Leaves no sandbox, mount or folder behind.

    ``home``: an empty or absent folder for the sandboxes. Raises UserError without root or CRIU.
    """
    if os.geteuid() != 0:
        raise UserError("calibrate: agents.sandbox measures real sandboxes, which needs root")
    from windtunnel.agents.sandbox.criu.program import find_criu

    criu = find_criu()
    if criu is None:
        raise UserError(
            "calibrate: agents.sandbox needs CRIU, which is missing; 'windtunnel sandbox setup' supplies it"
        )
    if home is not None and home.exists() and any(home.iterdir()):
        raise UserError(f"calibrate: home {home} is not empty, accepted is an empty or absent folder")
    load = os.getloadavg()[0]
    grid, repeats = (QUICK_GRID, 3) if quick else (FULL_GRID, 7)
    with _own_host(home) as host:
        basics = _basics(host, repeats, progress)
        sizes = _sizes(host, grid, repeats, basics, progress)
        pool, inspector = host.context.pool.kind, host.context.inspector
    costs, errors = fitted(basics, sizes)
    profile = SandboxProfile(
        costs=costs,
        provenance={
            "machine": f"{os.cpu_count()} CPUs {processor_name()}",
            "date": today(),
            "kernel": platform.release(),
            "criu": ".".join(map(str, criu.version)),
            "load": f"{load:.1f} others' load at the start",
            "repetitions": f"lower quartile of {repeats}",
            "memory": "text of numbers, all new in the first image and unchanged in the next",
            "errors": errors,
            "pool": pool,
            "inspector": inspector.kind if inspector is not None else "none",
        },
    )
    where = path or profiles.own(NAME)
    save_costs(profile, where)
    return Calibrated(where, f"{profile.origin}; {errors}")


@contextlib.contextmanager
def _own_host(home: Path | None) -> Iterator[SandboxHost]:
    """A host in a folder of its own; whatever is in it at the end is removed."""
    from windtunnel.agents.sandbox.host import SandboxHost

    folder = home or Path(tempfile.mkdtemp(prefix="windtunnel-calibrate-"))
    # the past is kept: removing it would run beside what is measured
    host = SandboxHost(folder, workers=TOGETHER, pool_size=8 * 2**30, retention=10_000)
    try:
        yield host
    finally:
        for info in host.boxes():
            host.remove(info.name)
        host.gc()
        host.close()
        shutil.rmtree(folder)


@contextlib.contextmanager
def _metered(samples: Samples, name: str) -> Iterator[None]:
    """Note how long the block took, and which part of that was CPU of this process and its children."""
    cpu, begin = _cpu_seconds(), time.monotonic()
    yield
    seconds = time.monotonic() - begin
    samples[name].append(seconds)
    samples[f"{name}_share"].append((_cpu_seconds() - cpu) / seconds)


def _cpu_seconds() -> float:
    both = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in both)


def _basics(host: SandboxHost, repeats: int, progress: Progress) -> Samples:
    """What does not depend on the sandbox's size."""
    basics: Samples = defaultdict(list)
    host.create(SandboxSpec("first"))  # imports the image, which is no part of a creation
    host.remove("first")
    boxes = []
    for number in range(1 + TOGETHER):
        with _metered(basics, "create"):
            boxes.append(host.create(SandboxSpec(f"basic{number}")))
    box = boxes[0]
    for number in range(repeats):
        progress("basics", number / repeats)
        box.run("true")
        basics["decide"].append(box.end_turn().wait().decide_seconds)
        box.run(f"mkdir -p /tmp/{number}")
        box.checkpoint()
        box.run(f"cd /tmp/{number}")
        with _metered(basics, "shell"):
            _expect(box, TurnClass.SHELL)
        box.run(f"echo {number} > /workspace/file")
        with _metered(basics, "files"):
            manifest = _expect(box, TurnClass.FILES)
        basics["files_freeze"].append(manifest.freeze_seconds)
        basics["files_after"].append(manifest.total_seconds - manifest.freeze_seconds)
        assert manifest.files is not None
        basics["files_new"].append(float(manifest.files.bytes_new))
        for other in boxes[1:]:
            other.run(f"kill $(jobs -p) 2> /dev/null; sleep {1000 + number} &")
        with _metered(basics, "at_once"):
            for pending in [box.end_turn(urgent=True) for box in boxes[1:]]:
                pending.wait()
    for other in boxes:
        host.remove(other.name)
    progress("basics", 1.0)
    return basics


def _expect(box: Box, turn_class: TurnClass) -> CheckpointManifest:
    manifest = box.checkpoint()
    if manifest.turn_class is not turn_class:
        raise UserError(
            f"calibrate: a turn of class {turn_class.word} was taken for {manifest.turn_class.word} "
            f"({'; '.join(manifest.reasons[:2])}); what is measured here would not be what is meant"
        )
    return manifest


def _sizes(
    host: SandboxHost, grid: Sequence[tuple[int, int]], repeats: int, basics: Samples, progress: Progress
) -> Sizes:
    """Sandboxes of every size. They are measured in turn, again and again, so that what else the machine does
    meanwhile falls on all sizes alike."""
    boxes: dict[tuple[int, int], Box] = {}
    sizes: Sizes = {size: defaultdict(list) for size in grid}
    for place, (memory, processes) in enumerate(grid):
        progress("sizes", place / len(grid))
        boxes[memory, processes] = _sized(host, f"sized{place}", memory, processes, sizes[memory, processes])
    for number in range(repeats):
        progress("repetitions", number / repeats)
        for size, box in boxes.items():
            samples = sizes[size]
            with _metered(basics, "full"):
                manifest = box.checkpoint(full=True)
            assert manifest.image is not None
            samples["raw"].append(float(manifest.image.bytes_raw))
            samples["new_next"].append(float(manifest.image.bytes_new))
            samples["freeze"].append(manifest.freeze_seconds)
            samples["after"].append(manifest.total_seconds - manifest.freeze_seconds)
            with _metered(basics, "restore"):
                samples["restore"].append(box.restore().seconds)
    for box in boxes.values():
        host.remove(box.name)
    progress("repetitions", 1.0)
    return sizes


def _sized(host: SandboxHost, name: str, memory: int, processes: int, samples: Samples) -> Box:
    """A sandbox of that many processes, the first of which holds the memory, after its first full image."""
    box = host.create(SandboxSpec(name, limits=SandboxLimits(memory=None)))
    box.put("/tmp/holder.py", HOLDER.encode())
    box.run(
        f"python3 /tmp/holder.py {memory} {processes * 10**12} > /tmp/held & "
        "until [ -s /tmp/held ]; do sleep 0.05; done",
        timeout=120,
    )
    if processes > 1:
        box.run(f"for n in $(seq {processes - 1}); do sleep 100000 & done")
    first = box.checkpoint(full=True)
    if first.image is None:
        raise UserError(
            f"calibrate: this machine makes no process images: {'; '.join(map(str, first.lacks))}"
        )
    samples["after_first"].append(first.total_seconds - first.freeze_seconds)
    samples["new_first"].append(float(first.image.bytes_new))
    return box


def fitted(basics: Samples, sizes: Sizes) -> tuple[SandboxCosts, str]:
    """Costs from what was measured, and in words how far the lines are from the points."""
    memory, processes = np.array(list(sizes), dtype=float).T
    ones = np.ones_like(memory)
    measured = {
        name: np.array([quartile(samples[name]) for samples in sizes.values()])
        for name in ("raw", "freeze", "after", "after_first", "restore", "new_first")
    }
    columns = {
        "freeze": ("full_freeze", [ones, memory, processes]),
        "after": ("full_after", [ones, memory]),
        "restore": ("restore", [ones, memory, processes]),
    }
    lines: dict[str, float] = {}
    words = []
    for name, (field, using) in columns.items():
        factors = least_squares(using, measured[name])
        lines |= zip((field, f"{field}_per_byte", f"{field}_per_process"), factors, strict=False)
        modelled = sum(factor * column for factor, column in zip(factors, using, strict=True))
        error = np.median(np.abs(modelled / np.maximum(measured[name], 1e-9) - 1))
        words.append(f"{name} {float(error):.0%}")
    raw = least_squares([ones, processes], measured["raw"] - memory)
    further = np.maximum(0.0, measured["after_first"] - measured["after"])
    plain = {name: quartile(basics[name]) for name in
             ("decide", "shell", "files_freeze", "files_after", "create", "files_new")}  # fmt: skip
    shares = {f"{name}_cpu": _share(basics, name) for name in ("shell", "files", "full", "restore")}
    at_once, cpu = quartile(basics["at_once"]), shares["full_cpu"]
    alone = lines["full_freeze"] + lines["full_freeze_per_process"] + lines["full_after"]
    costs = SandboxCosts(
        **plain,
        **shares,
        **lines,
        full_after_per_new_byte=least_squares([memory], further)[0],
        image_base=raw[0],
        image_per_process=raw[1],
        new_base=quartile([value for samples in sizes.values() for value in samples["new_next"]]),
        new_per_byte=least_squares([memory], measured["new_first"])[0],
        # the disk parts of all, in the time that their CPU parts leave
        disk_lanes=lanes(TOGETHER * alone * (1 - cpu), at_once - alone * cpu),
    )
    return costs, "median error of the fits: " + ", ".join(words)


def lanes(disk: float, seconds: float) -> float:
    """How many lanes serve so many seconds of disk in that time: one at least, TOGETHER at most."""
    return min(float(TOGETHER), max(1.0, disk / seconds)) if seconds > 0 else float(TOGETHER)


def _share(basics: Samples, name: str) -> float:
    """Waiting for a busy CPU looks like waiting for a disk, so the upper quartile is nearest to the truth."""
    ordered = sorted(basics[f"{name}_share"])
    return min(1.0, ordered[3 * len(ordered) // 4])
