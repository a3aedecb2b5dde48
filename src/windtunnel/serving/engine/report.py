"""An emulation as tables on the terminal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from windtunnel.base.units import seconds
from windtunnel.serving.engine.emulation import Emulated
from windtunnel.serving.engine.twin.figures import PERCENTILES

if TYPE_CHECKING:
    from rich.console import Console

WORDS = {"ttft": "first token (TTFT)", "tpot": "each further token (TPOT)", "total": "end to end"}
COLUMNS = ("mean", *(f"p{one}" for one in PERCENTILES))


def headline(data: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Figures in words; all of them emulated."""
    rows = [
        ("requests", f"{data['requests']:,}: {data['finished']:,} finished, {data['refused']:,} refused"),
        ("got what was promised", f"{data['attainment']:.2%}"),
        ("goodput", f"{data['goodput']:.4g} requests/s that got it"),
        (
            "throughput",
            f"{data['requests_per_second']:.4g} requests/s, {data['tokens_per_second']:,.0f} tokens/s",
        ),
        (
            "KV held",
            f"{data['kv_mean']:.1%} on average, {data['kv_peak']:.1%} at most of {data['kv_tokens']:,}",
        ),
        ("prompt tokens cached", f"{data['cached']:.2%}"),
        ("engine busy", f"{data['busy']:.1%} of {data['seconds']:,.0f} s, {data['steps']:,} steps"),
    ]  # fmt: skip
    if "cost" in data:
        cost = data["cost"]
        rows.append(
            (
                "cost",
                f"{cost['total']:.4g} in all, {cost['per_million_tokens']:.4g} a million tokens,"
                f" {cost['per_thousand_met']:.4g} a thousand requests that got what was promised",
            )
        )
    return rows


def show(emulated: Emulated, console: Console) -> None:
    """Print it."""
    from rich.table import Table

    for name, words in emulated.about.items():
        console.print(f"{name:13}{words}", style="dim", highlight=False, soft_wrap=True)
    table = Table("emulated", *COLUMNS)
    for name, words in WORDS.items():
        table.add_row(words, *(seconds(emulated.summary[name][column]) for column in COLUMNS))
    console.print(table)
    for name, words in headline(emulated.summary):
        console.print(f"{name:22}{words}", highlight=False, soft_wrap=True)
    for words in sorted({words for part in emulated.parts for words in part.never.values()})[:3]:
        console.print(f"never served: {words}", highlight=False, soft_wrap=True)
    console.print(f"Run    {emulated.run}", highlight=False)
