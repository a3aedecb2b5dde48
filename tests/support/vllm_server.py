"""A small vLLM server with the policies' scheduler, and requests that reach its rules.

``python -m support.vllm_server`` writes the log of such a run to `RECORDED`, where vLLM is installed.
"""

from __future__ import annotations

import json
import lzma
import sys
import tempfile
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from windtunnel.serving.vllm.calibrate import build_model
from windtunnel.serving.vllm.serve import Server, find_port, server_process, wait_until_ready
from windtunnel.serving.vllm.settings import VllmSettings
from windtunnel.store import eventlog

RECORDED = Path(__file__).parent.parent / "serving" / "vllm" / "recorded.jsonl.xz"
WORDS = (
    "--enforce-eager --dtype float32 --max-model-len 512 --max-num-seqs 8 --max-num-batched-tokens 136"
    " --no-async-scheduling --num-gpu-blocks-override 14"
)
STEP_TIME = "base=0.02,row=0.004,token=0.0004"


def requests() -> list[dict[str, Any]]:
    """Prompts that begin alike, branches, promises, and one that is late at once."""
    base = [3 + 7 * place % 251 for place in range(140)]
    some: list[dict[str, Any]] = []
    for place in range(8):
        some.append({"prompt": [*base[: 40 + 11 * place], 300 + place], "max_tokens": 6 + 3 * place})
    for place in range(3):
        request = {"prompt": [*base, 400 + place], "max_tokens": 12, "n": 3, "temperature": 1.0}
        some.append({**request, "vllm_xargs": {"tpot": 0.5}})
    some.append({"prompt": [9] * 30, "max_tokens": 40, "vllm_xargs": {"tpot": 0.2}})
    some.append({"prompt": [8] * 120, "max_tokens": 3, "vllm_xargs": {"ttft": 1e-6}})
    return some


def run(folder: Path) -> tuple[Path, list[int]]:
    """The log of a server that is asked twice, and the status of each request."""
    events = folder / eventlog.NAME
    model = build_model(folder / "model")
    server = Server(str(model), "m", port=find_port("127.0.0.1", 0), more=WORDS)
    url = f"http://127.0.0.1:{server.port}"
    settings = VllmSettings("taper", "refuse", step_time=STEP_TIME, events=str(events))

    def ask(request: dict[str, Any]) -> int:
        body = json.dumps({"model": "m", "temperature": 0, "ignore_eos": True, **request}).encode()
        sent = urllib.request.Request(f"{url}/v1/completions", body, {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(sent, timeout=300) as response:
                return int(response.status)
        except urllib.error.HTTPError as error:
            return error.code

    with (
        (folder / "server.log").open("wb") as log,
        server_process(server.command(settings), log.fileno()) as process,
    ):
        wait_until_ready(process, url)
        status: list[int] = []
        for _ in range(2):
            with ThreadPoolExecutor(len(requests())) as threads:
                status += threads.map(ask, requests())
    return events, status


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as place:
        path, codes = run(Path(place))
        RECORDED.write_bytes(lzma.compress(path.read_bytes(), preset=9 | lzma.PRESET_EXTREME))
        print(codes, RECORDED.stat().st_size)
        sys.exit(0)
