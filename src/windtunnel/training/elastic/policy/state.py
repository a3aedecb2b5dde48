"""What the state of a run is made of: settings, hosts and leases, agreements, and what a log tells of it.

All-gathers over the control plane are fenced by generation: every rank of a generation posts a value under a
key; when all have, the key is decided and everybody gets all values. Keys that begin with ``commit/`` are
durable. This is the commit record for the step in doubt (Oobleck leaves it open; see also two-phase commit,
Gray and Lamport, "Consensus on transaction commit", section 3). Time is handed in (monotonic seconds).
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from windtunnel.training.elastic.model import MemberHost, Membership
from windtunnel.training.elastic.policy.checkpoints import FAILED, WANTED, Checkpoints, keep
from windtunnel.training.elastic.policy.evidence import Leases
from windtunnel.training.elastic.policy.rules import Decision, Observation


def deadline(seconds: float, what: str) -> float:
    """A field of so many ``seconds``, for ``what`` is waited."""
    return field(default=seconds, metadata={"what": what})  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Deadlines:
    """How long the supervisor waits for what (seconds); each wait ends in a decision or in a clear error."""

    grace: float = deadline(0.15, "an agent whose connection broke, to come back")
    back: float = deadline(2.0, "the agents, after the supervisor was started again")
    suspect: float = deadline(0.5, "evidence, when a rank suspects its peers")
    reach: float = deadline(2.0, "an answer of one host to another, then")
    hello: float = deadline(120.0, "the first hosts")
    hosts: float = deadline(600.0, "hosts that were ordered")
    form: float = deadline(
        60.0, "the ranks of a generation to group, once all have a process (else `--timeout`)"
    )
    process: float = deadline(120.0, "the fork server to start a rank's process, before that")
    end: float = deadline(5.0, "the agents to go when the run is over")


@dataclass(frozen=True)
class SupervisorSettings:
    """``places`` of ``per_host`` ranks each. Agents send a beat every ``beat`` seconds and are given up after
    ``lease`` seconds of silence; losses within ``settle`` seconds are one change.
    """

    places: int
    per_host: int
    beat: float = 0.1
    lease: float = 1.0
    settle: float = 0.02
    deadlines: Deadlines = field(default_factory=Deadlines)


@dataclass(frozen=True)
class Outcome:
    """How the run ended. ``status``: 0 when all ranks are done, 3 where what was asked for cannot be reached,
    else 1, with the ``reason`` in words.
    ``results``: what each rank returned.
    """

    status: int
    reason: str
    results: dict[int, Any]

    @staticmethod
    def of(events: list[dict[str, Any]]) -> Outcome | None:
        """That of the run with these ``events``; None while it goes on."""
        for event in reversed(events):
            if event["kind"] == "finished":
                done = {e["rank"]: e.get("result") for e in events if e["kind"] == "done"}
                return Outcome(event["status"], event["reason"], done)
        return None


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

    def kill_launcher(self) -> None:
        """The fault that strikes the process of the supervisor itself."""


@dataclass
class LiveHost:
    """One host: its agent's process id and connection (None while it has none), and the workers whose
    process ids are known. ``fenced``: workers that were ordered to be killed. ``unseen``: ranks that the
    agent did not name when it came back, and when they will be given up. ``unmet``: what ranks have said to
    those that they form a group with, and this host is still to be told.
    """

    member: MemberHost
    pid: int
    link: int | None = None
    away_since: float | None = None
    workers: dict[int, int | None] = field(default_factory=dict)
    fenced: set[int] = field(default_factory=set)
    unseen: dict[int, float] = field(default_factory=dict)
    unmet: dict[str, str] = field(default_factory=dict)


class Hosts:
    """All hosts that are there, in the order of their ids (which is the order in which they came).

    A host is there as long as something came from its agent within ``lease`` seconds. When the agent's
    connection breaks it has only the shorter ``grace`` to come back in: an agent that was killed never does,
    and its host is lost then, not a lease later. A host that was lost is *gone* for good: its id is never
    accepted again, whatever still runs there.
    """

    def __init__(self, lease: float, grace: float, next_id: int = 0, gone: set[int] | None = None) -> None:
        self.live: dict[int, LiveHost] = {}
        self.gone: set[int] = gone or set()
        self.leases: Leases[int] = Leases(lease)
        self._grace = grace
        self._next = next_id
        self._by_link: dict[int, LiveHost] = {}

    def join(self, address: str, memory: str, domain: str, pid: int, link: int, now: float) -> LiveHost:
        """A host that was never here. One whose welcome was lost on the way is recognised by its agent."""
        for host in self.live.values():
            if host.link is None and (host.member.address, host.member.memory, host.pid) == (
                address,
                memory,
                pid,
            ):
                self.attach(host, link, now)
                return host
        host = LiveHost(MemberHost(self._next, address, memory, domain), pid, link)
        self._next += 1
        self.live[host.member.id] = self._by_link[link] = host
        self.renew(host, now)
        return host

    def expect(self, member: MemberHost, pid: int, until: float) -> None:
        """A host of which only the log tells: it has until ``until`` to come back."""
        self.live[member.id] = LiveHost(member, pid)
        self.leases.renew(member.id, until - self.leases.seconds)
        self._next = max(self._next, member.id + 1)

    def attach(self, host: LiveHost, link: int, now: float) -> None:
        if host.link is not None:
            del self._by_link[host.link]
        host.link, host.away_since, host.unmet = link, None, {}
        self._by_link[link] = host
        self.renew(host, now)

    def detach(self, host: LiveHost, now: float) -> None:
        if host.link is not None:
            del self._by_link[host.link]
        host.link, host.away_since = None, now

    def renew(self, host: LiveHost, now: float) -> None:
        self.leases.renew(host.member.id, now)

    def forgive(self, now: float) -> bool:
        """Whether the supervisor itself was stopped: nobody else's silence means anything then."""
        stopped = self.leases.forgive(now)
        for host in self.live.values():
            if stopped and host.away_since is not None:
                host.away_since = now
        return stopped

    def expired(self, now: float) -> list[tuple[LiveHost, str]]:
        """Hosts that are lost, with the evidence: "connection" or "lease"."""
        silent = self.leases.silent(now)
        lost = []
        for id, host in self.live.items():
            if host.away_since is not None and now > host.away_since + self._grace:
                lost.append((host, "connection"))
            elif id in silent:
                lost.append((host, "lease"))
        return lost

    def due(self) -> float:
        """When the first of those without a connection is lost, if it does not come back."""
        away = [host.away_since for host in self.live.values() if host.away_since is not None]
        return min(away, default=math.inf) + self._grace

    def lose(self, host: LiveHost) -> None:
        if host.link is not None:
            del self._by_link[host.link]
        del self.live[host.member.id]
        self.leases.end(host.member.id)
        self.gone.add(host.member.id)

    def doubtful(self) -> bool:
        """Whether a host is away now: it is lost, or back, within an instant."""
        return any(host.link is None for host in self.live.values())

    def of_link(self, link: int) -> LiveHost | None:
        return self._by_link.get(link)


