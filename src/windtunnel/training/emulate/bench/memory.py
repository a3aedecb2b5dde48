"""Tensor memory: bytes of real storages in a real run against those of one captured rank, to be equal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from windtunnel.bench.rows import Row
from windtunnel.training.emulate.bench.jobs import BenchJob, capture_one, peak_bytes, run_for_real

SECTION = "memory"


def memory_rows(quick: bool) -> Iterator[Row]:
    """Peak bytes of a step from the second on: what most steps of the real ranks have, and the emulated."""
    worlds = (1, 2) if quick else (1, 2, 4)
    for world in worlds:
        for parallel in ("ddp", "fsdp"):
            # Memory needs no long steps.
            job = BenchJob(parallel, world, seq=64, batch=2)
            emulated = peak_bytes(capture_one(job))
            figures = run_for_real(job, "memory", steps=5)
            settled = [int(peak) for rank in figures for peak in rank[1:]]
            # A thread of gloo may hold a buffer for a moment longer, so that now and then a step stands out.
            measured, times = Counter(settled).most_common(1)[0]
            yield Row(
                SECTION, f"peak tensor bytes, {job.name}", "bytes", measured, emulated,
                source=f"storages of all ranks in a real run: so in {times} of {len(settled)} steps",
                target="equal", met=measured == emulated,
            )  # fmt: skip
