"""What there is evidence of: why a process ended, who is silent, and which hosts do not reach each other.

*Last words.* What a program prints before it ends need not have to do with its end. Evidence is the traceback
of an uncaught exception (the interpreter prints it, and ends with status 1), and what argparse says before it
ends with status 2; all else is told as a status or a signal alone.

*Silence* (`Leases`) is the one way in which a part of a job notices that another gives no sign of life: the
supervisor looks so at its hosts, an agent at its trainers and at the supervisor. It counts only while
somebody looks: where nobody did for half a lease it was the looker that was stopped, and signs of life wait
for him to be read. Time is handed in (monotonic seconds). Source: leases (Gray and Cheriton, SOSP 1989).

*Reach.* Ranks that wait for each other in vain do not know for whom. So when a suspicion stays alone every
host is asked which of the others do not answer it at all (`Round`). The kernel answers for a process that is
stopped or hangs: what does not answer is the way between two hosts, or a whole host. As long as the
supervisor reaches both, no lease ends, and no generation with both of them can group.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Container, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
_BEGIN = "Traceback (most recent call last):"
_EXCEPTION = re.compile(r"[A-Za-z_][\w.]*(?:: .*|:)?")
_USAGE = re.compile(r"\S+: error: .*")
# How gloo says that a peer is gone or silent. Its other errors (sizes that differ) are a program's own.
_OF_PEERS = (
    "connection closed",
    "connection reset",
    "connection refused",
    "pair closure",
    "broken pipe",
    "socket",
    "timed out",
    "timeout",
    "connectfullmesh",
    "connect",
)
_SOURCE = re.compile(r"\[/\S+\.(?:cc|cpp|hpp|h):\d+\] ?")
_STORES = ("DistNetworkError", "DistStoreError")


def cause_in(lines: Sequence[str], status: int | None) -> str:
    """Why a process that printed ``lines`` to stderr ended with ``status``: the last traceback with its
    exception, or a word of argparse; "" where neither is there."""
    if status == 2:
        return next((line for line in reversed(lines) if _USAGE.fullmatch(line)), "")
    begins = [index for index, line in enumerate(lines) if line == _BEGIN]
    if status != 1 or not begins:
        return ""
    for index in range(begins[-1] + 1, len(lines)):
        if not lines[index].startswith(" "):
            whole = lines[begins[-1] : index + 1]
            return "\n".join(whole) if _EXCEPTION.fullmatch(lines[index]) else ""
    return ""


def in_short(text: str) -> str:
    """A failure in one line: what ended, and the last line of its traceback. Names of C++ files are left
    out."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if not lines:
        return ""
    head = lines[0]
    for mark in ("Traceback (most recent call last)", 'File "'):
        head = head.partition(mark)[0] if len(lines) > 1 else head
    parts = [head.strip().rstrip(":"), lines[-1]] if len(lines) > 1 else [head]
    short = _SOURCE.sub("", ": ".join(filter(None, parts)))
    return short.partition(". This is typically caused by")[0]


def blames_peers(error: str) -> bool:
    """Whether an exception, or a traceback that ends with it, says that a peer or the store is gone or
    silent: grounds to suspect the peer, not the program that met it."""
    name, _, text = error.strip().rpartition("\n")[2].partition(": ")
    if name.rpartition(".")[2] in _STORES:
        return True
    low = text.lower()
    if name != "RuntimeError" and not name.endswith("BackendError"):
        return False
    return "nccl" in low or "monitoredbarrier" in low or ("gloo" in low and any(p in low for p in _OF_PEERS))


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


class Leases(Generic[K]):
    """Each is silent after ``seconds`` without a sign of life."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.last_signs: dict[K, float] = {}
        self._last_look: float | None = None

    def renew(self, key: K, now: float) -> None:
        """A sign of life."""
        self.last_signs[key] = max(now, self.last_signs.get(key, now))

    def end(self, key: K) -> None:
        """Nobody waits for its signs any more."""
        self.last_signs.pop(key, None)

    def forgive(self, now: float) -> bool:
        """To be called before each look. Whether the looker was stopped: then everybody begins anew."""
        before, self._last_look = self._last_look, now
        if before is None or now - before <= self.seconds / 2:
            return False
        self.last_signs = {key: max(now, sign) for key, sign in self.last_signs.items()}
        return True

    def silent(self, now: float) -> dict[K, float]:
        """Who is, and for how many seconds."""
        return {key: now - sign for key, sign in self.last_signs.items() if now - sign > self.seconds}
