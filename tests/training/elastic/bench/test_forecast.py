"""The forecast of the plan for the reported run of Llama 3, which had more than 90 % effective time."""

from __future__ import annotations

from benchmarks.training.elastic.forecast import INTERRUPTIONS, reported_rows


def test_the_plan_forecasts_what_llama_3_reported() -> None:
    rows = list(reported_rows(quick=True))
    effective = next(row for row in rows if row.name.endswith("effective training time"))
    assert effective.met and effective.emulated is not None and 0.9 < effective.emulated < 0.99
    drawn = next(row for row in rows if row.name.endswith("interruptions in 54 days"))
    assert drawn.emulated is not None and abs(drawn.emulated - INTERRUPTIONS) < 3 * INTERRUPTIONS**0.5
