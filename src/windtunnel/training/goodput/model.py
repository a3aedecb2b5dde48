"""The question of a job on hosts that fail, and the advice that answers it, as plain data."""

from __future__ import annotations

from dataclasses import dataclass

from windtunnel.training.checkpoint.model import Placement
from windtunnel.training.goodput.twin.simulate import JobModel, PhaseCosts, SimulationResult


@dataclass(frozen=True)
class Question:
    """A job on hosts that fail.

    ``mtbf``: mean seconds between failures of the whole job. ``software``: part of them that leaves the
    host alive; ``domain_share``: part of the others that takes all hosts of a domain. ``host_memory``:
    bytes of a host that checkpoints may take. ``domains``: failure domain of every host. ``horizon``:
    seconds to look ahead. ``longest``: seconds between two checkpoints to storage at most. ``away``: mean
    seconds until a lost host is back, where ``costs.replace`` is infinite as the trace brings hosts itself.
    ``spares``: hosts that wait idle; None: none, and what one would bring is looked at beside it.
    """

    job: JobModel
    costs: PhaseCosts
    mtbf: float
    horizon: float
    host_memory: float
    domains: tuple[str, ...]
    software: float = 0.0
    spares: int | None = None
    domain_share: float = 0.0
    longest: float = 86400.0
    away: float | None = None

    @property
    def hardware(self) -> float:
        """Failures within the horizon that take a host with its memory."""
        return self.horizon / self.mtbf * (1.0 - self.software)


@dataclass(frozen=True)
class Choice:
    """One number of copies.

    ``memory``: bytes of a host. ``every``, ``storage_every``: steps between checkpoints to memory and to
    storage. ``pair``: probability to recover from memory when two hosts are lost at once. ``fallbacks``:
    expected recoveries from storage within the horizon. ``waste``: seconds in it that depend on the choice.
    """

    copies: int
    placement: Placement
    memory: int
    fits: bool
    sum_in_words: str
    every: int
    storage_every: int
    pair: float
    fallbacks: float
    waste: float


@dataclass(frozen=True)
class RecoveryAdvice:
    """What is recommended, why, and what the twin saw.

    ``intervals``: steps between checkpoints to storage, for each scheme. ``smallest``: hosts of the smallest
    pipeline of templates. ``results``: of all schemes; ``scheme``: the best one.
    """

    chosen: Choice
    choices: tuple[Choice, ...]
    intervals: dict[str, int]
    smallest: int
    results: tuple[SimulationResult, ...]
    scheme: str
    reasons: tuple[str, ...]
