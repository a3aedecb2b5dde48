"""Who does not reach whom, and which hosts have to go for it.

Ranks that wait for each other in vain do not know for whom. So when a suspicion stays alone every host is
asked which of the others do not answer it at all (`Round`). The kernel answers for a process that is stopped
or hangs: what does not answer is the way between two hosts, or a whole host. As long as the supervisor
reaches both, no lease ends, and no generation with both of them can group.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Sequence
from dataclasses import dataclass, field


@dataclass
class Round:
    """One question to all hosts of a generation, answered by all or over at ``until``. ``answers``: whom each
    host that has answered does not reach."""

    number: int
    hosts: frozenset[int]
    until: float
    answers: dict[int, tuple[int, ...]] = field(default_factory=dict)

    def over(self, now: float, live: Container[int]) -> bool:
        """Nobody who could still answer has not."""
        return now > self.until or not any(host in live for host in self.hosts - set(self.answers))

    def silent(self) -> tuple[tuple[int, int], ...]:
        """Pairs of whom the first does not reach the second."""
        return tuple(
            (host, other) for host in sorted(self.answers) for other in sorted(set(self.answers[host]))
        )


def to_fence(
    places: Sequence[int | None], silent: Collection[tuple[int, int]], answered: Collection[int]
) -> tuple[int, ...]:
    """The hosts without which all that are left reach each other; () where nobody is cut off.

    Of each pair the host goes that more others do not reach, so that a host that is dead to all goes alone;
    between alike ones one that did not answer the question, else the one with the higher place. A pair of
    which both answered counts against both: it cannot be told who is deaf. Where more than half would have
    to go it is no matter of some hosts, and nobody goes.
    """
    place = {host: number for number, host in enumerate(places) if host is not None}
    against: dict[int, set[int]] = {host: set() for host in place}
    for first, other in silent:
        if first != other and first in place and other in place:
            against[other].add(first)
            if other in answered:
                against[first].add(other)
    gone: list[int] = []
    while any(against.values()):
        worst = max(against, key=lambda host: (len(against[host]), host not in answered, place[host]))
        gone.append(worst)
        del against[worst]
        for others in against.values():
            others.discard(worst)
    return tuple(sorted(gone)) if 2 * len(gone) <= len(place) else ()
