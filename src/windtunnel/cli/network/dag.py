"""``windtunnel network dag``: jobs of computing and sending, in one order."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from windtunnel.cli import new_group
from windtunnel.cli.common import Json, LogFile, emit

SHORT = 0.05
"""Of their time, without a CPU: more, and the figures are of this machine."""
group = new_group("Schedule jobs of compute and transfer tasks together (MXDAG).")


@group.command("run")
def run(
    file: Annotated[
        Path, typer.Argument(metavar="FILE.yaml", help="The jobs and their cluster: docs/dag.md.")
    ],
    schedule: Annotated[
        str, typer.Option(help="Schedule: mxdag, fair, fifo, sebf, cpath, or all.")
    ] = "mxdag",
    what_if: Annotated[
        list[str] | None,
        typer.Option(
            metavar="WHAT=VALUE",
            help="Compare with another size, unit, host or rate: JOB/TASK=2 GB, TASK.host=b,"
            " TASK.unit=1 MB, HOST.nic=25 Gb/s. May be repeated.",
        ),
    ] = None,
    real: Annotated[
        bool,
        typer.Option(
            "--live",
            help="Run the jobs here: programs and TCP flows on hosts that are network namespaces.",
        ),
    ] = False,
    log: LogFile = None,
    as_json: Json = False,
) -> None:
    """Compute when the jobs of a file end under each schedule, and which tasks are critical.

    Example: windtunnel network dag run jobs.yaml --schedule all --what-if 'shuffle=1 GB'
    """
    from windtunnel.network.dag.planning import plan

    result = plan(file, schedule, what_if or (), log, real=real)
    emit(as_json, result, _lines(result))


def _lines(planned: dict[str, Any]) -> Iterator[str]:
    from windtunnel.base.units import seconds

    for name, job in planned["jobs"].items():
        yield f"{name}: {' -> '.join(job['critical'])}, {seconds(job['length'])} with nobody in its way"
        for path in job["copaths"]:
            yield f"  beside it {' -> '.join(path['tasks'])}, {seconds(path['spare'])} to spare"
    for title, runs in (("", planned["runs"]), ("what if: ", planned["what_if"])):
        for name, result in runs.items():
            ends = ", ".join(f"{job} {seconds(took)}" for job, took in result["jobs"].items())
            yield f"{title}{name}: {seconds(result['mean'])} a job ({ends})"
            if "emulated" in result:
                short = result["short"]
                busy = f"; SHORT OF CPU: spins lacked {short:.0%}" if short > SHORT else ""
                yield f"  measured; emulated {seconds(result['emulated'])}{busy}"
