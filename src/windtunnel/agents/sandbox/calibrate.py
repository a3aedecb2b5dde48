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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from windtunnel.agents.sandbox.costs import (
    SandboxCosts,
    SandboxProfile,
    Work,
    cost_table,
    profile_path,
    save_costs,
)
from windtunnel.agents.sandbox.model import Limits, Manifest, SandboxSpec, TurnClass
from windtunnel.agents.sandbox.policy import Retention
from windtunnel.base.errors import UserError
from windtunnel.calibration.fit import least_squares, quartile
from windtunnel.calibration.profiles import Calibrated, Progress, today
from windtunnel.cluster.catalogue import processor_name
from windtunnel.engines.events import Environment, ProcessGenerator, Shared

if TYPE_CHECKING:
    from windtunnel.agents.sandbox.box import Box
    from windtunnel.agents.sandbox.host import Host

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


def calibrate(
    path: Path | None = None,
    *,
    quick: bool = False,
    home: Path | None = None,
    progress: Callable[[str, float], None] = lambda part, fraction: None,
) -> SandboxProfile:
    """Measure, fit, and write the profile to ``path`` (default: the user's own). About a minute, or ten
    seconds with ``quick``. Leaves no sandbox, mount or folder behind.

    ``home``: an empty or absent folder for the sandboxes. Raises UserError without root or CRIU.
    """
    if os.geteuid() != 0:
        raise UserError("calibrate: agents.sandbox measures real sandboxes, which needs root")
    from windtunnel.agents.sandbox.criu import find_criu

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
        seen = _sizes(host, grid, repeats, basics, progress)
        pool, inspector = host.context.pool.kind, host.context.inspector
    costs, errors = fitted(basics, seen)
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
        path=str(path or profile_path()),
    )
    save_costs(profile, path or profile_path())
    return profile


@contextlib.contextmanager
def _own_host(home: Path | None) -> Iterator[Host]:
    """A host in a folder of its own; whatever is in it at the end is removed."""
    from windtunnel.agents.sandbox.host import Host

    folder = home or Path(tempfile.mkdtemp(prefix="windtunnel-calibrate-"))
    # the past is kept: removing it would run beside what is measured
    host = Host(folder, workers=TOGETHER, pool_size=8 * 2**30, retention=Retention(keep=10_000))
    try:
        yield host
    finally:
        for info in host.boxes():
            host.remove(info.name)
        host.gc()
        host.close()
        shutil.rmtree(folder)


@contextlib.contextmanager
def _metered(basics: Basics, name: str) -> Iterator[None]:
    """Note which part of the block's time was CPU of this process and its children."""
    cpu, begin = _cpu_seconds(), time.monotonic()
    yield
    seconds = time.monotonic() - begin
    basics.cpu.setdefault(name, []).append((_cpu_seconds() - cpu) / seconds)


def _cpu_seconds() -> float:
    both = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in both)


def _basics(host: Host, repeats: int, progress: Callable[[str, float], None]) -> Basics:
    basics = Basics()
    host.create(SandboxSpec("first"))  # imports the image, which is no part of a creation
    host.remove("first")
    boxes = []
    for number in range(1 + TOGETHER):
        begin = time.monotonic()
        boxes.append(host.create(SandboxSpec(f"basic{number}")))
        basics.create.append(time.monotonic() - begin)
    box = boxes[0]
    for number in range(repeats):
        progress("basics", number / repeats)
        box.run("true")
        basics.decide.append(box.end_turn().wait().decide_seconds)
        box.run(f"mkdir -p /tmp/{number}")
        box.checkpoint()
        box.run(f"cd /tmp/{number}")
        with _metered(basics, "shell"):
            manifest = _expect(box, TurnClass.SHELL)
        basics.shell.append(manifest.total_seconds)
        box.run(f"echo {number} > /workspace/file")
        with _metered(basics, "files"):
            manifest = _expect(box, TurnClass.FILES)
        basics.files_freeze.append(manifest.freeze_seconds)
        basics.files_after.append(manifest.total_seconds - manifest.freeze_seconds)
        assert manifest.files is not None
        basics.files_new.append(float(manifest.files.bytes_new))
        basics.restore.append(box.restore().seconds)
        begin = time.monotonic()
        forked = host.fork(box.tip)
        basics.fork.append(time.monotonic() - begin)
        host.remove(forked[0].name)
        basics.at_once.append(_at_once(boxes[1:], number))
    for one in boxes:
        host.remove(one.name)
    progress("basics", 1.0)
    return basics


