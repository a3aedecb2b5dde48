"""The servers of the bench, and clients that ask them."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from math import inf, nan
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx
import numpy as np
import psutil

from benchmarks.harness.rows import need
from windtunnel.serving.vllm.calibrate import SHAPE, WORDS, build_model
from windtunnel.serving.vllm.serve import Server, find_port, server_process, wait_until_ready
from windtunnel.serving.vllm.settings import VllmSettings

HYBRID: dict[str, Any] = {
    "vocab_size": 512, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 4096,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2,
    "linear_num_value_heads": 4, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
}  # fmt: skip
"""Of a Qwen3-Next that vLLM serves on a CPU: its kernels want heads of 128 in bfloat16."""
HYBRID_WORDS = (
    "--enforce-eager --dtype bfloat16 --max-model-len 4000 --max-num-batched-tokens 4096 --max-num-seqs 16"
    " --enable-prefix-caching --mamba-cache-mode align --num-gpu-blocks-override 24"
)
EACH = 600.0
"""Seconds in which a request is answered."""
PYTHON = "WINDTUNNEL_ENGINE_PYTHON"
"""Names the interpreter of the own engine: vLLM pins another Transformers than it needs."""


@dataclass
class Answer:
    """Of a request, seconds: when it was sent, its first token, its last one; the tokens of each answer.
    ``refused``: it got none."""

    sent: float
    first: float = nan
    end: float = nan
    tokens: dict[int, list[int]] = field(default_factory=dict)
    refused: bool = False

    @property
    def count(self) -> int:
        return sum(map(len, self.tokens.values()))

    def in_time(self, ttft: float, tpot: float) -> bool:
        """Whether its first token and all others came as they were promised."""
        most = max(map(len, self.tokens.values()), default=1)
        late = self.first - self.sent > ttft or self.end - self.first > tpot * max(1, most - 1)
        return not self.refused and not late


@dataclass(frozen=True)
class PromptRequest:
    """One request: ``after`` so many seconds. ``ttft`` and ``tpot``: promised, seconds; ``priority``: of
    vLLM's own policy of that name, the least first."""

    after: float
    prompt: Sequence[int]
    tokens: int
    answers: int = 1
    temperature: float = 0.0
    ttft: float = inf
    tpot: float = inf
    priority: int = 0


@dataclass(frozen=True)
class Variant:
    """A server: vLLM with our scheduler and these settings, or with its own (None); ``words``: further ones
    of its command. ``engine``: the own engine in its place."""

    settings: VllmSettings | None = None
    words: str = ""
    engine: bool = False


@dataclass
class Live:
    """A server that is up."""

    url: str
    process: psutil.Process
    events: Path
    vllm: bool = True

    def spent(self) -> float:
        """Processor seconds of all its processes."""
        parts = [self.process, *self.process.children(recursive=True)]
        return sum(sum(part.cpu_times()[:2]) for part in parts)

    def cached(self) -> tuple[float, float]:
        """Prompt tokens that its cache had, and all that were looked up."""
        lines = httpx.get(f"{self.url}/metrics").text.splitlines()
        hits, queries = (
            sum(
                float(line.split()[-1])
                for line in lines
                if line.startswith(f"vllm:prefix_cache_{name}_total")
            )
            for name in ("hits", "queries")
        )
        return hits, queries

    def ask(self, requests: Sequence[PromptRequest], at_once: int = 1 << 30) -> tuple[list[Answer], float]:
        """The answers, and seconds until the last one."""
        return asyncio.run(_all(self.url, requests, at_once, self.vllm))


@contextmanager
def servers(
    variants: Mapping[str, Variant], words: str = WORDS, hybrid: bool = False
) -> Iterator[dict[str, Live]]:
    """A server for each name, all of one model."""
    need("" if find_spec("vllm") else "vLLM is not installed (docs/vllm.md)")
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory()))
        model = _hybrid(folder / "model") if hybrid else build_model(folder / "model")
        running = {}
        for name, variant in variants.items():
            port = find_port("127.0.0.1", 0)
            events = folder / f"{name}.jsonl"
            settings = replace(variant.settings or VllmSettings(), events=str(events))
            more = f"{words} {variant.words}"
            server = Server(str(model), "bench", port=port, more=more, scheduler=variant.settings is not None)
            command = _engine(model, port) if variant.engine else server.command(settings)
            url = f"http://127.0.0.1:{port}"
            log = stack.enter_context((folder / f"{name}.log").open("wb"))
            process = stack.enter_context(server_process(command, log.fileno()))
            running[name] = process, Live(url, psutil.Process(process.pid), events, not variant.engine)
        for process, live in running.values():
            wait_until_ready(process, live.url)
        yield {name: live for name, (_, live) in running.items()}


def _engine(model: Path, port: int) -> list[str]:
    start = "from windtunnel.cli.main import main; main()"
    words = ["serve", str(model), "--name", "bench", "--port", str(port), "--admission", "wait"]
    words += ["--prefix-cache", "none", "--dtype", "float32", "--threads", "1", "--log", "0"]
    words += ["--chunk", "1024"]  # prompt tokens of a step, as in vLLM by `WORDS`
    return [os.environ.get(PYTHON, sys.executable), "-c", start, *words]


def _hybrid(folder: Path) -> Path:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model("qwen3_next", **HYBRID)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    return folder


def prompts(count: int, length: int, random: np.random.Generator) -> list[list[int]]:
    return random.integers(3, SHAPE["vocab_size"], (count, length)).tolist()


async def _all(
    url: str, requests: Sequence[PromptRequest], at_once: int, vllm: bool
) -> tuple[list[Answer], float]:
    room = asyncio.Semaphore(at_once)
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=256)
    began = time.monotonic()
    async with httpx.AsyncClient(timeout=EACH, limits=limits) as client:

        async def respond(request: PromptRequest) -> Answer:
            await asyncio.sleep(began + request.after - time.monotonic())
            async with room:
                return await _ask(client, url, request, vllm)

        answers = await asyncio.gather(*map(respond, requests))
    return list(answers), time.monotonic() - began


async def _ask(client: httpx.AsyncClient, url: str, request: PromptRequest, vllm: bool) -> Answer:
    body = {
        "model": "bench", "prompt": list(request.prompt), "max_tokens": request.tokens, "n": request.answers,
        "temperature": request.temperature, "ignore_eos": True, "stream": True,
    }  # fmt: skip
    if vllm:
        promised = {"ttft": request.ttft, "tpot": request.tpot}
        body |= {"return_token_ids": True, "priority": request.priority}
        body["vllm_xargs"] = {name: value for name, value in promised.items() if value < inf}
    else:
        body["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
    answer, count = Answer(time.monotonic()), 0
    async with client.stream("POST", f"{url}/v1/completions", json=body) as response:
        if response.status_code != 200:
            answer.refused = True
            return answer
        async for line in response.aiter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line[6:])
            if "error" in event:
                answer.refused = True
                return answer
            now = time.monotonic()
            for choice in event["choices"]:
                new = choice.get("token_ids") or []
                if not vllm:  # tells how many, not which
                    new = [0] * (event["usage"]["completion_tokens"] - count)
                    count += len(new)
                if new:
                    answer.first = min(now, answer.first if answer.first == answer.first else inf)
                    answer.end = now
                    answer.tokens.setdefault(choice["index"], []).extend(new)
    answer.refused = not answer.tokens
    return answer
