"""What is said about files: operations, their results, who the hosts are. Plain data, sent and logged as it is."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum
from typing import Literal

from windtunnel.base.errors import HostError

Mode = Literal["host", "serial", "linefs"]
MODES: tuple[Mode, ...] = ("host", "serial", "linefs")
CHUNK = 4 << 20
"""Bytes that a stage takes at once (LineFS: 1,024 blocks of 4 KiB)."""
WRITE_MOST = 1 << 20
"""Bytes of one write in the log; a longer one is several."""


class FilesError(HostError):
    """The files cannot be reached, or fewer hosts hold them than were asked for."""


class Kind(IntEnum):
    """Of an operation. A write without an offset (-1) appends."""

    CREATE = 1
    WRITE = 2
    TRUNCATE = 3
    RENAME = 4
    UNLINK = 5
    MKDIR = 6
    RMDIR = 7


@dataclass(frozen=True)
class Position:
    """A point of the log: the next frame there has ``sequence``, begins at the logical ``offset``, and is of
    ``epoch`` or a later one: what an earlier primary left behind this point is none of the log."""

    sequence: int = 1
    offset: int = 0
    epoch: int = 0


@dataclass(frozen=True)
class Operation:
    """One change. ``client`` and ``request`` number it: what is sent again is performed once. ``offset``: of a
    write, or the size of a truncation. ``time``: of it, seconds since the epoch."""

    kind: Kind
    path: str
    target: str = ""
    offset: int = 0
    time: float = 0.0
    client: int = 0
    request: int = 0


@dataclass(frozen=True)
class Done:
    """``sequence``: of the operation in the log. ``synced``: up to which all copies are on disks. ``offset``:
    where a write began."""

    sequence: int
    synced: int
    offset: int = 0


@dataclass(frozen=True)
class Stat:
    """Of a file or a folder; ``size`` in bytes, ``modified`` in seconds since the epoch."""

    inode: int
    folder: bool
    size: int
    modified: float


@dataclass(frozen=True)
class Host:
    """``domain``: what fails with it (a rack). Addresses of its three processes: for clients, for the other
    hosts, and of its engine of `data.group`."""

    name: str
    domain: str
    server: str
    nic: str
    engine: str


@dataclass(frozen=True)
class Membership:
    """Who holds the files in an epoch: the first of the chain is the primary, the others follow in the order
    in which what is written reaches them. ``copies``: hosts that were asked for."""

    epoch: int
    copies: int
    chain: tuple[Host, ...]


@dataclass(frozen=True)
class Status:
    """Of one host. ``written``: the sequence number behind the last whole frame of its log; ``synced``: behind
    what is on the disks of all; ``published``: in its own files; ``trim``: in those of all. ``stalled``: why
    nothing gets on, or "". ``seconds``: CPU time of each stage."""

    name: str
    epoch: int
    chain: tuple[str, ...]
    copies: int
    written: int
    synced: int
    published: Position
    trim: Position
    wait: bool = False
    stalled: str = ""
    seconds: dict[str, float] = field(default_factory=dict)
