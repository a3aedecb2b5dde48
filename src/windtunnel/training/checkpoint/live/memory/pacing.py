"""When the next bytes of a checkpoint may be sent, and how many: the sender's side of idle-span scheduling.

In mode ``idle`` bytes go only while a *window* is open (GEMINI, section 5: the network idle spans of a
training step, which the trainer opens and closes), in chunks that end before the window does: a chunk of s
bytes takes ``startup + s / bandwidth``. Nor does a chunk take longer than `LONGEST`: a window that closes
before its time is not heard of in the middle of one. After each chunk the link is taken to be busy for that
long (a token bucket of one chunk), so that nothing of ours queues in front of the training's own traffic.
Other modes send at once, slowed down only by a ``bandwidth`` where one is given.

All senders of a host share one `Pacer`, since they share its network card; so do its ranks: a window is open
while it is open for every rank that has ever opened one.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

SMALLEST = 16 << 10
"""No chunk is cut below this, unless it is the last: its fixed cost would be most of it."""
ENDLESS = 600.0
"""A window of so many seconds is no idle span, but leave to send the rest."""
LONGEST = 0.02
"""Seconds."""
_LEARNING = 0.3
_FIRST_GUESS = 50e6


@dataclass(frozen=True)
class Pace:
    """``mode``: "blocking", "concurrent" or "idle". ``chunk``: bytes of the largest chunk (one sub-buffer of
    the staging memory). ``bandwidth``: bytes/s; None: as fast as it goes, and in mode idle as measured.
    ``startup``: seconds that each chunk costs beside."""

    mode: str = "concurrent"
    chunk: int = 4 << 20
    bandwidth: float | None = None
    startup: float = 0.0


class Pacer:
    """Decides for all senders of a host. ``clock``: seconds, monotonic and common to the processes of the
    host."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
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
            self._changed.notify_all()

    def allowance(self, left: int, now: float) -> tuple[int, float]:
        """How many of ``left`` bytes may be sent at ``now``; and if none, after how many seconds to ask again
        (``inf``: when a window opens)."""
        pace = self._pace
        if now < self._busy_until:
            return 0, self._busy_until - now
        most = min(left, pace.chunk)
        if pace.mode != "idle":
            return most, 0.0
        bandwidth = pace.bandwidth or self._measured or _FIRST_GUESS
        most = min(most, max(SMALLEST, int(LONGEST * bandwidth)))
        room = min(self._until.values(), default=0.0) - now
        if room > ENDLESS:
            return most, 0.0
        fits = int((room - pace.startup) * bandwidth)
        size = min(most, fits)
        return (size, 0.0) if size >= min(left, SMALLEST) else (0, math.inf)

    def inside(self) -> bool:
        """Whether bytes that are sent now go into a window with an end."""
        return self._pace.mode == "idle" and min(self._until.values(), default=0.0) - self._clock() < ENDLESS

    def take(self, left: int, patience: float, cancelled: threading.Event) -> int:
        """Wait for leave to send, at most ``patience`` seconds; how many bytes, 0 for none yet."""
        with self._changed:
            end = self._clock() + patience
            while True:
                now = self._clock()
                size, pause = self.allowance(left, now)
                if size:
                    # Taken before it is sent: several senders must not use the same room twice.
                    if self._pace.bandwidth:
                        self._busy_until = now + self._pace.startup + size / self._pace.bandwidth
                    return size
                if now >= end or cancelled.is_set():
                    return 0
                self._changed.wait(min(pause, end - now))

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
