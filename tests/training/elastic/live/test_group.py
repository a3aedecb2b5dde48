"""A process group of real processes comes out of every operation that can block it, and meets again."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import group_bodies
import pytest
from worker_worlds import World, world

from support.meeting import MeetingServer

LAST = group_bodies.WORLD - 1


@pytest.fixture
def meeting(tmp_path: Path) -> Iterator[MeetingServer]:
    server = MeetingServer(f"{tmp_path}/meeting")
    yield server
    server.close()


def start(
    processes: World, meeting: MeetingServer, body: object, *args: object, ranks: int = LAST + 1
) -> None:
    for rank in range(ranks):
        processes.start(rank, body, meeting.address, *args)  # type: ignore[arg-type]


@pytest.mark.parametrize("operation", group_bodies.OPERATIONS)
def test_frozen_peer(meeting: MeetingServer, operation: str) -> None:
    with world() as processes:
        start(processes, meeting, group_bodies.blocked, operation, True)
        processes.wait_for(*[(rank, "ready") for rank in range(LAST + 1)])
        processes.kill(LAST, signal.SIGSTOP)
        meeting.meet(0, {"cut": "now"}, [], 0.0)
        for total, in_time, _ in processes.wait_for((0, "met"), (1, "met")):
            assert total == 2.0 and in_time
        meeting.meet(0, {}, ["alive/0", "alive/1"], 0.0)


@pytest.mark.parametrize("operation", ["all_reduce", "receive", "barrier", "fsdp"])
def test_killed_peer(meeting: MeetingServer, operation: str) -> None:
    """Nobody tells the others: the neighbours see the end of the connection, and each that cuts brings out
    the next one."""
    with world() as processes:
        start(processes, meeting, group_bodies.blocked, operation, False)
        processes.wait_for(*[(rank, "ready") for rank in range(LAST + 1)])
        processes.kill(LAST)
        for total, in_time, *_ in processes.wait_for((0, "met"), (1, "met")):
            assert total == 2.0 and in_time


def test_a_newer_generation_while_forming(meeting: MeetingServer) -> None:
    with world() as processes:
        start(processes, meeting, group_bodies.too_few, ranks=LAST)
        processes.wait_for((0, "forming"), (1, "forming"))
        meeting.form(2)
        assert processes.wait_for((0, "met"), (1, "met")) == [LAST, LAST]


def test_connections_of_the_program_are_not_cut(meeting: MeetingServer) -> None:
    with world() as processes:
        start(processes, meeting, group_bodies.strangers, ranks=2)
        reports = processes.wait_for((0, "alive"), (1, "alive"))
        # At least one end of a connection for each subgroup and for WORLD.
        assert sum(count for _, count, *_ in reports) >= reports[0][2] + 1
        for opened, _, _, refused in reports:
            assert opened
            assert refused == "ConnectionAbortedError"


def test_a_forked_child_holds_no_connection(meeting: MeetingServer) -> None:
    with world() as processes:
        start(processes, meeting, group_bodies.with_child, ranks=2)
        child, _ = processes.wait_for((1, "child"), (0, "ready"))
        try:
            processes.kill(1)
            assert re.search("closed|reset", processes.wait_for((0, "noticed"))[0])
            os.kill(child, 0)
        finally:
            os.kill(child, signal.SIGKILL)


@pytest.mark.conformance
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["new_group", "ddp", "fsdp"])
def test_many_recoveries_leak_nothing(meeting: MeetingServer, kind: str) -> None:
    with world() as processes:
        start(processes, meeting, group_bodies.recoveries, kind, 80 if kind == "new_group" else 24)
        held = processes.wait_for(*[(rank, "held") for rank in range(LAST + 1)], bound=300.0)
        for early, late in held:
            # Sockets, descriptors, threads.
            grown = [after - before for before, after in zip(early[:3], late[:3], strict=True)]
            assert max(grown) <= 2, grown
            assert late[3] - early[3] < 8 << 20
