"""The next token from logits. A unit's n-th token is drawn with a number that depends on the request's seed,
the unit and n alone: so neither who else is in the batch nor a worker that dies changes what a request gets.

All rows of a step that are drawn alike are drawn at once, each by what it holds alone, and none is sorted:
``top_k`` selects, and where a nucleus (``top_p``) ends is sought in a histogram of the weights.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

import torch
from torch import Tensor

COLDEST = 1e-5
"""A temperature below which the likeliest token is taken, as vLLM does: float32 tells no other apart."""
AT_ONCE = 1 << 20
"""Logits that are drawn from at once: some rows, whose weights stay in a cache."""
BUCKETS, FINENESS = 1024, 32.0
"""Of the histogram: that many, so many for each factor e between weights."""
LOWEST = torch.finfo(torch.float32).min
Row = tuple["Sampling", int, int]
"""How, which unit, and how many tokens it has got."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """``temperature`` 0: the likeliest token. ``logprobs``: how many of the likeliest are wanted (None:
    none). ``top_k`` likeliest tokens are drawn from (0: all), of these what ``top_p`` leaves."""

    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    logprobs: int | None = None
    top_k: int = 0


@dataclass(frozen=True, slots=True)
class Sampled:
    """A token, and if asked for its log-probability and the likeliest tokens with theirs."""

    token: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


def sample(logits: Tensor, rows: Sequence[Row]) -> list[Sampled]:
    """``logits``: (rows, vocabulary)."""
    vocabulary = logits.shape[-1]
    alike: dict[int | None, list[int]] = {}  # rows by their top_k; None: the likeliest is taken
    for at, (how, _, _) in enumerate(rows):
        drawn = how.temperature >= COLDEST
        alike.setdefault(how.top_k * (how.top_k < vocabulary) if drawn else None, []).append(at)
    tokens = [0] * len(rows)
    for top_k, places in alike.items():
        size = max(1, AT_ONCE // vocabulary)
        for part in (places[at : at + size] for at in range(0, len(places), size)):
            some = logits if len(part) == len(logits) else logits[part]
            tensor = some.argmax(-1) if top_k is None else _drawn(some, [rows[at] for at in part], top_k)
            for at, token in zip(part, tensor.tolist(), strict=True):
                tokens[at] = token
    return [
        Sampled(token) if how.logprobs is None else _with_logprobs(logits[at], token, how.logprobs)
        for at, (token, (how, _, _)) in enumerate(zip(tokens, rows, strict=True))
    ]


def _with_logprobs(logits: Tensor, token: int, count: int) -> Sampled:
    logits = logits.float()
    values, tokens = logits.topk(min(count, len(logits)))
    total = logits.logsumexp(-1)
    top = zip(tokens.tolist(), (values - total).tolist(), strict=True)
    return Sampled(token, (logits[token] - total).item(), tuple(top))


def _drawn(logits: Tensor, rows: Sequence[Row], top_k: int) -> Tensor:
    """A token for each of ``rows``."""
    tokens = None
    logits = logits.float().nan_to_num(LOWEST)  # a row that is no numbers harms no other
    if top_k:
        logits, tokens = logits.topk(top_k)
    temperatures = logits.new_tensor([how.temperature for how, _, _ in rows])[:, None]
    logs = (logits - logits.amax(-1, keepdim=True)).div_(temperatures)
    weights = logs.exp()
    if any(how.top_p < 1 for how, _, _ in rows):
        weights = weights * (weights >= _least(logs, weights, [how.top_p for how, _, _ in rows]))
    sums = weights.cumsum(-1)
    total = sums[:, -1:].contiguous()
    points = logits.new_tensor([_number(*row) for row in rows])[:, None] * total
    last = torch.searchsorted(sums, total)  # of those with any weight: a point may be rounded up to the total
    drawn = torch.searchsorted(sums, points, right=True).minimum(last)
    return (drawn if tokens is None else tokens.gather(-1, drawn))[:, 0]


def _least(logs: Tensor, weights: Tensor, top_p: Sequence[float]) -> Tensor:
    """The weight of each row's last token within its nucleus, (rows, 1)."""
    buckets = logs.mul(-FINENESS).clamp_(max=BUCKETS - 1).long()
    sums = weights.new_zeros(len(logs), BUCKETS).scatter_add_(-1, buckets, weights).cumsum(-1)
    threshold = sums[:, -1:] * weights.new_tensor(top_p)[:, None]
    crossed = torch.searchsorted(sums, threshold).clamp_(max=BUCKETS - 1)
    least = []
    for at, (bucket, share) in enumerate(zip(crossed[:, 0].tolist(), top_p, strict=True)):
        inside = weights[at][buckets[at] == bucket].sort(descending=True).values
        before = sums[at, bucket - 1] if bucket else 0.0
        within = int((before + inside.cumsum(-1) - inside < threshold[at]).sum())
        least.append(inside[max(0, within - 1)] if share < 1 else weights.new_zeros(()))
    return torch.stack(least)[:, None]


def _number(how: Sampling, unit: int, number: int) -> float:
    """From 0 to 1."""
    digest = blake2b(struct.pack("<qqq", how.seed, unit, number), digest_size=8).digest()
    return int.from_bytes(digest, "little") / 2**64
