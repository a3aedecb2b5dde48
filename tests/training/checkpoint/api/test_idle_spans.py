"""The profile of idle spans, and windows that open in them."""

from __future__ import annotations

import os
import socket
import threading
from pathlib import Path
from typing import Any

import pytest
from checkpoint_world import Cluster, FakeJob

from windtunnel.training.checkpoint.live import spans
from windtunnel.training.checkpoint.live.settings import Settings


def look(profile: spans.Profile, begin: float, idle: list[float], busy: float = 0.02) -> float:
    """A step: busy, idle, busy, idle, …, busy, looked at each millisecond."""
    now = begin
    for number in range(2 * len(idle) + 1):
        length = busy if number % 2 == 0 else idle[number // 2]
        for _ in range(round(length * 1000)):
            now += 0.001
            profile.look(now, number % 2 == 0)
    profile.step(now)
    return now


def test_the_profile_is_the_shortest_of_each_span_of_the_usual_steps() -> None:
    profile = spans.Profile(steps=4, shortest=0.003)
    now = look(profile, 0.0, [0.5])  # the first step is not looked at
    for idle in ([0.040, 0.090], [0.050, 0.080], [0.2], [0.045, 0.085]):
        assert profile.expected is None
        now = look(profile, now, idle)
    assert profile.expected == pytest.approx([0.040, 0.080], abs=0.0025)


def test_gaps_too_short_to_use_are_no_spans() -> None:
    profile = spans.Profile(steps=1, shortest=0.003)
    now = look(profile, 0.0, [0.001, 0.05])
    look(profile, now, [0.001, 0.05])
    assert profile.expected == pytest.approx([0.05], abs=0.0025)


class Memory:
    def __init__(self) -> None:
        self.told: list[float] = []
        self.changed = threading.Condition()

    def open_window(self, seconds: float) -> None:
        with self.changed:
            self.told.append(seconds)
            self.changed.notify_all()

    def close_window(self) -> None:
        self.open_window(0.0)

    def committed(self) -> int:
        return -1

    def wait(self, condition: Any) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: condition(self.told), 20)


def sender(folder: Path, memory: Memory, expected: list[float], **options: Any) -> spans.IdleSender:
    """One that has its profile already; traffic is what ``marked`` says."""
    job = FakeJob(Cluster(folder, 1), 0)
    made = spans.IdleSender(job, memory, Settings(**options), 1000, sockets=list)
    made._profile.expected = expected
    made._plan(expected)
    return made


def test_a_window_opens_when_the_network_falls_quiet_and_closes_with_traffic(folder: Path) -> None:
    memory = Memory()
    one = sender(folder, memory, [100.0], bandwidth=1e6)
    one.mark(True)
    memory.wait(lambda told: told[-1] == 0.0)
    one.mark(False)
    memory.wait(lambda told: 0.0 < told[-1] <= 80.0)  # the safe part of what is left
    one.mark(True)
    memory.wait(lambda told: told[-1] == 0.0)
    one.close()


def test_what_does_not_fit_makes_checkpoints_rarer_and_says_so_once(folder: Path) -> None:
    memory = Memory()
    one = sender(folder, memory, [0.01, 0.01], bandwidth=30_000.0, startup=1e-6, safety=1.0)
    assert one.every == 2
    assert ["one is made every 2 steps" in note for note in one._job.cluster.notes()] == [True]
    one.close()


def test_without_room_in_any_span_sending_goes_on_beside_the_traffic(folder: Path) -> None:
    memory = Memory()
    one = sender(folder, memory, [], bandwidth=1e6)
    assert one._always and one.every == 1
    one.close()


def test_traffic_is_read_from_the_sockets() -> None:
    server = socket.create_server(("127.0.0.1", 0))
    left = socket.create_connection(server.getsockname())
    right, _ = server.accept()
    pipe = os.pipe()
    fds = [left.fileno(), right.fileno(), pipe[0], 9999]  # what is no socket (any more) counts nothing
    before = spans.traffic(fds)
    left.sendall(b"x" * 50_000)
    got = 0
    while got < 50_000:
        got += len(right.recv(65536))
    assert spans.traffic(fds) - before >= 50_000
    for fd in pipe:
        os.close(fd)
    for sock in (left, right, server):
        sock.close()
