"""Sends copies of this host's shards to the services of other hosts: one thread and one queue a host.

A PUT goes: request with the header of the slot; the holder answers ``go``, ``have`` (it has verified that
very copy), ``layout`` (send that first), ``wait`` (its slot may not be overwritten yet) or an error; after
``go`` the chunks; after the last one its verdict, ``complete`` or ``torn``. What fails on the way is tried
again, on a new connection, for as long as the membership names that host.
"""

from __future__ import annotations

import contextlib
import fcntl
import socket
import termios
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from windtunnel.base import wire
from windtunnel.training.checkpoint.live.memory import transfer
from windtunnel.training.checkpoint.live.memory.pacing import Pacer
from windtunnel.training.checkpoint.live.slot import Header, read_header
from windtunnel.training.elastic.model import MemberHost


@dataclass(frozen=True)
class Limits:
    """Seconds. ``connect``: until a peer's listener answers. ``silence``: without a byte, before a connection
    counts as dead. ``membership``: how long a request of a newer generation waits for word of it here.
    ``slot``: how long a PUT waits at the holder for its slot. ``pause``: longest one between two attempts."""

    connect: float = 2.0
    silence: float = 20.0
    membership: float = 10.0
    slot: float = 2.0
    pause: float = 0.5


@dataclass(eq=False)
class Delivery:
    """One copy that is to reach one host. ``keeps()``: the other steps that are complete here.
    ``done(delivery, host, verdict)`` is called once, with "complete", "have", or why it was given up; not if
    it is cancelled."""

    path: Path
    header: Header
    slots: int
    rank: int
    generation: int
    keeps: Callable[[], list[int]]
    done: Callable[[Delivery, int, str], None]
    cancelled: threading.Event = field(default_factory=threading.Event)
    sent: int = 0
    inside: int = 0