def _expect(box: Box, turn_class: TurnClass) -> Manifest:
    manifest = box.checkpoint()
    if manifest.turn_class is not turn_class:
        raise UserError(
            f"calibrate: a turn of class {turn_class.word} was taken for {manifest.turn_class.word} "
            f"({'; '.join(manifest.reasons[:2])}); what is measured here would not be what is meant"
        )
    return manifest


def _at_once(boxes: Sequence[Box], number: int) -> float:
    """Seconds until every sandbox has a full checkpoint, all started together."""
    for box in boxes:
        box.run(f"kill $(jobs -p) 2> /dev/null; sleep {1000 + number} &")
    begin = time.monotonic()
    for pending in [box.end_turn(urgent=True) for box in boxes]:
        pending.wait()
    return time.monotonic() - begin


def _sizes(
    host: Host,
    grid: Sequence[tuple[int, int]],
    repeats: int,
    basics: Basics,
    progress: Callable[[str, float], None],
) -> list[Seen]:
    """Sandboxes of every size. They are measured in turn, again and again, so that what else the machine does
    meanwhile falls on all sizes alike."""
    boxes = []
    for place, (memory, processes) in enumerate(grid):
        progress("sizes", place / len(grid))
        boxes.append(_sized(host, f"sized{place}", memory, processes))
    for number in range(repeats):
        progress("repetitions", number / repeats)
        for box, seen in boxes:
            _repeat(host, box, seen, number, basics)
    for box, _ in boxes:
        host.remove(box.name)
    progress("repetitions", 1.0)
    return [seen for _, seen in boxes]


def _sized(host: Host, name: str, memory: int, processes: int) -> tuple[Box, Seen]:
    """A sandbox of that many processes, the first of which holds the memory, and its first full image."""
    box = host.create(SandboxSpec(name, limits=Limits(memory=None)))
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
    seen = Seen(
        memory=float(memory),
        processes=processes,
        after_first=first.total_seconds - first.freeze_seconds,
        new_first=float(first.image.bytes_new),
    )
    return box, seen


def _repeat(host: Host, box: Box, seen: Seen, number: int, basics: Basics) -> None:
    """One full checkpoint, one restore."""
    with _metered(basics, "full"):
        manifest = box.checkpoint(full=True)
    assert manifest.image is not None
    seen.raw.append(float(manifest.image.bytes_raw))
    seen.new_next.append(float(manifest.image.bytes_new))
    seen.freeze.append(manifest.freeze_seconds)
    seen.after.append(manifest.total_seconds - manifest.freeze_seconds)
    with _metered(basics, "restore"):
        seen.restore.append(box.restore().seconds)


def calibrate_here(quick: bool, progress: Progress) -> Calibrated:
    """`calibrate` for ``windtunnel calibrate agents.sandbox``."""
    profile = calibrate(quick=quick, progress=progress)
    return Calibrated(Path(profile.path), profile.origin, cost_table(profile))


TOGETHER = 6
"""So many full checkpoints at once show how many disk parts go on beside each other."""


@dataclass
class Seen:
    """Measured seconds and bytes of one sandbox; lists have one entry for each repetition."""

    memory: float = 0.0
    processes: int = 0
    raw: list[float] = field(default_factory=list)
    new_first: float = 0.0
    new_next: list[float] = field(default_factory=list)
    freeze: list[float] = field(default_factory=list)
    after_first: float = 0.0
    after: list[float] = field(default_factory=list)
    restore: list[float] = field(default_factory=list)


@dataclass
class Basics:
    """Measured seconds of what does not depend on the sandbox's size, and shares of CPU."""

    decide: list[float] = field(default_factory=list)
    shell: list[float] = field(default_factory=list)
    files_freeze: list[float] = field(default_factory=list)
    files_after: list[float] = field(default_factory=list)
    files_new: list[float] = field(default_factory=list)
    create: list[float] = field(default_factory=list)
    fork: list[float] = field(default_factory=list)
    restore: list[float] = field(default_factory=list)
    at_once: list[float] = field(default_factory=list)
    cpu: dict[str, list[float]] = field(default_factory=dict)


