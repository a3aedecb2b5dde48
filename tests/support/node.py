"""Agents for tests of `control.node`: one that only counts, and groups of this host to lend between."""

from __future__ import annotations

import contextlib
import mmap
import os
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from windtunnel.control.node import Groups, HarvestActuator, HarvestModel, Schedule
from windtunnel.control.node.live.cpu import folder_of, setting
from windtunnel.linux import LinuxError
from windtunnel.linux.cgroup import HostCgroup
from windtunnel.linux.system import checked, libc
from windtunnel.store import eventlog

SCHEDULE = Schedule(longest=1.0, valid=0.4, deadline=0.4, assess=0.1, hold=0.5)


class Counting:
    """Predicts how many epochs there were."""

    epochs = 0

    def collect(self, now: float) -> float:
        return now

    def validate(self, sample: float) -> bool:
        return True

    def update(self, samples: list[float], ask: Any) -> None:
        self.epochs += 1

    def predict(self) -> int:
        return self.epochs

    def assess(self) -> bool:
        return True


class Noting:
    """Does nothing but write down that it cleaned up; well as long as a file ``ill`` is not there."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def act(self, prediction: int | None) -> dict[str, Any]:
        return {"acted": prediction}

    def assess(self) -> bool:
        return not (self.folder / "ill").exists()

    def mitigate(self) -> dict[str, Any]:
        return {}

    def clean_up(self) -> dict[str, Any]:
        (self.folder / "cleaned").touch()
        return {}


@dataclass
class Lending(HarvestActuator):
    """Well as long as a file ``ill`` is not in ``folder``."""

    folder: Path = Path()

    def assess(self) -> bool:
        return not (self.folder / "ill").exists()


def effects(log: Path, did: str, since: int = 0) -> list[eventlog.Event]:
    """What was done of that kind, after so many events."""
    rows = [] if not log.exists() else eventlog.read(log)
    return [row for row in rows[since:] if row["kind"] == "effect" and row["did"] == did]


@contextlib.contextmanager
def groups(busy: bool = False) -> Iterator[tuple[Path, Path, Path]]:
    """Two groups, and the folder of the elastic one's CPU files, which has a quota of its own; ``busy``: a
    process of the primary spins."""
    below = Path(f"windtunnel-test-{os.getpid()}")
    pair = [HostCgroup(below / name) for name in ("primary", "elastic")]
    try:
        for group in pair:
            group.make(None, 1.5, None)
        if busy:
            code = "import sys\nfor file in sys.argv[1:]: open(file, 'w').write('0')\nwhile True: pass"
            subprocess.Popen([sys.executable, "-c", code, *map(str, pair[0].procs)])
        yield below / "primary", below / "elastic", folder_of(below / "elastic")
    finally:
        for group in pair:
            group.kill()
            group.remove()


@contextlib.contextmanager
def zram(size: int = 256 << 20) -> Iterator[str]:
    """A swap in compressed memory, before all others; "" where this host gives none."""
    try:
        name = "zram" + Path("/sys/class/zram-control/hot_add").read_text().strip()
    except OSError:
        yield ""
        return
    device = Path("/dev") / name
    try:
        Path(f"/sys/block/{name}/disksize").write_text(str(size))
        header = bytearray(mmap.PAGESIZE)
        struct.pack_into("<II", header, 1024, 1, size // mmap.PAGESIZE - 1)
        header[-10:] = b"SWAPSPACE2"
        device.write_bytes(header)
        checked(libc.swapon(bytes(device), 0xFFFF), "swapon")
        yield str(device)
    finally:
        libc.swapoff(bytes(device))
        Path(f"/sys/block/{name}/reset").write_text("1")
        Path("/sys/class/zram-control/hot_remove").write_text(name.removeprefix("zram"))


def lending(below: tuple[Path, Path]) -> tuple[HarvestModel, HarvestActuator]:
    """An agent that lends between two groups, whatever others on this host do."""
    return HarvestModel(Groups(*below)), HarvestActuator(Groups(*below), limit=1.0)


def missing() -> str:
    """Why this host has no groups to lend between, or ""."""
    if os.geteuid():
        return "needs root"
    try:
        with groups() as (primary, elastic, folder):
            Groups(primary, elastic).lend(0.5)
            return "" if setting(folder) else "the host has no controller of CPU time"
    except (LinuxError, OSError) as error:
        return str(error)


def root(test: Callable[..., None]) -> Callable[..., None]:
    why = missing()
    return pytest.mark.root(pytest.mark.skipif(bool(why), reason=why)(test))
