"""``windtunnel network dag``: jobs of computing and sending, in one order."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from windtunnel.cli import Group

SHORT = 0.05
"""Of their time, without a CPU: more, and the figures are of this machine."""
group = typer.Typer(
    cls=Group, no_args_is_help=True, help="Jobs of computing and sending, in one order (MXDAG)."
)


def register(app: typer.Typer) -> None:
    """Add the verb to ``app``."""
    app.add_typer(group, name="dag")


@group.callback()
def _dag() -> None:
    pass


@group.command("run")
def run(
    file: Annotated[
        Path, typer.Argument(metavar="FILE.yaml", help="Jobs and what they run on: docs/dag.md.")
    ],
    schedule: Annotated[str, typer.Option(help="mxdag, fair, fifo, sebf, cpath, or all.")] = "mxdag",
    what_if: Annotated[
        list[str] | None,
        typer.Option(
            metavar="WHAT=VALUE",
            help="Run once more with another size, unit, host or rate: JOB/TASK=2 GB, TASK.host=b,"
            " TASK.unit=1 MB, HOST.nic=25 Gb/s. May be repeated.",
        ),
    ] = None,
    real: Annotated[
        bool,
        typer.Option(
            "--live",
            help="Run them: programs (or spins) and TCP flows on hosts that are namespaces of this one.",
        ),
    ] = False,
    log: Annotated[Path | None, typer.Option(metavar="FILE", help="Log decisions there, for replay.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print all as one JSON value.")] = False,
) -> None:
    """Say when the jobs of a file end, by which schedule, and which tasks that hangs on.

    Example: windtunnel network dag run jobs.yaml --schedule all --what-if 'shuffle=1 GB'
    """
    from windtunnel.base.units import seconds
    from windtunnel.network.dag.planning import plan

    made = plan(file, schedule, what_if or (), log, real=real)
    if as_json:
        typer.echo(json.dumps(made))
        return
    for name, one in made["jobs"].items():
        typer.echo(f"{name}: {' -> '.join(one['critical'])}, {seconds(one['length'])} with nobody in its way")
        for way in one["copaths"]:
            typer.echo(f"  beside it {' -> '.join(way['tasks'])}, {seconds(way['spare'])} to spare")
    for title, runs in (("", made["runs"]), ("what if: ", made["what_if"])):
        for name, found in runs.items():
            ends = ", ".join(f"{job} {seconds(took)}" for job, took in found["jobs"].items())
            typer.echo(f"{title}{name}: {seconds(found['mean'])} a job ({ends})")
            if "emulated" in found:
                busy = f"; SHORT OF CPU: spins lacked {found['short']:.0%}" if found["short"] > SHORT else ""
                typer.echo(f"  measured; emulated {seconds(found['emulated'])}{busy}")
