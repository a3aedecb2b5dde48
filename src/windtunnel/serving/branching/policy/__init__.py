"""Which extra branches take part in a decode step (after Gandhi et al., 2026; the text of the paper was not
in reach, so this is TAPER-style, not its algorithm).

A request in a parallel stage has several branches that could be decoded at once. One unit of every request
is decoded in any case (protected); each further branch makes the step longer for all who share it: its
externality. Branches share what their request has read so far, so leaving one out for a step frees nothing
and costs nothing: every step is decided anew.

Each request that was promised a pace has slack. A branch takes part only if the step, as it is predicted with
a margin, ends within the slack of all who can still be in time. Slack is the time until the next token is
due, and what branches will bring: a token that is decoded beside others (``beside``) costs its request no
step of its own, so its time is over; up to `BANK` such tokens to come count, since answers may end early. So
who has branches ahead of him or beside him bears
steps that are longer than his pace, and those who decode one token after another do not.

A pace is promised over all the tokens that a request has to come, and errors of many steps cancel out: the
margin is what the sum of so many steps rarely exceeds. Who is at his end needs that of a single step.

Who is late, but can make up for it in narrow steps, has no slack and forbids every wider step; but not where
his own branches bring what he lacks, nor where narrow steps do not help: one of those would keep everybody
narrow for ever.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import inf

from windtunnel.serving.branching.policy.predictor import Predictor, bucket
from windtunnel.serving.engine.model import StepTime

__all__ = ["POLICIES", "BranchCandidate", "Decision", "Observation", "Predictor", "decide"]

ALWAYS = 1 << 30
"""`Decision.holds` of who would decide the same in all steps to come."""
BANK = 100
"""Tokens to come that count: of branches, as time that their request has, and of a late request, as those
within which it may get in time again."""


@dataclass(frozen=True, slots=True)
class BranchCandidate:
    """A branch that may take part: ``suffix``: KV tokens of its own that it reads, ``remaining``: tokens
    that it decodes at most."""

    request: int
    unit: int
    suffix: int
    remaining: int


@dataclass(frozen=True, slots=True)
class Observation:
    """What one step looks like before extra branches.

    ``now``: seconds on the caller's clock. ``rows``: protected units, which read ``read`` KV tokens.
    ``prefill``: (tokens, their context at the end) of each chunk. ``requests`` and ``slacks``: for each
    request that was promised a pace or a first token, the seconds until its next token is due, less what will
    be left of its prefill after this step: every token of any branch buys time. Of the same requests,
    ``paces``: the seconds promised for a token, ``left``: how many they may still have to decode one after
    another, and ``beside``: how many beside those (before the first token none). ``room``: rows that may be
    added. ``time`` · ``gain`` · ``widths`` (by `predictor.bucket` of the rows) is the expected duration; of
    as many steps in a row as of a place in ``margins`` (by `predictor.bucket`, too) that is rarely exceeded
    by more than this share. ``rho``: the share of the slack that may be spent.
    """

    now: float
    rows: int
    read: int
    prefill: tuple[tuple[int, int], ...]
    requests: tuple[int, ...]
    slacks: tuple[float, ...]
    paces: tuple[float, ...]
    left: tuple[int, ...]
    beside: tuple[int, ...]
    candidates: tuple[BranchCandidate, ...]
    room: int
    time: StepTime
    gain: float = 1.0
    margins: tuple[float, ...] = ()
    widths: tuple[float, ...] = ()
    rho: float = 0.9

    def predicted(self, rows: int, read: int, *, prefill: bool = True) -> float:
        """Seconds of this step, as expected, if so many rows read so many KV tokens in all; without its
        ``prefill``: of those to come."""
        seconds = self.time.of(rows, read, self.prefill if prefill else ())
        width = self.widths[min(bucket(rows), len(self.widths) - 1)] if self.widths else 1.0
        return seconds * self.gain * width

    def margin(self, steps: int) -> float:
        """The share by which so many steps in a row rarely exceed what is expected of them."""
        return self.margins[min(bucket(steps), len(self.margins) - 1)] if self.margins else 0.0


@dataclass(frozen=True, slots=True)
class Decision:
    """``admitted``: (request, unit) of the candidates that take part. Seconds, as expected: ``predicted`` of
    the step with them, ``budget`` that they might cost, ``externality`` that they do cost. ``holds``: for
    how many steps in a row the same would be decided if nobody came, ended or was late."""

    admitted: tuple[tuple[int, int], ...]
    predicted: float = 0.0
    budget: float = 0.0
    externality: float = 0.0
    holds: int = 1


def decide(observation: Observation) -> Decision:
    """As many of the candidates, in `_order`, as the slack of nobody forbids."""
    base, narrow = (
        observation.predicted(observation.rows, observation.read),
        observation.predicted(observation.rows, observation.read, prefill=False),
    )
    wide = {entry.request for entry in observation.candidates}
    least = inf
    for number, slack, pace, left, beside in zip(
        observation.requests,
        observation.slacks,
        observation.paces,
        observation.left,
        observation.beside,
        strict=True,
    ):
        steps = min(left, BANK)
        share = 1 / (1 + observation.margin(steps))  # of any time, that may be planned with
        has = share * (slack + min(beside, BANK) * pace)
        if has > base:
            least = min(least, has)
        elif number not in wide and has - base + steps * (share * pace - narrow) > 0:
            least = base
    budget = least - base
    # wider steps may be shorter by the predictor's widths, but not by more than this
    shortest = min(observation.widths) / max(observation.widths) if observation.widths else 1.0
    rows, read, best = observation.rows, observation.read, (0, base)
    order = _order(observation)[: max(0, observation.room)]
    for place, candidate in enumerate(order, 1):
        rows, read = rows + 1, read + candidate.suffix
        seconds = observation.predicted(rows, read)
        if seconds - base <= observation.rho * budget:
            best = (place, seconds)
        elif seconds * shortest - base > observation.rho * budget:
            break
    count, seconds = best
    return Decision(
        tuple((entry.request, entry.unit) for entry in order[:count]), seconds, budget, seconds - base
    )


def _order(observation: Observation) -> list[BranchCandidate]:
    """The longest branch of each request, then the second of each, and so on."""
    turns: dict[int, int] = {}
    placed = []
    for entry in sorted(
        observation.candidates,
        key=lambda candidate: (-candidate.remaining, candidate.request, candidate.unit),
    ):
        turn = turns[entry.request] = turns.get(entry.request, 0) + 1
        placed.append((turn, entry))
    placed.sort(key=lambda pair: pair[0])
    return [candidate for _, candidate in placed]


def off(observation: Observation) -> Decision:
    """One branch of a request at a time."""
    return Decision((), observation.predicted(observation.rows, observation.read), inf, 0.0, ALWAYS)


def eager(observation: Observation) -> Decision:
    """All branches at once, whoever is harmed, as far as there are rows."""
    candidates = observation.candidates
    admitted = candidates[: max(0, observation.room)]
    seconds = observation.predicted(
        observation.rows + len(admitted), observation.read + sum(candidate.suffix for candidate in admitted)
    )
    return Decision(
        tuple((candidate.request, candidate.unit) for candidate in admitted),
        seconds,
        inf,
        seconds - observation.predicted(observation.rows, observation.read),
        ALWAYS if len(admitted) == len(candidates) else 1,
    )


POLICIES: Mapping[str, Callable[[Observation], Decision]] = {"taper": decide, "off": off, "eager": eager}
