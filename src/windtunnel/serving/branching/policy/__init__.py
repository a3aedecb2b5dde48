"""Which extra branches take part in a decode step (after Gandhi et al., 2026; the text of the paper was not
in reach, so this is TAPER-style, not its algorithm).

A request in a parallel stage has several branches that could be decoded at once. One unit of every request
is decoded in any case (protected); each further branch makes the step longer for all who share it: its
externality. Branches share what their request has read so far, so leaving one out for a step frees nothing
and costs nothing: every step is decided anew.

Each request that was promised a pace has slack: the time until its next token is due. A branch takes part
only if the step, as it is predicted with a margin, ends within the slack of all who can still be in time.
Who is late, but can make up for it in narrow steps (`REGAIN`), has no slack and forbids every wider step; who
cannot forbids nothing: one of them would keep everybody narrow for ever.

By token pace a request may pay for itself (`decide`): each further branch of its own that takes part brings
a token, and with it one more token's time. So a request whose branches decode together bears a step that is
longer than its pace, as long as it gets ahead of its tokens by that; others bear what their own slack allows.
``strict`` charges all alike, the least slack of all, and nobody who is late is waited for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from heapq import heapify, heapreplace
from math import inf

from windtunnel.serving.branching.policy.predictor import Predictor, bucket
from windtunnel.serving.engine.model import StepTime

__all__ = ["POLICIES", "Candidate", "Decision", "Observation", "Predictor", "decide"]

ALWAYS = 1 << 30
"""`Decision.holds` of who would decide the same in all steps to come."""
REGAIN = 100
"""Tokens within which a late request may get in time again, seconds being gained with each."""
CAPS = (1, 2, 3, 4, 6, 8, 12, 16)


@dataclass(frozen=True, slots=True)
class Candidate:
    """A branch that may take part: ``suffix``: KV tokens of its own that it reads, ``remaining``: tokens
    that it decodes at most, ``path``: the most that any branch of its request has left (its critical
    path)."""

    request: int
    unit: int
    suffix: int
    remaining: int
    path: int


@dataclass(frozen=True, slots=True)
class Observation:
    """What one step looks like before extra branches.

    ``now``: seconds on the caller's clock. ``rows``: protected units, which read ``read`` KV tokens.
    ``prefill``: (tokens, their context at the end) of each chunk. ``requests`` and ``slacks``: for each
    request that was promised a pace or a first token, the seconds until its next token is due, less what
    will be left of its prefill after this step; by ``pace`` ("token": every token of any branch buys time,
    "step": every step does). ``paces`` and ``left``: of the same requests, the seconds promised for a token,
    and how many they may still decode (before the first token 0). ``room``: rows that may be added.
    ``time`` · ``gain`` · ``widths`` (by `predictor.bucket` of the rows) is the expected duration, and with
    (1 + ``margin``) the one that is rarely exceeded. ``rho``: the share of the slack that may be spent.
    """

    now: float
    rows: int
    read: int
    prefill: tuple[tuple[int, int], ...]
    requests: tuple[int, ...]
    slacks: tuple[float, ...]
    paces: tuple[float, ...]
    left: tuple[int, ...]
    candidates: tuple[Candidate, ...]
    room: int
    time: StepTime
    gain: float = 1.0
    margin: float = 0.0
    widths: tuple[float, ...] = ()
    rho: float = 0.9
    pace: str = "token"

    def predicted(self, rows: int, read: int, *, prefill: bool = True) -> float:
        """Seconds of this step, rarely exceeded, if so many rows read so many KV tokens in all; without its
        ``prefill``: of those to come."""
        seconds = self.time.of(rows, read, self.prefill if prefill else ())
        width = self.widths[min(bucket(rows), len(self.widths) - 1)] if self.widths else 1.0
        return seconds * self.gain * width * (1 + self.margin)


@dataclass(frozen=True, slots=True)
class Decision:
    """``admitted``: (request, unit) of the candidates that take part. Seconds: ``predicted`` of the step
    with them, ``budget`` that they might cost, ``externality`` that they do cost. ``holds``: for how many
    steps in a row the same would be decided if nobody came, ended or was late."""

    admitted: tuple[tuple[int, int], ...]
    predicted: float = 0.0
    budget: float = 0.0
    externality: float = 0.0
    holds: int = 1


def decide(seen: Observation, pays: bool = True) -> Decision:
    """As many of the candidates, in `_order`, as the slack of nobody forbids. ``pays``: whether a request
    may spend what its own branches bring, and late ones are waited for."""
    base, narrow = seen.predicted(seen.rows, seen.read), seen.predicted(seen.rows, seen.read, prefill=False)
    worth = float(pays and seen.pace == "token")
    least = []  # slack with what was bought so far, request, slack without, what a branch buys
    for number, slack, pace, left in zip(seen.requests, seen.slacks, seen.paces, seen.left, strict=True):
        if slack <= base and pays and slack - base + min(left, REGAIN) * (pace - narrow) > 0:
            slack = base
        elif slack <= base:
            continue
        least.append((slack, number, slack, worth * pace))
    heapify(least)
    bought: dict[int, int] = {}
    rows, read, best = seen.rows, seen.read, (0, base, 0.0)
    order = _order(seen)[: max(0, seen.room)]
    for place, one in enumerate(order, 1):
        rows, read = rows + 1, read + one.suffix
        bought[one.request] = bought.get(one.request, 0) + 1
        while least:  # the least slack of all, with what those that branch have bought so far
            known, number, slack, each = least[0]
            now = slack + each * bought.get(number, 0)
            if now == known:
                break
            heapreplace(least, (now, number, slack, each))
        budget = least[0][0] - base if least else inf
        seconds = seen.predicted(rows, read)
        if seconds - base <= seen.rho * budget:
            best = (place, seconds, budget)
        elif not pays:
            break
    taken, seconds, budget = best
    return Decision(tuple((one.request, one.unit) for one in order[:taken]), seconds, budget, seconds - base)


def _order(seen: Observation) -> list[Candidate]:
    """One branch of each request, then a second one of each, and so on; within a round and a request those
    first that have the greatest share of their request's critical path left for the time that they cost."""

    def value(one: Candidate) -> float:
        cost = seen.time.row + seen.time.kv * one.suffix
        return one.remaining / (max(one.path, 1) * cost) if cost else inf

    ranked = sorted(seen.candidates, key=lambda one: (-value(one), one.request, one.unit))
    rounds: dict[int, int] = {}
    placed = []
    for place, one in enumerate(ranked):
        rounds[one.request] = rounds.get(one.request, 0) + 1
        placed.append((rounds[one.request], place))
    return [ranked[place] for _, place in sorted(placed)]


def capped(seen: Observation, most: int) -> Decision:
    """At most ``most`` branches of a request at a time, whoever is harmed, as far as there are rows."""
    chosen, count = [], dict[int, int]()
    for one in seen.candidates:
        count[one.request] = count.get(one.request, 0) + 1
        if count[one.request] < most:
            chosen.append(one)
    taken = chosen[: max(0, seen.room)]
    seconds = seen.predicted(seen.rows + len(taken), seen.read + sum(one.suffix for one in taken))
    return Decision(
        tuple((one.request, one.unit) for one in taken), seconds, inf,
        seconds - seen.predicted(seen.rows, seen.read), ALWAYS if len(taken) == len(chosen) else 1,
    )  # fmt: skip


def off(seen: Observation) -> Decision:
    """One branch of a request at a time."""
    return capped(seen, 1)


def eager(seen: Observation) -> Decision:
    """All branches at once."""
    return capped(seen, ALWAYS)


POLICIES: Mapping[str, Callable[[Observation], Decision]] = {
    "taper": decide,
    "strict": partial(decide, pays=False),
    "off": off,
    "eager": eager,
    **{f"cap{most}": partial(capped, most=most) for most in CAPS},
}
