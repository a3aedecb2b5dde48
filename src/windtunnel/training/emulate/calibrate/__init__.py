"""Measures the machine at hand: operators over shapes and dtypes, the host's overhead, gloo collectives.

This is the live room of cost: it imports torch and takes real time. What it finds is a `DeviceProfile`.
"""

from __future__ import annotations

import torch

from windtunnel.base.errors import UserError
from windtunnel.calibration import profiles
from windtunnel.calibration.profiles import Calibrated, Progress, today
from windtunnel.cluster.catalogue import processor_name
from windtunnel.cluster.load import load_cluster
from windtunnel.cluster.model import Device
from windtunnel.training.emulate.calibrate.gloo import measure_gloo
from windtunnel.training.emulate.calibrate.measure import measure_operators, measure_overhead
from windtunnel.training.emulate.calibrate.operators import grid
from windtunnel.training.emulate.graph import Operator
from windtunnel.training.emulate.twin.costs.profile import DeviceProfile, save_profile

__all__ = ["calibrate_here", "measure_gloo", "measure_operators", "measure_overhead"]


def calibrate_here(quick: bool, progress: Progress, device: str = "cpu", threads: int = 1) -> Calibrated:
    """Measure ``device`` of the catalogue, which this machine has, and save its profile.

    Raises:
        UserError: the machine has no such device.
    """
    what = load_cluster(f"{device}:1x1").host.device
    here = _torch_device(what)
    operators: list[tuple[Operator, float]] = []
    for part, ops in grid(quick, here).items():
        operators += measure_operators(
            ops,
            here,
            threads,
            seconds=1.0 if quick else 8.0,
            progress=lambda fraction, part=part: progress(part, fraction),  # type: ignore[misc]
        ).operators
    profile = DeviceProfile(what.name, operators, provenance=_provenance(here, threads, quick))
    if here == "cpu":
        progress("host", 0.0)
        profile.host_overhead = measure_overhead(threads)
        progress("gloo", 0.0)
        profile.collectives = measure_gloo(2, threads, quick=quick)
    path = profiles.own(what.name)
    save_profile(profile, path)
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


def _provenance(torch_device: str, threads: int, quick: bool) -> dict[str, str]:
    machine = torch.cuda.get_device_name() if torch_device == "cuda" else processor_name()
    return {
        "machine": machine, "date": today(), "torch": torch.__version__, "threads": str(threads),
        "grid": "quick" if quick else "full", "measured": "yes",
    }  # fmt: skip
