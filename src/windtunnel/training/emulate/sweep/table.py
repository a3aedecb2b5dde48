"""A sweep on the terminal: one line for each point, those on the Pareto front marked."""

from __future__ import annotations

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from windtunnel.report import text
from windtunnel.training.emulate.sweep.folder import Row
from windtunnel.training.emulate.sweep.result import Result


def print_sweep(found: Result, console: Console, title: str) -> None:
    """Print the table of a sweep, and below it why points failed."""
    options = list(dict.fromkeys(option for row in found.rows for option in row["chosen"]))
    # Names of clusters are long: they stand above the table, and it says c1, c2.
    names = list(dict.fromkeys(row["cluster"] for row in found.rows))
    short = {name: f"c{place}" for place, name in enumerate(names, start=1)} if len(names) > 1 else {}
    if not short:
        title = f"{title} on {names[0]}"
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("", no_wrap=True)
    table.add_column("#", justify="right", no_wrap=True)
    if short:
        table.add_column("on", no_wrap=True)
    for option in options:
        table.add_column(option.lstrip("-"), justify="right", overflow="fold")
    for name in ("iteration", "tok/s/dev", "MFU", "reserved", "fits", _cost_name(found)):
        table.add_column(name, justify="right", no_wrap=True)
    for row in found.rows:
        where = [short[row["cluster"]]] if short else []
        chosen = [escape(value_text(row["chosen"].get(option))) for option in options]
        table.add_row(
            "[green]★[/]" if row["pareto"] else "", str(row["point"]), *where, *chosen, *_figures(found, row),
            style="bold" if row["pareto"] else "dim" if row["status"] == "failed" else None,
        )  # fmt: skip
    console.print(escape(title), style="bold", highlight=False)
    for name, place in short.items():
        console.print(f"  [cyan]{place}[/] {escape(name)}", highlight=False)
    console.print(table, highlight=False)
    reasons: dict[str, list[int]] = {}
    for row in found.failed:
        reasons.setdefault(row["error"], []).append(row["point"])
    for reason, points in reasons.items():
        console.print(f"[red]✗ {text.ranks(points)}[/] {escape(reason)}", highlight=False)
    if found.done:
        cost = "cost is from the price given" if found.cost_unit == "price" else "a device hour costs 1"
        front = "★ no point that fits is better in time, memory and cost."
        console.print(f"{front} Figures are emulated; {cost}.", style="dim", highlight=False)


def value_text(value: object) -> str:
    """A value of an option: a flag is ``yes`` or ``no``."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    return str(value)


def _cost_name(found: Result) -> str:
    what = "dev-h" if found.cost_unit == "device-hours" else "cost"
    return f"{what}/Mtok" if found.cost_per_token else f"{what}/iter"


def _figures(found: Result, row: Row) -> list[str]:
    if row["status"] == "failed":
        return ["[red]failed[/]", *[text.NONE] * 5]
    return [
        text.seconds(row["iteration_time_s"]),
        text.count(row["tokens_per_second_per_device"]),
        text.share(row["mfu"]),
        text.size(row["peak_reserved_bytes"]),
        "[green]yes[/]" if row["fits"] else "[red]no[/]",
        f"{found.cost(row):.4g}",
    ]
