"""``windtunnel advise``: what would make a job faster on a cluster."""

from __future__ import annotations

import json
from typing import Annotated

import typer

SETTINGS = {"allow_interspersed_args": False, "ignore_unknown_options": False}


def register(app: typer.Typer) -> None:
    """Add the verb to ``app``."""
    app.command("advise", context_settings=SETTINGS)(advise)


def advise(
    script: Annotated[str, typer.Argument(metavar="SCRIPT", help="A torchrun-style training script.")],
    cluster: Annotated[
        str, typer.Option("--cluster", "-c", help="A name such as v100:8x8,nic=ethernet-25, or a file.")
    ],
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="ARGS", help="The script's own arguments.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON value.")] = False,
) -> None:
    """Emulate SCRIPT once on a cluster, and say what would make it faster there.

    Example: windtunnel advise --cluster v100:8x8,nic=ethernet-25 examples/train_resnet.py
    """
    from windtunnel.base.importing import uncollected

    with uncollected():
        from rich.console import Console
        from rich.table import Table

        from windtunnel import advise as made
        from windtunnel.base.plain import to_plain
        from windtunnel.cli import shown_progress

    with shown_progress("advise") as progress:
        found = made.advise(script, arguments or (), cluster, progress)
    if as_json:
        typer.echo(json.dumps(to_plain(found)))
        return
    table = Table("about", "finding (emulated)", "gain")
    for one in found:
        table.add_row(one.about, one.finding, "" if one.gain is None else f"{one.gain:+.1%}")
    console = Console(highlight=False)
    console.print(table)
    for one in found:
        console.print(f"More of the {one.about}: [bold]{one.command}[/]", soft_wrap=True)
