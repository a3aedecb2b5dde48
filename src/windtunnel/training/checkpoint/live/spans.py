"""Idle mode: checkpoints go to peers while training does not use the network (GEMINI, section 5).

A training step uses the network the same way each time. A thread reads the byte counters of the process
group's sockets (TCP_INFO) every millisecond or two. The first steps give a profile: after how many bytes of a
step the network falls quiet, and for how long. These first checkpoints are waited for, so that none of their
own traffic is in it. From then on each look goes to the policy (`policy.pacing`), which opens and closes
windows for the agent at the places that are in the profile.

Whether a checkpoint fits the spans of a step is the policy's word (`policy.pacing`). Where it does not,
checkpoints are made every so many steps instead, and the run's events say so. Now and then the ranks tell
each other their profiles, and all decide alike.

Traffic that is not TCP of this process (NCCL over InfiniBand) is not seen.
"""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from windtunnel.base.plain import from_plain, to_plain
from windtunnel.store import eventlog
from windtunnel.training.checkpoint.policy import (
    NetworkProfile,
    NetworkSample,
    Profiles,
    Spread,
    Window,
    decide,
)
from windtunnel.training.checkpoint.policy.pacing import OPEN
from windtunnel.training.checkpoint.settings import CheckpointSettings
from windtunnel.training.elastic import group_sockets

PERIOD = 0.0015  # seconds between two looks at the sockets
MOST_RECORDED = 32  # changes of the window
_WINDOW = 16  # newest steps that the profile is made of
_NEAR = 0.01  # of the bytes of a step: places so close are the same one
_NEAREST = 4096  # bytes
# struct tcp_info of Linux: bytes_acked and bytes_received, 64 bit each, since 4.1
_COUNTERS = struct.Struct("@QQ")
_COUNTERS_AT = 120


@dataclass(frozen=True)
class Span:
    """The network is idle for ``seconds`` after ``place`` bytes of a step."""

    place: int
    seconds: float


