"""What a host remembers of one sandbox between two processes of its own: ``box.json``, written atomically."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from windtunnel.agents.sandbox.model import Limits, Spec
from windtunnel.base import atomic

Status = Literal["making", "running", "stopped", "dead"]


@dataclass(frozen=True)
class Record:
    """One sandbox. ``pid`` and ``started`` (clock ticks since boot) name its init as long as ``boot`` is the
    boot id of the host; ``tip`` is its newest checkpoint; ``base`` the checkpoint that it was forked from."""

    spec: Spec
    created: float
    status: Status = "making"
    pid: int = 0
    started: int = 0
    boot: str = ""
    turns: int = 0
    tip: str = ""
    base: str = ""
    image: str = ""


def boot_id() -> str:
    """Identifies this boot of the host: pids of another boot mean nothing."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def start_ticks(pid: int) -> int:
    """When a process started, in clock ticks since boot; 0 when there is none or it is a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except (OSError, IndexError):
        return 0
    return 0 if fields[0] in ("Z", "X") else int(fields[19])


def is_alive(record: Record) -> bool:
    """Whether the sandbox's init is still the one that the record names."""
    return record.pid > 0 and record.boot == boot_id() and start_ticks(record.pid) == record.started > 0


def write(folder: Path, record: Record) -> None:
    """Replace ``box.json``; a crash leaves the old one or the new one."""
    folder.mkdir(parents=True, exist_ok=True)
    atomic.replace(folder / "box.json", json.dumps(asdict(record), indent=1), durable=True)


def read(folder: Path) -> Record | None:
    """The record in ``folder``; None where there is none that can be read."""
    try:
        plain: dict[str, Any] = json.loads((folder / "box.json").read_text())
        spec = plain["spec"]
        return Record(**{**plain, "spec": Spec(**{**spec, "limits": Limits(**spec["limits"])})})
    except (OSError, ValueError, KeyError, TypeError):
        return None
