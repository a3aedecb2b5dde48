"""The server as its clients see it: those that others wrote, and those that behave badly."""

from __future__ import annotations

import asyncio
import http.client
import json
import re
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.serving import Served, served
from support.waiting import until
from windtunnel.replay import replay
from windtunnel.store import runs

ROOT = Path(__file__).parents[3]
pytestmark = [pytest.mark.slow]
openai = pytest.importorskip("openai", reason="needs openai: pip install windtunnel[strangers]")
MODEL = "tiny-hybrid"
PROMPT = "The tunnel blows, the wing stays: " * 3


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    words = ("--policy", "eager", "--max-rows", "16", "--chunk", "64", "--queue", "80", "--log", "1")
    home = tmp_path_factory.mktemp("home")
    with served(home, *words) as running:
        yield running


@pytest.fixture
def client(server: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.url, api_key="none", max_retries=0, timeout=60) as api:
        yield api


def idle(server: Served) -> bool:
    """Whether nobody is served and nothing is held for anybody."""
    facts = server.facts()
    return not any(facts[f"windtunnel_{name}"] for name in ("running", "waiting", "kv_reserved"))


def test_the_official_client(client: openai.OpenAI, server: Served) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    asked = {"model": MODEL, "prompt": PROMPT, "max_tokens": 12, "temperature": 0}
    whole = client.completions.create(**asked, logprobs=2)
    assert whole.usage is not None and whole.usage.completion_tokens == 12 == len(
        whole.choices[0].logprobs.tokens
    )
    parts = list(client.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    assert "".join(part.choices[0].text for part in parts[:-1]) == whole.choices[0].text
    assert parts[-1].usage is not None and parts[-1].usage.total_tokens == whole.usage.total_tokens
    cached = [client.completions.create(**asked) for _ in range(2)][-1]
    assert cached.usage.prompt_tokens_details.cached_tokens > 0
    assert cached.choices[0].text == whole.choices[0].text
    tokens = [byte + 3 for byte in PROMPT.encode()]
    assert client.completions.create(**asked | {"prompt": tokens}).choices[0].text == whole.choices[0].text
    several = client.completions.create(**asked | {"prompt": [PROMPT, "x"], "n": 2})
    assert [choice.text for choice in several.choices[:2]] == [whole.choices[0].text] * 2 and len(
        several.choices
    ) == 4

    talk = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Lift?"}]
    seeded = [
        client.chat.completions.create(model=MODEL, messages=talk, seed=seed, n=2, max_tokens=9, top_p=0.9)
        for seed in (1, 1, 2)
    ]
    texts = [[choice.message.content for choice in answer.choices] for answer in seeded]
    assert texts[0] == texts[1] != texts[2] and texts[0][0] != texts[0][1]
    cut = texts[0][0][3:5]
    stopped = client.chat.completions.create(
        model=MODEL, messages=talk, seed=1, n=2, max_tokens=9, top_p=0.9, stop=[cut]
    )
    assert stopped.choices[0].message.content == texts[0][0].split(cut)[0]
    assert stopped.choices[0].finish_reason == "stop"


def test_branches_are_joined_and_the_answer_goes_on(client: openai.OpenAI) -> None:
    asked = {"model": MODEL, "prompt": "List: ", "max_tokens": 6, "temperature": 0}
    branches = {"prompts": ["one", "two", ""], "max_tokens": 5}
    apart = client.completions.create(**asked, extra_body={"branches": branches, "ignore_eos": True})
    for choice, head in zip(apart.choices, branches["prompts"], strict=True):
        alone = client.completions.create(**asked | {"prompt": f"List: {head}", "max_tokens": 5})
        assert choice.text == alone.choices[0].text
    joined = client.completions.create(
        **asked, extra_body={"branches": {**branches, "join": "."}, "ignore_eos": True}
    )
    assert [choice.text for choice in joined.choices[1:]] == [choice.text for choice in apart.choices]
    assert len(joined.choices) == 4 and joined.usage.completion_tokens == 21


@pytest.mark.parametrize(
    ("fields", "status", "said"),
    [
        ({"model": "gpt-4"}, 404, "does not exist"),
        ({"max_tokens": 10**5}, 400, "maximum context length is 4096"),
        ({"prompt": [1, 400]}, 400, "token 400 is none of the model's 259"),
        ({"max_tokens": 0}, 400, "max_tokens"),
        ({"logit_bias": {"5": 1}}, 400, "logit_bias"),
        ({"temperature": "warm"}, 400, "temperature"),
        ({"branches": {"prompts": []}}, 400, "branches.prompts"),
        ({"branches": {"prompts": ["a"]}, "n": 2}, 400, "n is not served"),
    ],
)
def test_what_is_not_served_is_refused_by_name(
    client: openai.OpenAI, fields: dict[str, object], status: int, said: str
) -> None:
    with pytest.raises(openai.APIStatusError, match=re.escape(said)) as refused:
        client.completions.create(model=MODEL, prompt="a", extra_body=fields)
    assert refused.value.status_code == status and refused.value.body["type"] == "invalid_request_error"


def test_clients_that_speak_badly_or_go_away_or_read_slowly(server: Served) -> None:
    host, port = server.url.removesuffix("/v1").removeprefix("http://").split(":")

    def said(data: bytes, *, close: bool = False) -> bytes:
        with socket.create_connection((host, int(port)), timeout=30) as sock:
            sock.sendall(data)
            if close:
                return b""
            sock.shutdown(socket.SHUT_WR)
            return b"".join(iter(lambda: sock.recv(65536), b""))

    def request(body: bytes) -> bytes:
        kind = "Host: x\r\nContent-Type: application/json\r\nConnection: close"
        head = f"POST /v1/completions HTTP/1.1\r\n{kind}\r\nContent-Length: {len(body)}\r\n\r\n"
        return head.encode() + body

    assert b" 400 " in said(request(b'{"model": "tiny-hyb'))[:20]
    assert b" 400 " in said(request(b"[" * 100_000))[:20]
    assert b" 400 " in said(request(b'"\xff\xfe"'))[:20]
    assert b" 400 " in said(b"\x16\x03\x01 not HTTP\r\n\r\n")[:20]
    assert b" 413 " in said(request(b"").replace(b"Content-Length: 0", b"Content-Length: 9999999"))[:20]
    assert b" 405 " in said(b"GET /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")[:20]
    offer = http.client.HTTPConnection(host, int(port), timeout=30)  # of HTTP/2, as Java's client makes it
    headers = {"Content-Type": "application/json", "Connection": "Upgrade", "Upgrade": "h2c"}
    short = json.dumps({"model": MODEL, "prompt": "a", "max_tokens": 2})
    offer.request("POST", "/v1/completions", short, headers)
    assert offer.getresponse().status == 200
    offer.close()
    long = {"model": MODEL, "prompt": "a", "max_tokens": 3000, "ignore_eos": True}
    said(request(json.dumps(long).encode()), close=True)  # gone before the answer
    said(request(json.dumps(long | {"stream": True}).encode()), close=True)
    assert until(lambda: idle(server))

    few = request(json.dumps({"model": MODEL, "prompt": "a", "max_tokens": 50, "stream": True}).encode())
    with socket.create_connection((host, int(port)), timeout=30) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
        sock.sendall(few)
        read = b""
        while b"[DONE]" not in read:
            read += sock.recv(100)
    assert read.count(b'"finish_reason": "') == 1


def test_many_clients_at_once_of_whom_some_leave(server: Served) -> None:
    async def ask(client: openai.AsyncOpenAI, number: int) -> str:
        stream = await client.completions.create(
            model=MODEL, prompt=f"{number % 8}", max_tokens=20, temperature=0, stream=True,
            extra_body={"ignore_eos": True},
        )  # fmt: skip
        text = ""
        async for chunk in stream:
            text += chunk.choices[0].text
            if number % 16 == 7:
                await stream.close()
                return "left"
        return text

    async def all_of_them() -> list[str]:
        async with openai.AsyncOpenAI(base_url=server.url, api_key="x", max_retries=0) as client:
            return await asyncio.gather(*(ask(client, number) for number in range(64)))

    texts = asyncio.run(all_of_them())
    assert texts.count("left") == 4
    assert all(len(set(texts[number::8]) - {"left"}) == 1 for number in range(8))
    assert until(lambda: idle(server))


def test_langchain(server: Served) -> None:
    chat = pytest.importorskip("langchain_openai", reason="needs langchain-openai").ChatOpenAI(
        base_url=server.url, api_key="x", model=MODEL, max_tokens=6, temperature=0, timeout=60
    )
    answer = chat.invoke([("system", "Be brief."), ("human", "Drag?")])
    assert answer.usage_metadata["output_tokens"] == 6
    assert (
        "".join(str(part.content) for part in chat.stream([("system", "Be brief."), ("human", "Drag?")]))
        == answer.content
    )


def test_the_example_in_the_documentation(server: Served, capsys: pytest.CaptureFixture[str]) -> None:
    page = (ROOT / "docs" / "serving.md").read_text()
    code = next(block for block in re.findall(r"```python\n(.*?)```", page, re.S) if "from openai" in block)
    assert "http://127.0.0.1:8811/v1" in code
    exec(compile(code.replace("http://127.0.0.1:8811/v1", server.url), "serving.md", "exec"), {})
    assert capsys.readouterr().out


def _shortened(schema: Any) -> None:
    """Lists of three at most: what is drawn and served for longer ones tells nothing more."""
    for part in schema.values() if isinstance(schema, dict) else schema:
        if isinstance(part, dict) and part.get("type") == "array":
            part["maxItems"] = 3
        if isinstance(part, dict | list):
            _shortened(part)


def test_the_interface_is_what_its_description_says(server: Served) -> None:
    schemathesis = pytest.importorskip("schemathesis", reason="needs schemathesis")
    from hypothesis import HealthCheck, Phase, given, settings
    from schemathesis.specs.openapi.checks import positive_data_acceptance

    description = server.get("/openapi.json")
    for form in ("Completion", "Chat"):  # few and short answers are as well
        described = description["components"]["schemas"][form]
        fields = described["properties"]
        assert fields["model"]["enum"] == [MODEL]
        for name in ("n", "max_tokens", "max_completion_tokens") if form == "Chat" else ("n", "max_tokens"):
            fields[name] = fields[name]["anyOf"][0] | {"maximum": 3}
        # else a chat fills the context
        described["required"] = [*described.get("required", []), "max_tokens"]
    description["components"]["schemas"]["Branched"]["properties"]["max_tokens"]["maximum"] = 3
    _shortened(description["components"]["schemas"])
    schema = schemathesis.openapi.from_dict(description)
    schema.config.base_url = server.url.removesuffix("/v1")
    answered = set()
    for operation in schema.get_all_operations():
        case = operation.ok().as_strategy()

        @settings(
            max_examples=8 if operation.ok().method == "post" else 1, deadline=None,
            phases=[Phase.generate], derandomize=True, database=None,
            suppress_health_check=list(HealthCheck),
        )  # fmt: skip
        @given(case=case)
        def agrees(case: schemathesis.Case) -> None:
            # a token may be none of the model's, and a prompt too long: no schema says so
            response = case.call_and_validate(timeout=60, excluded_checks=[positive_data_acceptance])
            if response.status_code == 200:
                answered.add(case.path)

        agrees()
    assert answered >= {"/v1/completions", "/v1/chat/completions", "/v1/models", "/health", "/metrics"}


def test_it_stops_when_told_and_its_decisions_are_kept(server: Served, client: openai.OpenAI) -> None:
    """The last test of this file: the server is gone after it."""
    client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=4, n=3, extra_body={"ignore_eos": True})
    stream = client.completions.create(
        model=MODEL, prompt="a", max_tokens=60, stream=True, extra_body={"ignore_eos": True}
    )
    parts = [next(iter(stream))]
    server.process.send_signal(signal.SIGTERM)
    parts += list(stream)
    assert sum(bool(part.choices[0].finish_reason) for part in parts) == 1
    assert server.process.wait(60) == 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WINDTUNNEL_HOME", str(server.home))
        run = runs.Store.open().get(server.run)
    assert run.status == "done" and run.summary is not None and run.summary["steps"] > 0
    parts_of = {part.capability: part for part in replay(server.log, policy="off").parts}
    assert parts_of["serving.branching"].differences
    assert not parts_of["serving.engine"].differences and not parts_of["serving.prefixcache"].differences
