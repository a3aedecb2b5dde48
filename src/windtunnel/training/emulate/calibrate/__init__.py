"""Measures the machine at hand: operators over shapes and dtypes, the host's overhead, gloo collectives.

This is the live room of cost: it imports torch and takes real time. What it finds is a `DeviceProfile`, saved
after every part, so that a calibration that was stopped goes on where it was.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from windtunnel.base.errors import UserError
from windtunnel.calibration import profiles
from windtunnel.calibration.profiles import Calibrated, Progress, today
from windtunnel.cluster.catalogue import processor_name
from windtunnel.cluster.load import load_cluster
from windtunnel.cluster.model import Device
from windtunnel.training.emulate.calibrate.gloo import measure_gloo
from windtunnel.training.emulate.calibrate.measure import measure_operators
from windtunnel.training.emulate.calibrate.operators import grid
from windtunnel.training.emulate.calibrate.overhead import measure_overhead
from windtunnel.training.emulate.graph import Operator
from windtunnel.training.emulate.twin.costs.profile import DeviceProfile, decode, read_profile, save_profile

__all__ = [
    "calibrate", "measure_gloo", "measure_operators", "measure_overhead", "read_operators",
]  # fmt: skip

# What must agree for measurements to belong together.
SAME = ("machine", "torch", "threads", "grid")


def calibrate_here(
    quick: bool, progress: Progress, device: str = "cpu", threads: int = 1, operators: Path | None = None
) -> Calibrated:
    """`calibrate` for ``windtunnel calibrate``: ``device`` of the catalogue, which this machine has.

    ``operators``: a file of further ones to measure exactly.

    Raises:
        UserError: the machine has no such device, or the file is no list of operators.
    """
    what = load_cluster(f"{device}:1x1").host.device
    here = _torch_device(what)
    operator_list = read_operators(operators) if operators else []
    path = profiles.own(what.name)
    profile = calibrate(
        what.name, here, path, threads=threads, quick=quick, operators=operator_list, progress=progress
    )
    return Calibrated(path, f"{len(profile.operators)} operators measured on {profile.provenance['machine']}")


def _torch_device(device: Device) -> str:
    """``"cpu"``, or ``"cuda"`` when this machine has ``device``."""
    if device.kind == "cpu":
        return "cpu"
    if not torch.cuda.is_available():
        raise UserError(f"calibrate: device {device.name} is not in this machine, accepted is cpu")
    present = torch.cuda.get_device_name()
    if present != device.torch_name:
        raise UserError(
            f"calibrate: device {device.name} is a {device.torch_name}, but this machine has a {present}"
        )
    return "cuda"


def calibrate(
    name: str, torch_device: str, path: Path, *, threads: int = 1, quick: bool = False,
    operators: Sequence[Operator] = (), progress: Progress | None = None,
) -> DeviceProfile:  # fmt: skip
    """Measure this machine's ``torch_device`` (``"cpu"`` or ``"cuda"``) as device ``name`` and save it at
    ``path``.

    ``operators``: further ones to measure exactly. ``progress`` is called with the part and the fraction of
    it that is done. An unfinished profile at ``path`` of the same machine, torch and threads is continued,
    a finished one is replaced.
    """
    report = progress or (lambda part, fraction: None)
    profile = _unfinished(name, path, _provenance(torch_device, threads, quick))
    parts = {**grid(quick, torch_device), "given": list(operators)}
    for part, ops in parts.items():
        missing = [op for op in ops if profile.exact(op) is None]
        if not missing:
            continue
        device_profile = measure_operators(
            missing,
            torch_device,
            threads,
            seconds=1.0 if quick else 8.0,
            progress=lambda fraction, part=part: report(part, fraction),  # type: ignore[misc]
        )
        for op, seconds in device_profile.operators:
            profile.add(op, seconds)
        save_profile(profile, path)
    if torch_device == "cpu":
        if not profile.host_overhead:
            report("host", 0.0)
            profile.host_overhead = measure_overhead(threads)
            save_profile(profile, path)
        if not profile.collectives:
            report("gloo", 0.0)
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
    machine = torch.cuda.get_device_name() if torch_device == "cuda" else processor_name()
    return {
        "machine": machine, "date": today(), "torch": torch.__version__, "threads": str(threads),
        "grid": "quick" if quick else "full", "measured": "yes", "state": "partial",
    }  # fmt: skip


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
