"""The outcomes of a sweep side by side: what they are compared by, and which are on the Pareto front."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Row = dict[str, Any]
"""The outcome of a point."""


@dataclass(frozen=True)
class SweepResult:
    """``rows``: outcomes in order of points, each with ``pareto``, true for those on the front.

    ``per_token``: whether points are compared by what a million tokens take and cost, which they are where
    tokens could be counted in all; else by what an iteration takes.
    """

    rows: list[Row]
    per_token: bool
    cost_unit: str

    @property
    def done(self) -> list[Row]:
        return [row for row in self.rows if row["status"] == "done"]

    def time(self, row: Row) -> float:
        """Seconds of the whole job, for an iteration or for a million tokens."""
        seconds: float = row["iteration_time_s"]
        return seconds / row["tokens_per_iteration"] * 1e6 if self.per_token else seconds

    def cost(self, row: Row) -> float:
        """For a million tokens or for an iteration."""
        return float(row["cost_per_million_tokens" if self.per_token else "cost_per_iteration"])

    def plain(self) -> dict[str, Any]:
        """As values of JSON; every figure but ``wall_time_s`` is emulated."""
        what = "a million tokens" if self.per_token else "an iteration"
        cost = "device hours" if self.cost_unit == "device-hours" else "cost"
        return {
            "rows": self.rows,
            "objectives": [f"seconds for {what}", "worst peak reserved memory, bytes", f"{cost} for {what}"],
            "provenance": {"wall_time_s": "measured", "price": "declared", "other figures": "emulated"},
        }


def result(rows: list[Row]) -> SweepResult:
    """Compare the outcomes of a sweep by time, worst peak reserved memory and cost.

    A point that does not fit into memory is on no front, however fast it would be.
    """
    done = [row for row in rows if row["status"] == "done"]
    per_token = all(row["tokens_per_iteration"] for row in done)
    plain = SweepResult(rows, per_token, done[0]["cost_unit"] if done else "price")
    fitting = [row for row in done if row["fits"]]
    values = [(plain.time(row), row["peak_reserved_bytes"], plain.cost(row)) for row in fitting]
    front = pareto_front(np.array(values, np.float64).reshape(-1, 3))
    best = {row["point"] for row, on_front in zip(fitting, front, strict=True) if on_front}
    marked = [row | {"pareto": row["point"] in best} for row in rows]
    return SweepResult(marked, per_token, plain.cost_unit)


def pareto_front(values: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Which rows of ``values`` (points x objectives, the smaller the better) are on the front.

    A row is on the front unless another one is at least as good in every objective and better in one; equal
    rows are on it together. Returns a mask, shape (points,).
    """
    beaten = [((values <= row).all(axis=1) & (values < row).any(axis=1)).any() for row in values]
    return ~np.array(beaten, np.bool_)
