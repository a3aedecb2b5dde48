"""A live rank's clock, and its line to the coordinator.

The clock goes while the program runs and stands while windtunnel does: inside of a collective, and while the
coordinator is asked. On a CPU it counts the process's CPU seconds, so that what else runs on this machine
makes no rank slower. On CUDA it counts seconds in which the device was done with all before: a collective
waits for the device. A wait never sleeps; it sets the clock on.

What is called is only noted down. It is sent with the next wait or at the end of a step, so a call costs no
system call, and of the coordinator only a wait needs an answer.
"""

from __future__ import annotations

import marshal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection


cpu_seconds = time.process_time


def cuda_seconds() -> float:
    """When the device has done all that it was given."""
    import torch

    torch.cuda.synchronize()
    return time.perf_counter()


class Clock:
    """``now``: virtual seconds. ``own``: of these, what the program ran; the others it waited. ``spent``:
    CPU seconds of windtunnel in this process. ``factor``: on a slower device or host."""

    def __init__(self, read: Callable[[], float], factor: float) -> None:
        self.read, self.factor = read, factor
        self.now = self.own = self.spent = 0.0
        self._depth = 0
        self._since = read()

    @contextmanager
    def standing(self) -> Iterator[None]:
        """Within it, time is windtunnel's and not the program's."""
        self._depth += 1
        if self._depth == 1:
            at = self.read()
            self.own += at - self._since
            self.now += (at - self._since) * self.factor
            began = time.process_time()
        try:
            yield
        finally:
            self._depth -= 1
            if self._depth == 0:
                self._since = self.read()
                self.spent += time.process_time() - began


class Link:
    """Calls are numbered from 0. ``connection`` is None where nobody coordinates: then nothing waits."""

    def __init__(self, connection: Connection | None, clock: Clock) -> None:
        self.connection, self.clock = connection, clock
        self.calls = 0
        self.waited = 0.0
        self._notes: list[tuple[object, ...]] = []
        self._unwaited: list[int] = []

    def called(self, kind: str, ranks: tuple[int, ...], nbytes: int, peer: int) -> int:
        """Note a call; its number. The clock stands. ``peer``: the other end of a message, else -1."""
        self._notes.append(("call", kind, ranks, nbytes, peer, self.clock.now))
        self.calls += 1
        return self.calls - 1

    def wait(self, number: int) -> None:
        """Set the clock on to the end of that call."""
        with self.clock.standing():
            self._notes.append(("wait", number))
            self.flush()
            if self.connection is None:
                return
            ended = marshal.loads(self.connection.recv_bytes())
            self.waited += max(0.0, ended - self.clock.now)
            self.clock.now = max(self.clock.now, ended)

    def wait_later(self, number: int) -> None:
        """A call of whose end only a future tells: DDP waits for these when backward ends."""
        self._unwaited.append(number)

    def settle(self) -> None:
        """Wait for all of those."""
        for number in self._unwaited:
            self.wait(number)
        self._unwaited.clear()

    def tell(self, *note: object) -> None:
        """Send a note, and what was noted before it. The clock stands."""
        self._notes.append(note)
        self.flush()

    def flush(self) -> None:
        if self.connection is not None:
            self.connection.send_bytes(marshal.dumps(self._notes))
        self._notes = []
