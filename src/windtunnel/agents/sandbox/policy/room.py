"""What room sandboxes may take: all of them of the host's disk, and each of the pool.

The host's disk keeps a reserve, below which nothing is made that would stay; what sandboxes write goes into
the pool, whose bytes are taken from the disk when it is made.
A sandbox of which nobody said how much it may write gets a bound that fits the pool: one that runs wild must
not stop the others.
"""

from __future__ import annotations

from dataclasses import dataclass

from windtunnel.agents.sandbox.model import Asks

LEAST_RESERVE = 1 << 30
RESERVED_SHARE = 0.05
USUAL = 10 << 30
MOST_SHARE = 0.8
"""Of the pool, for one sandbox."""
HOSTS_CHOICE = 0
"""As a limit: what the host gives."""


@dataclass(frozen=True)
class Room(Asks["Admission"]):
    """Something is to be made that takes room. ``free`` and ``total``: bytes of the host's disk."""

    what: str
    free: int
    total: int


@dataclass(frozen=True)
class Admission:
    """``refused``: why not, in words; empty: it may be made."""

    refused: str = ""


def reserve(total: int) -> int:
    """Bytes of a host's disk that sandboxes leave free."""
    return max(LEAST_RESERVE, int(total * RESERVED_SHARE))


def admitted(room: Room) -> Admission:
    kept = reserve(room.total)
    if room.free >= kept:
        return Admission()
    return Admission(
        f"{room.what} is refused, because {room.free >> 20} MiB of the host's disk are free and {kept >> 20} "
        "are its reserve: 'windtunnel sandbox rm' of a sandbox or 'windtunnel sandbox gc' frees some"
    )


def disk_limit(requested: int | None, pool: int, *, bounded: bool) -> int | None:
    """Bytes that a sandbox may use beyond its image, in a pool of so many; None for no bound."""
    if requested != HOSTS_CHOICE:
        return requested
    return min(USUAL, int(pool * MOST_SHARE)) if bounded else None
