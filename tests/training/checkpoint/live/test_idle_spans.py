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
from windtunnel.training.checkpoint.policy.pacing import OPEN
from windtunnel.training.checkpoint.settings import CheckpointSettings


class Course:
    """Steps looked at each millisecond: busy, idle, busy, idle, …, busy."""

    def __init__(self, profile: spans.SpanProfile) -> None:
        self.profile, self.now, self.count = profile, 0.0, 0

    def step(self, idle: list[float], busy: float = 0.02, wait: float = 0.0) -> None:
        for number in range(2 * len(idle)):
            self.go(busy if number % 2 == 0 else idle[number // 2], number % 2 == 0)
        self.profile.step(self.now)
        self.go(wait, False)
        if wait:
            self.profile.resume()

    def go(self, seconds: float, busy: bool) -> None:
        for _ in range(round(seconds * 1000)):
            self.now += 0.001
            self.count += 1_000_000 if busy else 0
            self.profile.look(self.now, busy, self.count)


def expected_seconds(profile: spans.SpanProfile) -> list[float]:
    assert profile.expected is not None
    return [span.seconds for span in profile.expected]


def test_the_profile_is_a_short_one_of_each_span_that_most_steps_have() -> None:
    profile = spans.SpanProfile(steps=4, shortest=0.003)
    course = Course(profile)
    course.step([0.5])  # the first step is not looked at
    for idle in ([0.040, 0.090], [0.050, 0.080], [0.2], [0.045, 0.085]):
        assert profile.expected is None
        course.step(idle)
    assert expected_seconds(profile) == pytest.approx([0.045, 0.080], abs=0.0025)


def test_a_pause_within_a_collective_is_at_no_place_of_the_profile() -> None:
    profile = spans.SpanProfile(steps=1, shortest=0.003)
    course = Course(profile)
    for _ in range(3):
        course.step([0.04, 0.09])
    course.go(0.02, True)
    course.go(0.01, False)
    here = profile.here()
    assert here is not None and here.seconds == pytest.approx(0.04, abs=0.0025)
    course.go(0.01, True)
    course.go(0.02, False)
    assert profile.here() is None
    course.go(0.01, True)
    course.go(0.01, False)
    here = profile.here()
    assert here is not None and here.seconds == pytest.approx(0.09, abs=0.0025)


class Memory:
    def __init__(self) -> None:
        self.windows: list[float] = []
        self.changed = threading.Condition()

    def open_window(self, seconds: float) -> None:
        with self.changed:
            self.windows.append(seconds)
            self.changed.notify_all()

    def close_window(self) -> None:
        self.open_window(0.0)

    def committed(self) -> int:
        return -1

    def wait(self, condition: Any) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: condition(self.windows), 20)


class Network:
    """Counts bytes, more with each look while it is ``busy``."""

    def __init__(self) -> None:
        self.busy = False
        self.bytes = 0

    def count(self) -> int:
        self.bytes += int(self.busy)
        return self.bytes


def sender(
    folder: Path, memory: Memory, expected: list[float], network: Network | None = None, **options: Any
) -> spans.IdleSender:
    """One that has its profile already."""
    job = FakeJob(Cluster(folder, 1), 0)
    count = (network or Network()).count
    idle_sender = spans.IdleSender(job, memory, CheckpointSettings(**options), 1000, count=count)
    usual = [spans.Span(n * 1_000_000, seconds) for n, seconds in enumerate(expected)]
    idle_sender._profile.expected = usual
    idle_sender._plan(usual)
    return idle_sender


def test_a_window_opens_when_the_network_falls_quiet_and_closes_with_traffic(folder: Path) -> None:
    memory, network = Memory(), Network()
    idle_sender = sender(folder, memory, [100.0], network, bandwidth=1e6)
    network.busy = True
    memory.wait(lambda windows: windows[-1] == 0.0)
    network.busy = False
    memory.wait(lambda windows: 0.0 < windows[-1] <= 80.0)  # the safe part of what is left
    network.busy = True
    memory.wait(lambda windows: windows[-1] == 0.0)
    idle_sender.close()


def test_what_does_not_fit_makes_checkpoints_rarer_and_says_so_once(folder: Path) -> None:
    memory = Memory()
    idle_sender = sender(folder, memory, [0.01, 0.01], bandwidth=30_000.0, startup=1e-6, safety=1.0)
    assert idle_sender.every == 2
    assert ["one is made every 2 steps" in note for note in idle_sender._job.cluster.notes()] == [True]
    idle_sender.close()


def test_without_room_in_any_span_sending_goes_on_beside_the_traffic(folder: Path) -> None:
    memory, network = Memory(), Network()
    idle_sender = sender(folder, memory, [100.0], network, bandwidth=1e6)
    network.busy = True
    memory.wait(lambda windows: windows[-1] == 0.0)
    idle_sender._plan([])  # the next steps have no idle span
    assert idle_sender._always and idle_sender.every == 1
    memory.wait(lambda windows: windows[-1] > 600.0)
    idle_sender.close()
    assert memory.windows[-2:] == [OPEN, 0.0]


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
