"""Whether a thread has not moved at all for a while, as one that waits for something that never comes.

gloo now and then loses an operation that is posted in the very moment in which its connection is shut down:
the rank that posted it sleeps until the group's timeout, while all others have regrouped. Nothing can wake
it from inside, but another process can take its place, whose state is in the memory of the host.
"""

from __future__ import annotations

import time
from pathlib import Path


class Stillness:
    """Watches the thread ``tid`` (as the kernel counts) of this process, from another thread."""

    def __init__(self, tid: int) -> None:
        self._status = Path(f"/proc/self/task/{tid}/status")
        self._seen: tuple[str, ...] = ()
        self._since = 0.0

    def begin(self) -> None:
        self._seen = self._switches()
        self._since = time.monotonic()

    def seconds(self) -> float:
        """For how long it has slept without a single wake-up, as far as was seen since `begin`.

        A thread that computes, that waits for a processor, or that is woken by data as it comes in, is never
        still: what counts is the kernel's count of its switches.
        """
        seen = self._switches()
        if not seen or seen != self._seen:
            self.begin()
        return time.monotonic() - self._since

    def _switches(self) -> tuple[str, ...]:
        """Empty unless it sleeps."""
        lines = self._status.read_text().splitlines()
        if not any(line.startswith("State:\tS") for line in lines):
            return ()
        return tuple(line for line in lines if "ctxt_switches" in line)
