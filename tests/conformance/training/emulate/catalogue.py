"""Trainers that nobody here wrote: the program of each, what it runs on, and the tokens that a step has."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from windtunnel.base import ranges

PROGRAMS = Path(__file__).parent / "programs"
TORCH = "2.13.0"
"""The version of PyTorch that the page's figures are of."""
PAGE = Path(__file__).parents[4] / "docs" / "benchmarks" / "frameworks.md"
BEGIN, END = "<!-- strangers -->\n", "<!-- end of strangers -->"
HEAD = (
    "| trainer | packages | cluster | ranks run | iteration | tokens | MFU | reserved | answered, not done |",
    "|---|---|---|---|---|---|---|---|---|",
)


@dataclass(frozen=True)
class Stranger:
    """``needs``: distributions beside torch, of the extra ``strangers``. ``tokens``: of an iteration of the
    whole job, worked out by hand from the arguments. ``settings``: of the environment, as users set it."""

    name: str
    program: str
    tokens: int
    needs: tuple[str, ...] = ()
    arguments: tuple[str, ...] = ()
    cluster: str = "h100-sxm:2x8"
    settings: tuple[tuple[str, str], ...] = ()

    @property
    def missing(self) -> list[str]:
        """What is not installed of what it needs."""
        return [name for name in self.needs if _version(name) is None]

    @property
    def versions(self) -> str:
        """Those of the packages, as installed."""
        return ", ".join(f"{name} {_version(name)}" for name in self.needs) or "–"


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


OFFLINE = (("HF_HUB_OFFLINE", "1"),)
HUGGING = {"needs": ("transformers", "accelerate"), "settings": OFFLINE}
TRL = {"needs": ("trl",), "cluster": "h100-sxm:1x4", "settings": OFFLINE}


def _named(name: str, program: str, tokens: int, arguments: str = "", **more: Any) -> Stranger:
    return Stranger(name, f"{program}.py", tokens, arguments=tuple(arguments.split()), **more)


