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
class Seen:
    """Of all turns: tokens that differ, the largest difference of logits, prompt tokens and those of them
    that were found."""

    differ: int = 0
    off: float = 0.0
    tokens: int = 0
    found: int = 0


def chats(family: str, turns: int = 4, share: float = 0.5) -> Seen:
    """Chats of a small model of a family, cached in memory for that share of what they say."""
    torch.set_num_threads(1)
    executor = Executor(families.build(tiny(family)))
    whole = CHATS * (turns * (HEARD + SAID) * executor.token_bytes + executor.state_bytes)
    return _chats(Prefixes(executor, "density", int(share * whole)), turns)


def _chats(prefixes: Prefixes, turns: int) -> Seen:
    """Chats in turn, each turn behind all that was said before, answered greedily."""
    seen, random = Seen(), np.random.default_rng(3)
    begun = random.integers(3, 199, HEARD).tolist()  # what all share
    chats = [list(begun) for _ in range(CHATS)]
    for turn in range(turns):
        for number, chat in enumerate(chats):
            chat += random.integers(3, 199, HEARD).tolist()
            chat += _turn(prefixes, chat, float(turn * CHATS + number), seen)
    return seen


def _turn(prefixes: Prefixes, prompt: Sequence[int], now: float, seen: Seen) -> list[int]:
    executor = prefixes.executor
    found = prefixes.look(prompt, now)
    stream = prefixes.take(found)
    logits, kept = read(executor, stream, prompt[found.depth :], found.keep)
    wanted = executor.prefill(alone := executor.new(), prompt)
    said = _decoded(executor, stream, logits, alone, wanted, seen)
    if found.end == 1:
        kept[stream.depth] = executor.snapshot(stream)
    prefixes.put([*prompt, *said[: stream.depth - len(prompt)]], kept, stream, now)
    prefixes.leave(found)
    for one in (stream, alone):
        executor.free(one)
    seen.tokens, seen.found = seen.tokens + len(prompt), seen.found + found.depth
    return said


def _decoded(
    executor: Executor, stream: Stream, logits: Tensor, alone: Stream, wanted: Tensor, seen: Seen
) -> list[int]:
    """What is said with nothing cached; both are decoded with it."""
    said: list[int] = []
    for _ in range(SAID):
        seen.off = max(seen.off, float((logits - wanted).abs().max() / wanted.abs().max()))
        seen.differ += int(logits.argmax() != wanted.argmax())
        said.append(int(wanted.argmax()))
        logits, wanted = (executor.decode([one], said[-1:])[0] for one in (stream, alone))
    return said
