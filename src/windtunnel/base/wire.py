"""Messages between the processes of a job: a JSON object and, where there are any, raw bytes after it.

A frame is two big-endian lengths (32 bit: the JSON text, 64 bit: the bytes), the text, the bytes. Every
receive is bounded by the socket's timeout; what a peer may ask a reader to hold is bounded too.
"""

from __future__ import annotations

import json
import socket
import struct
from typing import Any

from typing_extensions import Buffer

_HEAD = struct.Struct("!IQ")
LARGEST_TEXT = 64 << 20


class WireError(ConnectionError):
    """The peer is gone, too slow, or speaks something else."""


def send(sock: socket.socket, message: dict[str, Any], data: Buffer | None = None) -> None:
    """One frame. Not safe from two threads at once: hold a lock.

    Raises:
        OSError: the connection is gone, or its timeout passed.
    """
    text = json.dumps(message, separators=(",", ":")).encode()
    view = memoryview(data).cast("B") if data is not None else memoryview(b"")
    sock.sendall(_HEAD.pack(len(text), len(view)) + text)
    if len(view):
        sock.sendall(view)


def receive(sock: socket.socket) -> tuple[dict[str, Any], int]:
    """The next message, and how many raw bytes follow it: read them with `fill` or drop them with `skip`.

    Raises:
        WireError: the peer closed, or sent no frame of ours.
        TimeoutError: nothing came within the socket's timeout.
    """
    head = bytearray(_HEAD.size)
    fill(sock, memoryview(head))
    length, following = _HEAD.unpack(head)
    if length > LARGEST_TEXT:
        raise WireError(f"a message of {length} bytes is longer than {LARGEST_TEXT}")
    text = bytearray(length)
    fill(sock, memoryview(text))
    try:
        message = json.loads(text)
    except ValueError as error:
        raise WireError("a message is not JSON") from error
    if not isinstance(message, dict):
        raise WireError("a message is not a JSON object")
    return message, following


def fill(sock: socket.socket, view: memoryview) -> None:
    """Exactly ``len(view)`` bytes into ``view``.

    Raises:
        WireError: the peer closed before.
    """
    at = 0
    while at < len(view):
        count = sock.recv_into(view[at:])
        if count == 0:
            raise WireError("the peer closed the connection")
        at += count


def skip(sock: socket.socket, count: int) -> None:
    """Read and drop ``count`` bytes."""
    scratch = memoryview(bytearray(min(count, 1 << 20)))
    while count:
        part = scratch[: min(count, len(scratch))]
        fill(sock, part)
        count -= len(part)


def connect(address: str, timeout: float) -> socket.socket:
    """A connection to "host:port" or to "unix:/path", with ``timeout`` on it, without delay of small
    messages.

    Raises:
        OSError: nobody listens there within ``timeout``.
    """
    if address.startswith("unix:"):
        sock = socket.socket(socket.AF_UNIX)
        sock.settimeout(timeout)
        try:
            sock.connect(address.removeprefix("unix:"))
        except OSError:
            sock.close()
            raise
        return sock
    host, _, port = address.rpartition(":")
    sock = socket.create_connection((host, int(port)), timeout=timeout)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return sock
