"""Published figures of real runs on hardware that is not here, against the emulation of the same job."""

from __future__ import annotations

from collections.abc import Iterator

from windtunnel.bench.rows import Row, left_out
from windtunnel.training.emulate.bench.speed import LargeJob, emulate_in_process

SECTION = "published"
TORCHTITAN = (
    "torchtitan, docs/performance.md, December 2024: Llama 3.1 8B, FSDP, selective checkpointing, 8 x H100"
)
TOKENS_PER_SECOND = 5762.0
RESERVED_BYTES = 82.4 * (1 << 30)
CODE = (
    "the same model and settings, but the code of examples/train_llama.py and not torchtitan's; one factor of"
    " the cost model (gpu.in_job) was fitted to torchtitan's row for A100s"
)


def published_rows(quick: bool) -> Iterator[Row]:
    """Tokens/s and reserved bytes of the torchtitan row, and why others are not here."""
    job = LargeJob(
        "8B, FSDP2, 8 x h100-96", "h100-96:1x8",
        "--size 8b --parallel fsdp --seq 8192 --batch 2 --ac selective", 0.0, 0.0,
    )  # fmt: skip
    if quick:
        yield left_out(SECTION, job.name, "left out by --quick")
    else:
        _, _, summary = emulate_in_process(job)
        yield Row(
            SECTION, f"{job.name}: tokens/s per device", "tokens/s",
            emulated=summary["tokens_per_second_per_device"],
            published=TOKENS_PER_SECOND, source=TORCHTITAN, note=CODE,
        )  # fmt: skip
        yield Row(
            SECTION, f"{job.name}: reserved memory", "bytes",
            emulated=max(row["peak_reserved_bytes"] for row in summary["ranks"]),
            published=RESERVED_BYTES, source=TORCHTITAN, note=CODE,
        )  # fmt: skip
    yield left_out(
        SECTION, "Megatron-LM, SC'21 table 1",
        "its models (GPT, vocabulary 51,200, no GQA) are none of the example's sizes",
    )  # fmt: skip
