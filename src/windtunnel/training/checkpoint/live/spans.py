"""Idle mode: checkpoints go to peers while training does not use the network (GEMINI, section 5).

A training step uses the network the same way each time. A thread reads the byte counters of the process
group's sockets (TCP_INFO) every millisecond or two; the first steps give a profile: how long each of the idle
spans of a step lasts. From then on, when the network falls quiet for the i-th time in a step, the agent is
given a window of the safe part of what the i-th span is expected to last, and it is closed as soon as traffic
is seen. Before the profile is known, windows are open all the time.

Whether a checkpoint fits the spans of a step is the chunk plan's word (`policy.spans`). Where it does not,
checkpoints are made every so many steps instead, and the run's events say so once.

Traffic that is not TCP of this process (NCCL over InfiniBand) is not seen: mark it, see `IdleSender.mark`.
"""

from __future__ import annotations

import socket
import statistics
import struct
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any, Protocol

from windtunnel.training.checkpoint.live.settings import Settings
from windtunnel.training.checkpoint.policy.spans import plan_chunks

PERIOD = 0.0015  # seconds between two looks at the sockets
_OPEN = 3600.0  # a window without an end
_QUIET = 2  # looks without traffic that make an idle span
# struct tcp_info of Linux: bytes_acked and bytes_received, 64 bit each, since 4.1
_COUNTERS = struct.Struct("@QQ")
_COUNTERS_AT = 120


class Windows(Protocol):
    """What is told when to send."""

    def open_window(self, seconds: float) -> None: ...

    def close_window(self) -> None: ...

    def committed(self) -> int: ...


class Profile:
    """Idle spans, step by step, from looks at the network. Pure: times are given.

    ``expected``: seconds of each span, once ``steps`` steps were seen; the shortest of what was seen, of the
    steps that have the usual number of spans.
    """

    def __init__(self, steps: int, shortest: float) -> None:
        self.expected: list[float] | None = None
        self._steps, self._shortest = steps, shortest
        self._seen: list[list[float]] = []
        self._spans: list[float] = []
        self._since: float | None = None

    @property
    def index(self) -> int:
        """Which idle span of the step this is, or the next one will be."""
        return len(self._spans)

    @property
    def idle_since(self) -> float | None:
        """When the present span began, None in traffic."""
        return self._since

    def look(self, now: float, busy: bool) -> None:
        """There was traffic since the last look, or not."""
        if not busy:
            self._since = now if self._since is None else self._since
            return
        if self._since is not None and now - self._since >= self._shortest:
            self._spans.append(now - self._since)
        self._since = None

    def step(self, now: float) -> None:
        """A step ended. An idle span that goes on into the next step counts as the next one's."""
        self._seen.append(self._spans)
        self._spans = []
        if self.expected is None and len(self._seen) > self._steps:
            usual = statistics.mode(len(spans) for spans in self._seen[1:])  # the first began anywhere
            alike = [spans for spans in self._seen[1:] if len(spans) == usual]
            self.expected = [min(durations) for durations in zip(*alike, strict=True)]
        if self.expected is not None:
            self._seen.clear()


def traffic(fds: Iterable[int]) -> int:
    """Bytes that the connected TCP sockets among ``fds`` sent (as acknowledged) and received so far."""
    total = 0
    for fd in fds:
        with suppress(OSError):
            total += sum(_counters(fd))
    return total


def _counters(fd: int) -> tuple[int, int]:
    # A socket object that is detached again: the descriptor stays its owner's.
    sock = socket.socket(fileno=fd)
    try:
        info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _COUNTERS_AT + _COUNTERS.size)
    finally:
        sock.detach()
    if len(info) < _COUNTERS_AT + _COUNTERS.size:
        return 0, 0
    return _COUNTERS.unpack_from(info, _COUNTERS_AT)


def group_sockets() -> list[int]:
    """Descriptors of the sockets of this process's cuttable group."""
    from windtunnel.training.survive.live import group

    current = group._current
    return list(current._recorder.sockets) if current is not None else []


