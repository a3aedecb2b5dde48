"""``windtunnel calibrate serving.vllm``: what the steps of a vLLM server take here, for the twin.

A server of a small model built at random is asked in waves of requests; its scheduler logs what each step
consisted of and how long it took. `fit_log` does the same with the log of any run of a vLLM server.
"""

from __future__ import annotations

import json
import tempfile
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import fmean

from windtunnel.base.errors import UserError
from windtunnel.calibration.profiles import Calibrated, Progress, own, today
from windtunnel.serving.engine.model import StepTime
from windtunnel.serving.engine.profile import Point, fit, save
from windtunnel.serving.vllm.serve import Server, find_port, server_process, wait_until_ready
from windtunnel.serving.vllm.settings import VllmSettings
from windtunnel.store import eventlog

NAME = "serving-vllm"
SHAPE = {
    "vocab_size": 4096, "hidden_size": 384, "intermediate_size": 1024, "num_hidden_layers": 8,
    "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 4096,
    "eos_token_id": 2, "bos_token_id": 1, "pad_token_id": 0, "tie_word_embeddings": True,
}  # fmt: skip
"""Of a Qwen3 of 14 million parameters."""
WORDS = "--enforce-eager --dtype float32 --max-model-len 1024 --max-num-seqs 64 --max-num-batched-tokens 1024"
QUICK = ((1, 16), (4, 16), (8, 64), (1, 400))
FULL = (*((rows, 16) for rows in (1, 2, 4, 8, 16, 32)), (4, 256), (8, 256), (1, 800), (2, 512))
"""Requests at once, and tokens of each one's prompt."""
DECODED, TURNS = 8, 3


def build_model(folder: Path) -> Path:
    """A directory with random weights, without a tokenizer."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3", **SHAPE), dtype=torch.float32)
    model.save_pretrained(folder)
    return folder


def calibrate_here(*, quick: bool, progress: Progress) -> Calibrated:
    """Measure and keep the profile; ``quick``: fewer and smaller steps."""
    waves = QUICK if quick else FULL
    progress("server", 0.0)
    with tempfile.TemporaryDirectory() as folder:
        events, model = Path(folder, eventlog.NAME), build_model(Path(folder, "model"))
        server = Server(str(model), "calibrated", port=find_port("127.0.0.1", 0), more=WORDS)
        command = server.command(VllmSettings("eager", "wait", events=str(events)))
        url = f"http://{server.host}:{server.port}"
        with Path(folder, "log").open("wb") as log, server_process(command, log.fileno()) as process:
            wait_until_ready(process, url)
            for turn in range(TURNS + 1):  # the first one warms up
                for place, (requests, prompt) in enumerate(waves):
                    progress("steps", (turn + place / len(waves)) / (TURNS + 1))
                    _wave(url, requests, prompt, salt=turn)
        time, error = fit_log(eventlog.read(events))
    path = own(NAME)
    save(path, time, 0, model="a Qwen3 of 14 M parameters in vLLM", error=error, date=today())
    return Calibrated(path, f"vLLM's steps, {error:.1%} from the step model on average")


def _wave(url: str, requests: int, prompt: int, salt: int) -> None:
    def ask(number: int) -> None:
        tokens = [3 + (salt * 977 + number * 131 + place * 7) % 4000 for place in range(prompt)]
        body = {"model": "calibrated", "prompt": tokens, "max_tokens": DECODED, "ignore_eos": True}
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request, timeout=600) as response:
            response.read()

    with ThreadPoolExecutor(requests) as threads:
        list(threads.map(ask, range(requests)))


def fit_log(events: Sequence[eventlog.Event]) -> tuple[StepTime, float]:
    """The step model of a vLLM server's log, and how far its steps are from it: the mean of their relative
    differences. Of steps that are alike the mean is taken: what stood still stands still again.

    Raises:
        UserError: the log has too few steps.
    """
    alike: dict[tuple[int, int, str], tuple[Point, list[float]]] = {}
    for event in events:
        if event["kind"] == "step" and event.get("took"):
            rows, read, chunks, seconds = event["took"]
            point = (rows, read, [tuple(chunk) for chunk in chunks])
            key = (rows, read // 64, json.dumps([[tokens, context // 64] for tokens, context in chunks]))
            alike.setdefault(key, (point, []))[1].append(seconds)
    if len(alike) < len(StepTime.__slots__):
        raise UserError(f"calibrate: the log has {len(alike)} kinds of steps, at least 7 are needed")
    points, seconds = zip(*alike.values(), strict=True)
    return fit(points, [fmean(each) for each in seconds], fused=True)
