"""Measures the machine at hand: operators over shapes and dtypes, the host's overhead, gloo collectives.

This is the live room of cost: it imports torch and takes real time. What it finds is a `DeviceProfile`, saved
after every part, so that a calibration that was stopped goes on where it was.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from windtunnel.base.errors import UserError
from windtunnel.training.emulate.calibrate.gloo import measure_gloo
from windtunnel.training.emulate.calibrate.grid import grid
from windtunnel.training.emulate.calibrate.measure import measure_operators
from windtunnel.training.emulate.calibrate.overhead import measure_overhead, measure_sharding
from windtunnel.training.emulate.graph import Operator
from windtunnel.training.emulate.twin.costs.profile import DeviceProfile, decode, read_profile, save_profile

__all__ = [
    "calibrate",
    "measure_gloo",
    "measure_operators",
    "measure_overhead",
    "measure_sharding",
    "read_operators",
]

# What must agree for measurements to belong together.
SAME = ("machine", "torch", "threads", "grid")


def calibrate(
    name: str,
    torch_device: str,
    path: Path,
    *,
    threads: int = 1,
    quick: bool = False,
    operators: Sequence[Operator] = (),
    progress: Callable[[str, float], None] | None = None,
) -> DeviceProfile:
    """Measure this machine's ``torch_device`` (``"cpu"`` or ``"cuda"``) as device ``name`` and save it at
    ``path``.

    ``operators``: further ones to measure exactly. ``progress`` is called with the part and the fraction of
    it that is done. An unfinished profile at ``path`` of the same machine, torch and threads is continued,
    a finished one is replaced.
    """
    told = progress or (lambda part, fraction: None)
    profile = _unfinished(name, path, _provenance(torch_device, threads, quick))
    parts = {**grid(quick, torch_device), "given": list(operators)}
    for part, ops in parts.items():
        missing = [op for op in ops if profile.exact(op) is None]
        if not missing:
            continue
        found = measure_operators(
            missing,
            torch_device,
            threads,
            seconds=1.0 if quick else 8.0,
            progress=lambda fraction, part=part: told(part, fraction),  # type: ignore[misc]
        )
        for op, seconds in found.operators:
            profile.add(op, seconds)
        save_profile(profile, path)
    if torch_device == "cpu":
        if not profile.host_overhead:
            told("host", 0.0)
            profile.host_overhead = measure_overhead(threads)
            save_profile(profile, path)
        if not profile.collectives:
            told("gloo", 0.0)
            profile.collectives = measure_gloo(2, threads, quick=quick)
    profile.provenance["state"] = "finished"
    save_profile(profile, path)
    return profile


def _unfinished(name: str, path: Path, provenance: dict[str, str]) -> DeviceProfile:
    """The profile to go on with: what an interrupted calibration like this one left, else an empty one."""
    if path.is_file():
        try:
            left = read_profile(path)
        except UserError:
            return DeviceProfile(name, provenance=provenance)
        same = all(left.provenance.get(key) == provenance[key] for key in SAME)
        if same and left.provenance.get("state") == "partial":
            return left
    return DeviceProfile(name, provenance=provenance)


def _provenance(torch_device: str, threads: int, quick: bool) -> dict[str, str]:
    machine = torch.cuda.get_device_name() if torch_device == "cuda" else _cpu_name()
    return {
        "machine": machine,
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "torch": torch.__version__,
        "threads": str(threads),
        "grid": "quick" if quick else "full",
        "measured": "yes",
        "state": "partial",
    }


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def read_operators(path: Path) -> list[Operator]:
    """Operators of a JSON file: a list of [name, arguments, outputs], as a profile's rows begin.

    Raises `UserError` when the file is not that.
    """
    try:
        rows: Any = json.loads(path.read_text())
        if isinstance(rows, dict):
            rows = rows["operators"]
        return [decode(*row[:3]) for row in rows]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{path}: not a list of operators ({error}), accepted is JSON rows of [name, arguments, outputs]"
        ) from error
