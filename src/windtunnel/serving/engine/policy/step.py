"""What the scheduler is given, what a step consists of, and what came of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf

from windtunnel.serving.engine.model import InferenceRequest, StepTime

Depths = tuple[int, ...]
"""Token positions, ascending."""
Unit = tuple[int, int]
"""(request, unit); unit 0 is the parent."""


@dataclass(frozen=True, slots=True)
class StepLimits:
    """``rows`` of a step and requests admitted at once; ``kv``: tokens; ``state``: KV tokens that as many
    bytes hold as the recurrent state of one unit; ``chunk``: tokens prefilled in a step; ``queue``: requests
    that may wait. ``admission`` and ``branching`` name policies, ``rho`` is as in
    `branching.policy.Observation`."""

    rows: int
    kv: int
    chunk: int = 512
    queue: int = 1 << 60
    state: int = 0
    admission: str = "refuse"
    branching: str = "off"
    rho: float = 0.9


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """Tokens at positions [begin, end) of a unit to prefill. ``samples``: the unit's first token follows."""

    request: int
    unit: int
    begin: int
    end: int
    samples: bool


@dataclass(slots=True)
class ScheduledStep:
    """What to do in one step, or in up to ``repeat`` ones that begin before ``until``. ``rows``: units that
    decode one token each, which read ``read`` KV tokens in the first of these steps; the last of them are
    ``branches``. ``modelled``: seconds by the step model, which those steps teach that are ``measured``."""

    began: float
    rows: tuple[Unit, ...]
    branches: tuple[Unit, ...] = ()
    prefill: tuple[PrefillChunk, ...] = ()
    joins: tuple[int, ...] = ()
    forks: tuple[tuple[int, tuple[int, ...]], ...] = ()
    admitted: tuple[int, ...] = ()
    refused: tuple[int, ...] = ()
    read: int = 0
    modelled: float = 0.0
    repeat: int = 1
    until: float = inf
    measured: bool = False
    chunks: tuple[tuple[int, int], ...] = field(init=False)
    """Tokens of each chunk of prefill, and their context at its end."""

    def __post_init__(self) -> None:
        self.chunks = tuple([(chunk.end - chunk.begin, chunk.end) for chunk in self.prefill])

    @property
    def work(self) -> bool:
        """Whether there is anything to compute: not if all that happened is that requests were refused."""
        return bool(self.rows or self.prefill)

    def seconds(self, time: StepTime, number: int = 0) -> float:
        """What the step takes by ``time`` when it is taken for the ``number``-th time in a row, from 0."""
        rows = len(self.rows)
        return time.of(rows, self.read + number * rows, self.chunks)

    def total(self, time: StepTime, count: int) -> float:
        """What all of them take when it is taken ``count`` times in a row: each row reads one token more each
        time."""
        return count * self.seconds(time) + time.kv * len(self.rows) * (count * (count - 1) // 2)


@dataclass(frozen=True, slots=True)
class Finished:
    """A request that has all its tokens. Times on the caller's clock; ``tokens``: that it emitted."""

    request: InferenceRequest
    first: float
    end: float
    tokens: int


@dataclass(slots=True)
class StepOutcome:
    """What a step brought about: units that have all their tokens, requests that got their first one, and
    those that are done."""

    ended: list[Unit] = field(default_factory=list)
    first: list[int] = field(default_factory=list)
    finished: list[Finished] = field(default_factory=list)
