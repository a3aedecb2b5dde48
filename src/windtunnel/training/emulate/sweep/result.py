"""The outcomes of a sweep side by side: what they are compared by, which are on the Pareto front, and a
table of them for the terminal."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape as markup
from rich.table import Table

from windtunnel.base import units
from windtunnel.report import text

Row = dict[str, Any]
"""The outcome of a point."""


@dataclass(frozen=True)
class SweepResult:
    """``rows``: outcomes in order of points, each with ``pareto``, true for those on the front.

    ``per_token``: whether points are compared by what a million tokens take and cost, which they are as soon
    as their iterations are not of equally many tokens; else by what an iteration takes.
    """

    rows: list[Row]
    per_token: bool
    cost_unit: str

    @property
    def done(self) -> list[Row]:
        return [row for row in self.rows if row["status"] == "done"]

    @property
    def failed(self) -> list[Row]:
        return [row for row in self.rows if row["status"] == "failed"]

    def time(self, row: Row) -> float:
        """Seconds of the whole job, for an iteration or for a million tokens."""
        seconds: float = row["iteration_time_s"]
        return seconds / row["tokens_per_iteration"] * 1e6 if self.per_token else seconds

    def cost(self, row: Row) -> float:
        """For a million tokens where tokens could be counted, else for an iteration."""
        cost = row["cost_per_million_tokens"]
        return float(row["cost_per_iteration"] if cost is None or not self.cost_per_token else cost)

    @property
    def cost_per_token(self) -> bool:
        return all(row["cost_per_million_tokens"] is not None for row in self.done)

    @property
    def time_title(self) -> str:
        return "seconds for a million tokens" if self.per_token else "iteration time, seconds"

    @property
    def cost_title(self) -> str:
        unit = "device hours" if self.cost_unit == "device-hours" else "cost"
        return f"{unit} for a million tokens" if self.cost_per_token else f"{unit} for an iteration"

    @property
    def columns(self) -> tuple[str, ...]:
        """What is shown of a point, in short."""
        what = "dev-h" if self.cost_unit == "device-hours" else "cost"
        cost = f"{what}/Mtok" if self.cost_per_token else f"{what}/iter"
        return ("iteration", "tok/s/dev", "MFU", "reserved", "fits", cost)

    def figures(self, row: Row) -> tuple[str, ...]:
        """The words for `columns` of a point that is done."""
        return (
            units.seconds(row["iteration_time_s"]), units.count(row["tokens_per_second_per_device"]),
            units.share(row["mfu"]), units.size(row["peak_reserved_bytes"]), "yes" if row["fits"] else "no",
            f"{self.cost(row):.4g}",
        )  # fmt: skip


def result(rows: list[Row]) -> SweepResult:
    """Compare the outcomes of a sweep by time, worst peak reserved memory and cost.

    A point that does not fit into memory is on no front, however fast it would be.
    """
    done = [row for row in rows if row["status"] == "done"]
    tokens = {row["tokens_per_iteration"] for row in done}
    plain = SweepResult(rows, len(tokens) > 1 and all(tokens), done[0]["cost_unit"] if done else "price")
    fitting = [row for row in done if row["fits"]]
    values = [(plain.time(row), row["peak_reserved_bytes"], plain.cost(row)) for row in fitting]
    front = pareto_front(np.array(values, np.float64).reshape(-1, 3))
    best = {row["point"] for row, on_front in zip(fitting, front, strict=True) if on_front}
    marked = [row | {"pareto": row["point"] in best} for row in rows]
    return SweepResult(marked, plain.per_token, plain.cost_unit)


def as_json(sweep_result: SweepResult, **more: Any) -> dict[str, Any]:
    """The result as one JSON object; every figure but ``wall_time_s`` is emulated."""
    return more | {
        "rows": sweep_result.rows,
        "objectives": [sweep_result.time_title, "worst peak reserved memory, bytes", sweep_result.cost_title],
        "provenance": {"wall_time_s": "measured", "price": "declared", "other figures": "emulated"},
    }


def pareto_front(values: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Which rows of ``values`` (points x objectives, the smaller the better) are on the front.

    A row is on the front unless another one is at least as good in every objective and better in one; equal
    rows are on it together. Returns a mask, shape (points,).
    """
    beaten = [((values <= row).all(axis=1) & (values < row).any(axis=1)).any() for row in values]
    return ~np.array(beaten, np.bool_)


def print_sweep(sweep_result: SweepResult, console: Console, title: str) -> None:
    """Print the table of a sweep, and below it why points failed."""
    options = list(dict.fromkeys(option for row in sweep_result.rows for option in row["chosen"]))
    # Names of clusters are long: they stand above the table, and it says c1, c2.
    names = list(dict.fromkeys(row["cluster"] for row in sweep_result.rows))
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
    for name in sweep_result.columns:
        table.add_column(name, justify="right", no_wrap=True)
    for row in sweep_result.rows:
        where = [short[row["cluster"]]] if short else []
        chosen = [markup(value_text(row["chosen"].get(option))) for option in options]
        failed = row["status"] == "failed"
        table.add_row(
            "[green]★[/]" if row["pareto"] else "",
            str(row["point"]),
            *where,
            *chosen,
            *(["[red]failed[/]"] if failed else _coloured(sweep_result.figures(row))),
            style="bold" if row["pareto"] else "dim" if failed else None,
        )
    console.print(markup(title), style="bold", highlight=False)
    for name, place in short.items():
        console.print(f"  [cyan]{place}[/] {markup(name)}", highlight=False)
    console.print(table, highlight=False)
    reasons: dict[str, list[int]] = {}
    for row in sweep_result.failed:
        reasons.setdefault(row["error"], []).append(row["point"])
    for reason, points in reasons.items():
        console.print(f"[red]✗ {text.ranks(points)}[/] {markup(reason)}", highlight=False)
    if sweep_result.done:
        cost = (
            "cost is from the price given" if sweep_result.cost_unit == "price" else "a device hour costs 1"
        )
        front = "★ no point that fits is better in time, memory and cost."
        console.print(f"{front} Figures are emulated; {cost}.", style="dim", highlight=False)


def value_text(value: object) -> str:
    """A value of an option: a flag is ``yes`` or ``no``."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    return str(value)


def _coloured(figures: tuple[str, ...]) -> list[str]:
    colours = {"yes": "green", "no": "red"}
    return [f"[{colours[text]}]{text}[/]" if text in colours else text for text in figures]
