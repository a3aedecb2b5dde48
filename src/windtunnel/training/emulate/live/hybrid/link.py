"""What a live rank tells the coordinator, and its own clock.

The clock goes while the program runs and stands while windtunnel does. On a CPU it counts the process's CPU
seconds, so that what else runs on this machine makes no rank slower. On CUDA it counts seconds up to which
the device was done with all before: a collective waits for the device.

What a call and a wait cost in virtual time does not change what the program does next. So nothing is asked
and answered: calls and waits are noted down with the rank's own time, and sent at the end of a step. The
coordinator sets the virtual clock on. Only before a call in which other live ranks take part, for which the
process really waits, all notes are sent.
"""

from __future__ import annotations

import marshal
import time
from collections.abc import Callable
from multiprocessing.connection import Connection

MOST = 4096
"""Notes that are held back."""

cpu_seconds = time.process_time


def cuda_seconds() -> float:
    """When the device has done all that it was given."""
    import torch

    torch.cuda.synchronize()
    return time.perf_counter()


class Clock:
    """``own``: seconds that the program ran, as of the last time that the clock stood; within ``with clock:``
    it does. ``spent``: CPU seconds of windtunnel in this process."""

    def __init__(self, read: Callable[[], float]) -> None:
        self.read = read
        self.own = self.spent = 0.0
        self._depth = 0
        self._since = read()
        self._began = 0.0

    def __enter__(self) -> None:
        self._depth += 1
        if self._depth == 1:
            at = self.read()
            self.own += at - self._since
            self._began = at if self.read is cpu_seconds else cpu_seconds()

    def __exit__(self, *error: object) -> None:
        self._depth -= 1
        if self._depth == 0:
            self._since = self.read()
            self.spent += (self._since if self.read is cpu_seconds else cpu_seconds()) - self._began


class CoordinatorLink:
    """Notes for the coordinator. Calls are numbered from 0. The clock stands in all of this."""

    def __init__(self, connection: Connection, clock: Clock) -> None:
        self.connection, self.clock = connection, clock
        self.calls = 0
        self._notes: list[tuple[object, ...]] = []
        self._unwaited: list[int] = []

    def called(self, kind: str, ranks: tuple[int, ...], nbytes: int, peer: int) -> int:
        """Note a call; its number. ``peer``: the other end of a message, else -1."""
        self._notes.append(("call", self.clock.own, kind, ranks, nbytes, peer))
        self.calls += 1
        return self.calls - 1

    def wait(self, number: int) -> None:
        """Note that the program waits for that call."""
        self._notes.append(("wait", self.clock.own, number))
        if len(self._notes) >= MOST:
            self.flush()

    def wait_later(self, number: int) -> None:
        """A call of whose end only a future tells: DDP waits for these when backward ends."""
        self._unwaited.append(number)

    def settle(self) -> None:
        """Wait for all of those."""
        if self._unwaited:
            with self.clock:
                for number in self._unwaited:
                    self.wait(number)
                self._unwaited.clear()

    def tell(self, name: str, *content: object) -> None:
        """Send a note, and what was noted before it."""
        self._notes.append((name, self.clock.own, *content))
        self.flush()

    def flush(self) -> None:
        self.connection.send_bytes(marshal.dumps(self._notes))
        self._notes.clear()
