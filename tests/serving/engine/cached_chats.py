"""What is cached against what is not: each family of models, with so little memory that not all of its
chats are kept."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from support.families import read, tiny
from windtunnel.serving.engine.live import families
from windtunnel.serving.engine.live.executor import Executor
from windtunnel.serving.engine.live.prefixes import Prefixes
from windtunnel.serving.engine.live.segments import Sequence as Stream

CHATS, HEARD, SAID = 3, 96, 6


@dataclass
class ChatTotals:
    """Of all turns: tokens that differ, the largest difference of logits, prompt tokens and those of them
    that were found."""

    differ: int = 0
    off: float = 0.0
    tokens: int = 0
    cached: int = 0


def chats(family: str, turns: int = 4, share: float = 0.5) -> ChatTotals:
    """Chats of a small model of a family, cached in memory for that share of what they say."""
    torch.set_num_threads(1)
    executor = Executor(families.build(tiny(family)))
    whole = CHATS * (turns * (HEARD + SAID) * executor.token_bytes + executor.state_bytes)
    return _chats(Prefixes(executor, "density", int(share * whole)), turns)


def _chats(prefixes: Prefixes, turns: int) -> ChatTotals:
    """Chats in turn, each turn behind all that was said before, answered greedily."""
    totals, random = ChatTotals(), np.random.default_rng(3)
    begun = random.integers(3, 199, HEARD).tolist()  # what all share
    chats = [list(begun) for _ in range(CHATS)]
    for turn in range(turns):
        for number, chat in enumerate(chats):
            chat += random.integers(3, 199, HEARD).tolist()
            chat += _turn(prefixes, chat, float(turn * CHATS + number), totals)
    return totals


def _turn(prefixes: Prefixes, prompt: Sequence[int], now: float, totals: ChatTotals) -> list[int]:
    executor = prefixes.executor
    match = prefixes.look(prompt, now)
    stream = prefixes.take(match)
    logits, kept = read(executor, stream, prompt[match.depth :], match.keep)
    wanted = executor.prefill(alone := executor.new(), prompt)
    said = _decoded(executor, stream, logits, alone, wanted, totals)
    if match.end == 1:
        kept[stream.depth] = executor.snapshot(stream)
    prefixes.put([*prompt, *said[: stream.depth - len(prompt)]], kept, stream, now)
    prefixes.leave(match)
    for sequence in (stream, alone):
        executor.free(sequence)
    totals.tokens, totals.cached = totals.tokens + len(prompt), totals.cached + match.depth
    return said


def _decoded(
    executor: Executor, stream: Stream, logits: Tensor, alone: Stream, wanted: Tensor, totals: ChatTotals
) -> list[int]:
    """What is said with nothing cached; both are decoded with it."""
    said: list[int] = []
    for _ in range(SAID):
        totals.off = max(totals.off, float((logits - wanted).abs().max() / wanted.abs().max()))
        totals.differ += int(logits.argmax() != wanted.argmax())
        said.append(int(wanted.argmax()))
        logits, wanted = (executor.decode([sequence], said[-1:])[0] for sequence in (stream, alone))
    return said
