"""The server met by clients that repeat, retry, leave and send nonsense, while its worker is stopped and
killed: each request is answered once, and nothing is held for anybody afterwards."""

from __future__ import annotations

import json
import socket
import urllib.error
import urllib.request
from collections.abc import Iterator
from math import inf
from pathlib import Path
from typing import Any

import pytest
import torch

from support.serving import Served, served
from support.waiting import until
from windtunnel.base.errors import UserError
from windtunnel.serving.engine.live.families import load
from windtunnel.serving.engine.live.loop import EngineJob, Over, ServingEngine, Token
from windtunnel.serving.engine.live.sampling import Sampling, sample
from windtunnel.serving.engine.live.tokens import LocalTokens
from windtunnel.serving.engine.model import StepTime

pytestmark = pytest.mark.conformance


openai = pytest.importorskip("openai", reason="needs openai: pip install windtunnel[strangers]")
MODEL = "tiny-hybrid"
ROWS, QUEUE = 4, 6


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    words = ("--max-rows", str(ROWS), "--chunk", "64", "--queue", str(QUEUE), "--log", "0")
    with served(tmp_path_factory.mktemp("home"), *words) as running:
        yield running


@pytest.fixture
def client(server: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.url, api_key="none", max_retries=0, timeout=60) as api:
        yield api


_ENDS = {"include_usage": True}
_TALK = [{"role": "user", "content": "1 0 m0 Finish medical want"}]
_PARTS = [{"role": "user", "content": [{"type": "text", "text": "1 0 m0 Finish medical want"}]}]
SENT: list[dict[str, Any]] = [
    # guidellm 0.8
    {"stream": True, "stream_options": {**_ENDS, "continuous_usage_stats": True}, "max_completion_tokens": 12,
     "ignore_eos": True, "messages": _PARTS},
    {"stream": True, "stream_options": {**_ENDS, "continuous_usage_stats": True}, "max_tokens": 12,
     "ignore_eos": True, "prompt": "1 0 m0 Finish medical want"},
    # vllm bench serve 0.32
    {"prompt": "1 0 m0 Finish", "repetition_penalty": 1.0, "max_tokens": 12, "logprobs": None, "stream": True,
     "stream_options": _ENDS, "ignore_eos": True, "temperature": 0.0},
    {"messages": _PARTS, "max_completion_tokens": 12, "stream": True, "stream_options": _ENDS,
     "ignore_eos": True},
    # lm-eval 0.4.13, what it generates with a key and a prompt in tokens, and in a chat
    {"prompt": [[87, 122, 114]], "max_tokens": 12, "temperature": 0.0, "stop": ["\n", "Q:"], "seed": 1234},
    {"messages": _TALK, "max_tokens": 12, "temperature": 0.0, "stop": ["\n", "Q:"], "seed": 1234},
]  # fmt: skip
LIKELIHOODS = {
    "prompt": [[87, 122]],
    "temperature": 0,
    "max_tokens": 1,
    "logprobs": 1,
    "seed": 1,
    "echo": True,
}
"""What lm-eval asks to choose among answers."""


def held(server: Served) -> tuple[float, ...]:
    """Requests admitted and waiting, and KV reserved for them."""
    facts = server.facts()
    return tuple(facts[f"windtunnel_{name}"] for name in ("running", "waiting", "kv_reserved"))


def body(**fields: Any) -> bytes:
    return json.dumps({"model": MODEL, "prompt": "a", "max_tokens": 2, **fields}).encode()


def nested(field: str, depth: int) -> bytes:
    return body(**{field: 0}).replace(b": 0", b": " + b"[" * depth + b"]" * depth)


