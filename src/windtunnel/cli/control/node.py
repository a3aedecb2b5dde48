"""``windtunnel control node``: agents that learn on this host."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import typer

from windtunnel.cli import new_group
from windtunnel.cli.common import Json, choice, emit

group = new_group("Agents that learn on a host (SOL).")


@group.command("demo")
def demo(
    agent: Annotated[str, typer.Argument(help="harvest lends idle CPU time; memory moves cold pages away.")],
    seconds: Annotated[float, typer.Option(min=1, help="Seconds of each of both runs.")] = 6.0,
    as_json: Json = False,
) -> None:
    """Lend idle CPU time, or move cold memory away, and show the effect. Needs root.

    Example: windtunnel control node demo harvest --json
    """
    from windtunnel.base.errors import LessError
    from windtunnel.control.node import measured, paged

    choice("agent", agent, ("harvest", "memory"))
    with TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        if agent == "memory":
            before, after = (paged(acts, seconds, log) for acts in (False, True))
            words = "{slow:.0%} of memory is away, {remote:.2g} of accesses went to {tier}".format(**after)
        else:
            before = asdict(measured("alone", seconds, log))
            after = asdict(measured("harvest", seconds, log, limit=max(0.1, 2 * before["waited"])))
            p99 = " ms, with loans ".join(f"{row['p99'] * 1e3:.1f}" for row in (before, after))
            words = f"p99 {p99} ms; {after['lent']:.2f} cores lent"
    names = {"validation": "rejected", "model": "distrusted", "expiry": "default", "actuator": "mitigate"}
    acted = {guard: after["counts"].get(name, 0) for guard, name in names.items()}
    result = {"without": before, "with": after, "safeguards": acted, "kind": "measured"}
    emit(as_json, result, (f"{words} (measured)", f"safeguards acted: {acted}"))
    if not after.get("restored", after.get("slow")) or not after["counts"].get("predict"):
        raise LessError("control node demo: no prediction was used, no memory went, or a quota is as lent")


@group.command("clean")
def clean() -> None:
    """Stop all agents that lend CPU time, and restore every quota. Needs root.

    Example: windtunnel control node clean
    """
    from windtunnel.control.node import clean as restore

    typer.echo("\n".join(f"Restored  {folder}" for folder in restore()) or "Nothing to restore")
