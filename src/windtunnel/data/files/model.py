"""What is said about files: operations, their results, who the hosts are. Plain data, sent and logged as it
is."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum
from typing import Literal

from windtunnel.base.errors import HostError

Mode = Literal["host", "serial", "linefs"]
MODES: tuple[Mode, ...] = ("host", "serial", "linefs")
CHUNK = 4 << 20
"""Bytes that a stage takes at once (LineFS: 1,024 blocks of 4 KiB)."""
WRITE_MOST = 1 << 18
"""Bytes of one write in the log; a longer one is several."""
LEAST_RING = 4 << 20


class FilesError(HostError):
    """The files cannot be reached, or fewer hosts hold them than were asked for."""


class NotPrimary(FilesError):
    """Another host is the primary, or will be."""


class TooFew(FilesError):
    """Fewer hosts hold the files than an fsync needs."""


ERRORS = (NotPrimary, TooFew, FilesError)
"""What calls raise besides OSError, the particular ones first."""


class OperationKind(IntEnum):
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
    """One change. ``client`` and ``request`` number it: what is sent again is performed once. ``offset``: of
    a write, or the size of a truncation. ``time``: of it, seconds since the epoch."""

    kind: OperationKind
    path: str
    target: str = ""
    offset: int = 0
    time: float = 0.0
    client: int = 0
    request: int = 0


@dataclass(frozen=True)
class OperationResult:
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
class FilesHost:
    """``domain``: what fails with it (a rack). Addresses of its three processes: for clients, for the other
    hosts, and of its engine of `data.group`."""

    name: str
    domain: str
    server: str
    nic: str
    engine: str


@dataclass(frozen=True)
class ChainMembership:
    """Who holds the files in an epoch: the first of the chain is the primary, the others follow in the order
    in which what is written reaches them. ``copies``: hosts that were asked for."""

    epoch: int
    copies: int
    chain: tuple[FilesHost, ...]


@dataclass(frozen=True)
class Status:
    """Of one host. ``leads``: it is the primary, and does what one does; ``able``: its
    server answers. ``written``: the sequence number behind
    the last whole frame of its log; ``synced``: behind what is on the disks of all; ``published``: in its own
    files; ``trim``: in those of all. ``wait``: writers are to. ``promise``: whether an fsync may return.
    ``stalled``: why something does not get on, or "". ``seconds``: CPU time of each stage."""

    name: str
    epoch: int
    chain: tuple[str, ...]
    copies: int
    leads: bool
    able: bool
    written: int
    synced: int
    published: Position
    trim: Position
    wait: bool = False
    promise: bool = False
    stalled: str = ""
    seconds: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class FilesHostSpec:
    """What the processes of a host are started with. ``listen``: an IPv4 address and a port, of which two
    more follow; "" for Unix sockets in ``folder``. ``secret``: a file. ``cores``: set aside for the pipeline
    and the engine. ``copies``: hosts that are to hold the files; ``least``: without which no fsync
    returns."""

    name: str
    folder: str
    store: str
    secret: str
    domain: str = ""
    listen: str = ""
    mode: Mode = "linefs"
    copies: int = 3
    least: int = 2
    ring: int = 64 << 20
    cores: tuple[int, ...] = ()

    @property
    def host(self) -> FilesHost:
        """The addresses of its processes."""
        if self.listen:
            address, _, port = self.listen.rpartition(":")
            server, nic, engine = (f"tcp:{address}:{int(port) + number}" for number in range(3))
        else:
            server, nic, engine = (f"unix:{self.folder}/{name}" for name in ("server", "nic", "engine"))
        return FilesHost(self.name, self.domain or self.name, server, nic, engine)
