"""The machines of a run and their leases.

A machine is there as long as something came from its agent within ``lease`` seconds. When the agent's
connection breaks it has only the shorter ``grace`` to come back in: an agent that was killed never does, and
its machine is lost then, not a lease later. A machine that was lost is *gone* for good: its id is never
accepted again, whatever still runs there. Time is handed in (monotonic seconds).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from windtunnel.training.elastic.model import Node


@dataclass
class Machine:
    """One machine: its agent's process id and connection (None while it has none), and the workers whose
    process ids are known. ``fenced``: workers that were ordered to be killed. ``unseen``: ranks that the
    agent did not name when it came back, and when they will be given up.
    """

    node: Node
    pid: int
    lease_ends: float
    link: int | None = None
    away_since: float | None = None
    workers: dict[int, int | None] = field(default_factory=dict)
    fenced: set[int] = field(default_factory=set)
    unseen: dict[int, float] = field(default_factory=dict)


class Machines:
    """All machines that are there, in the order of their ids (which is the order in which they came)."""

    def __init__(self, lease: float, grace: float, next_id: int = 0, gone: set[int] | None = None) -> None:
        self.live: dict[int, Machine] = {}
        self.gone: set[int] = gone or set()
        self._lease = lease
        self._grace = grace
        self._next = next_id
        self._by_link: dict[int, Machine] = {}

    def join(self, host: str, memory: str, domain: str, pid: int, link: int, now: float) -> Machine:
        """A machine that was never here. One whose welcome was lost on the way is recognised by its agent."""
        for machine in self.live.values():
            if machine.link is None and (machine.node.host, machine.node.memory, machine.pid) == (
                host,
                memory,
                pid,
            ):
                self.attach(machine, link, now)
                return machine
        machine = Machine(Node(self._next, host, memory, domain), pid, now + self._lease, link)
        self._next += 1
        self.live[machine.node.id] = self._by_link[link] = machine
        return machine

    def expect(self, node: Node, pid: int, until: float) -> None:
        """A machine of which only the log tells: it has until ``until`` to come back."""
        self.live[node.id] = Machine(node, pid, until)
        self._next = max(self._next, node.id + 1)

    def attach(self, machine: Machine, link: int, now: float) -> None:
        if machine.link is not None:
            del self._by_link[machine.link]
        machine.link, machine.away_since = link, None
        self._by_link[link] = machine
        self.renew(machine, now)

    def detach(self, machine: Machine, now: float) -> None:
        if machine.link is not None:
            del self._by_link[machine.link]
        machine.link, machine.away_since = None, now

    def renew(self, machine: Machine, now: float) -> None:
        machine.lease_ends = max(machine.lease_ends, now + self._lease)

    def renew_all(self, now: float) -> None:
        """The supervisor itself was stopped: nobody else's silence means anything."""
        for machine in self.live.values():
            self.renew(machine, now)
            if machine.away_since is not None:
                machine.away_since = now

    def expired(self, now: float) -> list[tuple[Machine, str]]:
        """Machines that are lost, with the evidence: "connection" or "lease"."""
        lost = []
        for machine in self.live.values():
            if machine.away_since is not None and now > machine.away_since + self._grace:
                lost.append((machine, "connection"))
            elif now > machine.lease_ends:
                lost.append((machine, "lease"))
        return lost

    def lose(self, machine: Machine) -> None:
        if machine.link is not None:
            del self._by_link[machine.link]
        del self.live[machine.node.id]
        self.gone.add(machine.node.id)

    def doubtful(self) -> bool:
        """Whether a machine is away now: it is lost, or back, within an instant."""
        return any(machine.link is None for machine in self.live.values())

    def of_link(self, link: int) -> Machine | None:
        return self._by_link.get(link)
