"""``windtunnel calibrate``: measure this machine, or show what a device's times rest on."""

from __future__ import annotations

from importlib import import_module

import typer
from rich.console import Console

from windtunnel.base.errors import UserError
from windtunnel.calibration.profiles import Calibrated
from windtunnel.capabilities import CAPABILITIES
from windtunnel.cli import progress_bar
from windtunnel.cli.common import print_table
from windtunnel.cluster.load import load_cluster
from windtunnel.cluster.model import Device

DEVICES = "windtunnel.training.emulate"
"""Whose profiles are of devices, by their names."""


def calibrate(
    name: str = typer.Argument(
        "cpu", help="A device of the catalogue that this machine has, a capability, or 'show'."
    ),
    device: str = typer.Argument("", metavar="DEVICE", help="With 'show': the device."),
    quick: bool = typer.Option(False, "--quick", help="Fewer and smaller cases: about half a minute."),
    threads: int = typer.Option(1, min=1, help="Threads of each rank on a CPU."),
) -> None:
    """Measure operation times on this machine, and save the profile for later emulations.

    'calibrate show DEVICE' prints the profile's origin and every parameter of the cost model with its source.

    Example: windtunnel calibrate agents.sandbox --quick
    """
    if name == "show":
        return _show(load_cluster(f"{device or 'cpu'}:1x1").host.device)
    if device:
        raise UserError(
            f"calibrate: argument {device!r} is too much, accepted are NAME, or 'show' and DEVICE"
        )
    capability = next(
        (entry.package for entry in CAPABILITIES if entry.calibrates and entry.name == name), None
    )
    of_device = {} if capability else {"device": name, "threads": threads}
    measured = import_module(f"{capability or DEVICES}.calibrate").calibrate_here
    with progress_bar(f"calibrate {name}") as progress:
        done: Calibrated = measured(quick=quick, progress=progress, **of_device)
    if done.table is not None:
        Console().print(done.table)
    typer.echo(f"{done.said}: {done.path}")


def _show(device: Device) -> None:
    from windtunnel.training.emulate.twin.costs.profile import find_profile
    from windtunnel.training.emulate.twin.costs.roofline import parameter_rows

    profile = find_profile(device.name)
    if profile is None:
        typer.echo(f"{device.name}: no measured profile; operators cost what the roofline below says.")
    else:
        typer.echo(f"{device.name}: {len(profile.operators)} operators measured")
        for key, value in profile.provenance.items():
            typer.echo(f"  {key}: {value}")
        for phase, seconds in profile.host_overhead.items():
            typer.echo(f"  overhead of an operator in {phase}: {seconds * 1e6:.2f} us")
    print_table(("parameter", "value", "source"), parameter_rows(device))
