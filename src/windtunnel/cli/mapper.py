"""``windtunnel mapper``: what layers and training steps cost on a chip that is only a drawing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from windtunnel.cli import Group

group = typer.Typer(
    cls=Group, no_args_is_help=True, help="What layers and steps cost on a chip that is a drawing."
)
Chip = Annotated[
    str, typer.Option("--accelerator", "-a", metavar="NAME|FILE", help="eyeriss, tpu, cpu, or a YAML file.")
]
Layers = Annotated[
    str,
    typer.Option(
        "--layer", "-l", metavar="NAME|FILE", help="alexnet, vgg16, lstm, mlp, alexnet.conv3, a file."
    ),
]
Dataflow = Annotated[str, typer.Option(metavar="A|B", help="Only this unrolling, such as 'C|K'; '' for all.")]
Policy = Annotated[str, typer.Option(help="energy, or fastest: fewest cycles, then least energy.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON value.")]


def register(app: typer.Typer) -> None:
    """Add the verb to ``app``."""
    app.add_typer(group, name="mapper")


@group.command("search")
def search(
    accelerator: Chip,
    layer: Layers,
    dataflow: Dataflow = "",
    policy: Policy = "energy",
    as_json: Json = False,
) -> None:
    """Find the best mapping of each layer, what it takes, and of a single layer the schedule.

    Example: windtunnel mapper search --accelerator eyeriss --layer alexnet.conv3
    """
    from windtunnel.silicon.mapper.policy.schedule import lines
    from windtunnel.silicon.mapper.run import search as make
    from windtunnel.silicon.mapper.spec import read_accelerator, read_layers
    from windtunnel.silicon.mapper.twin import total

    chip = read_accelerator(accelerator)
    rows = make(read_layers(layer), chip, dataflow, policy)
    if as_json:
        names = [level.name for level in chip.levels]
        typer.echo(json.dumps({"levels": names, "layers": [one.plain() for one in rows]}))
        return
    shown: dict[str, tuple[str, Any]] = {
        one.layer.name: (f"{one.decision.mapping.dataflow}, {one.decision.utilisation:.0%} of PEs", one.cost)
        for one in rows
    }
    if len(rows) > 1:
        shown["together"] = ("", total(one.cost for one in rows))
    _table(chip, "layer", shown)
    if beam := [one.layer.name for one in rows if not one.decision.exact]:
        typer.echo(f"not exact, by a beam: {', '.join(beam)}")
    if len(rows) == 1:
        typer.echo("\n".join(lines(rows[0].layer, chip, rows[0].decision.mapping)))


@group.command("allocate")
def allocate(accelerator: Chip, layer: Layers, dataflow: Dataflow = "C|K", as_json: Json = False) -> None:
    """Size the memories for all layers together; the array and its throughput stay.

    Example: windtunnel mapper allocate --accelerator eyeriss --layer lstm
    """
    from windtunnel.base.units import size
    from windtunnel.silicon.mapper.run import allocate as make
    from windtunnel.silicon.mapper.spec import read_accelerator, read_layers

    made = make(read_layers(layer), read_accelerator(accelerator), dataflow)
    plain: dict[str, Any] = {"energy_gain": made.gain, "points": len(made.points)}
    for name, one in (("base", made.base), ("best", made.best)):
        held = {level.name: level.capacity for level in one.accelerator.levels}
        plain[name] = {"capacity_bytes": held, "joules": one.energy, "cycles": one.cycles}
        if not as_json:
            words = ", ".join(f"{level} {size(amount)}" for level, amount in held.items())
            typer.echo(f"{name}  {one.energy:.4g} J  {one.cycles:.4g} cycles  {words}")
    typer.echo(
        json.dumps(plain)
        if as_json
        else f"{made.gain:.2f} times less energy, the best of {len(made.points)} sizes (emulated)"
    )


@group.command("profile")
def profile(
    run: Annotated[str, typer.Argument(metavar="RUN", help="The id of an emulation, or last.")],
    accelerator: Chip,
    out: Annotated[Path, typer.Option("--out", "-o", metavar="FILE", help="For the cluster.")] = Path(
        "chip.yaml"
    ),
    policy: Policy = "fastest",
    as_json: Json = False,
) -> None:
    """Price the step of an emulated run on an accelerator, and make it a device that emulate takes.

    Example: windtunnel mapper profile last --accelerator tpu --out tpu.yaml
    """
    from windtunnel.silicon.mapper.run import profile as make
    from windtunnel.silicon.mapper.spec import read_accelerator

    chip = read_accelerator(accelerator)
    made = make(run, chip, out, policy)
    costs = {**made.kinds, "together": made.step}
    if as_json:
        plain = {kind: vars(one) for kind, one in costs.items()}
        files = {"cluster": str(made.cluster), "profile": str(made.profile)}
        typer.echo(json.dumps({"levels": [level.name for level in chip.levels], "step": plain, **files}))
        return
    _table(chip, "operators of a rank's step", {kind: ("", one) for kind, one in costs.items()})
    typer.echo(
        f"Profile  {made.profile}\nCluster  {made.cluster}: windtunnel emulate --cluster {made.cluster} …"
    )


def _table(chip: Any, what: str, rows: dict[str, tuple[str, Any]]) -> None:
    """Seconds, joules, and the bytes of each level."""
    from rich.console import Console
    from rich.table import Table

    from windtunnel.base.units import amount, seconds

    table = Table(what, "", box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
    for name in ("time", "energy", *(level.name for level in chip.levels)):
        table.add_column(name, justify="right", no_wrap=True)
    for name, (words, one) in rows.items():
        table.add_row(name, words, seconds(one.seconds), f"{one.joules:.4g} J", *map(amount, one.bytes))
    console = Console()
    console.width = console.width if console.is_terminal else 120
    console.print(table)
    console.print(
        f"{chip.name}, emulated; bytes are read and written at each level", style="dim", highlight=False
    )
