"""Which requests end a turn."""

from __future__ import annotations

import gzip
import json
from typing import Any

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from windtunnel.agents.sandbox.proxy.classify import AgentLoops, Outline, Unreadable, classify, read

CHAT, MESSAGES = "/v1/chat/completions", "/v1/messages"
RESPONSES = "/v1/responses"
TOOLS = [{"name": "bash"}]


def understood(path: str, body: Any, encoding: str = "") -> Outline:
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    return read(path, {"content-encoding": encoding}, raw, limit=10_000)


def kinds(*requests: tuple[str, dict[str, Any]]) -> list[str]:
    agent, kinds = AgentLoops(), []
    for path, body in requests:
        verdict = classify(understood(path, body), agent)
        agent = verdict.agent
        kinds.append(verdict.kind)
    return kinds


def said(*texts: str) -> list[dict[str, str]]:
    return [{"role": ("user", "assistant")[n % 2], "content": text} for n, text in enumerate(texts)]


def main(*texts: str, **fields: Any) -> tuple[str, dict[str, Any]]:
    asked = {"model": "big", "system": "You are an agent.", "tools": TOOLS, "messages": said(*texts)}
    return MESSAGES, asked | fields


def test_claude_code_session() -> None:
    billing = {"type": "text", "text": "x-anthropic-billing-header: cch=%d;"}
    prompt = {"type": "text", "text": "You are Claude Code, Anthropic's official CLI for Claude."}

    def step(number: int, *texts: str) -> tuple[str, dict[str, Any]]:
        return main(*texts, system=[{**billing, "text": billing["text"] % number}, prompt])

    def small(text: str, system: str = "", **fields: Any) -> tuple[str, dict[str, Any]]:
        return MESSAGES, {"model": "small", "system": system, "messages": said(text), **fields}

    assert kinds(
        small("quota", max_tokens=1),
        small("fix it", "Analyze if this message indicates a new conversation topic. If it does, …"),
        step(1, "fix it"),
        small("git push", "Your task is to process Bash commands that an AI coding agent wants to run."),
        step(2, "fix it", "ok", "result"),
        main("look around", system="You are an agent for Claude Code. Explore."),
        main("look around", "yes", "found", system="You are an agent for Claude Code. Explore."),
        step(3, "fix it", "ok", "result", "ok", "result"),
        step(4, "a summary of all that", "go on"),
    ) == ["main", "helper", "main", "helper", "main", "helper", "helper", "main", "main"]


def test_agent_without_tools_is_told_by_growth() -> None:
    def step(*texts: str, system: str = "You solve tasks in bash.") -> tuple[str, dict[str, Any]]:
        return CHAT, {"model": "m", "messages": [{"role": "system", "content": system}, *said(*texts)]}

    assert kinds(
        step("task"),
        step("task", "ls", "files"),
        (CHAT, {"model": "other", "messages": said("Is this command safe? ls")}),
        step("task", "ls", "files", "cat", "text", system="You solve tasks in bash. It is Monday."),
    ) == ["main", "main", "helper", "main"]


def test_responses() -> None:
    agent = {"model": "m", "instructions": "agent", "tools": TOOLS}
    assert kinds(
        (RESPONSES, agent | {"input": "task"}),
        (RESPONSES, agent | {"input": said("task", "ls", "files")}),
        (RESPONSES, agent | {"input": said("x"), "previous_response_id": "r"}),
        (RESPONSES, {"model": "m", "instructions": "name this", "input": "task"}),
    ) == ["main", "main", "main", "helper"]


def test_helper_that_came_first_gives_way_to_the_first_request_with_tools() -> None:
    odd = (CHAT, {"model": "small", "messages": said("Which language is this? fix it")})
    assert kinds(odd, main("task"), odd, main("task", "ok", "go")) == [
        "main",
        "main",
        "helper",
        "main",
    ]


def test_another_conversation_that_is_alone_becomes_a_main_loop_beside_the_first() -> None:
    def other(*texts: str) -> tuple[str, dict[str, Any]]:
        return main(*texts, system="You are another agent.")

    assert kinds(
        main("task"),
        other("a"),
        other("a", "b", "c"),
        other("a", "b", "c", "d", "e"),
        main("task", "ok", "go"),
        other("a", "b", "c", "d", "e", "f", "g"),
    ) == ["main", "helper", "helper", "main", "main", "main"]


def test_what_changes_with_every_request_makes_no_other_one() -> None:
    def system(number: int) -> list[dict[str, str]]:
        billing = f"x-anthropic-billing-header: cch={number};"
        return [{"type": "text", "text": text} for text in (billing, "S")]

    text = {"text": "hi", "type": "text", "cache_control": {}}
    first = main("hi", system=system(1), metadata={"user_id": "a"})[1]
    second = main(system=system(2), metadata={"user_id": "b"})[1] | {
        "messages": [{"content": [text], "role": "user"}],
        "tools": [{"name": "bash", "cache_control": {"type": "ephemeral"}}],
    }
    assert understood(MESSAGES, first).digest == understood(MESSAGES, second).digest


@pytest.mark.parametrize("pack", [gzip.compress, zstandard.compress])
def test_compressed_bodies_are_understood(pack: Any) -> None:
    plain = json.dumps(main("task")[1]).encode()
    encoding = {"gzip": "gzip", "zstandard": "zstd"}[pack.__module__.split(".")[0]]
    assert understood(MESSAGES, pack(plain), encoding) == understood(MESSAGES, plain)
    with pytest.raises(Unreadable, match="more than"):
        understood(MESSAGES, pack(b"[" + b" " * 1_000_000 + b"]"), encoding)
    with pytest.raises(Unreadable):
        understood(MESSAGES, b"broken" + pack(plain)[6:], encoding)


DEEP = b'{"messages": ' + b"[" * 700 + b"]" * 700 + b"}"


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b"1", b'{"messages": 3}', b"[" * 100_000, b"\xff\xfe", DEEP]
)
def test_bodies_that_are_no_request(body: bytes) -> None:
    with pytest.raises(Unreadable):
        understood(CHAT, body)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@given(
    st.fixed_dictionaries(
        {"messages": st.lists(JSON, max_size=4)},
        optional=dict.fromkeys(("system", "tools", "model", "max_tokens", "input", "instructions"), JSON),
    ),
    st.sampled_from([CHAT, MESSAGES, RESPONSES]),
)
def test_no_request_is_a_surprise_and_order_of_keys_is_no_difference(body: dict[str, Any], path: str) -> None:
    try:
        asked = understood(path, body)
    except Unreadable:
        return
    turned = understood(path, dict(reversed(body.items())))
    assert asked.digest == turned.digest
    assert classify(asked, AgentLoops()).kind in ("main", "helper")


@given(st.lists(st.text(min_size=1, max_size=8), min_size=1, max_size=6), st.data())
def test_growth_is_main_whatever_else_is_asked_between(texts: list[str], data: st.DataObject) -> None:
    agent = AgentLoops()
    for size in range(1, len(texts) + 1):
        if data.draw(st.booleans()):
            helper = (CHAT, {"model": "small", "messages": said(data.draw(st.text(max_size=8)))})
            agent = classify(understood(*helper), agent).agent
        path, body = main(*texts[:size])
        verdict = classify(understood(path, body), agent)
        assert verdict.kind == "main"
        agent = verdict.agent