Values = dict[int, Any]
DURABLE = "commit/"
"""Keys that begin so outlive their generation."""
KEPT_DECIDED = 4096
"""Decided keys of the present generation that are kept for those who post again after a broken connection."""
KEPT_DURABLE = 65536
"""Durable keys that are kept in memory; all are in the log."""


class Agreements:
    """The agreements of the present generation, and the durable ones of all.

    A post of another generation than the present one is refused: whatever is not decided when a generation
    ends is never decided under it. Values of durable keys outlive the generation, so that a rank that was cut
    while it waited can ask later what became of them.
    """

    def __init__(self, durable: OrderedDict[str, Values]) -> None:
        self.generation = 0
        self.world = 0
        self._open: dict[str, Values] = {}
        self._decided: OrderedDict[str, Values] = OrderedDict()
        self._durable = durable

    def begin(self, generation: int, world: int) -> None:
        """A new generation of ``world`` ranks: what was open is forgotten."""
        self.generation, self.world = generation, world
        self._open.clear()
        self._decided.clear()

    def post(self, generation: int, key: str, rank: int, value: Any) -> bool:
        """Whether this post completes the agreement: then `seal` it.

        A rank's first post counts; the same one again (after a reconnection) changes nothing.
        """
        if generation != self.generation or not 0 <= rank < self.world or key in self._decided:
            return False
        values = self._open.setdefault(key, {})
        values.setdefault(rank, value)
        return len(values) == self.world

    def complete(self, key: str) -> Values:
        """What all ranks posted under ``key``, in the order of ranks."""
        return dict(sorted(self._open[key].items()))

    def seal(self, key: str) -> None:
        """``key`` is decided (and in the log, if it is durable)."""
        values = self.complete(key)
        del self._open[key]
        keep(self._decided, key, values, KEPT_DECIDED)
        if key.startswith(DURABLE):
            keep(self._durable, key, values, KEPT_DURABLE)

    def decided(self, generation: int, key: str) -> Values | None:
        """The values of a key that is decided in the present generation, None if it is not."""
        return self._decided.get(key) if generation == self.generation else None

    def ask(self, key: str) -> Values | None:
        """The values of a decided key of this generation, or of a durable one of any."""
        return self._decided.get(key, self._durable.get(key))


