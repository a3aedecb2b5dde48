"""What fusion alone is worth: the papers' jobs on a cluster that is not there, one codec in its best groups,
in single layers, and in DDP's buckets."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.harness.rows import Row, figure
from benchmarks.training.gradsync.jobs import JOBS, paper_profile
from windtunnel.cluster.load import load_cluster
from windtunnel.training.gradsync.policy.plan import BUCKETS, uniform_plan

CLUSTER = "v100:8x1,nic=ethernet-25"


def fusion_rows(quick: bool) -> Iterator[Row]:
    """One codec in its best groups, in single layers, and in DDP's buckets."""
    for name in [*JOBS][:2] if quick else JOBS:
        profile = paper_profile(name, load_cluster(CLUSTER))
        for codec in ("dragonn:0.01", "sign"):
            fused, layers, buckets = (
                uniform_plan(profile, codec, most).forecasts[0].seconds for most in (None, 1, BUCKETS)
            )
            for seconds, words in ((layers, "single layers"), (buckets, "DDP's buckets")):
                yield figure(
                    f"{name}, {codec}: {words} / best groups", "x", emulated=seconds / fused,
                    note=f"{len(profile.tensors)} gradients on {CLUSTER}",
                )  # fmt: skip