STRANGERS = (
    _named("Hugging Face Trainer, DDP, bfloat16, 2 micro-batches", "hf_trainer", 16 * 2 * 2 * 256,
           "--accumulate 2 --batch 2 --sequence 256", **HUGGING),
    _named("Hugging Face Trainer, FSDP2, bfloat16, 2 micro-batches", "hf_trainer", 16 * 2 * 2 * 256,
           "--fsdp --accumulate 2 --batch 2 --sequence 256", **HUGGING),
    _named("Hugging Face Trainer, LlamaForCausalLM of 8B", "hf_trainer", 16 * 1 * 2048,
           "--size 8b --batch 1 --sequence 2048", cluster="b200:2x8", **HUGGING),
    _named("Hugging Face Trainer, LlamaForCausalLM of 70B, FSDP2", "hf_trainer", 64 * 1 * 2048,
           "--fsdp --size 70b --batch 1 --sequence 2048", cluster="h100-sxm:8x8", **HUGGING),
    _named("Hugging Face `generate()`, greedy, then a step on what came out", "hf_generate", 8 * 4 * 32,
           needs=("transformers",), cluster="h100-sxm:1x8", settings=OFFLINE),
    _named("Hugging Face `generate()`, sampling, then a step on what came out", "hf_generate", 8 * 4 * 32,
           "--sample", needs=("transformers",), cluster="h100-sxm:1x8", settings=OFFLINE),
    _named("Hugging Face Seq2SeqTrainer, BART, evaluates by generation in every step", "hf_evaluate",
           4 * 4 * (32 + 16), cluster="h100-sxm:1x4", **HUGGING),
    _named("TRL, GRPO", "trl_grpo", 4 * 4 * (8 + 16), **TRL),
    _named("TRL, GRPO, evaluates by generation in every step", "trl_grpo", 4 * 4 * (8 + 16), "--evaluate",
           **TRL),
    _named("TRL, PPO", "trl_ppo", 4 * 2 * 2 * (8 + 16), **TRL),  # of the policy and of the value model
    _named("Hugging Face Trainer, DDP, bfloat16, flash_attention_2", "hf_trainer", 16 * 2 * 256,
           "--batch 2 --sequence 256 --attention flash_attention_2", **HUGGING),
    _named("Accelerate, 4 micro-batches, gathers a metric and saves in every step", "accelerate_loop",
           16 * 4 * 2 * 128, "--accumulate 4 --batch 2 --sequence 128 --save",
           needs=("accelerate", "transformers"), settings=OFFLINE),
    _named("Lightning, DDP, bf16-mixed, 2 micro-batches, saves in every step", "lightning_trainer",
           16 * 2 * 2 * 256, "--nodes 2 --accumulate 2 --batch 2 --sequence 256 --save",
           needs=("lightning",)),
    _named("Lightning, FSDP, bf16-mixed, 2 micro-batches", "lightning_trainer", 4 * 2 * 2 * 256,
           "--strategy fsdp --nodes 1", needs=("lightning",), cluster="h100-sxm:1x4"),
    _named("FSDP2, torchao float8 with float8 all-gather, compiled blocks", "fsdp2_float8", 16 * 4 * 1024,
           "--batch 4 --sequence 1024", needs=("torchao",)),
    _named("torchtitan, Llama 3, FSDP", "torchtitan_train", 16 * 2 * 512, needs=("torchtitan",)),
    _named("torchtitan, Llama 3, FSDP 4 × TP 4", "torchtitan_train", 4 * 2 * 512,
           "--parallelism.tensor_parallel_degree 4", needs=("torchtitan",)),
    _named("DeepSpeed ZeRO-1, its FusedAdam, bfloat16, 2 micro-batches", "deepspeed_zero", 4 * 2 * 4 * 256,
           "--stage 1", needs=("deepspeed",), cluster="h100-sxm:1x4"),
    _named("DeepSpeed ZeRO-3, PyTorch's AdamW, bfloat16, 2 micro-batches", "deepspeed_zero",
           16 * 2 * 4 * 256, "--stage 3 --torch-adam", needs=("deepspeed",)),
    _named("Megatron-Core, TP2, without Transformer Engine, 4 micro-batches", "megatron_gpt",
           8 * 4 * 2 * 256, needs=("megatron-core",)),
    _named("Megatron-Core, TP2 × PP2, distributed optimizer, 4 micro-batches", "megatron_gpt",
           2 * 4 * 2 * 256, "--pp 2 --distributed-optimizer", needs=("megatron-core",),
           cluster="h100-sxm:1x8"),
    _named("Megatron-Core, TP2, Transformer Engine's layers, distributed optimizer, 4 micro-batches",
           "megatron_gpt", 8 * 4 * 2 * 256, "--fused --distributed-optimizer", needs=("megatron-core",)),
    _named("Megatron-Core, TP2, Transformer Engine, float8, 4 micro-batches", "megatron_gpt",
           8 * 4 * 2 * 256, "--fused --distributed-optimizer --fp8", needs=("megatron-core",)),
)  # fmt: skip


def row(stranger: Stranger, summary: dict[str, Any]) -> str:
    """Its line of the table, from what the command printed. Every figure is emulated."""
    reserved = max(rank["peak_reserved_bytes"] for rank in summary["ranks"]) / 2**30
    cells = (
        stranger.name, stranger.versions, f"`{stranger.cluster}`",
        f"{len(ranges.read(summary['captured_ranks']))} of {summary['world_size']}",
        f"{summary['iteration_time_s'] * 1e3:.2f} ms", f"{summary['tokens_per_iteration']:,}",
        f"{100 * summary['mfu']:.1f} %", f"{reserved:.2f} GiB",
        " ".join(f"{note}." for note in summary["approximations"]) or "–",
    )  # fmt: skip
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def shown() -> dict[str, str]:
    """The lines of the table as the page has them, by trainer."""
    lines = PAGE.read_text().split(BEGIN)[1].split(END)[0].splitlines()[len(HEAD) :]
    return {line.split(" | ")[0].removeprefix("| "): line for line in lines if line}


def write(name: str, line: str) -> None:
    """Put a line into the page's table, in the order of `STRANGERS`."""
    rows = shown() | {name: line}
    table = [*HEAD, *(rows[stranger.name] for stranger in STRANGERS if stranger.name in rows)]
    before, rest = PAGE.read_text().split(BEGIN)
    PAGE.write_text(before + BEGIN + "\n".join(table) + "\n" + END + rest.split(END)[1])
