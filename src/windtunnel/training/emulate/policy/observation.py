"""What is known of a job's ranks, and what can be decided on it: plain data, written to the run's log."""

from __future__ import annotations

from dataclasses import dataclass, field

from windtunnel.training.emulate.policy.groups import Axes, FamilySeen, find_axes

CAPTURE_LIMIT = 256
CHECK_LIMIT = 16
REFUSED = -1


@dataclass(frozen=True)
class Source:
    """A place in the user's program that asks which rank it is: ``values[rank]`` is what that captured rank
    was told there."""

    site: str
    values: dict[int, int]


@dataclass(frozen=True)
class Condition:
    """A place in the user's program where what happens depends on the rank.

    ``text``: a Python expression of ``v0``, ``v1``… that stand for what ``sources`` (rows of the
    observation's) tell; without it, the rank itself. ``involved``: it is not what decides, but enters there
    into something that cannot be worked out for another rank.
    """

    site: str
    text: str = ""
    sources: tuple[int, ...] = ()
    involved: bool = False


@dataclass(frozen=True)
class Observation:
    """What is known of a job's ranks so far.

    ``ranks``: what the user wants captured, ``auto``, ``all``, or as in ``0,17,120-127``. ``limit``: ranks
    that are captured at most where the choice is free. ``captured``: for each rank that was, in their order,
    the number of its class (ranks that did the same). ``families``: of process groups, those that cover the
    world, in the order of their making; ``peers``: to whom the first rank sends or from whom it receives.
    ``jobs``: ranks captured at once. ``seconds_each``: that the process of a rank took, in the mean.

    ``checks``: ranks that may be checked, if not more than half as many as are captured; 0: none may.
    ``calls``: for each class, the number of its outline (what it calls, in which order). ``checked``: for
    each rank of which only the outline was taken, that outline's number, or `REFUSED`. ``conditions``: of the
    user's program, on the rank, as what was captured shows them; ``devices_per_host`` of the cluster.
    """

    world_size: int
    ranks: str = "auto"
    limit: int = CAPTURE_LIMIT
    captured: dict[int, int] = field(default_factory=dict)
    families: tuple[FamilySeen, ...] = ()
    peers: tuple[int, ...] = ()
    jobs: int = 1
    seconds_each: float | None = None
    checks: int = 0
    calls: tuple[int, ...] = ()
    checked: dict[int, int] = field(default_factory=dict)
    conditions: tuple[Condition, ...] = ()
    sources: tuple[Source, ...] = ()
    devices_per_host: int = 1

    @property
    def axes(self) -> Axes:
        """Raises `ValueError` before a first rank is captured."""
        if not self.captured:
            raise ValueError("no rank is captured")
        return find_axes(self.world_size, next(iter(self.captured)), self.families, self.peers)


@dataclass(frozen=True)
class Capture:
    """Capture these ranks next."""

    ranks: tuple[int, ...]
    why: str


@dataclass(frozen=True)
class Check:
    """Run these ranks next only for their outlines: whether they call what those that stand for them do."""

    ranks: tuple[int, ...]
    why: str


@dataclass(frozen=True)
class Known:
    """Nothing more need be run. The cells of the world: on axis a, index i belongs to the segment that the
    last of ``starts[a]`` up to i begins, and a cell's ranks do what its first one does. None: every rank
    does what the nearest captured one does. ``alike``: for ranks of which another captured one is known to
    be the better picture, that one."""

    starts: tuple[tuple[int, ...], ...] | None
    alike: dict[int, int] = field(default_factory=dict)


Decision = Capture | Check | Known