class SpanProfile:
    """Idle spans, step by step, from looks at the network. Pure: times are given.

    ``expected``: the spans that most steps have, in order, once ``steps`` steps were seen; each as short as a
    short one of those seen last.
    """

    def __init__(self, steps: int, shortest: float) -> None:
        self.expected: list[Span] | None = None
        self._steps, self._shortest = steps, shortest
        self._recent: deque[list[Span]] = deque(maxlen=_WINDOW)
        self._count = -1  # the first began anywhere
        self._spans: list[Span] = []
        self._since: float | None = None
        self._begin = self._place = self._since_place = 0
        self._near = _NEAREST

    @property
    def complete(self) -> bool:
        """Whether all steps of the profile are new ones since the last time that this was so."""
        return self._count >= self._steps and (self._count - self._steps) % _WINDOW == 0

    @property
    def idle_since(self) -> float | None:
        """When the present span began, None in traffic. An acknowledgement that comes late ends no span."""
        return self._since

    def look(self, now: float, busy: bool, count: int) -> None:
        """There was traffic since the last look, or not; ``count``: bytes so far."""
        self._place = count - self._begin
        if self._since is not None and self._place - self._since_place > self._near:
            self._end_span(now)
        if not busy and self._since is None:
            self._since, self._since_place = now, self._place

    def step(self, now: float) -> None:
        """A step ended, and with it an idle span."""
        self._end_span(now)
        self._near = max(_NEAREST, int(_NEAR * self._place))
        if self._count >= 0:
            self._recent.append(self._spans)
        self._count += 1
        self._begin, self._place, self._spans = self._begin + self._place, 0, []
        if self._count >= self._steps:
            self.expected = self._usual()

    def resume(self) -> None:
        """A wait between two steps ended, which no other step will have."""
        self._since = None

    def here(self) -> Span | None:
        """The expected span at the present place."""
        return next((s for s in self.expected or () if abs(s.place - self._place) <= self._near), None)

    def _end_span(self, now: float) -> None:
        if self._since is not None and now - self._since >= self._shortest:
            self._spans.append(Span(self._since_place, now - self._since))
        self._since = None

    def _usual(self) -> list[Span]:
        places: list[list[Span]] = []
        for span in sorted((s for spans in self._recent for s in spans), key=lambda s: s.place):
            if places and span.place - places[-1][0].place <= self._near:
                places[-1].append(span)
            else:
                places.append([span])
        usual = []
        for alike in places:
            if 2 * len(alike) > len(self._recent):
                lengths = sorted(span.seconds for span in alike)
                # One may be short by chance; a window that is open too long does little harm.
                usual.append(Span(alike[0].place, lengths[len(lengths) // 4]))
        return usual


def group_traffic() -> int:
    """`traffic` of the sockets of the process group."""
    return traffic(group_sockets())


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


class IdleSender:
    """Watches the network and opens windows of ``memory`` (a `LocalMemory`); ``every``: steps that one
    checkpoint is spread over."""

    def __init__(
        self,
        job: Any,
        memory: Any,
        settings: CheckpointSettings,
        nbytes: int,
        *,
        count: Callable[[], int] = group_traffic,
    ) -> None:
        self.every = 1
        self._job, self._memory, self._settings, self._nbytes = job, memory, settings, nbytes
        self._count = count
        self._profile = SpanProfile(settings.profile, 2 * PERIOD)
        self._lock = threading.RLock()
        self._quiet = 0
        self._window_open = self._endless = True  # until the profile is known
        self._always = False
        self._rates: list[float] = []
        self._sent: tuple[int, float] | None = None
        serials = job.keep("idle", dict)
        self._plans = 0
        self._serial = serials[job.generation] = serials.get(job.generation, -1) + 1
        self._stop = threading.Event()
        self._recorded = 0
        memory.open_window(OPEN)
        self._thread = threading.Thread(target=self._run, name="windtunnel-idle", daemon=True)
        self._thread.start()

    def step_ended(self) -> None:
        """A step of training ended; once the profile is known, and now and then, decide how often to save.
        All ranks call it.

        Raises:
            MembershipChanged: the membership changed.
        """
        with self._lock:
            predicted = self._profile.expected is not None
            self._profile.step(time.monotonic())
            expected = self._profile.expected
            self._quiet = 0
            if predicted:
                self._look(True)
        if expected is not None and self._profile.complete:
            self._plan(expected)

    @property
    def learning(self) -> bool:
        """Whether checkpoints are to be waited for, and `resume` called then."""
        return self._profile.expected is None

    def resume(self) -> None:
        """The wait is over."""
        with self._lock:
            self._profile.resume()

    def saved(self, step: int) -> None:
        """``step`` is being sent from now on."""
        self._sent = step, time.monotonic()

    def close(self) -> None:
        """No more windows."""
        self._stop.set()
        self._thread.join(5.0)
        with suppress(OSError):
            self._memory.close_window()

    def _plan(self, expected: list[Span]) -> None:
        chosen = self._settings
        if not self._nbytes or chosen.copies < 2:
            return
        bandwidth = chosen.bandwidth or max(self._rates, default=None)
        mine = NetworkProfile(tuple(span.seconds for span in expected), self._nbytes, bandwidth)
        self._plans += 1
        answers = self._job.agree(f"idle/{self._serial}.{self._plans}", to_plain(mine))
        ranks = tuple(from_plain(NetworkProfile, answers[rank]) for rank in sorted(answers))
        profiles = Profiles(ranks, chosen.copies, chosen.buffer, chosen.parts, chosen.startup, chosen.safety)
        spread = decide(profiles)
        assert isinstance(spread, Spread)
        before, self.every, self._always = (self.every, self._always), spread.every, spread.always
        if self._plans > 1 and before == (self.every, self._always):
            return
        if self._job.rank == 0:
            self._job.event("decision", **eventlog.decided("training.checkpoint", "newest", profiles, spread))
        if bandwidth is None:
            return
        text = f"{len(expected)} idle spans of {sum(mine.spans):.3g} s a step; "
        text += f"{self._nbytes} bytes at {bandwidth:.3g}/s"
        if self._always:
            text += ": no span has room, so checkpoints are sent beside the training's traffic"
        elif self.every > 1:
            text += f": one is made every {self.every} steps"
        self._job.event("note", text=f"network profile: {text}")

    def _run(self) -> None:
        last = self._count()
        while not self._stop.wait(PERIOD):
            total = self._count()
            busy = total != last
            with self._lock:
                self._profile.look(time.monotonic(), busy, total)
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
            seconds = max(1e-6, time.monotonic() - begin)
            self._rates.append(self._nbytes * (self._settings.copies - 1) / seconds)
            self._sent = None

    def _window(self, busy: bool) -> None:
        with self._lock:
            if self._profile.expected is not None:
                self._look(busy)

    def _look(self, busy: bool) -> None:
        """Do with the window what the policy says. One rank tells the first times that it changes."""
        since, here = self._profile.idle_since, self._profile.here()
        self._quiet = 0 if busy or since is None else self._quiet + 1
        chosen, expected = self._settings, self._profile.expected or ()
        sample = NetworkSample(
            busy, self._quiet, 0.0 if since is None else time.monotonic() - since,
            here.seconds if here is not None else None, max((span.seconds for span in expected), default=0.0),
            self._always, self._window_open, self._endless, chosen.safety, chosen.startup,
        )  # fmt: skip
        decision = decide(sample)
        assert isinstance(decision, Window)
        if decision.act == "keep":
            return
        self._window_open, self._endless = decision.act == "open", decision.endless
        if self._recorded < MOST_RECORDED and self._job.rank == 0:
            self._recorded += 1
            self._job.event("decision", **eventlog.decided("training.checkpoint", "newest", sample, decision))
        if decision.act == "open":
            self._memory.open_window(decision.seconds)
        else:
            self._memory.close_window()
