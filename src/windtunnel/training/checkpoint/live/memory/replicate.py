"""Sends copies of this host's shards to the services of other hosts: one thread and one queue a host.

A PUT goes: request with the header of the slot; the holder answers ``go``, ``have`` (it has verified that
very copy), ``layout`` (ask again, with that), ``wait`` (its slot may not be overwritten yet) or an error;
after ``go`` the chunks; after the last one its verdict, ``complete`` or ``torn``. What fails on the way is
tried again, on a new connection, for as long as the membership names that host.

When the next bytes go, and how many, the `Pacer` asks the policy (`policy.pacing`): in mode ``idle`` bytes go
only while a *window* is open, so that nothing of ours queues in front of the training's own traffic.

All senders of a host share one `Pacer`, since they share its network card; so do its ranks: a window is open
while it is open for every rank that has ever opened one.
"""

from __future__ import annotations

import contextlib
import fcntl
import math
import socket
import termios
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from windtunnel.base import handshake, wire
from windtunnel.base.plain import to_plain
from windtunnel.training.checkpoint.live.memory import messages
from windtunnel.training.checkpoint.live.memory.messages import Pace
from windtunnel.training.checkpoint.live.memory.state import State
from windtunnel.training.checkpoint.live.slot import SlotFile
from windtunnel.training.checkpoint.model import Shard
from windtunnel.training.checkpoint.policy import Allowance, Sending, decide
from windtunnel.training.checkpoint.policy.pacing import ENDLESS, SMALLEST
from windtunnel.training.elastic.model import MemberHost

TOLD = 32
"""Answers in a generation that are written down where there is a pace to keep; of those in a row that say to
wait, the first."""
_LEARNING = 0.3
Tell = Callable[[Sending, Allowance], object]


class Pacer:
    """Asks for all senders of a host. ``clock``: seconds, monotonic and common to the processes of the host.
    ``tell``: gets the first answers of a generation; is not called under a lock."""

    def __init__(self, clock: Callable[[], float] = time.monotonic, tell: Tell = lambda *_: None) -> None:
        self._clock, self._tell = clock, tell
        self._reported, self._waits = 0, False
        self._changed = threading.Condition()
        self._pace = Pace()
        self._until: dict[int, float] = {}
        self._busy_until = 0.0
        self._measured: float | None = None

    @property
    def pace(self) -> Pace:
        return self._pace

    @property
    def measures(self) -> bool:
        """Whether `sent` is to be told of each chunk: windows are kept, and nobody said how fast the link
        is."""
        return self._pace.mode == "idle" and self._pace.bandwidth is None

    def configure(self, pace: Pace) -> None:
        """What holds from now on."""
        with self._changed:
            self._pace = pace
            self._changed.notify_all()

    def window(self, rank: int, until: float) -> None:
        """Rank ``rank`` leaves the network idle until the clock says ``until`` (``inf``: for as long as it
        takes; 0: no longer)."""
        with self._changed:
            self._until[rank] = until
            self._changed.notify_all()

    def forget(self) -> None:
        """The ranks of this host are new ones."""
        with self._changed:
            self._until.clear()
            self._busy_until = 0.0
            self._reported, self._waits = 0, False
            self._changed.notify_all()

    def question(self, left: int, now: float) -> Sending:
        """What is to be decided at ``now``, of ``left`` bytes."""
        pace, until = self._pace, min(self._until.values(), default=0.0)
        room = None if math.isinf(until) else max(0.0, until - now)
        bandwidth, busy = pace.bandwidth or self._measured, max(0.0, self._busy_until - now)
        return Sending(pace.mode, left, pace.chunk, bandwidth, pace.startup, room, busy)

    def inside(self) -> bool:
        """Whether bytes that are sent now go into a window with an end."""
        return self._pace.mode == "idle" and min(self._until.values(), default=0.0) - self._clock() < ENDLESS

    def take(self, left: int, patience: float, cancelled: threading.Event) -> int:
        """Wait for leave to send, at most ``patience`` seconds; how many bytes, 0 for none yet."""
        decisions: list[tuple[Sending, Allowance]] = []
        with self._changed:
            end = self._clock() + patience
            while True:
                now = self._clock()
                sending = self.question(left, now)
                answer = decide(sending)
                assert isinstance(answer, Allowance)
                size = answer.nbytes
                paced = self._pace.mode == "idle" or self._pace.bandwidth
                if paced and self._reported < TOLD and (size or not self._waits):
                    decisions.append((sending, answer))
                    self._reported += 1
                self._waits = not size
                if size:
                    # Taken before it is sent: several senders must not use the same room twice.
                    if self._pace.bandwidth:
                        self._busy_until = now + self._pace.startup + size / self._pace.bandwidth
                    break
                if now >= end or cancelled.is_set():
                    break
                pause = math.inf if answer.pause is None else answer.pause
                self._changed.wait(min(pause, end - now))
        for decision in decisions:
            self._tell(*decision)
        return size

    def sent(self, nbytes: int, seconds: float) -> None:
        """A chunk took so long, until the peer had it."""
        if nbytes < SMALLEST or seconds <= 0:
            return
        rate = nbytes / seconds
        before = self._measured
        self._measured = rate if before is None else before + _LEARNING * (rate - before)

    def wake(self) -> None:
        """Those who wait look up, whether what they send is still wanted."""
        with self._changed:
            self._changed.notify_all()


