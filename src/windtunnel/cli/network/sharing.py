"""``windtunnel network sharing``: bandwidth shares on an interface of this host."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from windtunnel.base.errors import UserError
from windtunnel.cli import new_group
from windtunnel.cli.common import Json, LogFile, print_json, print_table

if TYPE_CHECKING:
    from windtunnel.network.sharing.live.attachment import Attachment

group = new_group("Bandwidth shares on an interface of this host (Augmented Queue).")
Device = Annotated[str, typer.Argument(metavar="IFACE", help="An interface of this host.")]
File = Annotated[Path, typer.Argument(metavar="SPEC.yaml", help="The tenants and shares: docs/sharing.md.")]
Lend = Annotated[
    bool, typer.Option("--lend", help="Run until interrupted, and lend unused bandwidth to others.")
]


@group.command("attach")
def attach(device: Device, spec: File, lends: Lend = False, log: LogFile = None) -> None:
    """Put bandwidth shares on an interface. They stay until `clear`.

    Example: windtunnel network sharing attach eth0 shares.yaml --lend
    """
    from windtunnel.network.sharing.live import attachment
    from windtunnel.network.sharing.spec import read_spec

    attached = attachment.attach(device, read_spec(spec))
    typer.echo(f"Attached  {device}, {attached.hook}")
    _stay(attached, lends, log)


@group.command("set")
def set_(device: Device, spec: File, lends: Lend = False, log: LogFile = None) -> None:
    """Change the rates, limits and marks of the attached tenants.

    Example: windtunnel network sharing set eth0 shares.yaml
    """
    from windtunnel.network.sharing.live import attachment
    from windtunnel.network.sharing.spec import read_spec

    attached = attachment.set_spec(device, read_spec(spec))
    typer.echo(f"Set  {device}, {attached.hook}")
    _stay(attached, lends, log)


@group.command("show")
def show(device: Device, as_json: Json = False) -> None:
    """Show each tenant's rate, and the traffic that passed, was marked and was dropped.

    Example: windtunnel network sharing show eth0 --json
    """
    from windtunnel.network.sharing.live import attachment

    shares = []
    for attached in attachment.opened(device):
        shares.append((attached, attachment.shown(attached)))
        attached.close()
    if as_json:
        return print_json([
            {"hook": attached.hook, "by": attached.by, "entities": rows} for attached, rows in shares
        ])  # fmt: skip
    from windtunnel.base.units import amount, rate

    for attached, rows in shares:
        cells = [
            (row.name, rate(row.rate), rate(row.lent), amount(row.gap),
             *map(amount, (row.passed, row.marked, row.dropped)))
            for row in rows
        ]  # fmt: skip
        head = ("entity", "rate", "lent", "ahead", "passed", "marked", "dropped")
        print_table(head, cells, f"{device}, {attached.hook}, by {attached.by}")


@group.command("clear")
def clear(device: Device) -> None:
    """Remove all shares from an interface. Queues of other programs stay.

    Example: windtunnel network sharing clear eth0
    """
    from windtunnel.network.sharing.live import attachment

    hooks = attachment.clear(device)
    typer.echo(f"Cleared  {device}, {' and '.join(hooks)}" if hooks else f"{device} had no shares")


def _stay(attached: Attachment, lends: bool, log: Path | None) -> None:
    if log is not None and not lends:
        raise UserError("network sharing: --log needs --lend")
    if not lends:
        attached.close()
        return
    from windtunnel.network.sharing.live.lending import lend

    typer.echo(f"Lends  {lend(attached, log=log)}")
