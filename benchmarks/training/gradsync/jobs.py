"""The papers' jobs on clusters that are not there: what a plan gains over DDP, by job and rate, and what
fusion alone is worth."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import replace

from benchmarks.harness.rows import Row
from windtunnel.cluster.load import load_cluster
from windtunnel.training.gradsync.model import Plan
from windtunnel.training.gradsync.policy.plan import BUCKETS, make_plan, uniform_plan
from windtunnel.training.gradsync.twin.jobs import JOBS, paper_profile

RATES = ("ethernet-1", "ethernet-10", "ethernet-25", "ethernet-100", "ib-400")
SIZES = (2, 8, 32, 128)
SINGLE = "v100:8x1,nic=ethernet-25"
PUBLISHED = {("UGATIT", "ethernet-100"): 1.49}
"""Speed gained over FP32 on 64 V100 with NVLink, with DGC (Espresso, EuroSys '23); its other figures are of
hosts with PCIe alone, or of other systems."""


def job_rows(quick: bool) -> Iterator[Row]:
    """Gains over DDP's buckets, and over fp16 in them; at 64 ranks by rate, and at 25 Gbit/s by size."""
    names = [*JOBS][:2] if quick else [*JOBS]
    for name in names:
        for rate in RATES[1:3] if quick else RATES:
            yield from _gains(name, f"v100:8x8,nic={rate},nics=1", rate)
    for name in names:
        for hosts in () if quick else SIZES:
            if hosts != 8:
                yield from _gains(name, f"v100:{hosts}x8,nic=ethernet-25,nics=1", f"{hosts * 8} ranks")


def _gains(name: str, cluster: str, what: str) -> Iterator[Row]:
    profile = paper_profile(name, load_cluster(cluster))
    # what DDP does: a table's gradient is summed with all its zeros
    dense = tuple(replace(one, width=0, density=1.0) for one in profile.tensors)
    plain = _of("none allreduce in DDP's buckets", make_plan(replace(profile, tensors=dense)))
    begin = time.perf_counter()
    plan = make_plan(profile)
    took = time.perf_counter() - begin
    single, ours = min(one.seconds for one in plan.forecasts[1:]), plan.forecasts[0].seconds
    half = _of("fp16 allreduce in DDP's buckets", plan)
    used = ", ".join(sorted({group.option.codec for group in plan.groups}))
    note = (
        f"with {used} in {len(plan.groups)} groups, {half / ours - 1:+.0%} over fp16 in buckets, "
        f"{single / ours - 1:+.1%} over the best single choice, bound {plain / plan.bound - 1:+.0%}; "
        f"decided in {took * 1e3:.0f} ms for {len(profile.tensors)} gradients"
    )
    published = PUBLISHED.get((name, what))
    yield Row(
        "jobs", f"{name}, {what}: speed over DDP", "", emulated=plain / ours - 1, published=published,
        source="Espresso" if published is not None else "", note=note,
    )  # fmt: skip


def _of(choice: str, plan: Plan) -> float:
    """Seconds that it is predicted to take; nan where it was not among those compared."""
    return next((one.seconds for one in plan.forecasts if one.choice == choice), math.nan)


def fusion_rows(quick: bool) -> Iterator[Row]:
    """One codec in its best groups, in single layers, and in DDP's buckets."""
    for name in [*JOBS][:2] if quick else JOBS:
        profile = paper_profile(name, load_cluster(SINGLE))
        for codec in ("topk:0.01", "sign"):
            fused, layers, buckets = (
                uniform_plan(profile, codec, most).forecasts[0].seconds for most in (None, 1, BUCKETS)
            )
            for seconds, words in ((layers, "single layers"), (buckets, "DDP's buckets")):
                yield Row(
                    "fusion", f"{name}, {codec}: {words} / best groups", "x", emulated=seconds / fused,
                    note=f"{len(profile.tensors)} gradients on {SINGLE}",
                )  # fmt: skip
