"""Which requests of an agent end a turn: those of its main loop.

An agent asks its model for more than its next step: a title, a summary, how many tokens a text has, whether a
command is harmless; and it may run agents of its own. Only a request of the main loop ends a turn. The
strongest evidence is growth: its messages begin with those of the main loop's last request. Then come the
system prompt, the tools and the model that the main loop uses.

In doubt a request is *main*: a checkpoint too many costs a little, one too few loses the turn's boundary.

Two requests are the same when their canonical forms are: JSON with sorted keys and without what changes from
one sending to the next though the question stays (cache marks, user ids, streaming options, a billing line in
the system prompt). What is compared is the *outline* of a request: one digest for each message, so that a
conversation which continues another is seen by comparing two tuples. Three shapes of body are understood:
OpenAI chat completions and responses, Anthropic messages.

Pure: what is known of a sandbox's loops goes in, a verdict and the new knowledge come out.
Source: Crab (arXiv 2604.28138), section 3 (its coordinator); the rules are ours.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import zstandard

Shape = Literal["chat", "responses", "messages"]
SHAPES: dict[str, Shape] = {"/chat/completions": "chat", "/responses": "responses", "/messages": "messages"}
"""By how the path of a request ends."""
VOLATILE = frozenset({"metadata", "user", "safety_identifier", "prompt_cache_key", "stream_options"})
"""Fields of a request that say nothing about what is asked."""
BILLING = "x-anthropic-billing-header:"
"""A block that Claude Code puts first in its system prompt, with a value that differs in every request."""


class Unreadable(Exception):
    """The body is no model request: it is forwarded as it is."""


@dataclass(frozen=True)
class Outline:
    """What a model request asks, without its words.

    ``digest``: equal where the same is asked. ``system`` and ``tools``: digests, empty for none.
    ``messages``: a digest each, less the system prompt's. ``follows``: it names the reply that it goes on
    from (the service has the conversation so far).
    """

    digest: str
    shape: Shape
    model: str
    system: str
    tools: str
    messages: tuple[str, ...]
    follows: bool = False


def read(path: str, headers: Mapping[str, str], body: bytes, *, limit: int) -> Outline:
    """Understand a request; ``limit`` bounds what a compressed body may unpack to. Raises Unreadable."""
    shape = next((shape for end, shape in SHAPES.items() if path.rstrip("/").endswith(end)), None)
    if shape is None:
        raise Unreadable(f"no model request is made to {path}")
    try:
        return _outline(path, shape, json.loads(unpacked(headers.get("content-encoding", ""), body, limit)))
    except (ValueError, RecursionError) as error:
        raise Unreadable(f"no JSON: {error}") from error


def _outline(path: str, shape: Shape, content: Any) -> Outline:
    if not isinstance(content, dict):
        raise Unreadable("no JSON object")
    head, messages = _split(shape, content)
    parts = [_text(_plain(message)) for message in messages]
    system, tools = _system_of(shape, content, messages), content.get("tools") or content.get("functions")
    plain_head = _text({"path": path.rstrip("/"), "asked": _plain(head)})
    return Outline(
        digest=_digest("\n".join((plain_head, *parts))),
        shape=shape,
        model=str(content.get("model", "")),
        system=_digest(_text(_plain(system))) if system else "",
        tools=_digest(_text(_plain(tools))) if tools else "",
        messages=tuple(_digest(part) for part in parts[_leading_system(messages) :]),
        follows=bool(content.get("previous_response_id") or content.get("conversation")),
    )


def unpacked(encoding: str, body: bytes, limit: int) -> bytes:
    """``body`` without its compression. Raises Unreadable for one that is unknown, broken or too large."""
    try:
        match encoding.strip().lower():
            case "" | "identity":
                data = body
            case "gzip" | "x-gzip":
                data = gzip.GzipFile(fileobj=io.BytesIO(body)).read(limit + 1)
            case "zstd":
                data = zstandard.ZstdDecompressor().stream_reader(io.BytesIO(body)).read(limit + 1)
            case _:
                raise Unreadable(f"content-encoding {encoding!r} is not understood")
    except (OSError, EOFError, zstandard.ZstdError) as error:
        raise Unreadable(f"broken {encoding}: {error}") from error
    if len(data) > limit:
        raise Unreadable(f"unpacks to more than {limit} bytes")
    return data


def _split(shape: Shape, content: dict[str, Any]) -> tuple[dict[str, Any], list[Any]]:
    """All but the messages, and the messages."""
    name = "input" if shape == "responses" else "messages"
    messages = content.get(name)
    if isinstance(messages, str):
        messages = [{"role": "user", "content": messages}]
    if not isinstance(messages, list):
        raise Unreadable(f"no list of {name}")
    return {key: value for key, value in content.items() if key != name}, messages


def _leading_system(messages: list[Any]) -> int:
    """How many messages at the beginning are the system prompt."""
    for number, message in enumerate(messages):
        if not isinstance(message, dict) or message.get("role") not in ("system", "developer"):
            return number
    return len(messages)


def _system_of(shape: Shape, content: dict[str, Any], messages: list[Any]) -> Any:
    """The system prompt: its own field, or the messages of that role at the beginning."""
    if shape == "messages":
        return content.get("system")
    if shape == "responses" and content.get("instructions"):
        return content.get("instructions")
    return messages[: _leading_system(messages)]


def _plain(value: Any, *, top: bool = True) -> Any:
    """``value`` without what is volatile, and with text written in one way."""
    if isinstance(value, dict):
        return {
            key: _content(_plain(inner, top=False))
            if key in ("content", "system")
            else _plain(inner, top=False)
            for key, inner in value.items()
            if key != "cache_control" and not (top and key in VOLATILE)
        }
    if isinstance(value, list):
        return [_plain(inner, top=False) for inner in value if not _is_billing(inner)]
    return value


def _content(value: Any) -> Any:
    """A content that is one string and one that is a list of one text mean the same."""
    return [{"text": value, "type": "text"}] if isinstance(value, str) else value


def _is_billing(value: Any) -> bool:
    return isinstance(value, dict) and str(value.get("text", "")).startswith(BILLING)


def _text(value: Any) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


LOOPS_KEPT = 8
TAKEOVER = 3
"""After so many requests in a row without one of the main loop, another conversation with tools counts as
one too."""


@dataclass(frozen=True)
class AgentLoops:
    """What is known of a sandbox's agent: the last request of each of its loops, the newest last, and how
    often in a row another conversation (by its system prompt) asked without any of them."""

    loops: tuple[Outline, ...] = ()
    stranger: str = ""
    strange: int = 0


@dataclass(frozen=True)
class Verdict:
    """What a request is, why, and what is known afterwards."""

    kind: Literal["main", "helper"]
    reason: str
    agent: AgentLoops = field(repr=False)


def classify(outline: Outline, agent: AgentLoops) -> Verdict:
    """Judge a request that a model answers."""
    grown = [
        (place, reason) for place, loop in enumerate(agent.loops) if (reason := _same_loop(outline, loop))
    ]
    if grown:
        same = [each for each in grown if outline.system == agent.loops[each[0]].system]
        place, reason = (same or grown)[-1]
        return _main(outline, agent, reason if same else f"{reason}, under another system prompt", place)
    if not agent.loops:
        return _main(outline, agent, "the first request" + (" with tools" if outline.tools else ""))
    if outline.tools and not any(loop.tools for loop in agent.loops):
        # what was taken for the main loop was a helper that came first
        return _main(outline, replace(agent, loops=()), "the first request with tools")
    newest = agent.loops[-1]
    for loop in reversed(agent.loops):
        if outline.system == loop.system and bool(outline.tools) == bool(loop.tools):
            if outline.model == loop.model or outline.system:
                return _main(outline, agent, "a new conversation with the main loop's system prompt")
            return Verdict("helper", f"model {outline.model} is not the main loop's {loop.model}", agent)
    if not outline.tools and newest.tools:
        return Verdict("helper", "no tools, while the main loop has some", agent)
    return _stranger(outline, agent)


def _same_loop(outline: Outline, loop: Outline) -> str:
    """How this request goes on from the last one of that loop; empty when it does not."""
    if outline.shape != loop.shape or (loop.tools and not outline.tools):
        return ""
    if outline.follows and outline.tools == loop.tools:
        return "it goes on from an earlier reply" if outline.system == loop.system else ""
    size = len(loop.messages)
    if not size or outline.messages[:size] != loop.messages:
        return ""
    return "it continues the conversation" if len(outline.messages) > size else "the same messages again"


def _stranger(outline: Outline, agent: AgentLoops) -> Verdict:
    """Another system prompt: an agent's agent or a helper, until it is the only one that asks."""
    strange = agent.strange + 1 if agent.stranger == outline.system else 1
    if strange >= TAKEOVER:
        return _main(outline, agent, f"the only conversation for {strange} requests")
    return Verdict(
        "helper",
        "the system prompt is not the main loop's",
        replace(agent, stranger=outline.system, strange=strange),
    )


def _main(outline: Outline, agent: AgentLoops, reason: str, place: int | None = None) -> Verdict:
    others = [loop for number, loop in enumerate(agent.loops) if number != place]
    others = [loop for loop in others if (loop.system, loop.shape) != (outline.system, outline.shape)]
    return Verdict("main", reason, AgentLoops((*others, outline)[-LOOPS_KEPT:]))