class Sender:
    """All that goes to one host, in order. ``known()``: the newest committed step and the one that all went
    back to last, as this host knows them; ``layout(digest)``: the blob."""

    def __init__(
        self,
        host: MemberHost,
        pacer: Pacer,
        limits: Limits,
        known: Callable[[], tuple[int, int]],
        layout: Callable[[str], bytes | None],
        outgoing: str = "",
    ) -> None:
        self.host = host
        self._pacer, self._limits, self._outgoing = pacer, limits, outgoing
        self._known, self._layout = known, layout
        self._queue: deque[Delivery] = deque()
        self._changed = threading.Condition()
        self._now: Delivery | None = None
        self._sock: socket.socket | None = None
        self._ended = False
        self._thread = threading.Thread(target=self._run, name=f"copies-to-{host.id}", daemon=True)
        self._thread.start()

    def add(self, delivery: Delivery) -> None:
        """Send it after those before."""
        with self._changed:
            self._queue.append(delivery)
            self._changed.notify_all()

    def cancel(self, unwanted: Callable[[Delivery], bool] = lambda _: True) -> None:
        """Forget deliveries, also the one under way. Does not wait."""
        with self._changed:
            for delivery in [d for d in self._queue if unwanted(d)]:
                delivery.cancelled.set()
                self._queue.remove(delivery)
            if self._now is not None and unwanted(self._now):
                self._now.cancelled.set()
                # It may be blocked by a peer that does not read.
                self._hang_up()
            self._changed.notify_all()
        self._pacer.wake()

    def end(self) -> None:
        """Cancel all, and stop. Does not wait."""
        self._ended = True
        self.cancel()

    def join(self, timeout: float) -> None:
        """Wait for the thread."""
        self._thread.join(timeout)

    def _hang_up(self) -> None:
        if self._sock is not None:
            with contextlib.suppress(OSError):
                self._sock.shutdown(socket.SHUT_RDWR)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._now = None
                while not self._queue and not self._ended:
                    self._changed.wait()
                if self._ended:
                    break
                self._now = delivery = self._queue.popleft()
            self._deliver(delivery)
        self._close()

    def _deliver(self, delivery: Delivery) -> None:
        pause = 0.01
        torn = 0
        while not delivery.cancelled.is_set():
            try:
                verdict = self._attempt(delivery)
            except FileNotFoundError:
                verdict = "its slot is gone"
                self._close()
            except (OSError, wire.WireError):
                verdict = "failed"
                self._close()
            if delivery.cancelled.is_set():
                return
            if verdict == "torn":
                torn += 1
                if torn >= 3:
                    verdict = "its data are not what its checksum says"
            if verdict not in ("failed", "wait", "torn"):
                delivery.done(delivery, self.host.id, verdict)
                return
            delivery.cancelled.wait(pause)
            pause = min(2 * pause, self._limits.pause)

    def _attempt(self, delivery: Delivery) -> str:
        sock = self._connection()
        answer = self._ask(sock, delivery)
        if answer.get("answer") == "layout":
            digest = delivery.header.layout
            blob = self._layout(digest)
            if blob is None:
                return f"its layout {digest} is not here"
            fields = {"op": "layout", "digest": digest, "generation": delivery.generation}
            transfer.ask(sock, fields, blob)
            answer = self._ask(sock, delivery)
        verdict = self._verdict(answer)
        if verdict != "go":
            return verdict
        with open(delivery.path, "rb", buffering=0) as file:
            self._stream(sock, file, delivery)
        answer, following = wire.receive(sock)
        wire.skip(sock, following)
        verdict = self._verdict(answer)
        if verdict == "torn" and read_header(delivery.path) != delivery.header:
            return "it was overwritten meanwhile"
        return verdict

    def _verdict(self, answer: dict[str, Any]) -> str:
        if answer.get("error") in ("stale", "late"):
            return "failed"  # the two hosts know of different generations; that does not last
        if "error" in answer:
            return f"host {self.host.id} refused it: {answer['text']}"
        return str(answer["answer"])

    def _ask(self, sock: socket.socket, delivery: Delivery) -> dict[str, Any]:
        h = delivery.header
        committed, base = self._known()
        message = {
            "op": "put",
            "generation": delivery.generation,
            "committed": committed,
            "base": base,
            "keeps": delivery.keeps(),
            "slots": delivery.slots,
            "capacity": h.capacity,
            "header": [h.shard, h.step, h.world, h.has_shared, h.generation, h.layout, h.nbytes, h.checksum],
        }
        return transfer.ask(sock, message)

    def _stream(self, sock: socket.socket, file: BinaryIO, delivery: Delivery) -> None:
        nbytes = delivery.header.nbytes
        at = 0
        while at < nbytes:
            size = self._pacer.take(nbytes - at, self._limits.silence / 4, delivery.cancelled)
            if delivery.cancelled.is_set():
                raise wire.WireError("it is not wanted any more")
            inside = self._pacer.inside()
            begun = time.monotonic()
            sock.sendall(transfer.LENGTH.pack(size))  # 0 where there is no leave yet: we live
            transfer.send_range(sock, file, at, size)
            if self._pacer.measures:
                _drain(sock, begun + self._limits.silence)
                self._pacer.sent(size, time.monotonic() - begun)
            at += size
            delivery.sent += size
            delivery.inside += size if inside else 0

    def _connection(self) -> socket.socket:
        if self._sock is None:
            sock = transfer.connect(self.host.memory, self._limits.connect, self._outgoing)
            # Longer than the other side waits before it answers.
            sock.settimeout(self._limits.silence + self._limits.slot + self._limits.membership)
            if self._pacer.pace.mode == "idle":
                # What lies in the socket's buffer leaves when the window may be over.
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, min(self._pacer.pace.chunk, 1 << 20))
            with self._changed:
                self._sock = sock
        return self._sock

    def _close(self) -> None:
        with self._changed:
            if self._sock is not None:
                self._sock.close()
                self._sock = None


def _drain(sock: socket.socket, end: float) -> None:
    """Wait until the peer's kernel has all that was sent: only then is the link free, and its rate known."""
    left = bytearray(4)
    while time.monotonic() < end:
        fcntl.ioctl(sock, termios.TIOCOUTQ, left)
        if not any(left):
            return
        time.sleep(0.0002)
