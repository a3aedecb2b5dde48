"""Which requests of an agent end a turn: those of its main loop.

An agent asks its model for more than its next step: a title, a summary, how many tokens a text has, whether a
command is harmless; and it may run agents of its own. Only a request of the main loop ends a turn. The
strongest evidence is growth: its messages begin with those of the main loop's last request. Then come the
system prompt, the tools and the model that the main loop uses, and what is known of the helper prompts of
well-known agents.

In doubt a request is *main*: a checkpoint too many costs a little, one too few loses the turn's boundary.

Pure: what is known of a sandbox's loops goes in, a verdict and the new knowledge come out.
Source: Crab (arXiv 2604.28138), section 3 (its coordinator); the rules are ours.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from typing import Literal

from windtunnel.agents.sandbox.live.model_proxy.canonical import Outline, Shape

Kind = Literal["main", "helper", "count-tokens", "other"]
LOOPS_KEPT = 8


@dataclass(frozen=True)
class AgentRules:
    """What is known of one agent. ``helpers``: patterns that begin the system prompt or the last message of
    its helper requests. ``main``: patterns of the system prompt of its main loop. ``tiny``: a request without
    tools for at most this many tokens is a helper. ``takeover``: after so many requests in a row without one
    of the main loop, another conversation with tools counts as one too."""

    helpers: tuple[str, ...] = ()
    main: tuple[str, ...] = ()
    tiny: int = 64
    takeover: int = 3


COMMON = (
    r"(please |now )?(write|generate|create|give|suggest)\b[^.\n]{0,60}\b(title|name|topic)\b[^.\n]{0,40}"
    r"(conversation|chat|session|thread|task)",
    r"you are a (title|summary|commit message) generator",
    r"you are a helpful (ai )?assistant tasked with summarizing conversations",
)
"""Beginnings of helper prompts that several agents share, compared without case."""

AGENTS: dict[str, AgentRules] = {
    "generic": AgentRules(COMMON),
    "claude-code": AgentRules(
        (
            *COMMON,
            r"analyze if this message indicates a new conversation topic",
            r"summarize this coding conversation in under \d+ characters",
            r"your task is to process bash commands that an ai coding agent",
            r"you are an expert at analyzing git history",
            r"(warmup|quota)$",
        ),
        main=(r"you are claude code, anthropic's official cli",),
    ),
    "openhands": AgentRules(
        (*COMMON, r"you are maintaining a context-aware state summary for an interactive agent"),
        main=(r"you are openhands agent",),
    ),
    "opencode": AgentRules((*COMMON, r"you are a title generator\. you output only a thread title")),
    "aider": AgentRules(
        (
            *COMMON,
            r"\*briefly\* summarize this partial conversation about programming",
            r"you are an expert software engineer that generates concise, one-line git commit messages",
        )
    ),
    "mini-swe-agent": AgentRules(),
}
"""Rules by the agent's name; patterns are compared without case."""


@dataclass(frozen=True)
class Loop:
    """A conversation of the main loop, as its last request showed it."""

    shape: Shape
    model: str
    system: str
    tools: str
    messages: tuple[str, ...]
    prompt: str = ""


@dataclass(frozen=True)
class Known:
    """What is known of a sandbox's agent: its loops, the newest last, and how often in a row another
    conversation (by its system prompt) asked without any of them."""

    loops: tuple[Loop, ...] = ()
    stranger: str = ""
    strange: int = 0


@dataclass(frozen=True)
class Verdict:
    """What a request is, why, and what is known afterwards."""

    kind: Kind
    reason: str
    known: Known = field(repr=False)


def classify(asked: Outline, known: Known, rules: AgentRules) -> Verdict:
    """Judge a request that a model answers (counting and listing are told by the path alone)."""
    for place in reversed(range(len(known.loops))):
        reason = _same_loop(asked, known.loops[place])
        if reason and asked.system == known.loops[place].system:
            return _main(asked, known, reason, place)
    if _matches(rules.main, asked.opening):
        return _main(asked, known, "the agent's own system prompt")
    if not asked.tools:
        if _matches(rules.helpers, asked.opening) or _matches(rules.helpers, asked.last):
            return Verdict("helper", "a known helper prompt", known)
        if asked.max_tokens is not None and asked.max_tokens <= rules.tiny:
            return Verdict("helper", f"no tools and at most {asked.max_tokens} tokens", known)
    for place in reversed(range(len(known.loops))):
        reason = _same_loop(asked, known.loops[place])
        if reason:
            return _main(asked, known, reason + ", under another system prompt", place)
    if not known.loops:
        return _main(asked, known, "the first request" + (" with tools" if asked.tools else ""))
    if asked.tools and not any(loop.tools for loop in known.loops):
        # what was taken for the main loop was a helper that came first
        return _main(asked, replace(known, loops=()), "the first request with tools")
    newest = known.loops[-1]
    for loop in reversed(known.loops):
        if asked.system == loop.system and bool(asked.tools) == bool(loop.tools):
            if asked.model == loop.model or asked.system:
                return _main(asked, known, "a new conversation with the main loop's system prompt")
            return Verdict("helper", f"model {asked.model} is not the main loop's {loop.model}", known)
    if not asked.tools and newest.tools:
        return Verdict("helper", "no tools, while the main loop has some", known)
    return _stranger(asked, known, rules)


def _same_loop(asked: Outline, loop: Loop) -> str:
    """How this request goes on from the last one of that loop; empty when it does not."""
    if asked.shape != loop.shape or (loop.tools and not asked.tools):
        return ""
    if asked.shape == "completions":
        return "it continues the prompt" if loop.prompt and asked.prompt.startswith(loop.prompt) else ""
    if asked.follows and asked.tools == loop.tools:
        return "it goes on from an earlier reply" if asked.system == loop.system else ""
    size = len(loop.messages)
    if not size or asked.messages[:size] != loop.messages:
        return ""
    return "it continues the conversation" if len(asked.messages) > size else "the same messages again"


def _stranger(asked: Outline, known: Known, rules: AgentRules) -> Verdict:
    """Another system prompt: an agent's agent or a helper, until it is the only one that asks."""
    strange = known.strange + 1 if known.stranger == asked.system else 1
    if strange >= rules.takeover:
        return _main(asked, known, f"the only conversation for {strange} requests")
    return Verdict(
        "helper",
        "the system prompt is not the main loop's",
        replace(known, stranger=asked.system, strange=strange),
    )


def _main(asked: Outline, known: Known, reason: str, place: int | None = None) -> Verdict:
    loop = Loop(asked.shape, asked.model, asked.system, asked.tools, asked.messages, asked.prompt)
    others = [one for number, one in enumerate(known.loops) if number != place]
    others = [one for one in others if (one.system, one.shape) != (loop.system, loop.shape)]
    return Verdict("main", reason, Known((*others, loop)[-LOOPS_KEPT:]))


def _matches(patterns: tuple[str, ...], text: str) -> bool:
    start = text.lstrip()
    return any(re.match(pattern, start, re.IGNORECASE) for pattern in patterns)
