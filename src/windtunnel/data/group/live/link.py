"""Frames of a group's operations, and the connections that carry them.

    magic, kind, ringed, results | mask, length | epoch, sequence, a, b, c | words | payload | tag

Both ends have shown that they know the group's secret (`base.handshake`), and the tag (`base.wire`) covers
all that passes the socket and its place there: what is torn, flipped or repeated ends the connection.

On one host a payload does not pass a socket. Who takes operations makes a *ring* in memory, a slot for each
that may be in flight, and hands it over with the connection: the predecessor writes the payload there by
itself (a one-sided WRITE) and sends the descriptor. No other process writes to a region: a predecessor that
was frozen and goes on in an older epoch writes to a ring that nobody reads any more.
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
from windtunnel.base.wire import TAG, WireError, WireSession
from windtunnel.data.group.policy import SLOT

MAGIC, SERVICE = b"wtg1", "group"
HEAD = struct.Struct("<4sB?HIIQQQQQ")
WORD = struct.Struct("<Q")
STANDING = struct.Struct("<QQQ??QQ")
"""What an engine says of itself: `policy.MemberState` from ``fenced`` on."""
CHUNK, DIGEST = 1 << 20, 32
"""Bytes that one digest is of, and bytes of it."""


class FrameKind(IntEnum):
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


class EngineLink:
    """One end of a connection. ``session``: None while the peer is a stranger; ``ring``: into which payloads
    are written; ``slots``: out of which they are read; ``window``: slots of either."""

    def __init__(self, sock: socket.socket, session: WireSession | None = None) -> None:
        self.sock, self.session, self.window = sock, session, 1
        self.inbox, self.outbox = bytearray(), bytearray()
        self.ring: mmap.mmap | None = None
        self.slots: mmap.mmap | None = None
        self.local = sock.family == socket.AF_UNIX

    def pack(self, frame: Frame) -> bytes:
        """The bytes of ``frame`` to send; its payload lies in the ring, where there is one."""
        kind, epoch, sequence, a, b, c, mask, results, payload = frame
        ringed, words, length = self.ring is not None, len(results) // WORD.size, len(payload)
        head = HEAD.pack(MAGIC, kind, ringed, words, mask, length, epoch, sequence, a, b, c) + results
        assert self.session is not None
        if self.ring is None:
            return b"".join((head, payload, self.session.seal(head, payload)))
        at = sequence % self.window * SLOT
        self.ring[at : at + length] = payload
        return head + self.session.seal(head)

    def parse(self) -> Frame | None:
        """The next frame of what has come; None while it is not whole. Raises WireError: it is none."""
        box = self.inbox
        if len(box) < HEAD.size:
            return None
        magic, kind, ringed, results, mask, length, epoch, sequence, a, b, c = HEAD.unpack_from(box)
        if magic != MAGIC or length > SLOT or ringed != (self.slots is not None):
            raise WireError("what came is no frame of a group")
        words = HEAD.size + results * WORD.size
        end = words if ringed else words + length
        if len(box) < end + TAG:
            return None
        head, payload, tag = bytes(box[:words]), bytes(box[words:end]), box[end : end + TAG]
        assert self.session is not None
        self.session.verify(tag, head, payload)
        del box[: end + TAG]
        if self.slots is not None:
            at = sequence % self.window * SLOT
            payload = self.slots[at : at + length]
        return Frame(kind, epoch, sequence, a, b, c, mask, head[HEAD.size :], payload)

    def receive(self) -> Frame:
        """The next frame, with the ring that comes with it. Raises OSError: the peer is gone, slow or odd."""
        while (frame := self.parse()) is None:
            part, files, _, _ = socket.recv_fds(self.sock, 1 << 18, 1)
            for file in files:
                self.ring = mmap.mmap(file, self.window * SLOT)
                os.close(file)
            if not part:
                raise WireError("the peer closed the connection")
            self.inbox += part
        return frame

    def join(self, epoch: int, window: int) -> None:
        """Become the predecessor of the engine at the other end. Raises OSError: it takes none."""
        self.sock.sendall(self.pack(Frame(FrameKind.JOIN, epoch, 0, window)))
        self.window = window
        if self.receive().kind != FrameKind.ANSWER:
            raise WireError("a newer epoch has begun there")

    def close(self) -> None:
        """Both directions end, for whoever waits in another thread too."""
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)
        self.sock.close()


def connect(address: str, secret: bytes, patience: float) -> EngineLink:
    """A connection to the engine at ``address``, with ``patience`` seconds as its timeout.

    Raises:
        handshake.HandshakeRefused: whoever listens there does not know the secret.
        OSError: nobody does within ``patience`` seconds.
    """
    sock = wire.connect(address, patience)
    # the timeout is taken off later; what is sent to who is frozen is given up all the same
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", int(patience) + 1, 0))
    try:
        client = handshake.ClientHandshake(Keys(secret), SERVICE)
        sock.sendall(client.hello)
        proof, session = client.prove(bytes(wire.rest(sock, client.ANSWER)))
        sock.sendall(proof)
    except BaseException:
        sock.close()
        raise
    return EngineLink(sock, session)
