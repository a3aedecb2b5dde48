"""``windtunnel calibrate``: measure this machine's device, or show what a device's times rest on."""

from __future__ import annotations

from pathlib import Path

import typer
from rich.console import Console
from rich.table import Table

from windtunnel.base import paths
from windtunnel.base.errors import UserError
from windtunnel.cluster.load import load_cluster
from windtunnel.cluster.model import Device


def register(app: typer.Typer) -> None:
    """Add the verb to ``app``."""
    app.command("calibrate")(calibrate)


def calibrate(
    device: str = typer.Argument(
        "cpu", help="A device of the catalogue that this machine has, 'agents.sandbox', or 'show'."
    ),
    shown: str = typer.Argument("", metavar="[DEVICE]", help="With 'show': the device to tell about."),
    quick: bool = typer.Option(False, "--quick", help="Fewer and smaller shapes: about half a minute."),
    threads: int = typer.Option(1, min=1, help="Threads of each rank on a CPU."),
    operators: str = typer.Option(
        "", metavar="FILE", help="JSON file of further operators to measure exactly."
    ),
) -> None:
    """Measure how long operators take on this machine and keep the profile for later emulations.

    'calibrate show DEVICE' prints the profile's origin and every parameter of the cost model with its source.
    """
    if device == "agents.sandbox":
        _measure_sandboxes(quick)
        return
    if device == "show":
        _show(_device(shown or "cpu"))
        return
    if shown:
        raise UserError(f"calibrate: argument {shown!r} is one too many, accepted is DEVICE or show DEVICE")
    _measure(_device(device), quick, threads, operators)


def _measure_sandboxes(quick: bool) -> None:
    from windtunnel.agents.sandbox.calibrate import calibrate as measure
    from windtunnel.agents.sandbox.calibrate import cost_table

    console = Console(stderr=True)
    with console.status("measuring sandboxes") as status:
        profile = measure(
            quick=quick,
            progress=lambda part, fraction: status.update(f"measuring sandboxes: {part} {fraction:.0%}"),
        )
    Console().print(cost_table(profile))
    typer.echo(f"{profile.origin}: {profile.path}")


def _device(name: str) -> Device:
    return load_cluster(f"{name}:1x1").host.device


def _measure(device: Device, quick: bool, threads: int, operators: str) -> None:
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    from windtunnel.training.emulate import calibrate as live

    torch_device = _torch_device(device)
    given = live.read_operators(Path(operators)) if operators else []
    path = paths.profiles() / f"{device.name}.json"
    columns = (TextColumn("{task.description:>12}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as bars:
        tasks: dict[str, int] = {}

        def progress(part: str, fraction: float) -> None:
            if part not in tasks:
                tasks[part] = bars.add_task(part, total=1.0)
            bars.update(tasks[part], completed=fraction)  # type: ignore[arg-type]

        profile = live.calibrate(
            device.name, torch_device, path, threads=threads, quick=quick, operators=given, progress=progress
        )
    typer.echo(f"{len(profile.operators)} operators measured on {profile.provenance['machine']}: {path}")


def _torch_device(device: Device) -> str:
    """``"cpu"``, or ``"cuda"`` when this machine has ``device``."""
    if device.kind == "cpu":
        return "cpu"
    import torch

    if not torch.cuda.is_available():
        raise UserError(f"calibrate: device {device.name} is not in this machine, accepted is cpu")
    present = torch.cuda.get_device_name()
    if present != device.torch_name:
        raise UserError(
            f"calibrate: device {device.name} is a {device.torch_name}, but this machine has a {present}"
        )
    return "cuda"


def _show(device: Device) -> None:
    from windtunnel.training.emulate.twin.costs.parameters import DEFAULT, parameter_rows
    from windtunnel.training.emulate.twin.costs.profile import find_profile

    console = Console()
    profile = find_profile(device.name)
    if profile is None:
        console.print(f"{device.name}: no measured profile; operators cost what the roofline below says.")
    else:
        console.print(f"{device.name}: {len(profile.operators)} operators measured", highlight=False)
        for key, value in profile.provenance.items():
            console.print(f"  {key}: {value}", highlight=False)
        for phase, seconds in profile.host_overhead.items():
            console.print(f"  overhead of an operator in {phase}: {seconds * 1e6:.2f} us", highlight=False)
    table = Table("parameter", "value", "source")
    for row in parameter_rows(DEFAULT, device):
        table.add_row(*row)
    console.print(table)
