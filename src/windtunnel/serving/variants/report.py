"""Variants as a table on the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from windtunnel.serving.variants.model import Variant


def table(variants: Sequence[Variant]) -> Table:
    """A line for each."""
    shown = Table()
    for heading in ("variant", "task", "accuracy", "one", "full batch", "load", "memory"):
        shown.add_column(
            heading, justify="left" if heading in ("variant", "task") else "right", overflow="fold"
        )
    for one in variants:
        shown.add_row(
            one.name, one.task, f"{one.accuracy:.2%}", f"{one.latency() * 1e3:.2f} ms",
            f"{one.latency(one.batch) * 1e3:.2f} ms", f"{one.load * 1e3:.0f} ms", f"{one.memory >> 20} MiB",
        )  # fmt: skip
    return shown
