"""A model request as the model proxy understands it: what it asks, in a form that a repeat has too.

Two requests are the same when their canonical forms are: JSON with sorted keys and without what changes from
one sending to the next though the question stays (cache marks, user ids, streaming options, a billing line in
the system prompt). The *outline* of a request is what ``classify`` compares: one digest for each message, so
that a conversation which continues another is seen by comparing two tuples.

Four shapes of body are understood: OpenAI chat completions, responses and completions, Anthropic messages.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import zstandard

Shape = Literal["chat", "responses", "completions", "messages"]

VOLATILE = frozenset({"metadata", "user", "safety_identifier", "prompt_cache_key", "stream_options"})
"""Fields of a request that say nothing about what is asked."""
BILLING = "x-anthropic-billing-header:"
"""A block that Claude Code puts first in its system prompt, with a value that differs in every request."""
TEXT_KEPT = 4000
"""Characters of the system prompt and of the last message that are kept for comparing."""


class Unreadable(Exception):
    """The body is no model request: it is forwarded as it is."""


@dataclass(frozen=True)
class Outline:
    """What a model request asks, without its words. ``system`` and ``tools``: digests, empty for none.
    ``messages``: a digest each, less the system prompt's. ``prompt``: the text of a plain completion.
    ``opening`` and ``last``: the beginning of the system prompt and of the last message. ``follows``: it
    names the reply that it goes on from (the conversation so far is kept by the service)."""

    shape: Shape
    model: str
    system: str
    tools: str
    messages: tuple[str, ...]
    prompt: str = ""
    max_tokens: int | None = None
    opening: str = ""
    last: str = ""
    follows: bool = False


@dataclass(frozen=True)
class Asked:
    """A model request: its identity and its outline, and the canonical parts to be recorded."""

    digest: str
    outline: Outline
    head: str
    """Canonical JSON of all but the messages."""
    parts: tuple[str, ...]
    """Canonical JSON of each message, in order."""


def shape_of(path: str) -> Shape | None:
    """Which kind of model request a POST to this path is; None: none."""
    end = path.rstrip("/")
    if end.endswith("/chat/completions"):
        return "chat"
    if end.endswith("/completions"):
        return "completions"
    if end.endswith("/responses"):
        return "responses"
    return "messages" if end.endswith("/messages") else None


def counts_tokens(path: str) -> bool:
    """Whether a request to this path only counts tokens."""
    return path.rstrip("/").endswith(("/count_tokens", "/input_tokens"))


def read(path: str, headers: Mapping[str, str], body: bytes, *, limit: int) -> Asked:
    """Understand a request; ``limit`` bounds what a compressed body may unpack to. Raises Unreadable."""
    shape = shape_of(path)
    if shape is None:
        raise Unreadable(f"no model request is made to {path}")
    try:
        asked = json.loads(unpacked(headers.get("content-encoding", ""), body, limit))
    except (ValueError, RecursionError) as error:
        raise Unreadable(f"no JSON: {error}") from error
    if not isinstance(asked, dict):
        raise Unreadable("no JSON object")
    head, messages = _split(shape, asked)
    parts = tuple(_text(_plain(message)) for message in messages)
    system, tools = _system_of(shape, asked, messages), asked.get("tools") or asked.get("functions")
    plain_head = _text({"path": path.rstrip("/"), "asked": _plain(head)})
    return Asked(
        digest=_digest("\n".join((plain_head, *parts))),
        outline=Outline(
            shape=shape,
            model=str(asked.get("model", "")),
            system=_digest(_text(_plain(system))) if system else "",
            tools=_digest(_text(_plain(tools))) if tools else "",
            messages=tuple(_digest(part) for part in parts[_leading_system(messages) :]),
            prompt=_prompt(asked) if shape == "completions" else "",
            max_tokens=_limit_of(asked),
            opening=_words(system)[:TEXT_KEPT],
            last=_words(messages[-1])[:TEXT_KEPT] if messages else "",
            follows=bool(asked.get("previous_response_id") or asked.get("conversation")),
        ),
        head=plain_head,
        parts=parts,
    )


def unpacked(encoding: str, body: bytes, limit: int) -> bytes:
    """``body`` without its compression. Raises Unreadable for one that is unknown, broken or too large."""
    try:
        match encoding.strip().lower():
            case "" | "identity":
                found = body
            case "gzip" | "x-gzip":
                found = gzip.GzipFile(fileobj=io.BytesIO(body)).read(limit + 1)
            case "deflate":
                found = zlib.decompressobj().decompress(body, limit + 1)
            case "zstd":
                found = zstandard.ZstdDecompressor().stream_reader(io.BytesIO(body)).read(limit + 1)
            case _:
                raise Unreadable(f"content-encoding {encoding!r} is not understood")
    except (OSError, EOFError, zlib.error, zstandard.ZstdError) as error:
        raise Unreadable(f"broken {encoding}: {error}") from error
    if len(found) > limit:
        raise Unreadable(f"unpacks to more than {limit} bytes")
    return found


def _split(shape: Shape, asked: dict[str, Any]) -> tuple[dict[str, Any], list[Any]]:
    """All but the messages, and the messages."""
    name = {"chat": "messages", "messages": "messages", "responses": "input", "completions": ""}[shape]
    if not name:
        return asked, []
    messages = asked.get(name)
    if isinstance(messages, str):
        messages = [{"role": "user", "content": messages}]
    if not isinstance(messages, list):
        raise Unreadable(f"no list of {name}")
    return {key: value for key, value in asked.items() if key != name}, messages


def _leading_system(messages: list[Any]) -> int:
    """How many messages at the beginning are the system prompt."""
    for number, message in enumerate(messages):
        if not isinstance(message, dict) or message.get("role") not in ("system", "developer"):
            return number
    return len(messages)


def _system_of(shape: Shape, asked: dict[str, Any], messages: list[Any]) -> Any:
    """The system prompt: its own field, or the messages of that role at the beginning."""
    if shape == "messages":
        return asked.get("system")
    if shape == "responses" and asked.get("instructions"):
        return asked.get("instructions")
    return messages[: _leading_system(messages)]


def _prompt(asked: dict[str, Any]) -> str:
    prompt = asked.get("prompt", "")
    return prompt if isinstance(prompt, str) else _text(prompt)


def _limit_of(asked: dict[str, Any]) -> int | None:
    for name in ("max_tokens", "max_completion_tokens", "max_output_tokens"):
        if isinstance(asked.get(name), int):
            return int(asked[name])
    return None


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


def _words(value: Any) -> str:
    """The text in a message or a system prompt, without its structure."""
    if isinstance(value, str):
        return value
    if isinstance(value, dict):
        inner = value.get("text", value.get("content"))
        return "" if _is_billing(value) or inner is None else _words(inner)
    if isinstance(value, list):
        return "\n".join(filter(None, map(_words, value)))
    return ""


def _text(value: Any) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
