"""What the supervisor, the node agents, the trainers and the twin say to each other of a job's membership.

A *place* is a position in the job (0 .. places-1); a *node* is a machine, with an id that is never used
again. Places stay while nodes come and go: a machine that replaces another takes its place under a new id. A
*generation* is a complete picture of the membership. Generations only grow; a newer one supersedes an older
one at any moment, also while the job recovers into the older one. Whatever a process sends carries its
generation, and what carries an old one is refused (fencing). The *epoch* numbers the supervisors of a run
likewise.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Node:
    """One machine of the job.

    ``host``: its address. ``memory``: "host:port" where its agent serves the shards that it holds in memory.
    ``domain``: what fails together with it (a rack, a switch, a power feed), "" where unknown.
    """

    id: int
    host: str
    memory: str
    domain: str = ""


@dataclass(frozen=True)
class Membership:
    """A generation: which node holds which place, and where its process group meets.

    Rank ``r`` lives on ``nodes[r // per_node]``, with local rank ``r % per_node``. ``store``: "host:port" of
    a TCPStore outside the trainers; the group of this generation meets under the prefix ``prefix``.
    ``cause``: why it was formed, in words. ``restart_all``: no process of an earlier generation goes on in
    this one.
    """

    generation: int
    epoch: int
    nodes: tuple[Node, ...]
    per_node: int
    store: str
    cause: str
    restart_all: bool = False

    @property
    def world(self) -> int:
        return len(self.nodes) * self.per_node

    @property
    def prefix(self) -> str:
        return f"generation/{self.epoch}.{self.generation}"

    def place_of(self, node: int) -> int | None:
        """The place that ``node`` (an id) holds, None if it holds none."""
        for place, member in enumerate(self.nodes):
            if member.id == node:
                return place
        return None

    def plain(self) -> dict[str, Any]:
        """The membership as values of JSON."""
        return asdict(self)

    @staticmethod
    def of(plain: dict[str, Any]) -> Membership:
        """The inverse of `plain`."""
        return Membership(**{**plain, "nodes": tuple(Node(**node) for node in plain["nodes"])})
