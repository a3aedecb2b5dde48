"""Published figures of real jobs on hardware that is not here, beside the emulation of the same jobs.

The rows are those of torchtitan and torchao that examples/train_llama.py can express. They were measured on
torchtitan's model code and on PyTorch 2.6 to 2.9, so that the same model and settings are compared, and not
the same program: torchtitan's eager RMSNorm was several operators then, where PyTorch 2.13 has one. One
factor of the cost model (``gpu.in_job``) was fitted to the row of A100s, nothing to the others.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from windtunnel.bench.rows import Row, left_out
from windtunnel.training.emulate.bench.speed import LargeJob, emulate_in_process

SECTION = "published"
GIB = float(1 << 30)
TIME_TARGET, MEMORY_TARGET = 0.10, 0.03

TITAN = "torchtitan, benchmarks/llama3_h100_202412_torchtitan.md, table {}"
A100 = "torchtitan, docs/performance.md at 217cc94"
AO = "torchao, docs/source/workflows/training.md"
WHICH = "which H100 it was is not said; taken for that of torchtitan's own rows (96 GB, 500 W)"


@dataclass(frozen=True)
class Published:
    """A real job: ``tokens`` a second and device, ``gib`` reserved (0: not told)."""

    name: str
    source: str
    cluster: str
    arguments: str
    tokens: float
    gib: float = 0.0
    note: str = ""


_8B = "--size 8b --parallel fsdp "
PUBLISHED = (
    Published("8B, FSDP8, eager", TITAN.format(1), "h100-96:1x8", _8B + "--batch 2", 5762, 82.4),
    Published("8B, FSDP8, compile, float8", TITAN.format(1), "h100-96:1x8", _8B + "--batch 2 --compile --fp8",
              8532, 76.8),
    Published("8B, FSDP8, 32k, full checkpointing, compile, float8", TITAN.format(2), "h100-96:1x8",
              _8B + "--seq 32768 --ac full --compile --fp8", 3890, 83.9),
    Published("8B, FSDP2 CP4, 131k, full checkpointing, compile, float8", TITAN.format(2), "h100-96:1x8",
              _8B + "--seq 131072 --cp 4 --ac full --compile --fp8", 1071, 84.0),
    Published("8B, FSDP128, eager", TITAN.format(3), "h100-96:16x8", _8B + "--batch 2", 5605, 67.0),
    Published("8B, FSDP128, compile, float8", TITAN.format(3), "h100-96:16x8",
              _8B + "--batch 2 --compile --fp8", 8380, 61.8),
    Published("70B, FSDP32 TP8, full checkpointing, compile",
              "torchtitan, benchmarks/asyncTP_llama3_h100_2025-06, plain TP", "h100-96:32x8",
              "--size 70b --parallel fsdp --tp 8 --batch 16 --ac full --compile", 597.3),
    Published("8B, FSDP64, A100, eager", A100, "a100-80:8x8", _8B + "--batch 1", 2973,
              note="gpu.in_job was fitted to this row"),
    Published("8B, FSDP8, H100, compile", AO, "h100-96:1x8", _8B + "--batch 1 --compile", 6150, 47.65,
              note=WHICH),
    Published("8B, FSDP8, H100, compile, float8", AO, "h100-96:1x8", _8B + "--batch 1 --compile --fp8",
              7689.5, 47.77, note=WHICH),
    Published("8B, FSDP8, B200, compile", AO, "b200:1x8", _8B + "--batch 1 --compile", 8307.5, 33.71,
              note="the devices' power was limited, by how much is not said"),
)  # fmt: skip

LEFT_OUT = (
    ("torchtitan: 70B and 405B in float8 with TP", "float8 goes without tensor parallelism in the example"),
    ("torchtitan: asynchronous TP", "symmetric memory is refused"),
    ("torchtitan: Llama 2, 13B and 70B", "they are none of the example's sizes"),
    ("torchao: MXFP8, row-wise scales, MI300X, Llama 4", "the example has none of these"),
    ("llm-foundry: MPT", "a GPT with ALiBi under FSDP1, which the example is not"),
    (
        "Megatron-LM, SC'21 table 1",
        "its models (GPT, vocabulary 51,200, no GQA) are none of the example's sizes",
    ),
)


def published_rows(quick: bool) -> Iterator[Row]:
    """Tokens/s and reserved bytes of each job, and why others are not here. ``quick`` leaves all out."""
    for job in PUBLISHED:
        if quick:
            yield left_out(SECTION, job.name, "left out by --quick")
            continue
        _, _, summary = emulate_in_process(LargeJob(job.name, job.cluster, job.arguments, 0.0, 0.0))
        rate = summary["tokens_per_second_per_device"]
        yield _row(job, "tokens/s per device", "tokens/s", rate, job.tokens, TIME_TARGET)
        if job.gib:
            reserved = max(one["peak_reserved_bytes"] for one in summary["ranks"])
            yield _row(job, "reserved memory", "bytes", reserved, job.gib * GIB, MEMORY_TARGET)
    for name, why in LEFT_OUT:
        yield left_out(SECTION, name, why)


def _row(job: Published, what: str, unit: str, emulated: float, published: float, within: float) -> Row:
    return Row(
        SECTION, f"{job.name}: {what}", unit, emulated=emulated, published=published, source=job.source,
        target=f"within {within:.0%}", met=abs(emulated / published - 1.0) <= within, note=job.note,
    )  # fmt: skip
