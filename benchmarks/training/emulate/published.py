"""Published figures of real jobs on hardware that is not here, beside the emulation of the same jobs.

The rows (``published.json``) are those of torchtitan and torchao that examples/train_llama.py can express,
and of llm-foundry in bfloat16 with its mixed precision ``DEFAULT`` (see `mpt`). They were measured on those
projects' model code, on PyTorch 2.6 to 2.9 (which one llm-foundry had is not said), so that the same model
and settings are compared, and not the same program: torchtitan's eager RMSNorm was several operators then,
where PyTorch 2.13 has one. One factor of the cost model (``gpu.in_job``) was fitted to torchtitan's row of
A100s, nothing to the others.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.harness.rows import Row, left_out, published
from benchmarks.training.emulate.speed import LargeJob, emulate_in_process

SECTION = "published"
GIB = float(1 << 30)
TIME_TARGET, MEMORY_TARGET = 0.10, 0.03


def published_rows(quick: bool) -> Iterator[Row]:
    """Tokens/s and reserved bytes of each job, and why others are not here. ``quick`` leaves all out."""
    data = published(__file__)
    for job in data["jobs"]:
        if quick:
            yield left_out(SECTION, job["name"], "left out by --quick")
            continue
        program = Path(__file__).with_name(job["program"]) if "program" in job else None
        _, _, summary = emulate_in_process(
            LargeJob(job["name"], job["cluster"], job["arguments"], 0.0, 0.0, program)
        )
        rate = summary["tokens_per_second_per_device"]
        yield _row(job, "tokens/s per device", "tokens/s", rate, job["tokens_per_s"], TIME_TARGET)
        if "reserved_gib" in job:
            reserved = max(one["peak_reserved_bytes"] for one in summary["ranks"])
            yield _row(job, "reserved memory", "bytes", reserved, job["reserved_gib"] * GIB, MEMORY_TARGET)
    for other in data["left_out"]:
        yield left_out(SECTION, other["name"], other["why"])


def _row(job: dict[str, Any], what: str, unit: str, emulated: float, published: float, within: float) -> Row:
    return Row(
        SECTION, f"{job['name']}: {what}", unit, emulated=emulated, published=published,
        source=job["source"], target=f"within {within:.0%}", met=abs(emulated / published - 1.0) <= within,
        note=job.get("note", ""),
    )  # fmt: skip
