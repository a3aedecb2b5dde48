"""Emulated time: SimPy's processes, and the resource that SimPy lacks: one that its users share.

An `Environment` is the clock; a process is a generator that yields what it waits for::

    env = Environment()
    cpu = SharedResource(env, capacity=2.0, most=1.0)  # two cores, of which a command uses one at most

    def command(seconds):
        yield env.timeout(1.0)
        yield cpu.use(seconds)
        print(env.now)

    for seconds in (1.0, 3.0, 3.0):
        env.process(command(seconds))
    env.run()  # prints 2.5, 4.5, 4.5

`SharedResource` is processor sharing with a cap: its users get equal rates, each ``most`` at most. As the
rate is the same for all, what one has received since the start is one number for all, and the next to finish
is the top of a heap: to come, to finish and to go cost O(log n). SimPy cannot take a scheduled event back,
so a resource has one timer that matters: where users came since it was set, it rings too early and is set
anew; where it would ring too late, an earlier one is set and the later one says nothing.

Nothing here draws a random number, and events of the same time keep the order in which they were made, so one
input has one outcome.
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from itertools import count
from math import inf

from simpy import Environment, Event, Process, Timeout
from simpy.events import Interruption, ProcessGenerator

__all__ = [
    "Environment",
    "Event",
    "Process",
    "ProcessGenerator",
    "ResourceUse",
    "SharedResource",
    "at",
    "kill",
    "run_through",
]


def at(env: Environment, time: float, call: Callable[[], None]) -> None:
    """Call it at that time, or now where that is past."""
    env.timeout(max(0.0, time - env.now)).callbacks.append(lambda event: call())


def run_through(env: Environment, until: float) -> None:
    """Let everything happen up to ``until`` and at it; SimPy's own ``run`` leaves out what happens at it."""
    while env.peek() <= until < inf:
        env.step()
    if until == inf:
        env.run()


def kill(process: Process) -> None:
    """End a process where it stands, now, and take it out of the resource that it uses.

    Raises:
        RuntimeError: a process kills itself.
    """
    if process.is_alive:
        # who ends so has not failed: nobody need catch it
        process.callbacks.append(lambda event: setattr(event, "defused", True))
        Interruption(process, None).callbacks.insert(0, lambda event: _release(process))


def _release(process: Process) -> None:
    if process.is_alive and isinstance(process.target, ResourceUse):
        process.target.cancel()


class ResourceUse(Event):
    """Happens when all units are received. A process that catches an ``Interrupt`` while it waits for one,
    and does not go on waiting, must ``cancel`` it."""

    def __init__(self, shared: SharedResource) -> None:
        super().__init__(shared.env)
        self._shared = shared
        self.cancelled = False

    def cancel(self) -> None:
        """Go: what was to come goes to the others. Nothing, once all is received."""
        if not self.triggered and not self.cancelled:
            self.cancelled = True
            self._shared._leave()


class SharedResource:
    """A resource of ``capacity`` units a second, of which one user gets ``most`` units a second at most."""

    def __init__(self, env: Environment, capacity: float, most: float) -> None:
        self.env = env
        self.served = 0.0
        """Units handed out since the start, until somebody last came or went, or it was last reckoned."""
        self._capacity = capacity
        self._most = most
        self._users: list[tuple[float, int, ResourceUse]] = []
        """A heap by what each will have received at its end; those who left stay until they are its top."""
        self._count = count()
        self.present = 0
        """Users that it has now."""
        self._received = 0.0
        """By one who has been there since the resource was last idle, at ``_since``."""
        self._since = env.now
        self._due = inf
        """When the first of the users ends if nobody comes or goes."""
        self._ring = inf
        """When the timer that matters rings."""

    def use(self, units: float) -> ResourceUse:
        """So many units; at once when there are none to wait for."""
        use = ResourceUse(self)
        if units <= 0:
            use.succeed()
            return use
        self.advance()
        self.present += 1
        heappush(self._users, (self._received + units, next(self._count), use))
        self._plan()
        return use

    def _leave(self) -> None:
        self.advance()
        self.present -= 1
        self._plan()

    def _rate(self) -> float:
        return min(self._most, self._capacity / self.present)

    def advance(self) -> None:
        """Reckon up to now."""
        now = self.env.now
        if self.present:
            each = self._rate() * (now - self._since)
            self._received += each
            self.served += each * self.present
        else:
            self._received = 0.0
        self._since = now

    def _plan(self) -> None:
        users = self._users
        while users and users[0][2].cancelled:
            heappop(users)
        if not users:
            self._due = inf
            return
        self._due = self._since + max(0.0, users[0][0] - self._received) / self._rate()
        if self._due < self._ring:
            self._set_timer()

    def _set_timer(self) -> None:
        delay = self._due - self.env.now
        self._ring = self.env.now + delay
        Timeout(self.env, delay).callbacks.append(self._rings)

    def _rings(self, timer: Event) -> None:
        if self.env.now != self._ring:
            return  # an earlier one was set since
        self._ring = inf
        if self._due > self.env.now:
            if self._due < inf:
                self._set_timer()
            return
        self.advance()
        # rounding must not leave the first user a hair short of its due, for ever
        self._received = max(self._received, self._users[0][0])
        while self._users and (self._users[0][0] <= self._received or self._users[0][2].cancelled):
            use = heappop(self._users)[2]
            if not use.cancelled:
                self.present -= 1
                use.succeed()
        self._plan()
