"""What a host remembers of a sandbox between two processes of its own (``box.json``, written atomically), and
what a crash has left of a home."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from windtunnel.agents.sandbox.live import machine
from windtunnel.agents.sandbox.live.place import Home
from windtunnel.agents.sandbox.model import Limits, SandboxSpec
from windtunnel.base import atomic
from windtunnel.base.processes import Identity

Status = Literal["making", "running", "stopped", "dead"]


@dataclass(frozen=True)
class Record:
    """One sandbox. ``pid`` and ``started`` (clock ticks since boot) name its init as long as ``boot`` is the
    boot id of the host; ``tip`` is its newest checkpoint; ``base`` the checkpoint that it was forked from."""

    spec: SandboxSpec
    created: float
    status: Status = "making"
    pid: int = 0
    started: int = 0
    boot: str = ""
    turns: int = 0
    tip: str = ""
    base: str = ""
    image: str = ""


def is_alive(record: Record) -> bool:
    """Whether the sandbox's init is still the one that the record names."""
    return Identity(record.pid, record.started, record.boot).lives()


def write(folder: Path, record: Record) -> None:
    """Replace ``box.json``; a crash leaves the old one or the new one."""
    folder.mkdir(parents=True, exist_ok=True)
    atomic.replace(folder / "box.json", json.dumps(asdict(record), indent=1), durable=True)


def read(folder: Path) -> Record | None:
    """The record in ``folder``; None where there is none that can be read."""
    try:
        plain: dict[str, Any] = json.loads((folder / "box.json").read_text())
        spec = plain["spec"]
        return Record(**{**plain, "spec": SandboxSpec(**{**spec, "limits": Limits(**spec["limits"])})})
    except (OSError, ValueError, KeyError, TypeError):
        return None


def leftovers(home: Home) -> list[str]:
    """What a crash has left, seen without opening the home; in words: groups, namespaces and devices without
    a sandbox; sandboxes and dumps half made."""
    if not home.boxes.is_dir():
        return []
    records = {folder.name: read(folder) for folder in sorted(home.boxes.iterdir())}
    owned = {name for name, one in records.items() if one is not None and one.status != "making"}
    found = machine.leftovers(home, owned)
    found += [f"half-made sandbox {name}" for name in records if name not in owned]
    dumps = home.path / "dumps"
    if dumps.is_dir():
        found += [f"half-stored process image {one.name}" for one in sorted(dumps.iterdir())]
    return found
