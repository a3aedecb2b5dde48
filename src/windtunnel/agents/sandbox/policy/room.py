"""What room sandboxes may take: all of them of the host's disk, and each of the pool.

The host's disk keeps a reserve, below which nothing is made that would stay, and nothing more is written.
A sandbox of which nobody said how much it may write gets a bound that fits the pool: one that runs wild must
not stop the others.
"""

from __future__ import annotations

from dataclasses import dataclass

LEAST_RESERVE = 1 << 30
RESERVED_SHARE = 0.05
SLACK = 0.005
"""Of the reserve: too little to say that anything is left."""
BALLAST, COMMANDS = 4 << 20, 6 << 20
"""Bytes that a channel holds from its beginning, and that it needs beside: for commands to go on, and to
begin anew while the kernel still frees what it was."""
CHANNEL = BALLAST + COMMANDS
LEAST_NEAR = 4 << 30
"""More than sandboxes write from one look at the disk to the next."""
USUAL = 10 << 30
MOST_SHARE = 0.8
"""Of the pool, for one sandbox."""
HOSTS_CHOICE = 0
"""As a limit: what the host gives."""


@dataclass(frozen=True)
class Room:
    """Something is to be made that takes room. ``free`` and ``total``: bytes of the host's disk."""

    what: str
    free: int
    total: int


@dataclass(frozen=True)
class Admission:
    """``refused``: why not, in words; empty: it may be made."""

    refused: str = ""


@dataclass(frozen=True)
class Growth:
    """Sandboxes write, so many of them. ``free`` and ``total``: bytes of the host's disk; ``near``: what was
    decided of that at the last look."""

    free: int
    total: int
    boxes: int
    near: bool = False


@dataclass(frozen=True)
class Ceiling:
    """``left``: bytes that all roots may still write, together; ``channels``: what the channels may hold in
    any case, so that commands go on; ``near``: whether the disk is to be watched closely; ``refused``: why
    nothing more is written, in words, or empty."""

    left: int
    channels: int
    near: bool
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


def ceiling(growth: Growth) -> Ceiling:
    kept = reserve(growth.total)
    slack = int(kept * SLACK)
    left = max(0, growth.free - kept - growth.boxes * COMMANDS)
    full = Room("what sandboxes write", min(growth.free, kept - 1), growth.total)
    refused = admitted(full).refused if left <= slack else ""
    near = max(kept, LEAST_NEAR) * (1.25 if growth.near else 1)
    return Ceiling(left, growth.boxes * CHANNEL, left < near, refused)


def disk_limit(asked: int | None, pool: int, *, bounded: bool) -> int | None:
    """Bytes that a sandbox may use beyond its image, in a pool of so many; None for no bound."""
    if asked != HOSTS_CHOICE:
        return asked
    return min(USUAL, int(pool * MOST_SHARE)) if bounded else None
