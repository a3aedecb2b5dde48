"""What an emulation is of, and what comes out of it: policies, machines, checkpoints, losses."""

from __future__ import annotations

from dataclasses import dataclass, field

from windtunnel.agents.sandbox.model import TurnClass
from windtunnel.agents.sandbox.policy import DEFAULT, Keep, PolicyName, Rules


@dataclass(frozen=True)
class Arm:
    """A policy with its rules, and whether those who are waited for go first (not with ``fifo``)."""

    name: str
    policy: PolicyName
    fifo: bool = False
    rules: Rules = DEFAULT


ARMS = {
    arm.name: arm
    for arm in (
        Arm("conversation", "conversation"),
        Arm("files", "files"),
        Arm("full", "full"),
        Arm("full-fifo", "full", fifo=True),
        Arm("semantic", "semantic"),
        Arm("semantic-fifo", "semantic", fifo=True),
    )
}


@dataclass(frozen=True)
class Machine:
    """One host of the emulation; all are alike. Bytes, and bytes a second. ``workers``: None: one a core.
    ``images``: processes can be kept."""

    cores: int = 32
    memory: float = 256e9
    disk: float = 1e9
    network: float = 1.25e9
    workers: int | None = None
    images: bool = True

    @property
    def lanes(self) -> int:
        return self.workers or self.cores


@dataclass(frozen=True)
class Loss:
    """One sandbox that lost its host: turns done, turns that come back, and seconds that are done again: the
    lost turns with the thinking between them, and the command under way. A reply under way is asked for
    again, and not counted."""

    box: int
    at: float
    turns: int
    kept: int
    seconds: float
    recovered: float = 0.0
    """Seconds from the host's death until the sandbox runs again."""


@dataclass(frozen=True)
class Made:
    """One checkpoint that exists. ``freeze`` and ``seconds`` (since it was asked for) as they turned out."""

    box: int
    turn: int
    turn_class: TurnClass
    at: float
    freeze: float
    seconds: float
    written: float
    memory: float


@dataclass
class Outcome:
    """What happened in a run. ``gates``: for each turn but the last of a session, seconds that the reply
    waited for the checkpoint. ``asked`` and ``hidden``: checkpoints of those turns, and how many were safe
    when the reply came. ``ends``: seconds that each session took. ``decided``: what the policy said of each
    turn's end, with the sandbox and the turn."""

    ends: list[float] = field(default_factory=list)
    gates: list[float] = field(default_factory=list)
    asked: int = 0
    hidden: int = 0
    made: list[Made] = field(default_factory=list)
    losses: list[Loss] = field(default_factory=list)
    cpu_served: float = 0.0
    decided: list[tuple[int, int, Keep]] = field(default_factory=list)
