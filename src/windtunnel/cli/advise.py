"""``windtunnel advise``: what would make a job faster on a cluster."""

from __future__ import annotations

from typing import Annotated

import typer

from windtunnel.cli.common import Arguments, Json, Script, print_json, print_table


def advise(
    script: Script,
    cluster: Annotated[
        str, typer.Option("--cluster", "-c", help="A name such as v100:8x8,nic=ethernet-25, or a file.")
    ],
    arguments: Arguments = None,
    as_json: Json = False,
) -> None:
    """Emulate SCRIPT once on a cluster, and list what would make it faster there.

    Example: windtunnel advise --cluster v100:8x8,nic=ethernet-25 examples/train_resnet.py
    """
    from windtunnel.base.importing import uncollected

    with uncollected():
        from windtunnel import advise as advice
        from windtunnel.cli import progress_bar

    with progress_bar("advise") as progress:
        findings = advice.advise(script, arguments or (), cluster, progress)
    if as_json:
        return print_json(findings)
    rows = [(row.about, row.finding, "" if row.gain is None else f"{row.gain:+.1%}") for row in findings]
    print_table(("about", "finding (emulated)", ">gain"), rows)
    for row in findings:
        typer.echo(f"More of the {row.about}: {row.command}")
