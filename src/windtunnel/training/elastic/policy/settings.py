"""What a supervisor is told, and what it answers in the end."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

from windtunnel.training.elastic.policy.rules import Decision, Observation


@dataclass(frozen=True)
class Deadlines:
    """How long is waited for what (seconds); each wait ends in a decision or in a clear error.

    ``grace``: for an agent whose connection broke. ``back``: for the agents, after the supervisor was
    started again. ``suspect``: for evidence, when all that is known is that a rank suspects its peers.
    ``hello``: for the first hosts. ``hosts``: for hosts that were ordered. ``form``: for the ranks
    of a generation to group. ``store``: for a store. ``end``: for the agents to go when the run is over.
    """

    grace: float = 0.15
    back: float = 2.0
    suspect: float = 0.5
    hello: float = 120.0
    hosts: float = 600.0
    form: float = 60.0
    store: float = 60.0
    end: float = 5.0


@dataclass(frozen=True)
class Settings:
    """``places`` of ``per_host`` ranks each. Agents send a beat every ``beat`` seconds and are given up after
    ``lease`` seconds of silence; losses within ``settle`` seconds are one change.

    ``most_suspicions``, ``most_formings``, ``most_fruitless``: generations in succession, without a step
    between them, that are formed because of suspicion alone, that did not group in time, that ended by any
    loss; one more fails the run.
    """

    places: int
    per_host: int
    beat: float = 0.1
    lease: float = 1.0
    settle: float = 0.02
    deadlines: Deadlines = field(default_factory=Deadlines)
    most_suspicions: int = 3
    most_formings: int = 3
    most_fruitless: int = 30


@dataclass(frozen=True)
class Outcome:
    """How the run ended. ``status``: 0 when all ranks are done, else 1, with the ``reason`` in words.
    ``results``: what each rank returned.
    """

    status: int
    reason: str
    results: dict[int, Any]


class Effects(Protocol):
    """What the decisions of a supervisor act on: connections (by number), the log, who provides hosts."""

    def send(self, link: int, message: dict[str, Any]) -> None: ...

    def drop(self, link: int) -> None:
        """Close the connection once what was sent is out."""

    def record(self, kind: str, generation: int, t: float | None = None, **fields: Any) -> None: ...

    def decision(
        self, generation: int, policy: str, observation: Observation, decision: Decision
    ) -> None: ...

    def order(self, count: int) -> None: ...
