"""Put runs side by side: in what they were different, and what came of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from windtunnel.store.database import Json
from windtunnel.store.runs import StoredRun

# Figures at the top of a summary, with their units; others are taken from where they lie in it.
_TOP = (
    ("iteration_time_s", "s"),
    ("tokens_per_second_per_device", "tokens/s"),
    ("mfu", "share"),
    ("hfu", "share"),
)


@dataclass(frozen=True, slots=True)
class Figure:
    """One figure of all runs; None where a run has none. ``ratios`` are to the first run's value."""

    name: str
    unit: str
    values: tuple[float | None, ...]

    @property
    def ratios(self) -> tuple[float | None, ...]:
        base = self.values[0]
        return tuple(value / base if base and value is not None else None for value in self.values)


@dataclass(frozen=True, slots=True)
class RunComparison:
    """``inputs``: for each input in which the runs differ, its value in each run (None: not given)."""

    inputs: dict[str, tuple[Any, ...]]
    figures: tuple[Figure, ...]


def compare(runs: Sequence[StoredRun]) -> RunComparison:
    """What differs in the inputs of the runs, and the figures of their summaries. A summary may lack any."""
    flat = [_flatten({"capability": run.capability, "seed": run.seed} | run.inputs) for run in runs]
    names = list(dict.fromkeys(name for inputs in flat for name in inputs))
    rows = {name: tuple(inputs.get(name) for inputs in flat) for name in names}
    differing = {name: row for name, row in rows.items() if any(value != row[0] for value in row)}
    summaries = [run.summary or {} for run in runs]
    columns = [figures(summary) for summary in summaries]
    units = {name: unit for column in columns for name, (unit, _) in column.items()}
    return RunComparison(
        inputs=differing,
        figures=tuple(
            Figure(name, unit, tuple(column[name][1] if name in column else None for column in columns))
            for name, unit in units.items()
        ),
    )


def figures(summary: Json) -> dict[str, tuple[str, float]]:
    """The figures of one summary: name to (unit, value). Seconds; bytes of the worst rank."""
    values: dict[str, tuple[str, float]] = {}
    for name, unit in _TOP:
        _put(values, name, unit, summary.get(name))
    parts = summary.get("critical_path")
    for kind, seconds in (parts if isinstance(parts, dict) else {}).items():
        _put(values, f"critical_path.{kind}", "s", seconds)
    classes = summary.get("ranks")
    ranks = [rank for rank in (classes if isinstance(classes, list) else []) if isinstance(rank, dict)]
    for name in ("peak_allocated_bytes", "peak_reserved_bytes"):
        _put(
            values,
            name,
            "bytes",
            max((rank[name] for rank in ranks if _number(rank.get(name))), default=None),
        )
    _put(values, "wall_time_s", "s", summary.get("wall_time_s"))
    return values


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _put(values: dict[str, tuple[str, float]], name: str, unit: str, value: Any) -> None:
    if _number(value):
        values[name] = (unit, float(value))


def _flatten(inputs: Json, prefix: str = "") -> Json:
    """Nested inputs as ``{"cluster.hosts": 16}``."""
    flat: Json = {}
    for name, value in inputs.items():
        if isinstance(value, dict):
            flat |= _flatten(value, f"{prefix}{name}.")
        else:
            flat[prefix + name] = value
    return flat
