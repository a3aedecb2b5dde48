"""What the processes of a job call at each other (`base.calls`): agents the supervisor, trainers their agent.

A call that has returned is in the hands of the one that was called, also where the caller dies then. Each
names who calls: a host the number of its attendance, a trainer its process id. Whoever was given up is not
heard. What the values of an agreement, the result of a rank and the further fields of an event are is the
program's affair; all else is checked before anybody acts on it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from windtunnel.base.calls import Departure

Message = dict[str, Any]
Values = dict[int, Any]


@dataclass(frozen=True)
class Post:
    """What ranks of one host say to an agreement."""

    generation: int
    key: str
    values: Values


@dataclass(frozen=True)
class Hello:
    """Who attends: an agent, with all that is still open. ``host``: its id, None where it never had one.
    ``workers``: the process ids of its ranks. ``met``: as of `HostAgent.meet`, in ``generation``."""

    address: str
    memory: str
    pid: int
    host: int | None = None
    domain: str = ""
    generation: int = 0
    epoch: int = 0
    workers: dict[int, int | None] = field(default_factory=dict)
    posts: list[Post] = field(default_factory=list)
    met: dict[str, str] = field(default_factory=dict)


class Supervision(Protocol):
    """What agents call at the supervisor. ``link``: the number of the attendance, which its welcome tells.

    Where that attendance is over a call raises OSError (ENOTCONN).
    """

    def attend(
        self, hello: Hello, tell: Callable[[Message, bytes], None], gone: Departure | None = None
    ) -> None:
        """Be told, until the supervisor ends it: ``welcome`` first, then each ``membership``, what was
        ``decided``, what groups are to be ``met`` by, whom to ``look`` for and to ``fence``, the ``end``, and
        a ``beat`` where nothing else is said. The host is there as long as this lasts, and it calls."""

    def beat(self, link: int) -> None: ...

    def post(self, link: int, generation: int, key: str, values: Values) -> None: ...

    def meet(self, link: int, generation: int, said: dict[str, str]) -> None:
        """Ranks say something to those that they form a group with (`live.store`)."""

    def compare_set(
        self, link: int, generation: int, key: str, expected: str, desired: str
    ) -> tuple[bool, str] | None:
        """The same, if ``expected`` is what was said so far ("": nothing): whether it was, and what is said
        now. None when the generation is another one."""

    def ask(self, link: int, key: str) -> Values | None:
        """What was decided for a durable key, or what the log says of checkpoints."""

    def event(self, link: int, kind: str, fields: Message) -> None: ...

    def worker(
        self, link: int, what: str, rank: int, generation: int, pid: int | None = None,
        status: int | None = None, signal: int | None = None, error: str = "", less: bool = False,
    ) -> None:  # fmt: skip
        """A process of a rank ``started``, is ``frozen``, or came to its ``exit``."""

    def suspect(self, link: int, rank: int, generation: int, error: str = "") -> None: ...

    def reached(self, link: int, round: int, silent: list[int]) -> None: ...

    def done(self, link: int, rank: int, generation: int, result: Any = None) -> None: ...

    def kill_launcher(self, link: int, epoch: int) -> None:
        """The launcher of the supervisor ``epoch``: its successor, which is called again, goes on."""


@dataclass(frozen=True)
class News:
    """The newest membership (`Membership.plain`), and the place of this host in it."""

    membership: Message
    place: int | None


@dataclass(frozen=True)
class TrainerWelcome:
    """What a trainer is told when it comes. ``host``: the id of its host. ``memory``: the socket of the
    memory service. ``config``: seconds by name (`AgentConfig.worker`)."""

    news: News
    rank: int
    local_rank: int
    host: int
    memory: str | None
    faults: list[str]
    config: dict[str, float]


class HostAgent(Protocol):
    """What trainers call at the agent of their host. ``pid``: theirs.

    One that was fenced, or is nobody of this generation, gets an OSError (ESRCH).
    """

    def join(self, pid: int) -> TrainerWelcome: ...

    def beat(self, pid: int, generation: int) -> News | None:
        """It moves. Returns at once where a newer generation than its own is known, else when the next beat
        is due."""

    def agree(self, pid: int, generation: int, key: str, value: Any, within: float) -> Values | None:
        """The values of all ranks; None when a newer generation comes instead. Raises TimeoutError."""

    def ask(self, pid: int, key: str, within: float) -> Values | None:
        """See `Supervision.ask`. Raises TimeoutError."""

    def meet(
        self, generation: int, said: dict[str, str], keys: list[str], within: float
    ) -> dict[str, str] | None:
        """What is said under ``keys`` by then, once all of it is; None when a newer generation comes instead.
        Raises TimeoutError."""

    def compare_set(
        self, generation: int, key: str, expected: str, desired: str, within: float
    ) -> tuple[bool, str] | None:
        """See `Supervision.compare_set`. Raises TimeoutError."""

    def event(self, pid: int, kind: str, fields: Message) -> None: ...

    def suspect(self, pid: int, generation: int, error: str) -> None: ...

    def done(self, pid: int, result: Any) -> None: ...

    def failed(self, pid: int, error: str, less: bool = False) -> None: ...

    def inject(self, pid: int, action: str, rate: float = 0.0) -> None: ...