WRONG = {
    "brackets": (b"[" * 200_000, "parsing"),
    "a nested prompt": (nested("prompt", 200_000), "parsing"),
    "a nested stop": (nested("stop", 400), "stop"),
    "a number of 5,000 digits": (body(seed=0).replace(b": 0", b": " + b"9" * 5000), "parsing"),
    "a large number": (body(max_tokens=10**400), "max_tokens: Input should be less"),
    "invalid UTF-8": (body(prompt="X").replace(b"X", b"\xff"), "parsing"),
    "half a pair in a name": (body(model="\ud800"), "does not exist"),
    "NaN": (body(temperature=float("nan")), "temperature"),
    "an infinite top_p": (body(top_p=inf), "top_p"),
    "NaN seconds": (body(objective={"ttft": float("nan")}), "objective.ttft"),
    "less than no tokens": (body(max_tokens=-1), "max_tokens: Input should be greater"),
    "a token below the vocabulary": (body(prompt=[4, -1]), "prompt.1: Input should be greater"),
    "one beyond it": (body(prompt=[10**40]), "none of the model's 259"),
    "one beyond it in a join": (body(branches={"prompts": ["a"], "join": [259]}), "branches.join"),
    "no tokens": (body(prompt=[]), "prompt: List should have at least 1"),
    "no text to stop at": (body(stop=[""]), "stop.0: String should have at least 1"),
    "texts and tokens": (body(prompt=["a", [1]]), "prompt"),
    "a million tokens": (body(prompt=[5] * 1_000_000), "maximum context length is 4096"),
    "a list": (b"[]", "the body"),
    "nothing": (b"", "the body"),
    "no body that ends": (b"5\r\nabcde\r\nzz\r\n", "Invalid HTTP"),
}  # fmt: skip


@pytest.mark.slow
def test_nonsense_is_refused_by_name_and_changes_nothing(server: Served, client: openai.OpenAI) -> None:
    host, port = server.url.removesuffix("/v1").removeprefix("http://").split(":")
    for what, (sent, said) in WRONG.items():
        size = "Transfer-Encoding: chunked" if "Invalid" in said else f"Content-Length: {len(sent)}"
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n{size}\r\n"
        with socket.create_connection((host, int(port)), timeout=60) as sock:
            sock.sendall(f"{head}Connection: close\r\n\r\n".encode() + sent)
            response = b"".join(iter(lambda sock=sock: sock.recv(65536), b"")).decode()
        status = "404" if "exist" in said else "400"
        assert response.startswith(f"HTTP/1.1 {status} ") and said in response, f"{what}: {response[:400]}"
    post = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
    for begun in ("GET /health HTTP/1.1\r\nX: ", f"{post}2\r\n{{}}\r\n0\r\nX: ", f"{post}2;x="):
        with socket.create_connection((host, int(port)), timeout=60) as sock:
            try:  # a head, a trailer, a chunk's extension that does not end
                sock.sendall(begun.encode() + b"y" * 900_000)
                response = sock.recv(65536).decode()
            except (ConnectionResetError, BrokenPipeError):
                response = ""
            assert not response or " 400 " in response, begun
    assert held(server) == (0, 0, 0) and server.get("/health") == {"status": "ok"}
    assert client.completions.create(model=MODEL, prompt="a", max_tokens=2).usage.completion_tokens == 2


@pytest.mark.slow
def test_what_clients_send_back_repeat_and_give_up(server: Served, client: openai.OpenAI) -> None:
    talk: list[Any] = [{"role": "user", "content": "Lift?"}]
    for _ in range(2):  # the answer is appended as the client read it
        answer = client.chat.completions.create(model=MODEL, messages=talk, max_tokens=3, temperature=0)
        talk += [answer.choices[0].message, {"role": "user", "content": "And?"}]
    dumped = [{**answer.choices[0].message.model_dump(), "role": "assistant"}, talk[-1]]
    assert client.chat.completions.create(model=MODEL, messages=dumped, max_tokens=3).choices
    with pytest.raises(openai.BadRequestError, match="tools"):
        tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
        client.chat.completions.create(model=MODEL, messages=talk[:1], tools=[tool])
    drawn = client.completions.create(model=MODEL, prompt=["ab", "ab"], max_tokens=9)
    assert drawn.choices[0].text != drawn.choices[1].text
    options = {"include_usage": True, "continuous_usage_stats": True}
    parts = list(client.completions.create(model=MODEL, prompt="ab", stream=True, stream_options=options))
    used = [part.usage.completion_tokens for part in parts]
    assert used == sorted(used) and used[-1] == used[-2] > used[0]
    with pytest.raises(openai.APITimeoutError):
        client.with_options(timeout=0.05).completions.create(
            model=MODEL, prompt="a", max_tokens=3000, extra_body={"ignore_eos": True}
        )
    until(lambda: held(server) == (0, 0, 0))


