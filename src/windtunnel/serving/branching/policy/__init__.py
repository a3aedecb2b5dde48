"""Which extra branches take part in a decode step (after Gandhi et al., 2026; the text of the paper was not
in reach).

A request in a parallel stage has several branches that could be decoded at once. One unit of every request
is decoded in any case (protected); each further branch makes the step longer for all who share it. Branches
share what their request has read so far, so leaving one out for a step frees nothing and costs nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from windtunnel.serving.engine.model import StepTime

__all__ = ["POLICIES", "Candidate", "Decision", "Observation", "decide"]

ALWAYS = 1 << 30
"""`Decision.holds` of who would decide the same in all steps to come."""


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
    request that was promised a pace or a first token, the seconds until its next token is due, less what is
    left of its prefill; by ``pace`` ("token": every token of any branch buys time, "step": every step does).
    ``room``: rows that may be added. ``time`` · ``gain`` is the expected duration, and with (1 + ``margin``)
    the one that is rarely exceeded. ``rho``: the share of the slack that may be spent.
    """

    now: float
    rows: int
    read: int
    prefill: tuple[tuple[int, int], ...]
    requests: tuple[int, ...]
    slacks: tuple[float, ...]
    candidates: tuple[Candidate, ...]
    room: int
    time: StepTime
    gain: float = 1.0
    margin: float = 0.0
    rho: float = 0.9
    pace: str = "token"


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


def off(seen: Observation) -> Decision:
    """One branch of a request at a time."""
    return Decision((), holds=ALWAYS)


def eager(seen: Observation) -> Decision:
    """All branches at once, as far as there are rows."""
    chosen = tuple((one.request, one.unit) for one in seen.candidates[: seen.room])
    return Decision(chosen, holds=ALWAYS if len(chosen) == len(seen.candidates) else 1)


decide = eager
POLICIES: Mapping[str, Callable[[Observation], Decision]] = {"off": off, "eager": eager}


class Predictor:
    """How far measured steps are from predicted ones: ``gain``, their ratio as it is now, and ``margin``,
    the share by which few steps exceed that."""

    def __init__(self) -> None:
        self.gain, self.margin = 1.0, 0.0

    def measured(self, predicted: float, seconds: float) -> None:
        """One step took ``seconds``; the model without gain said ``predicted``."""
        if predicted > 0:
            self.gain += 0.05 * (seconds / predicted - self.gain)
