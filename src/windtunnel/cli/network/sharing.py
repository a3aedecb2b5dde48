"""``windtunnel network sharing``: bandwidth shares on an interface of this host."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from windtunnel.cli import Group

if TYPE_CHECKING:
    from windtunnel.network.sharing.live.attachment import Attachment

group = typer.Typer(
    cls=Group, no_args_is_help=True, help="Bandwidth shares on an interface of this host (Augmented Queue)."
)
Device = Annotated[str, typer.Argument(metavar="IFACE", help="An interface of this host.")]
File = Annotated[Path, typer.Argument(metavar="SPEC.yaml", help="Who shares it, and how: docs/sharing.md.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON value.")]
Lend = Annotated[
    bool, typer.Option("--lend", help="Stay, and lend what some leave to others until interrupted.")
]
Log = Annotated[
    Path | None, typer.Option(metavar="FILE", help="With --lend: log decisions there, for replay.")
]


def register(app: typer.Typer) -> None:
    """Add the verb to ``app``."""
    app.add_typer(group, name="sharing")


@group.command("attach")
def attach(device: Device, spec: File, lends: Lend = False, log: Log = None) -> None:
    """Put shares on an interface; they stay until they are cleared, whoever runs.

    Example: windtunnel network sharing attach eth0 shares.yaml --lend
    """
    from windtunnel.network.sharing.live import attachment
    from windtunnel.network.sharing.spec import read_spec

    found = attachment.attach(device, read_spec(spec))
    typer.echo(f"Attached  {device}, {found.hook}")
    _stay(found, lends, log)


@group.command("set")
def set_(device: Device, spec: File, lends: Lend = False, log: Log = None) -> None:
    """Give the entities that are attached other rates, limits and marks.

    Example: windtunnel network sharing set eth0 shares.yaml
    """
    from windtunnel.network.sharing.live import attachment
    from windtunnel.network.sharing.spec import read_spec

    found = attachment.set_spec(device, read_spec(spec))
    typer.echo(f"Set  {device}, {found.hook}")
    _stay(found, lends, log)


@group.command("show")
def show(device: Device, as_json: Json = False) -> None:
    """Say who has which rate, and what passed, was marked and was dropped.

    Example: windtunnel network sharing show eth0 --json
    """
    from windtunnel.network.sharing.live import attachment

    standing = []
    for found in attachment.opened(device):
        standing.append((found, attachment.shown(found)))
        found.close()
    if as_json:
        value = [
            {"hook": found.hook, "by": found.by, "entities": [asdict(row) for row in rows]}
            for found, rows in standing
        ]
        typer.echo(json.dumps(value))
        return
    from rich.console import Console
    from rich.table import Table

    from windtunnel.base import units

    for found, rows in standing:
        title = f"{device}, {found.hook}, by {found.by}"
        table = Table("entity", "rate", "lent", "ahead", "passed", "marked", "dropped", title=title)
        for row in rows:
            rates = [units.rate(row.rate), units.rate(row.lent), units.amount(row.gap)]
            table.add_row(row.name, *rates, *map(units.amount, (row.passed, row.marked, row.dropped)))
        Console().print(table)


@group.command("clear")
def clear(device: Device) -> None:
    """Take all shares from an interface; what others put there stays.

    Example: windtunnel network sharing clear eth0
    """
    from windtunnel.network.sharing.live import attachment

    hooks = attachment.clear(device)
    typer.echo(f"Cleared  {device}, {' and '.join(hooks)}" if hooks else f"{device} had no shares")


def _stay(found: Attachment, lends: bool, log: Path | None) -> None:
    from windtunnel.base.errors import UserError

    if log is not None and not lends:
        raise UserError("network sharing: --log is given without --lend, accepted is both")
    if not lends:
        found.close()
        return
    from windtunnel.network.sharing.live.lending import lend

    typer.echo(f"Lends  {lend(found, log=log)}")
