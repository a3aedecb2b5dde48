"""Timers, and what waits for them."""

from __future__ import annotations

import ctypes
import os
import select
import signal
import struct
import threading
import time

from .ground import Kind, Wrong, expect, libc, must, readable, until

MONOTONIC = 1
EVENT_SIZE = 64
"""Of struct sigevent."""


class _Times(ctypes.Structure):
    """struct itimerspec."""

    _fields_ = tuple((name, ctypes.c_long) for name in ("every", "every_ns", "first", "first_ns"))

    def __init__(self, first: float = 0.0, every: float = 0.0) -> None:
        super().__init__(int(every), int(every % 1 * 1e9), int(first), int(first % 1 * 1e9))

    def left(self) -> float:
        return float(self.first) + self.first_ns / 1e9

    def period(self) -> float:
        return float(self.every) + self.every_ns / 1e9


def _timerfd(first: float, every: float = 0.0) -> int:
    descriptor = must(libc.timerfd_create(MONOTONIC, 0), "timerfd_create")
    must(libc.timerfd_settime(descriptor, 0, ctypes.byref(_Times(first, every)), None), "timerfd_settime")
    return descriptor


def _armed(descriptor: int) -> _Times:
    times = _Times()
    must(libc.timerfd_gettime(descriptor, ctypes.byref(times)), "timerfd_gettime")
    return times


def _ticks(descriptor: int, what: str) -> int:
    readable(descriptor, what)
    return int(struct.unpack("Q", os.read(descriptor, 8))[0])


def timerfd_periodic() -> Kind:
    """A timerfd ticks on with its period."""
    timer = _timerfd(0.05, 0.05)
    far = _timerfd(5000, 77.5)
    _ticks(timer, "the timer")
    yield
    for _ in range(3):
        _ticks(timer, "the periodic timer")
    expect("its period", round(_armed(timer).period(), 3), 0.05)
    if not 4000 < _armed(far).left() <= 5000:
        raise Wrong(f"the far timer ticks first in {_armed(far).left()} s instead of 5000")
    expect("the far timer's period", _armed(far).period(), 77.5)


def timerfd_one_shot() -> Kind:
    """A timerfd that is armed once fires once, and not before its time."""
    soon, far, spent, off = _timerfd(0.3), _timerfd(5000), _timerfd(0.01), _timerfd(0)
    readable(spent, "the spent timer")
    yield
    expect("expirations", _ticks(soon, "the one-shot timer"), 1)
    expect("expirations before the restore", _ticks(spent, "the timer that had fired"), 1)
    if not 4000 < _armed(far).left() <= 5000:
        raise Wrong(f"the far timer fires in {_armed(far).left()} s instead of 5000")
    expect("the unarmed timer", _armed(off).left(), 0.0)


def timerfd_real_time() -> Kind:
    """A timerfd of wall-clock time fires at its hour."""
    timer = must(libc.timerfd_create(0, 0), "timerfd_create")
    at = _Times(int(time.time()) + 5000)
    must(libc.timerfd_settime(timer, 1, ctypes.byref(at), None), "timerfd_settime")
    yield
    if not 3000 < _armed(timer).left() <= 5000:
        raise Wrong(f"it fires in {_armed(timer).left()} s instead of 5000")


def posix_timer() -> Kind:
    """POSIX timers, one periodic by signal and one far away, tick on."""
    got = []
    signal.signal(signal.SIGRTMIN, lambda *_: got.append(1))

    def started(first: float, every: float) -> ctypes.c_void_p:
        event = ctypes.create_string_buffer(struct.pack("Qii", 0, signal.SIGRTMIN, 0), EVENT_SIZE)
        timer = ctypes.c_void_p()
        must(libc.timer_create(MONOTONIC, event, ctypes.byref(timer)), "timer_create")
        must(libc.timer_settime(timer, 0, ctypes.byref(_Times(first, every)), None), "timer_settime")
        return timer

    started(0.05, 0.05)
    far = started(5000, 0)
    until(lambda: got, "the first signal of the timer")
    yield
    before = len(got)
    until(lambda: len(got) > before + 2, "further signals of the timer")
    left = _Times()
    must(libc.timer_gettime(far, ctypes.byref(left)), "timer_gettime")
    if not 4000 < left.left() <= 5000:
        raise Wrong(f"the far timer fires in {left.left()} s instead of 5000")


