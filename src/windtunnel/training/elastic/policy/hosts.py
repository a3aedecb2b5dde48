"""The hosts of a run and their leases.

A host is there as long as something came from its agent within ``lease`` seconds. When the agent's
connection breaks it has only the shorter ``grace`` to come back in: an agent that was killed never does, and
its host is lost then, not a lease later. A host that was lost is *gone* for good: its id is never
accepted again, whatever still runs there. Time is handed in (monotonic seconds).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from windtunnel.training.elastic.model import MemberHost


@dataclass
class LiveHost:
    """One host: its agent's process id and connection (None while it has none), and the workers whose
    process ids are known. ``fenced``: workers that were ordered to be killed. ``unseen``: ranks that the
    agent did not name when it came back, and when they will be given up.
    """

    member: MemberHost
    pid: int
    lease_ends: float
    link: int | None = None
    away_since: float | None = None
    workers: dict[int, int | None] = field(default_factory=dict)
    fenced: set[int] = field(default_factory=set)
    unseen: dict[int, float] = field(default_factory=dict)


class Hosts:
    """All hosts that are there, in the order of their ids (which is the order in which they came)."""

    def __init__(self, lease: float, grace: float, next_id: int = 0, gone: set[int] | None = None) -> None:
        self.live: dict[int, LiveHost] = {}
        self.gone: set[int] = gone or set()
        self._lease = lease
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
        host = LiveHost(MemberHost(self._next, address, memory, domain), pid, now + self._lease, link)
        self._next += 1
        self.live[host.member.id] = self._by_link[link] = host
        return host

    def expect(self, member: MemberHost, pid: int, until: float) -> None:
        """A host of which only the log tells: it has until ``until`` to come back."""
        self.live[member.id] = LiveHost(member, pid, until)
        self._next = max(self._next, member.id + 1)

    def attach(self, host: LiveHost, link: int, now: float) -> None:
        if host.link is not None:
            del self._by_link[host.link]
        host.link, host.away_since = link, None
        self._by_link[link] = host
        self.renew(host, now)

    def detach(self, host: LiveHost, now: float) -> None:
        if host.link is not None:
            del self._by_link[host.link]
        host.link, host.away_since = None, now

    def renew(self, host: LiveHost, now: float) -> None:
        host.lease_ends = max(host.lease_ends, now + self._lease)

    def renew_all(self, now: float) -> None:
        """The supervisor itself was stopped: nobody else's silence means anything."""
        for host in self.live.values():
            self.renew(host, now)
            if host.away_since is not None:
                host.away_since = now

    def expired(self, now: float) -> list[tuple[LiveHost, str]]:
        """Hosts that are lost, with the evidence: "connection" or "lease"."""
        lost = []
        for host in self.live.values():
            if host.away_since is not None and now > host.away_since + self._grace:
                lost.append((host, "connection"))
            elif now > host.lease_ends:
                lost.append((host, "lease"))
        return lost

    def lose(self, host: LiveHost) -> None:
        if host.link is not None:
            del self._by_link[host.link]
        del self.live[host.member.id]
        self.gone.add(host.member.id)

    def doubtful(self) -> bool:
        """Whether a host is away now: it is lost, or back, within an instant."""
        return any(host.link is None for host in self.live.values())

    def of_link(self, link: int) -> LiveHost | None:
        return self._by_link.get(link)
