"""``windtunnel mapper``: what layers and training steps cost on a chip that is only a drawing."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from windtunnel.cli import new_group
from windtunnel.cli.common import Json, emit, print_json, print_table

group = new_group("Map neural network layers onto an accelerator design (Interstellar).")
Chip = Annotated[
    str, typer.Option("--accelerator", "-a", metavar="NAME|FILE", help="eyeriss, tpu, cpu, or a YAML file.")
]
Layers = Annotated[
    str,
    typer.Option(
        "--layer", "-l", metavar="NAME|FILE", help="Layers: alexnet, vgg16, lstm, mlp.fc1, or a file."
    ),
]
Dataflow = Annotated[
    str, typer.Option(metavar="A|B", help="Only this spatial unrolling, such as 'C|K'; '' for all.")
]
Policy = Annotated[
    str, typer.Option(help="Objective: energy, or fastest (fewest cycles, then least energy).")
]
Out = Annotated[Path, typer.Option("--out", "-o", metavar="FILE", help="File for the cluster.")]


@group.command("search")
def search(
    accelerator: Chip, layer: Layers, dataflow: Dataflow = "", policy: Policy = "energy",
    as_json: Json = False,
) -> None:  # fmt: skip
    """Find each layer's best mapping and its cost. For a single layer, show the schedule too.

    Example: windtunnel mapper search --accelerator eyeriss --layer alexnet.conv3
    """
    from windtunnel.silicon.mapper import read_accelerator, read_layers
    from windtunnel.silicon.mapper.policy.schedule import lines
    from windtunnel.silicon.mapper.run import search as make
    from windtunnel.silicon.mapper.twin import total

    chip = read_accelerator(accelerator)
    rows = make(read_layers(layer), chip, dataflow, policy)
    costs = [(f"{row.layer.name}  {row.decision.mapping.dataflow}", row.cost) for row in rows]
    costs += [("together", total(cost for _, cost in costs))] if len(rows) > 1 else []
    _show(chip, "layer", costs, as_json, [*map(vars, rows)])
    if beam := [row.layer.name for row in rows if not row.decision.exact]:
        typer.echo(f"not exact, by a beam: {', '.join(beam)}", err=as_json)
    if len(rows) == 1 and not as_json:
        typer.echo(f"{rows[0].decision.utilisation:.0%} of all PEs work; the schedule:")
        typer.echo("\n".join(lines(rows[0].layer, chip, rows[0].decision.mapping)))


@group.command("allocate")
def allocate(accelerator: Chip, layer: Layers, dataflow: Dataflow = "C|K", as_json: Json = False) -> None:
    """Choose memory sizes for all layers together. The array stays as it is.

    Example: windtunnel mapper allocate --accelerator eyeriss --layer lstm
    """
    from windtunnel.base.plain import to_plain
    from windtunnel.base.units import size
    from windtunnel.silicon.mapper import read_accelerator, read_layers
    from windtunnel.silicon.mapper.run import allocate as make

    allocation = make(read_layers(layer), read_accelerator(accelerator), dataflow)
    lines = []
    for name, point in (("base", allocation.base), ("best", allocation.best)):
        levels = ", ".join(f"{level.name} {size(level.capacity)}" for level in point.accelerator.levels)
        lines.append(f"{name}  {point.energy:.4g} J  {point.cycles:.4g} cycles  {levels}")
    lines.append(
        f"{allocation.gain:.2f} times less energy, the best of {len(allocation.points)} sizes (emulated)"
    )
    emit(as_json, {"energy_gain": allocation.gain, **to_plain(allocation)}, lines)


@group.command("profile")
def profile(
    run: Annotated[str, typer.Argument(metavar="RUN", help="The id of an emulation, or last.")],
    accelerator: Chip, out: Out = Path("chip.yaml"), policy: Policy = "fastest", as_json: Json = False,
) -> None:  # fmt: skip
    """Estimate an emulated run's step on an accelerator, and write it as a device for `emulate`.

    Example: windtunnel mapper profile last --accelerator tpu --out tpu.yaml
    """
    from windtunnel.silicon.mapper import read_accelerator
    from windtunnel.silicon.mapper.run import profile as make

    chip = read_accelerator(accelerator)
    result = make(run, chip, out, policy)
    files = {"cluster": str(result.cluster), "profile": str(result.profile)}
    _show(
        chip, "operators of a rank's step", [*result.kinds.items(), ("together", result.step)], as_json, files
    )
    if not as_json:
        typer.echo(f"Profile  {result.profile}\nCluster  {out}, for: windtunnel emulate --cluster {out} …")


def _show(chip: Any, what: str, rows: list[tuple[str, Any]], as_json: bool, more: Any) -> None:
    """Seconds, joules, and the bytes of each level: as a table, or with ``more`` as JSON."""
    from windtunnel.base.units import amount, seconds

    names = [level.name for level in chip.levels]
    if as_json:
        return print_json({"levels": names, "costs": dict(rows), "details": more})
    cells = [
        (name, seconds(cost.seconds), f"{cost.joules:.4g} J", *map(amount, cost.bytes)) for name, cost in rows
    ]
    note = f"{chip.name}, emulated; bytes are read and written at each level"
    print_table((what, ">time", ">energy", *(f">{name}" for name in names)), cells, note=note, rules=False)