def interval_timer() -> Kind:
    """setitimer of wall-clock time and of CPU time go on."""
    got = []
    signal.signal(signal.SIGALRM, lambda *_: got.append(1))
    signal.signal(signal.SIGVTALRM, lambda *_: None)
    signal.setitimer(signal.ITIMER_REAL, 0.05, 0.05)
    signal.setitimer(signal.ITIMER_VIRTUAL, 500, 250)
    until(lambda: got, "the first alarm")
    yield
    before = len(got)
    until(lambda: len(got) > before + 2, "further alarms")
    left, every = signal.getitimer(signal.ITIMER_VIRTUAL)
    expect("the period of CPU time", every, 250.0)
    if not 400 < left < 501:
        raise Wrong(f"{left:.3f} s of CPU time are left instead of 500")


def alarm() -> Kind:
    """An alarm that is set rings once."""
    got = []
    signal.signal(signal.SIGALRM, lambda *_: got.append(1))
    signal.setitimer(signal.ITIMER_REAL, 0.4)
    yield
    until(lambda: got, "the alarm")


def sleeping() -> Kind:
    """Threads in nanosleep, in poll with a timeout and in a timed wait wake up in time."""
    woke: list[str] = []
    event = threading.Event()

    def asleep(name: str, wait: object) -> None:
        def body() -> None:
            wait()  # type: ignore[operator]
            woke.append(name)

        threading.Thread(target=body, daemon=True).start()

    asleep("sleep", lambda: time.sleep(0.6))
    asleep("poll", lambda: select.poll().poll(600))
    asleep("event", lambda: event.wait(0.6))
    yield
    until(lambda: len(woke) == 3, f"the end of all three sleeps ({woke})")


def epoll_of_timers() -> Kind:
    """An event loop of epoll with timers and a pipe goes on, edge-triggered entries too."""
    timer = _timerfd(0.05, 0.05)
    reader, writer = os.pipe()
    quiet, loud = os.pipe()
    loop = select.epoll()
    loop.register(timer, select.EPOLLIN)
    loop.register(reader, select.EPOLLIN | select.EPOLLET)
    loop.register(quiet, select.EPOLLIN | select.EPOLLONESHOT)
    yield
    os.write(writer, b"x")
    os.write(loud, b"y")
    reported: set[int] = set()
    deadline = time.monotonic() + 5
    while reported != {timer, reader, quiet} and time.monotonic() < deadline:
        for descriptor, _ in loop.poll(0.5):
            if descriptor == quiet:
                expect("one-shot events", quiet in reported, False)
            reported.add(descriptor)
            if descriptor == timer:
                os.read(timer, 8)
    names = {timer: "timer", reader: "pipe", quiet: "one-shot pipe"}
    expect("what epoll told of", sorted(names[descriptor] for descriptor in reported), sorted(names.values()))


def clocks() -> Kind:
    """Monotonic time goes on and never back."""
    before, boot = time.monotonic(), time.clock_gettime(time.CLOCK_BOOTTIME)
    yield
    if time.monotonic() < before or time.clock_gettime(time.CLOCK_BOOTTIME) < boot:
        raise Wrong(f"monotonic time went from {before} to {time.monotonic()}")


def async_loop() -> Kind:
    """asyncio goes on: a periodic task, a child's pipe, a server of its own."""
    import asyncio
    import threading

    counts = {"tick": 0, "answers": 0}

    async def work() -> None:
        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            while line := await reader.readline():
                writer.write(line.upper())

        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        while True:
            counts["tick"] += 1
            writer.write(b"hello\n")
            expect("the answer", await reader.readline(), b"HELLO\n")
            counts["answers"] += 1
            await asyncio.sleep(0.02)

    threading.Thread(target=lambda: asyncio.run(work()), daemon=True).start()
    until(lambda: counts["answers"] > 2, "the first answers")
    yield
    before = counts["answers"]
    until(lambda: counts["answers"] > before + 3, "further answers")