@pytest.mark.slow
def test_what_benchmark_and_evaluation_clients_send_is_answered(server: Served) -> None:
    for sent in SENT:
        kind = "chat/completions" if "messages" in sent else "completions"
        asked = urllib.request.Request(
            f"{server.url}/{kind}", json.dumps({"model": MODEL, **sent}).encode(),
            {"Content-Type": "application/json"},
        )  # fmt: skip
        with urllib.request.urlopen(asked, timeout=60) as answer:
            lines = answer.read().decode().splitlines()
        if not sent.get("stream"):
            assert json.loads(lines[0])["usage"]["completion_tokens"] <= 12
            continue
        assert lines[-2:] == ["data: [DONE]", ""]
        parts = [json.loads(line.removeprefix("data: ")) for line in lines[:-2] if line]
        assert parts[-1]["choices"] == [] and parts[-1]["usage"]["completion_tokens"] == 12
        assert all("usage" in part for part in parts) == ("continuous_usage_stats" in sent["stream_options"])
    with pytest.raises(urllib.error.HTTPError) as refused:
        server.post("completions", **LIKELIHOODS)
    assert json.loads(refused.value.read())["error"]["param"] == "echo"
    refused.value.close()


def test_a_unit_that_is_ended_before_its_first_token_decodes_no_more_than_that() -> None:
    executor = load("tiny-attention")
    engine = ServingEngine(
        executor, StepTime(1e-3, 1e-5, 1e-7, 1e-5, 1e-9), rows=1, kv=1 << 20, chunk=4, queue=1
    )
    engine.add(EngineJob(0, 0.0, tuple(range(3, 15)), (9,)))
    engine.step()
    engine.end((0, 0))  # in mid-prefill
    engine.add(EngineJob(1, 0.0, (5,), (2,)))
    engine.add(EngineJob(2, 0.0, (5,), (2,)))
    events = []
    while engine.busy:
        events += engine.step()
    assert [event.job for event in events if isinstance(event, Token)] == [0, 1, 1]
    assert Over(2, refused="queue") in events


@pytest.mark.parametrize("temperature", [1e-310, 1e-30, 1e-6])
def test_a_temperature_close_to_none_takes_the_likeliest(temperature: float) -> None:
    logits = torch.tensor([[1.0, 40.0, 3.0, 39.0]])
    assert [draw.token for draw in sample(logits, [(Sampling(temperature, seed=3), 0, 0)])] == [1]


def test_a_tokenizer_that_is_broken_or_a_template_that_refuses_is_told_in_a_sentence(tmp_path: Path) -> None:
    import tokenizers
    import transformers

    words = tokenizers.models.WordLevel({"<unk>": 0, "a": 1}, unk_token="<unk>")
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizers.Tokenizer(words))
    fast.chat_template = "{% if messages[0].role != 'user' %}{{ raise_exception('users first') }}{% endif %}a"
    fast.save_pretrained(tmp_path)
    local = LocalTokens(tmp_path)
    assert local.chat([{"role": "user", "content": "\ud800"}]) == local.encode("a") == [1]
    assert local.encode("\ud800") == [0]
    with pytest.raises(UserError, match="does not take these messages: users first"):
        local.chat([{"role": "assistant", "content": "a"}])
    (tmp_path / "tokenizer.json").write_text('{"version": "1.0", "model": {}}')
    with pytest.raises(UserError, match="its tokenizer cannot be read"):
        LocalTokens(tmp_path)
