"""The outcomes of a sweep side by side: what they are compared by, and which are on the Pareto front."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from windtunnel.training.emulate.sweep.folder import Row
from windtunnel.training.emulate.sweep.pareto import pareto_front


@dataclass(frozen=True)
class Result:
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


def result(rows: list[Row]) -> Result:
    """Compare the outcomes of a sweep by time, worst peak reserved memory and cost.

    A point that does not fit into memory is on no front, however fast it would be.
    """
    done = [row for row in rows if row["status"] == "done"]
    tokens = {row["tokens_per_iteration"] for row in done}
    plain = Result(rows, len(tokens) > 1 and 0 not in tokens, done[0]["cost_unit"] if done else "price")
    fitting = [row for row in done if row["fits"]]
    values = [(plain.time(row), row["peak_reserved_bytes"], plain.cost(row)) for row in fitting]
    front = pareto_front(np.array(values).reshape(-1, 3))
    best = {row["point"] for row, on_front in zip(fitting, front, strict=True) if on_front}
    marked = [row | {"pareto": row["point"] in best} for row in rows]
    return Result(marked, plain.per_token, plain.cost_unit)


def as_json(found: Result, **more: Any) -> dict[str, Any]:
    """The result as one JSON object; every figure but ``wall_time_s`` is emulated."""
    return more | {
        "rows": found.rows,
        "objectives": [found.time_title, "worst peak reserved memory, bytes", found.cost_title],
        "provenance": {"wall_time_s": "measured", "price": "declared", "other figures": "emulated"},
    }
