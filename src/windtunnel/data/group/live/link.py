"""Frames of a group's operations, and the connections that carry them.

A frame is a header of fixed size, one word for each result of a gCAS so far, and the payload:

    magic, kind, ringed, results | mask, length | epoch, sequence, a, b, c | words | payload | tag

Both ends have shown each other that they know the group's secret (`base.handshake`), and the tag (`base.wire`,
HMAC-SHA256) covers all of the frame and its place in the stream: what is torn, flipped, repeated or of a
stranger ends the connection.

On one host a payload does not pass a socket. Who takes operations makes a *ring* in memory, a slot for each
operation that may be in flight, and hands it over with the connection: the predecessor writes the payload
there by itself (a one-sided WRITE) and sends the descriptor. The region is changed by its own engine only: a
predecessor that was frozen and goes on in an older epoch writes to a ring that nobody reads any more.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import socket
import struct
from enum import IntEnum
from typing import NamedTuple

from windtunnel.base import handshake, wire
from windtunnel.base.keys import Keys
from windtunnel.base.wire import TAG, Session, WireError
from windtunnel.data.group.policy import SLOT

MAGIC, SERVICE = b"wtg1", "group"
HEAD = struct.Struct("<4sB?HIIQQQQQ")
WORD = struct.Struct("<Q")
STANDING = struct.Struct("<QQQ??QQ")
"""What a member answers when it is fenced: fenced, epoch, sequence, steady, torn, size, room."""
CHUNK, DIGEST = 1 << 20, 32
"""Bytes that one digest is of, and bytes of it."""


class Kind(IntEnum):
    """``WRITE`` to ``FLUSHED`` go along the chain, ``ACK`` to ``STALE`` to the coordinator; the others are
    asked of one engine, which says ``ANSWER``, ``FAILED`` or ``STALE``."""

    WRITE, MEMCPY, CAS, FLUSH, FLUSHED = range(1, 6)
    ACK, BROKEN, LOST, STALE, ANSWER, FAILED = range(16, 22)
    FENCE, STATUS, JOIN, CHAIN, READ, HASH, PATCH = range(32, 39)


class Frame(NamedTuple):
    """``a``, ``b``, ``c``: what the kind needs (offsets, lengths, words). ``mask``: the execute map."""

    kind: int
    epoch: int
    sequence: int
    a: int = 0
    b: int = 0
    c: int = 0
    mask: int = 0
    results: bytes = b""
    payload: bytes = b""


class Link:
    """One end of a connection. ``session``: None while the peer is a stranger; ``ring``: into which payloads
    are written; ``slots``: out of which they are read; ``window``: slots of either."""

    def __init__(self, sock: socket.socket, session: Session | None = None) -> None:
        self.sock, self.session = sock, session
        self.inbox, self.outbox = bytearray(), bytearray()
        self.ring: mmap.mmap | None = None
        self.slots: mmap.mmap | None = None
        self.window = 1
        self.local = sock.family == socket.AF_UNIX

    def pack(self, frame: Frame) -> bytes:
        """The bytes of ``frame``; its payload lies in the ring, where there is one."""
        payload, length = frame.payload, len(frame.payload)
        ringed = self.ring is not None and length > 0
        head = HEAD.pack(
            MAGIC, frame.kind, ringed, len(frame.results) // WORD.size, frame.mask, length, *frame[1:6]
        ) + frame.results  # fmt: skip
        assert self.session is not None
        tag = self.session.seal(head, payload)
        if ringed:
            assert self.ring is not None
            at = frame.sequence % self.window * SLOT
            self.ring[at : at + length] = payload
            return head + tag
        return b"".join((head, payload, tag))

    def parse(self) -> Frame | None:
        """The next frame of what has come; None while it is not whole.

        Raises:
            WireError: it is none of ours.
        """
        box = self.inbox
        if len(box) < HEAD.size:
            return None
        magic, kind, ringed, results, mask, length, *numbers = HEAD.unpack_from(box)
        if magic != MAGIC or length > SLOT or (ringed and self.slots is None):
            raise WireError("what came is no frame of a group")
        words = HEAD.size + results * WORD.size
        end = words + (0 if ringed else length)
        if len(box) < end + TAG:
            return None
        if ringed:
            assert self.slots is not None
            at = numbers[1] % self.window * SLOT
            payload = self.slots[at : at + length]
        else:
            payload = bytes(box[words:end])
        assert self.session is not None
        head = bytes(box[:words])
        self.session.verify(box[end : end + TAG], head, payload)
        del box[: end + TAG]
        epoch, sequence, a, b, c = numbers
        return Frame(kind, epoch, sequence, a, b, c, mask, head[HEAD.size :], payload)

    def receive(self) -> Frame:
        """The next frame, waited for as long as the socket's timeout says.

        Raises:
            OSError: the peer is gone, too slow, or speaks something else.
        """
        while (frame := self.parse()) is None:
            part = self.sock.recv(1 << 18)
            if not part:
                raise WireError("the peer closed the connection")
            self.inbox += part
        return frame

    def join(self, epoch: int, window: int) -> None:
        """Become the predecessor of the engine at the other end. Raises `Refused` and OSError."""
        self.window = window
        self.sock.sendall(self.pack(Frame(Kind.JOIN, epoch, 0, window)))
        held: list[int] = []
        while (answer := self.parse()) is None:
            part, files, _, _ = socket.recv_fds(self.sock, 4096, 1)
            held += files
            if not part:
                raise WireError("the peer closed the connection")
            self.inbox += part
        for file in held:
            self.ring = mmap.mmap(file, window * SLOT)
            os.close(file)
        if answer.kind != Kind.ANSWER:
            raise Refused(answer)

    def close(self) -> None:
        """Both directions end, for whoever waits in another thread too."""
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)
        self.sock.close()


class Refused(WireError):
    """An engine answered that it does not do what was asked. ``frame``: how it said so."""

    def __init__(self, frame: Frame) -> None:
        super().__init__(frame.payload.decode() or f"epoch {frame.a} is the newest")
        self.frame = frame


def connect(address: str, secret: bytes, patience: float) -> Link:
    """A connection to the engine at ``address``, with ``patience`` seconds as its timeout.

    Raises:
        handshake.Refused: whoever listens there does not know the secret.
        OSError: nobody does within ``patience`` seconds.
    """
    sock = wire.connect(address, patience)
    try:
        client = handshake.Client(Keys(secret), SERVICE)
        sock.sendall(client.hello)
        answer = bytearray(client.ANSWER)
        wire.fill(sock, memoryview(answer))
        proof, session = client.prove(bytes(answer))
        sock.sendall(proof)
    except BaseException:
        sock.close()
        raise
    return Link(sock, session)


def local_ring(window: int) -> tuple[mmap.mmap, int]:
    """Slots for ``window`` operations, and the descriptor to hand over."""
    file = os.memfd_create("group-ring", os.MFD_CLOEXEC)
    os.ftruncate(file, window * SLOT)
    return mmap.mmap(file, window * SLOT), file