def fitted(basics: Basics, seen: Sequence[Seen]) -> tuple[SandboxCosts, str]:
    """Costs from what was measured, and in words how far the lines are from the points."""
    memory = np.array([one.memory for one in seen])
    processes = np.array([float(one.processes) for one in seen])
    ones = np.ones_like(memory)
    raw = least_squares([ones, processes], np.array([quartile(one.raw) for one in seen]) - memory)
    freeze_seen = np.array([quartile(one.freeze) for one in seen])
    freeze = least_squares([ones, memory, processes], freeze_seen)
    after_seen = np.array([quartile(one.after) for one in seen])
    after = least_squares([ones, memory], after_seen)
    further = np.array([max(0.0, one.after_first - quartile(one.after)) for one in seen])
    restore_seen = np.array([quartile(one.restore) for one in seen])
    restore = least_squares([ones, memory, processes], restore_seen)
    fork = max(0.0, quartile(basics.fork) - quartile(basics.restore))
    costs = SandboxCosts(
        decide=quartile(basics.decide),
        shell=quartile(basics.shell),
        shell_cpu=_share(basics, "shell"),
        files_freeze=quartile(basics.files_freeze),
        files_after=quartile(basics.files_after),
        files_cpu=_share(basics, "files"),
        full_freeze=freeze[0],
        full_freeze_per_byte=freeze[1],
        full_freeze_per_process=freeze[2],
        full_after=after[0],
        full_after_per_byte=after[1],
        full_after_per_new_byte=least_squares([memory], further)[0],
        full_cpu=_share(basics, "full"),
        restore=restore[0],
        restore_per_byte=restore[1],
        restore_per_process=restore[2],
        restore_cpu=_share(basics, "restore"),
        fork=fork,
        create=quartile(basics.create),
        image_base=raw[0],
        image_per_process=raw[1],
        new_base=quartile([value for one in seen for value in one.new_next]),
        new_per_byte=least_squares([memory], np.array([one.new_first for one in seen]))[0],
        files_new=quartile(basics.files_new),
        disk_lanes=1.0,
    )
    costs = replace(costs, disk_lanes=_lanes(costs, quartile(basics.at_once)))
    modelled = {
        "freeze": (freeze_seen, freeze[0] * ones + freeze[1] * memory + freeze[2] * processes),
        "after": (after_seen, after[0] * ones + after[1] * memory),
        "restore": (restore_seen, restore[0] * ones + restore[1] * memory + restore[2] * processes),
    }
    words = [
        f"{name} {float(np.median(np.abs(model / np.maximum(measured, 1e-9) - 1))):.0%}"
        for name, (measured, model) in modelled.items()
    ]
    return costs, "median error of the fits: " + ", ".join(words)


def _lanes(costs: SandboxCosts, seconds: float) -> float:
    """With how many lanes the twin says of the checkpoints that ran at once what was measured."""
    work = costs.checkpoint(TurnClass.FULL, processes=1)
    cores = os.cpu_count() or 1
    tried = [1 + step / 2 for step in range(2 * TOGETHER - 1)]
    # of those that fit alike the fewest: more was not shown
    return min(
        tried,
        key=lambda lanes: (
            round(abs(together(replace(costs, disk_lanes=lanes), work, TOGETHER, cores) - seconds), 4),
            lanes,
        ),
    )


def together(costs: SandboxCosts, work: Work, count: int, cores: int) -> float:
    """Seconds until so many equal operations end that start at once, each with a worker of its own."""
    env = Environment()
    cpu, disk = Shared(env, cores, 1.0), Shared(env, costs.disk_lanes, 1.0)

    def one() -> ProcessGenerator:
        for seconds in (work.freeze, work.after):
            yield cpu.use(seconds * work.cpu)
            yield disk.use(seconds * (1 - work.cpu))

    for _ in range(count):
        env.process(one())
    env.run()
    return env.now


def _share(basics: Basics, name: str) -> float:
    """Waiting for a busy CPU looks like waiting for a disk, so the upper quartile is nearest to the truth."""
    ordered = sorted(basics.cpu[name])
    return min(1.0, ordered[3 * len(ordered) // 4])
