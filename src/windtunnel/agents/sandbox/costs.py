"""What the operations of a sandbox cost: plain figures, and formulas that anything can use.

A cost is a base, plus so much for each byte of memory and each process; the figures come from a *profile*,
which calibration measures on a machine and writes with that machine's facts. Time is split into CPU and the
rest (disk), because the two are shared with different neighbours. Without a profile of the user's own the
shipped one is used, and whoever shows a figure says which it was.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from windtunnel.agents.sandbox.model import TurnClass
from windtunnel.base.plain import from_plain
from windtunnel.calibration import profiles

VERSION = 2
SHIPPED = Path(__file__).with_name("costs.json")
NAME = "agents.sandbox"


@dataclass(frozen=True)
class SandboxCosts:
    """Seconds, bytes, seconds for each byte; ``*_cpu`` are the parts of a time that are CPU (0 to 1).

    *Memory* is what a process image holds as raw bytes beyond ``image_base`` and ``image_per_process``;
    *processes* are those beyond the sandbox's own init and main shell.
    """

    decide: float
    """Reading a turn's effects and giving it a class; all CPU."""
    shell: float
    """A checkpoint of shells only: the manifest, on the disk."""
    shell_cpu: float
    files_freeze: float
    """The frozen part of a checkpoint of files: freeze, snapshot, new baselines, thaw."""
    files_after: float
    """The rest of it: the snapshot and the manifest on the disk."""
    files_cpu: float
    full_freeze: float
    """The frozen part of a full checkpoint of a bare sandbox: freeze, snapshot beside dump, thaw."""
    full_freeze_per_byte: float
    full_freeze_per_process: float
    full_after: float
    """The rest of it: arming, page store, disk, manifest."""
    full_after_per_byte: float
    """For each raw byte of memory that goes through the page store, known or not."""
    full_after_per_new_byte: float
    """Further, for each raw byte that the page store has not seen."""
    full_cpu: float
    restore: float
    """Files cloned, page store read, processes restored: a bare sandbox."""
    restore_per_byte: float
    restore_per_process: float
    restore_cpu: float
    create: float
    """A new sandbox from an image that is imported already, with its first checkpoint."""
    image_base: float
    """Raw bytes of the image of a bare sandbox."""
    image_per_process: float
    new_base: float
    """Bytes that an image adds to the page store when no memory changed."""
    new_per_byte: float
    """Bytes added for each raw byte that changed: what compression leaves of it."""
    files_new: float
    """Bytes of file system metadata that a snapshot adds."""
    disk_lanes: float
    """How many checkpoints' disk parts go on at once before they slow one another down."""

    def __post_init__(self) -> None:
        for entry in fields(self):
            value = getattr(self, entry.name)
            if not 0 <= value < math.inf:
                raise ValueError(f"{entry.name} is {value}, accepted is a number from 0")
            if entry.name.endswith("_cpu") and value > 1:
                raise ValueError(f"{entry.name} is {value}, accepted is 0 to 1")
        if self.disk_lanes <= 0:
            raise ValueError("disk_lanes is 0, accepted is a positive number")

    def image_bytes(self, memory: float, processes: int) -> float:
        """Raw bytes of a process image."""
        return self.image_base + memory + self.image_per_process * processes

    def checkpoint(
        self,
        turn_class: TurnClass,
        *,
        memory: float = 0.0,
        processes: int = 0,
        dirty: float = 0.0,
        files: float = 0.0,
    ) -> OperationCost:
        """What a checkpoint of that class takes; ``dirty``: raw bytes of memory that changed since the last
        image, ``files``: bytes written since the last snapshot."""
        if turn_class is TurnClass.NONE:
            return OperationCost()
        if turn_class is TurnClass.SHELL:
            return OperationCost(after=self.shell, cpu=self.shell_cpu)
        if turn_class is TurnClass.FILES:
            return OperationCost(self.files_freeze, self.files_after, self.files_cpu, self.files_new + files)
        freeze = (
            self.full_freeze + self.full_freeze_per_byte * memory + self.full_freeze_per_process * processes
        )
        after = (
            self.full_after
            + self.full_after_per_byte * memory
            + self.full_after_per_new_byte * min(dirty, memory)
        )
        new = self.new_base + self.new_per_byte * min(dirty, memory)
        return OperationCost(freeze, after, self.full_cpu, self.files_new + files + new)

    def bring_back(self, *, memory: float, processes: int) -> OperationCost:
        """What a restore takes."""
        seconds = self.restore + self.restore_per_byte * memory + self.restore_per_process * processes
        return OperationCost(after=seconds, cpu=self.restore_cpu)


@dataclass(frozen=True)
class OperationCost:
    """One operation: seconds with the sandbox frozen, seconds after that, the part that is CPU, and bytes
    written."""

    freeze: float = 0.0
    after: float = 0.0
    cpu: float = 0.0
    written: float = 0.0

    @property
    def seconds(self) -> float:
        return self.freeze + self.after


@dataclass(frozen=True)
class SandboxProfile:
    """Costs and where they come from: ``provenance`` (machine, date, versions, load while measured, what
    kind of memory was measured, fit errors)."""

    costs: SandboxCosts
    provenance: dict[str, str] = field(default_factory=dict)
    path: str = ""

    @property
    def origin(self) -> str:
        """One line for whoever shows an emulated figure."""
        which = "shipped profile" if self.path == str(SHIPPED) else "own profile"
        machine, date = (self.provenance.get(key, f"no {key}") for key in ("machine", "date"))
        return f"{which}, measured on {machine}, {date}"


def load_costs(path: Path | None = None) -> SandboxProfile:
    """The profile at ``path``; None: the user's own where there is one, else the shipped one.

    Raises UserError when the file is no profile.
    """
    if path is None:
        path = own if (own := profiles.own(NAME)).is_file() else SHIPPED

    def make(data: dict[str, Any]) -> SandboxProfile:
        costs = from_plain(SandboxCosts, data["costs"])
        return SandboxProfile(costs, from_plain(dict[str, str], data["provenance"]), str(path))

    return profiles.read(path, "a profile of sandbox costs", VERSION, make)


def save_costs(profile: SandboxProfile, path: Path) -> None:
    """Write a profile, whole or not at all."""
    content = {
        "provenance": profile.provenance,
        "costs": {name: float(f"{value:.4g}") for name, value in asdict(profile.costs).items()},
    }
    profiles.save(path, VERSION, content)
