"""Published figures of real jobs on hardware that is not here, beside the emulation of the same jobs.

The rows are those of torchtitan and torchao that examples/train_llama.py can express, and of llm-foundry in
bfloat16 with its mixed precision ``DEFAULT`` (see `mpt`). They were measured on those projects' model code,
on PyTorch 2.6 to 2.9 (which one llm-foundry had is not said), so that the same model and settings are
compared, and not the same program: torchtitan's eager RMSNorm was several operators then, where PyTorch 2.13
has one. One factor of the cost model (``gpu.in_job``) was fitted to torchtitan's row of A100s, nothing to the
others.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.harness.rows import Row, left_out
from benchmarks.training.emulate.speed import LargeJob, emulate_in_process

SECTION = "published"
GIB = float(1 << 30)
TIME_TARGET, MEMORY_TARGET = 0.10, 0.03

TITAN = "torchtitan, benchmarks/llama3_h100_202412_torchtitan.md, table {}"
A100 = "torchtitan, docs/performance.md at 217cc94"
AO = "torchao, docs/source/workflows/training.md"
FOUNDRY = "llm-foundry, scripts/train/benchmarking/README.md at 5e85bd6"
WHICH = "which H100 it was is not said; taken for that of torchtitan's own rows (96 GB, 500 W)"


@dataclass(frozen=True)
class Published:
    """A real job: ``tokens`` a second and device, ``gib`` reserved (0: not told). ``program``: the example
    where None."""

    name: str
    source: str
    cluster: str
    arguments: str
    tokens: float
    gib: float = 0.0
    note: str = ""
    program: Path | None = None


def _mpt(name: str, cluster: str, arguments: str, tokens: float, note: str = "") -> Published:
    program = Path(__file__).with_name("mpt.py")
    return Published(f"MPT {name}", FOUNDRY, cluster, arguments, tokens, note=note, program=program)


_8B = "--size 8b --parallel fsdp "
PUBLISHED = (
    Published("8B, FSDP8, eager", TITAN.format(1), "h100-96:1x8", _8B + "--batch 2", 5762, 82.4),
    Published("8B, FSDP8, compile, float8", TITAN.format(1), "h100-96:1x8", _8B + "--batch 2 --compile --fp8",
              8532, 76.8),
    Published("8B, FSDP8, 32k, full checkpointing, compile, float8", TITAN.format(2), "h100-96:1x8",
              _8B + "--seq 32768 --ac full --compile --fp8", 3890, 83.9),
    Published("8B, FSDP4 CP2, 65k, full checkpointing, compile, float8", TITAN.format(2), "h100-96:1x8",
              _8B + "--seq 65536 --cp 2 --ac full --compile --fp8", 2540, 84.2),
    Published("8B, FSDP2 CP4, 131k, full checkpointing, compile, float8", TITAN.format(2), "h100-96:1x8",
              _8B + "--seq 131072 --cp 4 --ac full --compile --fp8", 1071, 84.0),
    Published("8B, CP8, 262k, full checkpointing, compile, float8", TITAN.format(2), "h100-96:1x8",
              _8B + "--seq 262144 --cp 8 --ac full --compile --fp8", 548, 84.5),
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
    _mpt("7B, FSDP8", "h100-sxm:1x8", "--size 7b --batch 6", 10643),
    _mpt("7B, FSDP128", "h100-sxm:16x8", "--size 7b --batch 6", 10475),
    _mpt("7B, FSDP512", "h100-sxm:64x8", "--size 7b --batch 6", 9670),
    _mpt("7B, FSDP8, 8k, full checkpointing", "h100-sxm:1x8",
         "--size 7b --seq 8192 --batch 8 --accumulate 2 --ac full", 6935),
    _mpt("7B, FSDP8, 32k, full checkpointing", "h100-sxm:1x8",
         "--size 7b --seq 32768 --batch 2 --accumulate 2 --ac full", 3318),
    _mpt("7B, FSDP8, 64k, full checkpointing", "h100-sxm:1x8",
         "--size 7b --seq 65536 --batch 1 --accumulate 2 --ac full", 1956),
    _mpt("13B, FSDP8", "h100-sxm:1x8", "--size 13b --batch 2", 4792),
    _mpt("13B, FSDP128, full checkpointing", "h100-sxm:16x8", "--size 13b --batch 16 --ac full", 5080),
    _mpt("30B, FSDP128, full checkpointing", "h100-sxm:16x8", "--size 30b --batch 8 --ac full", 2199),
    _mpt("70B, FSDP128, full checkpointing", "h100-sxm:16x8", "--size 70b --batch 8 --ac full", 1058),
    _mpt("70B, FSDP512, full checkpointing", "h100-sxm:64x8", "--size 70b --batch 8 --ac full", 1007),
    _mpt("1B, 512 ranks, SHARD_GRAD_OP", "h100-sxm:64x8", "--size 1b --batch 12 --sharding SHARD_GRAD_OP",
         39837),
    _mpt("7B, FSDP8, A100, 2 micro-batches", "a100-80:1x8", "--size 7b --batch 6 --accumulate 2", 4641),
    _mpt("7B, FSDP8, A100, 8k, full checkpointing", "a100-80:1x8",
         "--size 7b --seq 8192 --batch 8 --accumulate 2 --ac full", 3206),
    _mpt("7B, FSDP8, A100, 64k, full checkpointing", "a100-80:1x8",
         "--size 7b --seq 65536 --batch 1 --accumulate 2 --ac full", 1013),
    _mpt("13B, FSDP8, A100, 3 micro-batches", "a100-80:1x8", "--size 13b --batch 2 --accumulate 3", 2262),
)  # fmt: skip

LEFT_OUT = (
    ("torchtitan: 70B and 405B in float8 with TP", "float8 goes without tensor parallelism in the example"),
    ("torchtitan: asynchronous TP", "symmetric memory is refused"),
    ("torchtitan: Llama 2, 13B and 70B", "they are none of the example's sizes"),
    ("torchao: MXFP8, row-wise scales, MI300X, Llama 4", "the example has none of these"),
    ("llm-foundry: amp_fp8", "its products are Transformer Engine's, which the program has not"),
    ("llm-foundry: 125M to 760M, other lengths and sizes of jobs", "a choice of its 146 rows is enough"),
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
        _, _, summary = emulate_in_process(
            LargeJob(job.name, job.cluster, job.arguments, 0.0, 0.0, job.program)
        )
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
