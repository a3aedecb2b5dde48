"""The bytes of a slot on a socket.

A copy that is pushed (PUT) comes in chunks, each behind its length: a length of 0 says that the sender waits
for its window and lives. A copy that is read (GET) comes as it lies in the file. Bulk bytes never become
Python objects: ``sendfile`` on one side, ``recv_into`` the mapped slot on the other, hashed as they arrive.
"""

from __future__ import annotations

import socket
import struct
from typing import Any, BinaryIO

import xxhash

from windtunnel.base import wire
from windtunnel.training.checkpoint.live import slot as slots
from windtunnel.training.checkpoint.live.slot import CopyError

LENGTH = struct.Struct("!I")


def connect(address: str, timeout: float, outgoing: str = "") -> socket.socket:
    """A connection to "host:port" or "unix:/path". ``outgoing``: the own address to use (which chooses the
    network card).

    Raises:
        OSError: nobody listens there within ``timeout``.
    """
    if not outgoing or address.startswith("unix:"):
        return wire.connect(address, timeout)
    host, _, port = address.rpartition(":")
    sock = socket.create_connection((host, int(port)), timeout, source_address=(outgoing, 0))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return sock


def ask(sock: socket.socket, message: dict[str, Any], data: bytes | None = None) -> dict[str, Any]:
    """Send a request and receive its answer, which has no raw bytes.

    Raises:
        OSError: the connection ended, or its timeout passed.
    """
    wire.send(sock, message, data)
    answer, following = wire.receive(sock)
    wire.skip(sock, following)
    return answer


def send_range(sock: socket.socket, file: BinaryIO, offset: int, count: int) -> None:
    """Bytes ``offset`` .. ``offset + count`` of a slot's data, from the kernel's copy of the file.

    Raises:
        OSError: the connection ended, or its timeout passed, or the file is shorter.
    """
    sent = sock.sendfile(file, slots.HEADER + offset, count) if count else 0
    if sent != count:
        raise wire.WireError("a slot is shorter than its header says")


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
            part = into[at : min(end, at + slots.BLOCK)]
            wire.fill(sock, part)
            at += len(part)
            if at - hashed >= slots.BLOCK or at == len(into):
                hasher.update(into[hashed:at])
                hashed = at
    return hasher.hexdigest()


def ask_copy(sock: socket.socket, shard: str, step: int, world: int | None = None) -> dict[str, Any]:
    """GET: the header of a copy; its ``nbytes`` bytes follow, outside of any frame, for `receive_copy`.

    Raises:
        CopyError: there is none. OSError: the connection ended, or its timeout passed.
    """
    answer = ask(sock, {"op": "get", "shard": shard, "step": step, "world": world})
    if "error" in answer:
        raise CopyError(f"{answer['text']}")
    return answer


def receive_copy(sock: socket.socket, answer: dict[str, Any], into: memoryview) -> str:
    """The data after `ask_copy`, verified; its checksum. After an error the connection is of no use any more.

    Raises:
        CopyError: another length than ``into`` has, or not what its checksum says. OSError: the connection.
    """
    what = f"{answer['shard']} of step {answer['step']}"
    if answer["nbytes"] != len(into):
        raise CopyError(f"{what} has {answer['nbytes']} bytes, {len(into)} are expected")
    hasher = xxhash.xxh3_128()
    for at in range(0, len(into), slots.BLOCK):
        part = into[at : at + slots.BLOCK]
        wire.fill(sock, part)
        hasher.update(part)
    checksum = hasher.hexdigest()
    if checksum != answer["checksum"]:
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
    blob = bytearray(following)
    wire.fill(sock, memoryview(blob))
    if xxhash.xxh3_128_hexdigest(blob) != digest:
        raise CopyError(f"layout {digest} is not what its digest says")
    return bytes(blob)
