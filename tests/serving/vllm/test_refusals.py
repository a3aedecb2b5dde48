"""What clients of vLLM's server get for a request that was shed, with answers as vLLM 0.32 writes them."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from windtunnel.serving.vllm.refusals import REASON, Refusals

SHED = f'"finish_reason":"abort","stop_reason":"{REASON}"'
ROLE = 'data: {"choices":[{"index":0,"delta":{"role":"assistant","content":""}}]}\n\n'
DONE = "data: [DONE]\n\n"
WHOLE = '{"choices":[{"index":0,"text":"a","finish_reason":"length","stop_reason":null}]}'
QUOTED = WHOLE.replace('"a"', '"{}"'.format(SHED.replace('"', '\\"')))


async def answer(parts: list[str]) -> list[dict[str, Any]]:
    """The messages that a client gets when the server's body has these parts."""
    sent: list[dict[str, Any]] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for part in parts:
            await send({"type": "http.response.body", "body": part.encode(), "more_body": True})
        await send({"type": "http.response.body", "body": b""})

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        raise AssertionError

    await Refusals(app)({"type": "http"}, receive, send)
    return sent


@pytest.mark.parametrize(
    "parts",
    [
        [f'{{"choices":[{{"index":0,"text":"",{SHED}}}]}}'],
        [f'data: {{"choices":[{{"index":0,"text":"",{SHED}}}]}}\n\n', DONE],
        [ROLE, f'data: {{"choices":[{{"index":0,"delta":{{}},{SHED}}}]}}\n\n', DONE],
    ],
)
def test_a_shed_request_gets_503_and_the_reason(parts: list[str]) -> None:
    start, body = asyncio.run(answer(parts))
    assert start["status"] == 503 and (b"retry-after", b"1") in start["headers"]
    assert REASON.encode() in body["body"] and b'"code": 503' in body["body"]


@pytest.mark.parametrize("parts", [[WHOLE], [QUOTED], [ROLE, "data: {}\n\n", DONE], []])
def test_other_answers_are_as_they_were(parts: list[str]) -> None:
    start, *bodies = asyncio.run(answer(parts))
    assert start["status"] == 200
    assert [message["body"].decode() for message in bodies] == [*parts, ""]
