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
from pathlib import Path
from typing import TYPE_CHECKING

from windtunnel.agents.sandbox.costs import SandboxProfile, profile_path, save_costs
from windtunnel.agents.sandbox.costs_fit import TOGETHER, Basics, Seen, fitted
from windtunnel.agents.sandbox.model import Limits, Manifest, SandboxSpec, TurnClass
from windtunnel.agents.sandbox.policy import Retention
from windtunnel.base.errors import UserError
from windtunnel.calibration.profiles import Calibrated, Progress, today
from windtunnel.cluster.catalogue import processor_name

if TYPE_CHECKING:
    from rich.table import Table

    from windtunnel.agents.sandbox.live.box import Box
    from windtunnel.agents.sandbox.live.host import Host

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
    from windtunnel.agents.sandbox.live.criu import find_criu

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
        },
        capabilities={
            "pool": pool,
            "inspector": inspector.kind if inspector is not None else "none",
            "criu": str(criu.path),
        },
        path=str(path or profile_path()),
    )
    save_costs(profile, path or profile_path())
    return profile


@contextlib.contextmanager
def _own_host(home: Path | None) -> Iterator[Host]:
    """A host in a folder of its own; whatever is in it at the end is removed."""
    from windtunnel.agents.sandbox.live.host import Host

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
        raise UserError(f"calibrate: this machine makes no process images: {'; '.join(first.not_covered)}")
    seen = Seen(
        memory=float(memory),
        processes=processes,
        after_first=first.total_seconds - first.freeze_seconds,
        new_first=float(first.image.bytes_new),
    )
    return box, seen


def _repeat(host: Host, box: Box, seen: Seen, number: int, basics: Basics) -> None:
    """One full checkpoint, one restore and one lazy fork."""
    with _metered(basics, "full"):
        manifest = box.checkpoint(full=True)
    assert manifest.image is not None
    seen.raw.append(float(manifest.image.bytes_raw))
    seen.new_next.append(float(manifest.image.bytes_new))
    seen.freeze.append(manifest.freeze_seconds)
    seen.after.append(manifest.total_seconds - manifest.freeze_seconds)
    with _metered(basics, "restore"):
        seen.restore.append(box.restore().seconds)
    begin = time.monotonic()
    host.fork(box.tip, names=[f"lazy{number}"], lazy=True)
    seen.lazy_fork.append(time.monotonic() - begin)
    host.remove(f"lazy{number}")


def calibrate_here(quick: bool, progress: Progress) -> Calibrated:
    """`calibrate` for ``windtunnel calibrate agents.sandbox``."""
    profile = calibrate(quick=quick, progress=progress)
    return Calibrated(Path(profile.path), profile.origin, cost_table(profile))


def cost_table(profile: SandboxProfile) -> Table:
    """The figures of a profile, with where they come from as the caption."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    costs = profile.costs
    table = Table(
        "operation",
        "seconds",
        "each MB",
        "each process",
        "CPU",
        box=SIMPLE_HEAD,
        caption="; ".join(f"{key}: {value}" for key, value in profile.provenance.items()),
        caption_justify="left",
    )
    full_after = costs.full_after_per_byte + costs.full_after_per_new_byte
    rows: tuple[tuple[str, float, float, float, float], ...] = (
        ("decide on a turn", costs.decide, 0, 0, 1),
        ("checkpoint of shells", costs.shell, 0, 0, costs.shell_cpu),
        ("checkpoint of files, frozen", costs.files_freeze, 0, 0, costs.files_cpu),
        ("checkpoint of files, after", costs.files_after, 0, 0, costs.files_cpu),
        (
            "full checkpoint, frozen",
            costs.full_freeze,
            costs.full_freeze_per_byte,
            costs.full_freeze_per_process,
            costs.full_cpu,
        ),
        (
            "full checkpoint, after, known pages",
            costs.full_after,
            costs.full_after_per_byte,
            0,
            costs.full_cpu,
        ),
        ("full checkpoint, after, new pages", costs.full_after, full_after, 0, costs.full_cpu),
        ("restore", costs.restore, costs.restore_per_byte, costs.restore_per_process, costs.restore_cpu),
        ("lazy restore", costs.lazy, costs.lazy_per_byte, costs.restore_per_process, costs.restore_cpu),
        ("fork, beyond a restore", costs.fork, 0, 0, costs.restore_cpu),
        ("create", costs.create, 0, 0, costs.restore_cpu),
    )
    for name, seconds, each_byte, each_process, cpu in rows:
        table.add_row(
            name,
            f"{seconds * 1e3:.2f} ms",
            f"{each_byte * 1e9:.3f} ms" if each_byte else "",
            f"{each_process * 1e3:.2f} ms" if each_process else "",
            f"{cpu:.0%}",
        )
    return table
