"""The next token from logits. A unit's n-th token is drawn with a number that depends on the request's seed,
the unit and n alone: so neither who else is in the batch nor a worker that dies changes what a request gets.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Sampling:
    """``temperature`` 0: the likeliest token. ``logprobs``: how many of the likeliest are told (None:
    none)."""

    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    logprobs: int | None = None


@dataclass(frozen=True, slots=True)
class Sampled:
    """A token, and if asked for its log-probability and the likeliest tokens with theirs."""

    token: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()

    def plain(self) -> list[Any]:
        return [self.token] if self.logprob is None else [self.token, self.logprob, self.top]


def sample(logits: Tensor, rows: Sequence[tuple[Sampling, int, int]]) -> list[Sampled]:
    """``logits``: (rows, vocabulary); for each row how, which unit, and how many tokens it has got."""
    likeliest = logits.argmax(-1).tolist()
    made = []
    for at, (how, unit, number) in enumerate(rows):
        token = likeliest[at] if how.temperature <= 0 else _drawn(logits[at], how, unit, number)
        if how.logprobs is None:
            made.append(Sampled(token))
        else:
            all_of = torch.log_softmax(logits[at].double(), -1)
            values, tokens = all_of.topk(min(how.logprobs, len(all_of)))
            top = tuple(zip(tokens.tolist(), values.tolist(), strict=True))
            made.append(Sampled(token, all_of[token].item(), top))
    return made


def _drawn(logits: Tensor, how: Sampling, unit: int, number: int) -> int:
    below = logits.double() - logits.max()  # so that no temperature makes the likeliest one infinite
    probabilities, tokens = torch.softmax(below / how.temperature, -1).sort(descending=True, stable=True)
    total = probabilities.cumsum(-1)
    kept = int((total - probabilities < how.top_p).sum())
    digest = blake2b(struct.pack("<qqq", how.seed, unit, number), digest_size=8).digest()
    point = int.from_bytes(digest, "little") / 2**64 * total[kept - 1]
    return int(tokens[min(int(torch.searchsorted(total[:kept], point, right=True)), kept - 1)])
