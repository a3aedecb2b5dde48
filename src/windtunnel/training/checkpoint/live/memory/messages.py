"""What ranks of a host call of its memory service (`base.rpc`), and what peers ask of it on their sockets.

Peers send requests with their answers, and the bytes of slots. A copy that is pushed (PUT) comes in chunks,
each behind its length: a length of 0 says that the sender waits for its window and lives. A copy that is read
(GET) comes as it lies in the slot. Bulk bytes never become Python objects: they go from the mapped slot on
one side (``sendfile`` takes tmpfs apart into pages of 4 KiB, which costs both sides more than twice the time)
into that on the other, hashed as they arrive.
"""

from __future__ import annotations

import dataclasses
import socket
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import xxhash

from windtunnel.base import wire
from windtunnel.base.plain import from_plain
from windtunnel.base.schema import Table, count, each, fields, flag, integer, maybe, text
from windtunnel.training.checkpoint.live import slot as slots
from windtunnel.training.checkpoint.live.slot import CopyError
from windtunnel.training.checkpoint.model import Copy, Shard
from windtunnel.training.checkpoint.policy.placement import Kind
from windtunnel.training.checkpoint.settings import Mode

_CHECKS = {"str": text, "int": count, "bool": flag}
_SHARD = fields(**{field.name: _CHECKS[str(field.type)] for field in dataclasses.fields(Shard)})

FROM_PEER: Table = {
    "prepare": fields(generation=count, shard=text, world=count, capacity=count),
    "layout?": fields(digest=text),
    "put": fields(
        generation=count,
        committed=integer,
        base=integer,
        keeps=each(integer),
        capacity=count,
        shard=_SHARD,
    ),
    "get": fields(shard=text, step=integer, world=maybe(count)),
}
"""Every request of a peer with its fields: what is not in here is refused (`base.schema`)."""


class StaleGeneration(Exception):
    """The service is in another generation than who asks; one of both will hear of the newer one."""


ERRORS = (StaleGeneration, CopyError)
"""What a rank may get beside a `UserError`."""


@dataclass(frozen=True)
class Caller:
    """Who calls: a rank of the job as it was in ``generation``."""

    rank: int
    generation: int


@dataclass(frozen=True)
class Pace:
    """In mode "idle" only what windows leave room for is sent. ``chunk``: bytes of the largest chunk (one
    sub-buffer of the staging memory). ``bandwidth``: bytes/s; None: as fast as it goes, and in mode idle as
    measured. ``startup``: seconds that each chunk costs beside."""

    mode: Mode = "concurrent"
    chunk: int = 4 << 20
    bandwidth: float | None = None
    startup: float = 0.0


@dataclass(frozen=True)
class Reservation:
    """Slots for a ``shard`` of ``nbytes`` bytes that has the layout ``digest``, here and with those who hold
    its ``copies`` (the one here counted; 1: it is sent nowhere). ``kind``, ``domains``: as in
    `placement.place`."""

    shard: str
    nbytes: int
    digest: str
    copies: int = 2
    kind: Kind = "mixed"
    domains: tuple[str, ...] = ()
    pace: Pace = Pace()


@dataclass(frozen=True)
class Reserved:
    """The files of the slots, and the memory that all shards take, in words."""

    paths: list[str]
    needs: str


@dataclass(frozen=True)
class Welcome:
    """The file with the newest committed step, and what peers want to see that one knows."""

    board: str
    secret: str
    tls: tuple[str, ...]


class Ranks(Protocol):
    """A call raises StaleGeneration where the service is in another generation than the caller."""

    def hello(self, caller: Caller) -> Welcome: ...

    def reserve(self, caller: Caller, reservation: Reservation, layout: bytes) -> Reserved: ...

    def saved(self, caller: Caller, shard: str, slot: int, step: int) -> int: ...

    def restored(self, caller: Caller, step: int, course: int) -> None: ...

    def wait(self, caller: Caller, step: int, seconds: float) -> bool: ...

    def window(self, caller: Caller, until: float) -> None: ...

    def persist(self, caller: Caller, step: int, url: str, keep: int) -> None: ...

    def copies(self) -> list[Copy]: ...

    def locate(self, shard: str, step: int, world: int | None, place: int | None) -> str:
        """The file of a copy at this host (``place`` None: this one), or the address of its holder."""

    def layout(self, digest: str) -> bytes: ...

    def addresses(self) -> list[str]:
        """Of all hosts' services."""

    def traffic(self) -> list[tuple[int, int, int]]:
        """By step: bytes that were sent, and how many of them within windows."""


