"""What every section stands on: hosts on a home folder of their own, and sessions played on them.

Where a section does not measure time, the model thinks in no time.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

from benchmarks.agents.sandbox.sessions import Observation, Output, observe, shipped
from benchmarks.harness.measure import scratch
from benchmarks.harness.rows import need
from windtunnel.agents.sandbox.box import Box
from windtunnel.agents.sandbox.criu import is_tmpfs
from windtunnel.agents.sandbox.criu.program import find_criu
from windtunnel.agents.sandbox.errors import MachineError, SandboxDied
from windtunnel.agents.sandbox.host import SandboxHost
from windtunnel.agents.sandbox.model import SandboxSpec, TurnRecord, TurnResult
from windtunnel.agents.sandbox.traces import Trace
from windtunnel.base import paths

KEEP_ALL = 100_000
SOURCE = "arXiv 2604.28138"


def missing() -> str:
    """Why real sandboxes cannot be measured here, in a sentence; empty when they can."""
    if os.geteuid() != 0:
        return "real sandboxes need root"
    if find_criu() is None:
        return "process images need CRIU; 'windtunnel sandbox setup' installs it"
    return ""


@contextlib.contextmanager
def own_home() -> Iterator[Path]:
    """A home folder on a disk, removed at the end with all that ran in it."""
    need(missing())
    with scratch(_disk()) as folder:
        # what others have still to write is not this section's
        os.sync()
        try:
            yield folder
        finally:
            with SandboxHost(folder, policy="conversation") as host:
                for info in host.boxes():
                    host.remove(info.name)
                host.gc()
            shutil.rmtree(folder)  # and whatever cannot go is told


def _disk() -> Path:
    """A folder for temporary files that does not lie in memory."""
    usual = Path(tempfile.gettempdir())
    if not is_tmpfs(str(usual)):
        return usual
    paths.cache().mkdir(parents=True, exist_ok=True)
    return paths.cache()


@contextlib.contextmanager
def open_host(home: Path, **options: Any) -> Iterator[SandboxHost]:
    """A host on ``home`` whose sandboxes end with it, and whose retention forgets nothing unless told."""
    with SandboxHost(home, **{"retention": KEEP_ALL, **options}) as host:
        try:
            yield host
        finally:
            for info in host.boxes():
                host.remove(info.name)


_numbers = count(1)


def new_name(stem: str) -> str:
    """A name that no other sandbox of this run has."""
    return f"{stem}-{next(_numbers)}"


PROGRAMS = "usr"
WAIT = 120.0
"""Seconds that a checkpoint may take before the run is given up."""


def sessions(quick: bool) -> list[Trace]:
    """The shipped sessions, longest first. ``quick``: two of them."""
    return sorted(shipped(), key=lambda trace: -len(trace.turns))[: 2 if quick else None]


@dataclass
class Seat:
    """A sandbox as a session sees it: when it is dead, a command tells so instead of raising."""

    host: SandboxHost
    box: Box

    @classmethod
    def new(cls, host: SandboxHost, name: str) -> Seat:
        return cls(host, host.create(SandboxSpec(name)))

    def run(self, command: str, *, shell: str = "main", timeout: float | None = None) -> TurnResult:
        try:
            return self.box.run(command, shell=shell, timeout=timeout)
        except (SandboxDied, MachineError) as error:
            return TurnResult(b"", b"", None, 0.0, "sandbox-died", str(error))

    @property
    def root(self) -> Path:
        return self.box.machine().externals.root

    def save(self) -> None:
        """A checkpoint, so that the first turn is not charged with what was before it."""
        self.box.checkpoint()

    def end_turn(self) -> TurnRecord:
        return self.box.end_turn().wait(WAIT)

    def look(self, trace: Trace, outputs: tuple[Output, ...]) -> Observation:
        """What the end of a session shows; the probes run commands."""
        return observe(self, self.root, self.box.info().processes, trace.probes, outputs, self.written())

    def written(self) -> list[str]:
        """Top-level folders that a session may write to: all but those of programs, which are the bulk."""
        return [name for name in os.listdir(self.root) if name != PROGRAMS]
