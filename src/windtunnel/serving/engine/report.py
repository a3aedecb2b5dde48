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
COLUMNS = ("mean", *(f"p{percentile}" for percentile in PERCENTILES))


def headline(data: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Figures in words; all of them emulated."""
    rows = [
        ("requests", f"{data['requests']:,}: {data['finished']:,} finished, {data['refused']:,} refused"),
        ("got what was promised", f"{data['attainment']:.2%}"),
        ("goodput", f"{data['goodput']:.4g} requests/s that got it"),
        ("requests/s", f"{data['requests_per_second']:.4g}, and {data['tokens_per_second']:,.0f} tokens/s"),
        ("KV held", f"{data['kv_mean']:.1%}, at most {data['kv_peak']:.1%} of {data['kv_tokens']:,} tokens"),
        ("prompt tokens cached", f"{data['cached']:.2%}"),
        ("engine busy", f"{data['busy']:.1%} of {data['seconds']:,.0f} s, {data['steps']:,} steps"),
    ]  # fmt: skip
    if "cost" in data:
        total, per_thousand, tokens = (
            data["cost"][name] for name in ("total", "per_thousand_met", "per_million_tokens")
        )
        words = (
            f"{total:.4g} in all, {tokens:.4g} a million tokens,"
            f" {per_thousand:.4g} a thousand requests that got it"
        )
        rows.append(("cost", words))
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
    never = sorted({words for part in emulated.parts for words in part.never.values()})[:3]
    rows = [*headline(emulated.summary), *(("never served", words) for words in never), ("run", emulated.run)]
    for name, words in rows:
        console.print(f"{name:22}{words}", highlight=False, soft_wrap=True)