LENGTH = struct.Struct("!I")
HOT = 512 << 10
"""Bytes that are received and then hashed, while the processor's cache holds them."""
LARGEST = 256 << 20
"""Raw bytes that may follow a request: a layout."""

Message = dict[str, Any]
Handler = Callable[[socket.socket, Message, bytes], Message | None]
"""Gets the connection, a request, and the raw bytes that came with it; returns the answer (None: it has
answered)."""


def service(address: str) -> str:
    """The name of the memory service at ``address`` (`handshake`)."""
    return f"memory {address}"


def ask(sock: socket.socket, message: dict[str, Any], data: bytes | None = None) -> dict[str, Any]:
    """Send a request and receive its answer, which has no raw bytes.

    Raises:
        OSError: the connection ended, or its timeout passed.
    """
    wire.send(sock, message, data)
    answer, following = wire.receive(sock)
    wire.skip(sock, following)
    return answer


def send_data(sock: socket.socket, data: memoryview) -> None:
    """A slot's bytes, block by block: the socket's timeout is for each of them, not for all.

    Raises:
        OSError: the connection ended, or its timeout passed.
    """
    for at in range(0, len(data), slots.BLOCK):
        sock.sendall(data[at : at + slots.BLOCK])


def receive_chunks(sock: socket.socket, into: memoryview) -> str:
    """Fill ``into`` with chunks, up to its end; the xxh3_128 of what came.

    Raises:
        OSError: the connection ended, or its timeout passed. WireError: more bytes than announced.
    """
    hasher = xxhash.xxh3_128()
    head = bytearray(LENGTH.size)
    at = hashed = 0
    while at < len(into):
        wire.fill(sock, memoryview(head))
        (length,) = LENGTH.unpack(head)
        if length > len(into) - at:
            raise wire.WireError(f"a chunk of {length} bytes, {len(into) - at} are expected")
        end = at + length
        while at < end:
            part = into[at : min(end, at + HOT)]
            wire.fill(sock, part)
            at += len(part)
            if at - hashed >= HOT or at == len(into):
                hasher.update(into[hashed:at])
                hashed = at
    return hasher.hexdigest()


def read_copy(sock: socket.socket, name: str, step: int, world: int | None, into: memoryview) -> str:
    """GET: a copy of the shard ``name``, verified; its checksum. It comes outside of any frame, so after an
    error the connection is of no use any more.

    Raises:
        CopyError: there is none, of another length than ``into`` has, or not what its checksum says.
        OSError: the connection ended, or its timeout passed.
    """
    answer = ask(sock, {"op": "get", "shard": name, "step": step, "world": world})
    if "error" in answer:
        raise CopyError(f"{answer['text']}")
    shard, what = from_plain(Shard, answer), f"{name} of step {step}"
    if shard.nbytes != len(into):
        raise CopyError(f"{what} has {shard.nbytes} bytes, {len(into)} are expected")
    hasher = xxhash.xxh3_128()
    for at in range(0, len(into), slots.BLOCK):
        part = into[at : at + slots.BLOCK]
        wire.fill(sock, part)
        hasher.update(part)
    checksum = hasher.hexdigest()
    if checksum != shard.checksum:
        raise CopyError(f"the checksum of {what} does not match its data")
    return checksum


def layout(sock: socket.socket, digest: str) -> bytes:
    """The layout with this digest, from the service at the other end.

    Raises:
        CopyError: it is not there, or not what its digest says. OSError: the connection.
    """
    wire.send(sock, {"op": "layout?", "digest": digest})
    answer, following = wire.receive(sock)
    if "error" in answer:
        wire.skip(sock, following)
        raise CopyError(f"{answer['text']}")
    if following > LARGEST:
        raise wire.WireError(f"a layout of {following} bytes, more than {LARGEST}")
    blob = bytes(wire.rest(sock, following))
    if xxhash.xxh3_128_hexdigest(blob) != digest:
        raise CopyError(f"layout {digest} is not what its digest says")
    return blob