@dataclass
class LoggedState:
    """The state after the last event. ``epoch``, ``address``: of the last supervisor. ``attended``: hosts
    that were not lost, with their agents' process ids. ``lost``: ranks of the present generation whose
    process is gone; ``suspects``: those that suspect their peers, with their errors.
    """

    epoch: int = 0
    address: str = ""
    generation: int = 0
    membership: Membership | None = None
    attended: dict[int, tuple[MemberHost, int]] = field(default_factory=dict)
    gone: set[int] = field(default_factory=set)
    next_id: int = 0
    coming: int = 0
    own_failures: int = 0
    lost: dict[int, str] = field(default_factory=dict)
    suspects: dict[int, str] = field(default_factory=dict)
    grouped: set[int] = field(default_factory=set)
    done: dict[int, Any] = field(default_factory=dict)
    durable: OrderedDict[str, Values] = field(default_factory=OrderedDict)
    checkpoints: Checkpoints = field(default_factory=Checkpoints)

    def apply(self, event: Mapping[str, Any]) -> None:
        """What an event of the log changes."""
        kind = event["kind"]
        if kind == "started":
            self.epoch, self.address = event["epoch"], event["address"]
        elif kind == "host.joined":
            host = MemberHost(event["host"], event["address"], event["memory"], event["domain"])
            self.attended[host.id] = (host, event["pid"])
            self.next_id = max(self.next_id, host.id + 1)
            self.coming = max(0, self.coming - 1)
        elif kind == "ordered":
            self.coming += event["count"]
        elif kind == "decided":
            self.membership = Membership.of(event["membership"])
            self.generation = self.membership.generation
            self.own_failures = event["own_failures"]
            for forgotten in (self.lost, self.suspects, self.grouped, self.done):
                forgotten.clear()
        elif kind == "agreed":
            self.durable[event["key"]] = {int(rank): value for rank, value in event["values"].items()}
        elif kind in ("committed", "persisted"):
            self.checkpoints.apply(event)
        elif kind == "lost" and event["what"] == "host":
            self.attended.pop(event["host"], None)
            self.gone.add(event["host"])
        elif event.get("generation") == self.generation and self.membership is not None:
            if kind == "lost" and event["evidence"] != "suspect":
                self.lost[event["rank"]] = event["error"]
            elif kind == "suspected":
                self.suspects[event["rank"]] = event["error"]
            elif kind == "grouped":
                self.grouped.add(event["rank"])
            elif kind == "done":
                self.done[event["rank"]] = event["result"]
            elif kind in (WANTED, FAILED):
                self.checkpoints.apply(event)


def past(events: list[dict[str, Any]]) -> LoggedState:
    """The state after ``events``."""
    state = LoggedState()
    for event in events:
        state.apply(event)
    return state
