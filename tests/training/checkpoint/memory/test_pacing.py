"""When chunks may be sent, by a clock that the test moves."""

from __future__ import annotations

import math
import threading

import pytest

from support.waiting import PATIENCE
from windtunnel.training.checkpoint.live.memory.replicate import Pace, Pacer
from windtunnel.training.checkpoint.policy.pacing import (
    LONGEST,
    NetworkProfile,
    Profiles,
    allowance,
    spread,
)

MB = 1 << 20
NEVER = threading.Event()


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def pacer(**pace: object) -> tuple[Pacer, Clock]:
    clock = Clock()
    pacer = Pacer(clock)
    pacer.configure(Pace(**pace))  # type: ignore[arg-type]
    return pacer, clock


def allowed(p: Pacer, left: int, now: float) -> tuple[int, float]:
    """How many bytes, and if none, after how many seconds to ask again."""
    answer = allowance(p.question(left, now))
    return answer.nbytes, math.inf if answer.pause is None else answer.pause


def sent_in(p: Pacer, clock: Clock, left: int, end: float) -> list[int]:
    """The chunks that are sent until ``end``."""
    chunks = []
    while left:
        size, pause = allowed(p, left, clock.now)
        if size:
            assert p.take(left, 0.0, NEVER) == size
            chunks.append(size)
            left -= size
        elif clock.now + pause > end:
            break
        else:
            clock.now += pause
    return chunks


def test_without_windows_all_goes_at_once() -> None:
    p, clock = pacer(chunk=MB)
    assert sent_in(p, clock, 3 * MB + 5, clock.now) == [MB, MB, MB, 5]
    assert not p.inside()


def test_a_bandwidth_is_kept() -> None:
    p, clock = pacer(chunk=MB, bandwidth=1e6)
    begun = clock.now
    sent = sum(sent_in(p, clock, 100 * MB, begun + 10))
    assert sent == pytest.approx(10e6, abs=1.1 * MB)


def test_in_idle_mode_chunks_end_before_the_window() -> None:
    p, clock = pacer(mode="idle", chunk=MB, bandwidth=100e6, startup=0.001)
    assert allowed(p, MB, clock.now) == (0, math.inf)
    p.window(0, clock.now + 0.045)
    begun = clock.now
    chunks = sent_in(p, clock, 100 * MB, begun + 1)
    assert sum(0.001 + size / 100e6 for size in chunks) <= 0.045
    assert p.inside()
    # As much as the policy takes for granted of that span.
    profile = NetworkProfile((0.045,), 100 * MB, 100e6)
    every = spread(Profiles((profile,), 2, 4 * MB, 4, 0.001, 1.0)).every
    assert sum(chunks) * every == pytest.approx(100 * MB, rel=0.05)


def test_a_window_is_open_when_all_ranks_of_the_host_say_so() -> None:
    p, clock = pacer(mode="idle", chunk=MB, bandwidth=100e6)
    p.window(0, clock.now + 5)
    p.window(1, 0.0)
    assert allowed(p, MB, clock.now)[0] == 0
    p.window(1, clock.now + 1)
    assert allowed(p, MB, clock.now)[0] == MB
    p.forget()
    assert allowed(p, MB, clock.now)[0] == 0


def test_an_unknown_bandwidth_is_learned() -> None:
    p, clock = pacer(mode="idle", chunk=64 * MB)
    assert p.measures
    p.window(0, clock.now + 1.0)
    for _ in range(30):
        p.sent(MB, 0.1)
    size, _ = allowed(p, 64 * MB, clock.now)
    assert size == pytest.approx(10 * MB * LONGEST, rel=0.01)


def test_who_waits_is_woken_by_a_window_and_by_a_cancellation() -> None:
    p = Pacer()
    p.configure(Pace("idle", MB, 100e6))
    got: list[int] = []
    cancelled = threading.Event()
    threads = [
        threading.Thread(target=lambda: got.append(p.take(1000, 30.0, NEVER))),
        threading.Thread(target=lambda: got.append(p.take(1 << 40, 30.0, cancelled))),
    ]
    threads[1].start()
    cancelled.set()
    p.wake()
    threads[1].join(PATIENCE)
    threads[0].start()
    p.window(0, math.inf)
    threads[0].join(PATIENCE)
    assert got == [0, 1000]
