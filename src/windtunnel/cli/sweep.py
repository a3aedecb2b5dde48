"""``windtunnel sweep``: the same script over a grid of clusters and arguments."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from windtunnel.cli.common import Json, print_json, print_table

if TYPE_CHECKING:
    from windtunnel.training.emulate.sweep.result import SweepResult


def sweep(
    spec: Annotated[Path, typer.Argument(metavar="SPEC", help="A sweep file (YAML), see docs/sweep.md.")],
    jobs: Annotated[int, typer.Option(min=1, help="Parallel processes. Each starts one or two more.")] = 1,
    on: Annotated[
        str | None,
        typer.Option(metavar="ENGINE", help="Run on ray, ray://HOST:PORT, or the URL of a control plane."),
    ] = None,
    resume: Annotated[bool, typer.Option(help="Keep the points of an earlier sweep.")] = True,
    report: Annotated[bool, typer.Option(help="Write the report of each run, too.")] = True,
    as_json: Json = False,
) -> None:  # fmt: skip
    """Emulate a script over a grid of clusters and arguments, to find the fastest, smallest or cheapest.

    Each point of the grid is a stored run. After an interruption the same command continues.

    Example: windtunnel sweep --jobs 2 examples/sweeps/llama_debug.yaml
    """
    from windtunnel import api
    from windtunnel.base.errors import ScriptError
    from windtunnel.cli import progress_bar

    with progress_bar(f"sweep {spec.stem}") as progress:
        done = api.sweep(spec, jobs=jobs, on=on, resume=resume, report=report, progress=progress)
    what, result = done.sweep, done.result
    if as_json:
        named = {"sweep_id": what.id, "name": what.name, "left_out": what.left_out}
        print_json(named | result.plain())
    else:
        _show(what.name, result)
        if what.left_out:
            typer.echo(f"{what.left_out} more points are left out by the conditions.")
    if not result.done:
        raise ScriptError(
            f"all {len(result.rows)} points failed, the first because: {result.rows[0]['error']}"
        )


def _show(name: str, result: SweepResult) -> None:
    """The points, and below them why some failed."""
    from windtunnel.base import units
    from windtunnel.report import text

    options = list(dict.fromkeys(option for row in result.rows for option in row["chosen"]))
    # names of clusters are long: they stand above the table, and it says c1, c2
    names = dict.fromkeys(row["cluster"] for row in result.rows)
    short = {cluster: f"c{place}" for place, cluster in enumerate(names, start=1)}
    typer.echo("\n  ".join((f"Sweep {name}", *(f"{place} {cluster}" for cluster, place in short.items()))))
    unit = "dev-h" if result.cost_unit == "device-hours" else "cost"
    per = "Mtok" if result.per_token else "iter"
    figures = ("iteration", "tok/s/dev", "MFU", "reserved", "fits", f"{unit}/{per}")
    rows, reasons = list[list[str]](), dict[str, list[int]]()
    for row in result.rows:
        chosen = [row["chosen"].get(option) for option in options]
        words = [("no", "yes")[value] if isinstance(value, bool) else str(value) for value in chosen]
        rows.append(["★" * row["pareto"], str(row["point"]), short[row["cluster"]], *words])
        if row["status"] == "failed":
            rows[-1].append("failed")
            reasons.setdefault(row["error"], []).append(row["point"])
            continue
        rows[-1] += [
            units.seconds(row["iteration_time_s"]), units.count(row["tokens_per_second_per_device"]),
            units.share(row["mfu"]), units.size(row["peak_reserved_bytes"]), "yes" if row["fits"] else "no",
            f"{result.cost(row):.4g}",
        ]  # fmt: skip
    varied = [option.lstrip("-") for option in options]
    print_table(("", ">#", "on", *(f">{column}" for column in (*varied, *figures))), rows)
    for reason, points in reasons.items():
        typer.echo(f"✗ {text.ranks(points)} {reason}")
    if result.done:
        cost = "cost is from the price given" if result.cost_unit == "price" else "a device hour costs 1"
        typer.echo(f"★ no point that fits is better in time, memory and cost. Figures are emulated; {cost}.")
