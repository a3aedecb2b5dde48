"""``windtunnel control node``: agents that learn on this host."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import typer

from windtunnel.cli import Group

group = typer.Typer(cls=Group, no_args_is_help=True, help="Agents that learn on a host (SOL).")


def register(app: typer.Typer) -> None:
    """Add the verb to ``app``."""
    app.add_typer(group, name="node")


@group.command("demo")
def demo(
    agent: Annotated[str, typer.Argument(help="Accepted is harvest: it lends idle CPU time.")],
    seconds: Annotated[float, typer.Option(min=1, help="Of each of both runs.")] = 6.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Lend what a bursty load leaves of this host to a batch, as root, and show what that does to its p99.

    Example: windtunnel control node demo harvest --json
    """
    from windtunnel.base.errors import LessError, UserError
    from windtunnel.control.node import measured

    if agent != "harvest":
        raise UserError(f"control node demo: AGENT is {agent!r}, accepted is harvest")
    with TemporaryDirectory() as folder:
        alone = measured("alone", seconds, Path(folder) / "log")
        lends = measured("harvest", seconds, Path(folder) / "log", limit=max(0.1, 2 * alone.waited))
    words = f"p99 {alone.p99 * 1e3:.1f} ms, with loans {lends.p99 * 1e3:.1f} ms; {lends.lent:.2f} cores lent"
    names = {"validation": "rejected", "model": "distrusted", "expiry": "default", "actuator": "mitigate"}
    acted = {guard: lends.counts.get(name, 0) for guard, name in names.items()}
    result = {"without": asdict(alone), "with": asdict(lends), "safeguards": acted, "kind": "measured"}
    typer.echo(json.dumps(result) if as_json else f"{words} (measured)\nsafeguards acted: {acted}")
    if not lends.restored or not lends.counts.get("predict"):
        raise LessError("control node demo: no prediction was used, or the quota is not what it was")


@group.command("clean")
def clean() -> None:
    """End agents that lend CPU time, frozen ones too, and restore every quota; as root, any number of times.

    Example: windtunnel control node clean
    """
    from windtunnel.control.node import clean as restore

    typer.echo("\n".join(f"Restored  {folder}" for folder in restore()) or "Nothing to restore")
