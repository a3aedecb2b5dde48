"""The link, live: a process between two TUN devices that lets packets pass when a trace says so.

A packet is there half the base delay after it was sent. At each opportunity one leaves the queue, or several
small ones, up to `MTU` bytes. What comes back waits the other half only. The trace begins with the first
packet. Every packet that passes is noted with how late it was; the reader of the report judges that.

A word on its standard input ends it with a report; if that closes, it just ends.
"""

from __future__ import annotations

import json
import os
import random
import select
import sys
import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field

from windtunnel.traces.bandwidth import MTU

ROOM = 65_536
_IPV4 = 4


def hurry() -> None:
    """Be woken in time, where this process may ask for that."""
    with suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))


@dataclass
class Relay:
    """``times``: opportunities within a ``period``, in seconds from the first packet, until it ``ends``;
    ``delay`` and ``packets`` as in `World`."""

    here: int
    there: int
    times: list[float]
    period: float
    ends: float
    delay: float
    packets: int
    loss: float
    seed: int
    began: float | None = None
    next: int = 0
    dropped: int = 0
    passed: int = 0
    waits: list[float] = field(default_factory=list)
    late: list[float] = field(default_factory=list)
    coming: deque[tuple[float, bytes]] = field(default_factory=deque)
    queue: deque[tuple[float, bytes]] = field(default_factory=deque)
    back: deque[tuple[float, bytes]] = field(default_factory=deque)

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)

    def read(self, device: int) -> None:
        """Take in what was sent, from either side."""
        way = self.coming if device == self.here else self.back
        with suppress(BlockingIOError):
            while packet := os.read(device, ROOM):
                if packet[0] >> 4 != _IPV4:  # a kernel looks for neighbours
                    continue
                now = time.monotonic()
                if self.began is None:
                    self.began = now
                way.append((now + self.delay / 2, packet))

    def turn(self, now: float) -> float:
        """All that was due by ``now``, in its order; when the next will be."""
        while self.back and self.back[0][0] <= now:
            self._write(self.here, self.back.popleft()[1])
        began = now if self.began is None else self.began
        while True:
            arrives = self.coming[0][0] if self.coming else now + 1.0
            turns, place = divmod(self.next, len(self.times))
            leaves = began + turns * self.period + self.times[place]
            if leaves >= began + self.ends:
                leaves = now + 1.0
            if min(arrives, leaves) > now:
                break
            if arrives <= leaves:
                if len(self.queue) < self.packets:
                    self.queue.append(self.coming.popleft())
                else:
                    self.coming.popleft()
                    self.dropped += 1
            else:
                self.next += 1
                self._leave(now, leaves)
        returns = self.back[0][0] if self.back else now + 1.0
        return min(arrives, returns, leaves if self.queue or self.coming else now + 1.0)

    def _leave(self, now: float, at: float) -> None:
        left = MTU
        while self.queue and len(self.queue[0][1]) <= left:
            entered, packet = self.queue.popleft()
            left, self.passed = left - len(packet), self.passed + len(packet)
            self.waits.append(now - entered)
            self.late.append(now - at)
            if self.random.random() >= self.loss:
                self._write(self.there, packet)

    def _write(self, device: int, packet: bytes) -> None:
        with suppress(OSError):  # nobody is there any more
            os.write(device, packet)


def main() -> None:
    here, there, trace = map(int, sys.argv[1:])
    with open(trace, "rb") as file:
        file.seek(0)
        relay = Relay(here, there, **json.load(file))
    hurry()
    print("ready", flush=True)
    due = time.monotonic()
    while True:
        ready, _, _ = select.select([here, there, 0], [], [], max(due - time.monotonic(), 0.0))
        if 0 in ready:
            break
        for device in ready:
            relay.read(device)
        due = relay.turn(time.monotonic())
    if os.read(0, 16):
        report = {name: getattr(relay, name) for name in ("waits", "late", "passed", "dropped")}
        print(json.dumps(report), flush=True)
