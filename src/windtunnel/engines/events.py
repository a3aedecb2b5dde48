"""Emulated time: events in the order of their time, activities, and resources that activities share.

An activity is a generator that yields what it waits for: a function that is given what to call when the wait
is over. A resource is shared equally by all that use it (processor sharing): since each then gets the same
rate, what one has received since the start is one number for all, and the next to finish is the top of a
heap.

Nothing here draws a random number, and events of the same time keep the order in which they were made, so one
input has one outcome.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Generator
from itertools import count

Wait = Callable[[Callable[[], None]], None]
Activity = Generator[Wait, None, None]


class Clock:
    """The time now, in seconds, and what is to happen."""

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[[], object]]] = []
        self._count = count()

    def at(self, time: float, call: Callable[[], object]) -> None:
        heapq.heappush(self._events, (max(time, self.now), next(self._count), call))

    def delay(self, seconds: float) -> Wait:
        """Wait so long."""
        return lambda resume: self.at(self.now + seconds, resume)

    def run(self, until: float = float("inf")) -> None:
        """Let everything happen that happens by ``until``."""
        while self._events and self._events[0][0] <= until:
            self.now, _, call = heapq.heappop(self._events)
            call()
        if until < float("inf"):
            self.now = max(self.now, until)


class Running:
    """An activity under way; it starts at once, and can be killed."""

    def __init__(self, activity: Activity) -> None:
        self._activity = activity
        self.ended = False
        self._go_on()

    def kill(self) -> None:
        """It never goes on; what it still holds of a resource is used up unseen."""
        self.ended = True
        self._activity.close()

    def _go_on(self) -> None:
        if self.ended:
            return
        try:
            wait = next(self._activity)
        except StopIteration:
            self.ended = True
            return
        wait(self._go_on)


class Shared:
    """A resource of ``capacity`` units a second, of which one user gets ``most`` units a second at most."""

    def __init__(self, clock: Clock, capacity: float, most: float) -> None:
        self._clock = clock
        self._capacity = capacity
        self._most = most
        self._received = 0.0
        self._last = 0.0
        self._users: list[tuple[float, int, Callable[[], None]]] = []
        self._count = count()
        self._version = 0
        self.served = 0.0
        """Units handed out since the start."""

    def use(self, units: float) -> Wait:
        """Wait until so many units are received; nothing to wait for when there are none."""

        def wait(resume: Callable[[], None]) -> None:
            if units <= 0:
                self._clock.at(self._clock.now, resume)
                return
            self._advance()
            heapq.heappush(self._users, (self._received + units, next(self._count), resume))
            self._schedule()

        return wait

    def _rate(self) -> float:
        return min(self._most, self._capacity / len(self._users)) if self._users else 0.0

    def _advance(self) -> None:
        rate, now = self._rate(), self._clock.now
        self._received += rate * (now - self._last)
        self.served += rate * len(self._users) * (now - self._last)
        self._last = now

    def _schedule(self) -> None:
        self._version += 1
        version = self._version
        if self._users:
            left = max(0.0, self._users[0][0] - self._received)
            self._clock.at(self._clock.now + left / self._rate(), lambda: self._finish(version))

    def _finish(self, version: int) -> None:
        if version != self._version:
            return
        self._advance()
        # rounding must not leave the first user a hair short of its due, for ever
        self._received = max(self._received, self._users[0][0])
        done = []
        while self._users and self._users[0][0] <= self._received:
            done.append(heapq.heappop(self._users)[2])
        self._schedule()
        for resume in done:
            resume()
