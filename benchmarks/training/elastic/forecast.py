"""The forecast of ``windtunnel plan resilience`` against a run that was reported, Llama 3 on 16,384 GPUs, and
against one of our own (`own`).

Published (Llama Team, "The Llama 3 Herd of Models", 2024): 419 unexpected interruptions in 54 days (table 5),
more than 90 % effective training time (section 3.3.4); 16 million tokens a step at 400 TFLOP/s a GPU with
pipelines of 16 hosts (table 4); storage that sustains 2 TB/s (section 3.3.1). State: 14 bytes a parameter
(bfloat16 weights, their float32 copy and two moments). How long a restart took is not published: the
forecast is made with a warm one and with one of ten minutes, and the time is told that would leave 90 %.
"""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.harness.rows import Row
from benchmarks.training.elastic.own import MINUTES, QUICK_MINUTES, own_rows
from windtunnel.training.goodput.model import STORAGE
from windtunnel.training.goodput.planning import PlanRequest, plan

DAYS = 54.0
INTERRUPTIONS = 419
EFFECTIVE = 0.90
PARAMETERS = 405e9
STEP = 6 * PARAMETERS * 16 * 2**20 / (16_384 * 400e12)  # seconds
STARTS = ("60s", "10min")
SOURCE = "Llama 3 (2024), table 5 and section 3.3.4: more than 90 %"


def forecast_rows(quick: bool, minutes: float | None = None) -> Iterator[Row]:
    """Rows of the section. ``minutes``: of the run of our own."""
    yield from reported_rows(quick)
    yield from own_rows(minutes or (QUICK_MINUTES if quick else MINUTES), quick)


def reported_rows(quick: bool) -> Iterator[Row]:
    """Rows of the run that was reported."""
    for start in STARTS[quick:]:
        made = plan(llama3(start))
        ours = next(result for result in made.advice.results if result.scheme == STORAGE)
        lost = 1.0 - ours.goodput
        pauses = sum(ours.phases[name] for name in ("detect", "wait", "start", "regroup", "load"))
        rest = lost * ours.horizon - pauses
        most = ((1.0 - EFFECTIVE) * ours.horizon - rest) / made.failures
        yield Row(
            "forecast", f"Llama 3 405B, restarts of {start}: effective training time", "",
            emulated=ours.goodput, published=EFFECTIVE, source=SOURCE, target="> 90 %",
            met=ours.goodput > EFFECTIVE,
            note=f"restart from storage, every {made.advice.intervals[STORAGE]} steps of {STEP:.2g} s;"
            f" {made.failures} interruptions were drawn; {most / 60:.0f} min a restart would leave 90 %",
        )  # fmt: skip
        yield Row(
            "forecast", f"Llama 3 405B, restarts of {start}: interruptions in 54 days", "interruptions",
            emulated=made.failures, published=INTERRUPTIONS, source=SOURCE,
            note="drawn with the published rate of each cause",
        )  # fmt: skip


def llama3(start: str) -> PlanRequest:
    """What is known of that run; ``start``: of a new process until it trains."""
    return PlanRequest(
        cluster="h100-sxm:2048x8", state_bytes=str(14 * PARAMETERS), mtbf=None, trace="llama3",
        step_time=f"{STEP:.6f}", step_overhead=None, days=DAYS, software=0.0, leaf_share=0.0,
        replace="10min", spares=32, detect="1s", start=start, storage="2 TB/s", storage_share=1.0,
        storage_within="1d", save_stall=None, host_memory="1 TB", network_share=0.25, stages=16,
        microbatches=0, layers=126, costs=None, seed=0, script="train.py", persist="checkpoints",
    )  # fmt: skip
