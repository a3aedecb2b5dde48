"""Datagrams many at a time, from compiled code: recvmmsg(2), sendmmsg(2), poll(2), and the clock.

A `DatagramBatch` is memory for so many datagrams with their addresses. Compiled loops use `receive`, `send`,
`wait` and `now` on it without the interpreter; a test or a plain program may call them, too. IPv4 only.
"""

from __future__ import annotations

import errno
import socket
import struct
from typing import Any, NamedTuple

import numpy as np
from numba import carray, types
from numpy.typing import NDArray

from windtunnel.base.compiled import jit

_ADDRESS = types.uint64
_poll = types.ExternalFunction("poll", types.int32(_ADDRESS, types.uint64, types.int32))
_receive = types.ExternalFunction(
    "recvmmsg", types.int32(types.int32, _ADDRESS, types.uint32, types.int32, _ADDRESS)
)
_send = types.ExternalFunction("sendmmsg", types.int32(types.int32, _ADDRESS, types.uint32, types.int32))
_clock = types.ExternalFunction("clock_gettime", types.int32(types.int32, _ADDRESS))
_errno = types.ExternalFunction("__errno_location", types.CPointer(types.int32)())
_AT_ONCE, _IN, _OUT = 0x40, 0x1, 0x4
_AGAIN = errno.EAGAIN
ADDRESS = np.dtype([("word", "u8"), ("zero", "u8")])
"""A sockaddr_in: family, port and address in one word."""
MESSAGE = np.dtype(
    [("name", "u8"), ("name_size", "u4"), ("pad1", "u4"), ("vector", "u8"), ("vectors", "u8"),
     ("control", "u8"), ("control_size", "u8"), ("flags", "i4"), ("pad2", "i4"), ("size", "u4"),
     ("pad3", "u4")]
)  # fmt: skip
"""A struct mmsghdr of 64-bit Linux; ``size``: what came."""
VECTOR = np.dtype([("base", "u8"), ("size", "u8")])
Array = NDArray[Any]


class DatagramBatch(NamedTuple):
    """``words``: for the poll, the clock, and `send`."""

    messages: Array
    vectors: Array
    addresses: Array
    words: NDArray[np.int64]


def batch(count: int, packets: Array | None = None) -> DatagramBatch:
    """For ``count`` datagrams; with ``packets`` (as many records) they are received into these."""
    buffers = DatagramBatch(
        np.zeros(count, MESSAGE), np.zeros(count, VECTOR), np.zeros(count, ADDRESS), np.zeros(4, np.int64)
    )
    buffers.messages["vector"] = buffers.vectors.ctypes.data + VECTOR.itemsize * np.arange(count)
    buffers.messages["vectors"] = 1
    if packets is not None:
        buffers.messages["name"] = buffers.addresses.ctypes.data + ADDRESS.itemsize * np.arange(count)
        buffers.vectors["base"] = packets.ctypes.data + packets.dtype.itemsize * np.arange(count)
        buffers.vectors["size"] = packets.dtype.itemsize
    return buffers


def word(address: tuple[str, int]) -> int:
    """A host's IPv4 address and port as `ADDRESS` has them."""
    packed = struct.pack("=H", socket.AF_INET) + struct.pack(">H", address[1])
    return int.from_bytes(packed + socket.inet_aton(socket.gethostbyname(address[0])), "little")


def address(of: int) -> tuple[str, int]:
    """And back."""
    packed = int(of).to_bytes(8, "little")
    return socket.inet_ntoa(packed[4:]), int(struct.unpack(">H", packed[2:4])[0])


@jit
def now(own: DatagramBatch) -> int:
    """Nanoseconds of the monotonic clock, as time.monotonic_ns()."""
    _clock(np.int32(1), np.uint64(own.words.ctypes.data))
    return own.words[0] * 1_000_000_000 + own.words[1]  # type: ignore[no-any-return]


@jit
def wait(own: DatagramBatch, fd: int, writes: bool, milliseconds: int) -> None:
    """Until there is something to receive (or, with ``writes``, room to send), or the time is over."""
    own.words[2] = fd | (_OUT if writes else _IN) << 32
    _poll(np.uint64(own.words.ctypes.data + 16), np.uint64(1), np.int32(milliseconds))


@jit
def receive(own: DatagramBatch, fd: int) -> int:
    """How many datagrams there were; minus errno for none."""
    for place in range(len(own.messages)):
        own.messages[place].name_size = 16
    received = _receive(
        np.int32(fd), np.uint64(own.messages.ctypes.data), np.uint32(len(own.messages)), np.int32(_AT_ONCE),
        np.uint64(0),
    )  # fmt: skip
    return received if received >= 0 else -carray(_errno(), 1)[0]  # type: ignore[no-any-return]


@jit
def send(own: DatagramBatch, fd: int, first: int, last: int) -> int:
    """Send those from ``first`` to before ``last``: how many were sent at once; minus errno for none."""
    where = own.messages.ctypes.data + first * 64
    count = _send(np.int32(fd), np.uint64(where), np.uint32(last - first), np.int32(_AT_ONCE))
    return count if count >= 0 else -carray(_errno(), 1)[0]  # type: ignore[no-any-return]


@jit
def put(own: DatagramBatch, place: int, base: int, size: int, name: int) -> None:
    """Datagram number ``place`` is so many bytes at ``base``, to the `ADDRESS` at ``name`` (0: of a connected
    socket)."""
    own.vectors[place].base = base
    own.vectors[place].size = size
    own.messages[place].name = name
    own.messages[place].name_size = 16 if name else 0


@jit
def send_all(own: DatagramBatch, fd: int, count: int) -> None:
    """Send the first ``count``. What the kernel has no room for within a tenth of a second, and what nobody
    is there for, is lost, as datagrams are."""
    first, tries = 0, 0
    while first < count:
        sent = send(own, fd, first, min(count, first + 512))
        if sent > 0:
            first, tries = first + sent, 0
        elif sent == -_AGAIN and tries < 10:
            wait(own, fd, True, 10)
            tries += 1
        else:
            first += 1
