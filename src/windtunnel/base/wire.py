"""Messages between the processes of a job: a JSON object and, where there are any, raw bytes after it.

A frame is two big-endian lengths (32 bit: the JSON text, 64 bit: the bytes), the text, the bytes. Every
receive is bounded by the socket's timeout; what a peer may ask a reader to hold is bounded too.

On a connection that leads over a network both sides have shown that they know the job's secret before the
first frame (`handshake`), and the socket carries a `WireSession`. From then on the lengths and the text are
followed by a tag, and so are the raw bytes of a frame: HMAC-SHA256 under a key of this connection and this
direction, over a counter and what was sent. What was altered, repeated, left out, sent back or moved here
from another connection has no such tag, and ends the connection. A Unix socket has no session: the kernel
says who is at its other end.
"""

from __future__ import annotations

import json
import select
import socket
import struct
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from typing_extensions import Buffer

HEAD = struct.Struct("!IQ")
LARGEST_TEXT = 64 << 20
DEEPEST = 100
TAG = 16
"""Bytes of a tag."""
_COUNT = struct.Struct("!Q")


class WireError(ConnectionError):
    """The peer is gone, too slow, or speaks something else."""


class _Direction:
    """One direction of a connection."""

    def __init__(self, key: bytes) -> None:
        import hmac  # with OpenSSL behind it, which a Unix socket does without

        self._mac, self._equal = hmac.new(key, digestmod="sha256"), hmac.compare_digest
        self._count = 0

    def equal(self, tag: Buffer, *parts: Buffer) -> bool:
        """Whether it is that of the next thing that is sent this way."""
        return self._equal(self.tag(*parts), bytes(tag))

    def tag(self, *parts: Buffer) -> bytes:
        """The tag of the next thing that is sent this way."""
        mac = self._mac.copy()
        mac.update(_COUNT.pack(self._count))
        for part in parts:
            mac.update(part)
        self._count += 1
        return mac.digest()[:TAG]


class WireSession:
    """What both ends of one connection know after their handshake: a key for each direction."""

    def __init__(self, sending: bytes, receiving: bytes) -> None:
        self._out, self._in = _Direction(sending), _Direction(receiving)

    def seal(self, *parts: Buffer) -> bytes:
        """The tag to send behind ``parts``."""
        return self._out.tag(*parts)

    def verify(self, tag: Buffer, *parts: Buffer) -> None:
        """Take ``parts`` for what the peer sent next.

        Raises:
            WireError: they are not.
        """
        if not self._in.equal(tag, *parts):
            raise WireError("a message is not from the peer that the connection was made with")


class Secured(socket.socket):
    """A TCP socket with room for its session. It may be encrypted (`tls`)."""

    authentic: WireSession | None = None

    @property
    def binding(self) -> bytes:
        """What the handshake is bound to: the certificates in use, where there are any."""
        return b""

    def pending(self) -> int:
        """Bytes that have been taken from the kernel, and not from here."""
        return 0


def session(sock: socket.socket) -> WireSession | None:
    """The session of a connection, None where it has none."""
    current: WireSession | None = getattr(sock, "authentic", None)
    return current


def frame(message: dict[str, Any], following: int, sealed: WireSession | None) -> bytes:
    """The frame of ``message`` up to the ``following`` raw bytes."""
    text = json.dumps(message, separators=(",", ":")).encode()
    head = HEAD.pack(len(text), following)
    return head + text + (sealed.seal(head, text) if sealed else b"")


def send(sock: socket.socket, message: dict[str, Any], data: Buffer | None = None) -> None:
    """One frame. Not safe from two threads at once: hold a lock.

    Raises:
        OSError: the connection is gone, or its timeout passed.
    """
    sealed = session(sock)
    view = memoryview(data).cast("B") if data is not None else memoryview(b"")
    sock.sendall(frame(message, len(view), sealed))
    if len(view):
        sock.sendall(view)
        if sealed:
            sock.sendall(sealed.seal(view))


def receive(sock: socket.socket) -> tuple[dict[str, Any], int]:
    """The next message, and how many raw bytes follow it: read them with `rest` or drop them with `skip`.

    Raises:
        WireError: the peer closed, or sent no frame of ours.
        TimeoutError: nothing came within the socket's timeout.
    """
    head = bytearray(HEAD.size)
    fill(sock, memoryview(head))
    length, following = lengths(head)
    sealed = session(sock)
    body = bytearray(length + (TAG if sealed else 0))
    fill(sock, memoryview(body))
    return opened(head, body, sealed), following


def lengths(head: Buffer) -> tuple[int, int]:
    """What a frame's first bytes say: the length of its text, and how many raw bytes follow.

    Raises:
        WireError: the text is longer than a reader will hold.
    """
    length, following = HEAD.unpack(head)
    if length > LARGEST_TEXT:
        raise WireError(f"a message of {length} bytes is longer than {LARGEST_TEXT}")
    return length, following


def opened(head: Buffer, body: bytearray, sealed: WireSession | None) -> dict[str, Any]:
    """The message in ``body``, the text with its tag.

    Raises:
        WireError: it is not from the peer, or not a JSON object.
    """
    if sealed:
        text = body[:-TAG]
        sealed.verify(body[-TAG:], head, text)
    else:
        text = body
    try:
        message = json.loads(text)
    except (ValueError, RecursionError) as error:  # RecursionError: thousands of brackets
        raise WireError("a message is not JSON") from error
    if not isinstance(message, dict):
        raise WireError("a message is not a JSON object")
    if text.count(b"[") + text.count(b"{") > DEEPEST and _deeper(message, DEEPEST):
        raise WireError(f"a message is nested more than {DEEPEST} deep")
    return message


def _deeper(value: Any, most: int) -> bool:
    """Whether lists and objects lie in each other more than ``most`` deep: who writes them again, from a
    deeper place, would fail at what was just about readable."""
    level = [value]
    for _ in range(most):
        level = [
            inner
            for outer in level
            for inner in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(inner, (dict, list))
        ]
        if not level:
            return False
    return True


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


def wait(sock: socket.socket, seconds: float | None = None) -> bool:
    """Whether the peer says something, or closes, within ``seconds``; None: however long that takes."""
    if isinstance(sock, Secured) and sock.pending():  # read from the kernel already
        return True
    poll = select.poll()  # select(2) takes no descriptor from 1,024 on
    poll.register(sock, select.POLLIN)
    return bool(poll.poll(None if seconds is None else 1000 * seconds))


def rest(sock: socket.socket, count: int) -> bytearray:
    """The ``count`` raw bytes of a frame.

    Raises:
        WireError: the peer closed before, or did not send them.
    """
    data = bytearray(count)
    fill(sock, memoryview(data))
    if count and (sealed := session(sock)):
        tag = bytearray(TAG)
        fill(sock, memoryview(tag))
        sealed.verify(tag, data)
    return data


def skip(sock: socket.socket, count: int) -> None:
    """Read and drop the ``count`` raw bytes of a frame.

    Raises:
        WireError: the peer closed before, or sends bytes where none belong.
    """
    if count and session(sock):
        raise WireError("a message has bytes that nobody asked for")
    scratch = memoryview(bytearray(min(count, 1 << 20)))
    while count:
        part = scratch[: min(count, len(scratch))]
        fill(sock, part)
        count -= len(part)


def connect(address: str, timeout: float) -> socket.socket:
    """A connection to "host:port" or to "unix:/path", with ``timeout`` on it, without delay of small
    messages. One over TCP is not to be used before its handshake (`handshake.connect`).

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
    sock = socket.create_connection((host.strip("[]"), int(port)), timeout=timeout)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return sock
