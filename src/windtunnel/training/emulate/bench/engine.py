"""How many events a second the replay engine does on one core."""

from __future__ import annotations

from collections.abc import Iterator

from windtunnel.bench.rows import Row
from windtunnel.engines.replay.bench import events_per_second

TARGET = 20e6


def engine_rows(quick: bool) -> Iterator[Row]:
    """Events a second on a synthetic job of ranks that all differ."""
    ranks = 128 if quick else 1024
    figures = events_per_second(ranks, repeats=3 if quick else 5)
    rate = figures["events_per_second"]
    yield Row(
        "engine", f"replay, {ranks} ranks that differ", "events/s", measured=rate,
        source=f"median of repeats of {figures['events']:.0f} events, packing included",
        target=f">= {TARGET / 1e6:.0f} M/s", met=rate >= TARGET,
    )  # fmt: skip