@dataclass(eq=False)
class Delivery:
    """One copy that is to reach one host. ``keeps()``: the other steps that are complete here.
    ``done(delivery, host, verdict)`` is called once, with "complete", "have", or why it was given up; not if
    it is cancelled."""

    slot: SlotFile
    shard: Shard
    rank: int
    generation: int
    keeps: Callable[[], list[int]]
    done: Callable[[Delivery, int, str], None]
    cancelled: threading.Event = field(default_factory=threading.Event)
    sent: int = 0
    inside: int = 0


class Sender:
    """All that goes from this host, with its ``state``, to one other, in order."""

    def __init__(self, host: MemberHost, pacer: Pacer, state: State) -> None:
        self.host = host
        self._pacer, self._state, self._limits = pacer, state, state.limits
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

    def cancel(self) -> None:
        """Forget all deliveries, also the one under way. Does not wait."""
        with self._changed:
            for delivery in self._queue:
                delivery.cancelled.set()
            self._queue.clear()
            if self._now is not None:
                self._now.cancelled.set()
                if self._sock is not None:  # it may be blocked by a peer that does not read
                    with contextlib.suppress(OSError):
                        self._sock.shutdown(socket.SHUT_RDWR)
            self._changed.notify_all()
        self._pacer.wake()

    def end(self) -> None:
        """Cancel all, and stop. Does not wait."""
        self._ended = True
        self.cancel()

    def join(self, timeout: float) -> None:
        """Wait for the thread."""
        self._thread.join(timeout)

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
        if not delivery.slot.path.exists():
            return "its slot is gone"  # though it still is mapped
        sock = self._connection()
        answer = self._ask(sock, delivery)
        if answer.get("answer") == "layout":
            digest = delivery.shard.layout
            blob = self._state.folder.layout(digest)
            if blob is None:
                return f"its layout {digest} is not here"
            answer = self._ask(sock, delivery, blob)
        verdict = self._verdict(answer)
        if verdict != "go":
            return verdict
        with delivery.slot.first(delivery.shard.nbytes) as data:
            self._stream(sock, data, delivery)
        answer, following = wire.receive(sock)
        wire.skip(sock, following)
        verdict = self._verdict(answer)
        if verdict == "torn" and delivery.slot.whole != delivery.shard:
            return "it was overwritten meanwhile"
        return verdict

    def _verdict(self, answer: dict[str, Any]) -> str:
        if answer.get("error") == "stale":
            return "failed"  # the two hosts know of different generations; that does not last
        if "error" in answer:
            return f"host {self.host.id} refused it: {answer['text']}"
        return str(answer["answer"])

    def _ask(self, sock: socket.socket, delivery: Delivery, layout: bytes | None = None) -> dict[str, Any]:
        message = {
            "op": "put",
            "generation": delivery.generation,
            "committed": self._state.committed,
            "base": self._state.base,
            "keeps": delivery.keeps(),
            "capacity": delivery.slot.capacity,
            "shard": to_plain(delivery.shard),
        }
        return messages.ask(sock, message, layout)

    def _stream(self, sock: socket.socket, data: memoryview, delivery: Delivery) -> None:
        nbytes = len(data)
        at = 0
        while at < nbytes:
            size = self._pacer.take(nbytes - at, self._limits.silence / 4, delivery.cancelled)
            if delivery.cancelled.is_set():
                raise wire.WireError("it is not wanted any more")
            inside = self._pacer.inside()
            begun = time.monotonic()
            sock.sendall(messages.LENGTH.pack(size))  # 0 where there is no leave yet: we live
            messages.send_data(sock, data[at : at + size])
            if self._pacer.measures:
                _drain(sock, begun + self._limits.silence)
                self._pacer.sent(size, time.monotonic() - begun)
            at += size
            delivery.sent += size
            delivery.inside += size if inside else 0

    def _connection(self) -> socket.socket:
        if self._sock is None:
            address = self.host.memory
            sock = handshake.connect(
                address, self._limits.connect, self._state.keys, messages.service(address)
            )
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
