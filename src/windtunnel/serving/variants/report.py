"""Variants as a table on the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from windtunnel.serving.variants.model import Variant


def table(variants: Sequence[Variant]) -> Table:
    """A line for each."""
    variants_table = Table()
    for heading in ("variant", "task", "accuracy", "one", "full batch", "load", "memory"):
        variants_table.add_column(
            heading, justify="left" if heading in ("variant", "task") else "right", overflow="fold"
        )
    for variant in variants:
        variants_table.add_row(
            variant.name,
            variant.task,
            f"{variant.accuracy:.2%}",
            f"{variant.latency() * 1e3:.2f} ms",
            f"{variant.latency(variant.batch) * 1e3:.2f} ms",
            f"{variant.load * 1e3:.0f} ms",
            f"{variant.memory >> 20} MiB",
        )
    return variants_table
