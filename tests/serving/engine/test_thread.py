"""What becomes of jobs when the engine ends, and what clients and who started the server get."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import threading
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from windtunnel.base.errors import LessError, ScriptError, WindtunnelError
from windtunnel.serving.engine.live import serve as serving
from windtunnel.serving.engine.live.families import load
from windtunnel.serving.engine.live.loop import Begun, EngineJob, Over, ServingEngine
from windtunnel.serving.engine.live.sampling import Sampling
from windtunnel.serving.engine.live.thread import EngineThread
from windtunnel.serving.engine.model import StepTime
from windtunnel.serving.engine.settings import ServeSettings
from windtunnel.store import runs

DIVIDES = "CAPABILITY = 'serving.engine'\ndef decide(observation):\n    return 1 / 0\n"


def test_jobs_get_their_events_and_those_that_are_left_fail_at_the_end() -> None:
    async def story() -> list[Any]:
        time_of = StepTime(1e-3, 1e-5, 1e-7, 1e-5, 1e-9)
        thread = EngineThread(ServingEngine(load("tiny-attention"), time_of, rows=2, kv=1 << 23))
        short, endless, gone = asyncio.Queue(), asyncio.Queue(), asyncio.Queue()
        thread.submit(EngineJob(1, 0.0, (5, 6), (3,), Sampling(logprobs=1)), short.put_nowait)
        thread.submit(EngineJob(2, 0.0, (5, 6), (4000,)), endless.put_nowait)
        thread.submit(EngineJob(3, 0.0, (5, 6), (1 << 22,)), gone.put_nowait)
        events = [await short.get() for _ in range(5)]
        assert "there is room for" in (await gone.get()).refused
        await thread.close()
        last = endless.get_nowait()
        while not isinstance(last, Over):
            last = endless.get_nowait()
        thread.submit(EngineJob(4, 0.0, (5,), (1,)), short.put_nowait)
        return [*events, last, short.get_nowait()]

    begun, *tokens, over, last, late = asyncio.run(story())
    assert begun == Begun(1, 0) and over == Over(1)
    assert [token.ends for token in tokens] == ["", "", "length"]
    assert all(token.sampled.top[0] == (token.sampled.token, token.sampled.logprob) for token in tokens)
    assert "being stopped" in last.failed and "being stopped" in late.failed


def test_a_stream_that_the_server_has_no_time_for_ends_with_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WINDTUNNEL_HOME", str(tmp_path))
    monkeypatch.setattr(serving, "GRACE", 0.2)
    lines: list[str] = []
    clients: list[threading.Thread] = []

    def ask(url: str) -> None:
        fields = {"prompt": "a", "max_tokens": 4000, "ignore_eos": True, "stream": True}
        body = json.dumps({"model": "tiny-attention", **fields}).encode()
        request = urllib.request.Request(f"{url}/v1/completions", body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=60) as answer:
            lines.append(answer.readline().decode())
            os.kill(os.getpid(), signal.SIGTERM)
            lines.extend(line.decode() for line in answer if line.strip())

    def ready(url: str, run: str) -> None:
        clients.append(threading.Thread(target=ask, args=(url,)))
        clients[0].start()

    serving.serve(ServeSettings("tiny-attention", port=0, threads=1), ready)
    clients[0].join(60)
    assert '"finish_reason": null' in lines[0] and lines[-1] == "data: [DONE]\n"
    assert json.loads(lines[-2].removeprefix("data: "))["error"]["message"] == "the server is being stopped"


@pytest.mark.parametrize(
    ("policy", "kind", "status", "words"),
    [
        ("", LessError, 3, "the engine failed, LookupError: of nothing; start the server again"),
        (DIVIDES, ScriptError, 1, "decide failed: division by zero"),
    ],
)
def test_an_engine_that_fails_ends_the_server_with_a_sentence(
    policy: str, kind: type[WindtunnelError], status: int, words: str, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setenv("WINDTUNNEL_HOME", str(tmp_path))
    answers: list[tuple[int, str]] = []
    clients: list[threading.Thread] = []
    settings = ServeSettings("tiny-attention", port=0, threads=1)
    if policy:
        (tmp_path / "mine.py").write_text(policy)
        settings = ServeSettings("tiny-attention", port=0, threads=1, branching=str(tmp_path / "mine.py"))

    def ask(url: str) -> None:
        body = json.dumps({"model": "tiny-attention", "prompt": "a"}).encode()
        request = urllib.request.Request(f"{url}/v1/completions", body, {"Content-Type": "application/json"})
        with pytest.raises(urllib.error.HTTPError) as caught, urllib.request.urlopen(request, timeout=60):
            pass
        with caught.value as error:
            answers.append((error.code, json.loads(error.read())["error"]["message"]))

    def ready(url: str, run: str) -> None:
        if not policy:
            monkeypatch.setattr(ServingEngine, "add", fails)
        clients.append(threading.Thread(target=ask, args=(url,)))
        clients[0].start()

    def fails(engine: ServingEngine, job: EngineJob) -> None:
        raise LookupError("of nothing")

    with pytest.raises(kind, match=words) as caught:
        serving.serve(settings, ready)
    clients[0].join(60)
    assert caught.value.status == status
    assert answers[0][0] == 500 and words in answers[0][1]
    assert runs.Store.open().list()[0].status == "failed"
