"""What the supervisor, the agents, the trainers and the twin say to each other of a job's membership.

A *place* is a position in the job (0 .. places-1); a *host* is a host, with an id that is never used
again. Places stay while hosts come and go: a host that replaces another takes its place under a new id. A
*generation* is a complete picture of the membership. Generations only grow; a newer one supersedes an older
one at any moment, also while the job recovers into the older one. Whatever a process sends carries its
generation, and what carries an old one is refused (fencing). The *epoch* numbers the supervisors of a run
likewise.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class MemberHost:
    """One host of the job.

    ``address``: where peers reach it. ``memory``: "host:port" where its agent serves the shards that it holds
    in memory. ``domain``: what fails together with it (a rack, a switch, a power feed), "" where unknown.
    """

    id: int
    address: str
    memory: str
    domain: str = ""


@dataclass(frozen=True)
class Membership:
    """A generation: which host holds which place.

    Rank ``r`` lives on ``hosts[r // per_host]``, with local rank ``r % per_host``. ``cause``: why it was
    formed, in words. ``restart_all``: no process of an earlier generation goes on in this one.
    """

    generation: int
    epoch: int
    hosts: tuple[MemberHost, ...]
    per_host: int
    cause: str
    restart_all: bool = False

    @property
    def world(self) -> int:
        return len(self.hosts) * self.per_host

    def place_of(self, host: int) -> int | None:
        """The place that ``host`` (an id) holds, None if it holds none."""
        for place, member in enumerate(self.hosts):
            if member.id == host:
                return place
        return None

    def plain(self) -> dict[str, Any]:
        """The membership as values of JSON."""
        return asdict(self)

    @staticmethod
    def of(plain: dict[str, Any]) -> Membership:
        """The inverse of `plain`."""
        return Membership(**{**plain, "hosts": tuple(MemberHost(**host) for host in plain["hosts"])})