class IdleSender:
    """Watches the network and opens windows; ``every``: steps that one checkpoint is spread over."""

    def __init__(
        self,
        job: Any,
        memory: Windows,
        settings: Settings,
        nbytes: int,
        *,
        sockets: Callable[[], Iterable[int]] = group_sockets,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.every = 1
        self._job, self._memory, self._settings, self._nbytes = job, memory, settings, nbytes
        self._sockets, self._clock = sockets, clock
        self._profile = Profile(settings.profile, 2 * PERIOD)
        self._lock = threading.Lock()
        self._marks = 0
        self._marked = False
        self._count = 0
        self._quiet = 0
        self._opened = True  # until the profile is known
        self._always = False
        self._rates: list[float] = []
        self._sent: tuple[int, float] | None = None
        self._stop = threading.Event()
        memory.open_window(_OPEN)
        self._thread = threading.Thread(target=self._run, name="windtunnel-idle", daemon=True)
        self._thread.start()

    def mark(self, busy: bool) -> None:
        """Communication that the sockets do not show begins, or ends; it may nest."""
        with self._lock:
            self._marks += 1 if busy else -1
            self._marked = True
        if busy and self._profile.expected is not None:
            self._close()

    def step_ended(self) -> None:
        """A step of training ended; once the profile is known, decide how often to save."""
        with self._lock:
            known = self._profile.expected is not None
            self._profile.step(self._clock())
            expected = self._profile.expected
        if expected is not None and not known:
            self._plan(expected)

    def saved(self, step: int) -> None:
        """``step`` is being sent from now on."""
        self._sent = step, self._clock()

    def close(self) -> None:
        """No more windows."""
        self._stop.set()
        self._thread.join(5.0)
        with suppress(OSError):
            self._memory.close_window()

    def _plan(self, expected: list[float]) -> None:
        chosen = self._settings
        bandwidth = chosen.bandwidth or (statistics.median(self._rates) if self._rates else None)
        if bandwidth is None or not self._nbytes or chosen.copies < 2:
            return
        plan = plan_chunks(
            expected,
            self._nbytes,
            chosen.copies,
            chosen.buffer,
            chosen.parts,
            bandwidth,
            chosen.startup,
            chosen.safety,
        )
        idle = sum(expected)
        told = f"{len(expected)} idle spans of {idle:.3g} s a step; {self._nbytes} bytes at {bandwidth:.3g}/s"
        if plan.every > 1:
            self.every = plan.every
            told += f": a checkpoint takes {plan.every} steps, so one is made every {plan.every} steps"
        elif plan.every == 0:
            self._always = True
            told += ": no span has room, so checkpoints are sent beside the training's traffic"
        self._job.event("note", text=f"network profile: {told}")

    def _run(self) -> None:
        last = traffic(self._sockets())
        while not self._stop.wait(PERIOD):
            total = traffic(self._sockets())
            with self._lock:
                busy = total != last or self._marks > 0 or self._marked
                self._marked = False
                self._profile.look(self._clock(), busy)
            last = total
            self._rate()
            with suppress(OSError):  # the agent is gone: the job will be told by others
                self._window(busy)

    def _rate(self) -> None:
        """What it takes from a save to its commit is the bandwidth, where none is given."""
        if self._sent is None or self._profile.expected is not None:
            return
        step, begin = self._sent
        if self._memory.committed() >= step:
            seconds = max(1e-6, self._clock() - begin)
            self._rates.append(self._nbytes * (self._settings.copies - 1) / seconds)
            self._sent = None

    def _window(self, busy: bool) -> None:
        expected, now = self._profile.expected, self._clock()
        if expected is None or self._always:
            return
        if busy:
            self._quiet = 0
            self._close()
            return
        self._quiet += 1
        since, index = self._profile.idle_since, self._profile.index
        if self._opened or self._quiet < _QUIET or since is None:
            return
        if index < len(expected):
            left = self._settings.safety * expected[index] - (now - since)
            if left > self._settings.startup:
                self._opened = True
                self._memory.open_window(left)

    def _close(self) -> None:
        if self._opened and not self._always:
            self._opened = False
            self._memory.close_window()
