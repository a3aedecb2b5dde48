"""What the scheduler of the engine knows of requests: counts and times, no tokens.

A request is a prompt and then stages. A `Serial` stage decodes one unit. A `Parallel` one decodes several
units (branches), each with a private suffix on what they share, and is joined: the branches' tokens are put
one after another behind the shared prefix, then the ``join`` tokens, and all that is prefilled before the
next stage. A unit is one stream of tokens that is decoded; which of a request's units take part is decided
in every step.

Times are seconds on one clock that the caller keeps; tokens are counts.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import inf


@dataclass(frozen=True, slots=True)
class Objective:
    """What a request was promised, seconds: until its first token, and for each further one."""

    ttft: float = inf
    tpot: float = inf

    @classmethod
    def of(cls, ttft: float | None, tpot: float | None) -> Objective:
        """None stands for no promise."""
        return cls(inf if ttft is None else ttft, inf if tpot is None else tpot)


@dataclass(frozen=True, slots=True)
class Serial:
    """One unit that decodes ``tokens`` at most."""

    tokens: int


@dataclass(frozen=True, slots=True)
class Parallel:
    """Branches: ``heads`` are the tokens that each begins with (prefilled), ``tokens`` what each decodes at
    most, ``join`` the tokens put behind all of them."""

    heads: tuple[int, ...]
    tokens: tuple[int, ...]
    join: int = 0


Stage = Serial | Parallel


@dataclass(frozen=True, slots=True)
class InferenceRequest:
    """``prompt``: its tokens; ``cached``: of these, what a prefix cache holds (all but one at most)."""

    id: int
    arrival: float
    prompt: int
    stages: tuple[Stage, ...]
    objective: Objective = Objective()
    cached: int = 0

    @property
    def most(self) -> int:
        """Tokens whose KV it may hold at once. Branches are dropped when they are joined, before what they
        said is prefilled again; the token that they begin with is held by each of them."""
        parent = most = self.prompt
        for stage in self.stages:
            if isinstance(stage, Serial):
                parent += stage.tokens
            else:
                grown = sum(stage.heads) + sum(stage.tokens)
                most = max(most, parent + grown + len(stage.heads))
                parent += grown + stage.join
            most = max(most, parent)
        return most


@dataclass(frozen=True, slots=True)
class StepTime:
    """Seconds of a step: ``base`` of any; ``decode + row·n + kv·K`` if n rows decode, which read K KV tokens
    (a shared prefix counted once); ``chunk + token·p + pair·p·Kp`` for each chunk of p prefilled tokens whose
    context is Kp tokens at their end. Kernels that take rows and chunks together need no ``decode`` and
    ``chunk``; an engine that passes them through the model one after another needs little else than these."""

    base: float
    row: float
    kv: float
    token: float
    pair: float
    decode: float = 0.0
    chunk: float = 0.0

    def of(self, rows: int, read: int, prefill: Iterable[tuple[int, int]] = ()) -> float:
        """Seconds; ``prefill``: (tokens, their context) of each chunk."""
        seconds = self.base
        if rows:
            seconds += self.decode + self.row * rows + self.kv * read
        for tokens, context in prefill:
            seconds += self.chunk + (self.token + self.pair * context) * tokens
        return seconds
