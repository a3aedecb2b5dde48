"""A process group of real processes comes out of every operation that can block it, and meets again."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator

import group_bodies
import pytest
import torch.distributed as dist
from worker_worlds import World, world

LAST = group_bodies.WORLD - 1


@pytest.fixture
def store() -> Iterator[dist.TCPStore]:
    yield dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def start(made: World, store: dist.TCPStore, body: object, *args: object, ranks: int = LAST + 1) -> None:
    for rank in range(ranks):
        made.start(rank, body, f"127.0.0.1:{store.port}", *args)  # type: ignore[arg-type]


@pytest.mark.parametrize("operation", group_bodies.OPERATIONS)
def test_frozen_peer(store: dist.TCPStore, operation: str) -> None:
    with world() as made:
        start(made, store, group_bodies.blocked, operation, True)
        made.wait_for(*[(rank, "ready") for rank in range(LAST + 1)])
        made.kill(LAST, signal.SIGSTOP)
        store.set("cut", "now")
        for total, in_time, _ in made.wait_for((0, "met"), (1, "met")):
            assert total == 2.0 and in_time
        assert store.check(["alive/0", "alive/1"])


@pytest.mark.parametrize("operation", ["all_reduce", "receive", "barrier", "fsdp"])
def test_killed_peer(store: dist.TCPStore, operation: str) -> None:
    """Nobody tells the others: the neighbours see the end of the connection, and each that cuts brings out
    the next one."""
    with world() as made:
        start(made, store, group_bodies.blocked, operation, False)
        made.wait_for(*[(rank, "ready") for rank in range(LAST + 1)])
        made.kill(LAST)
        for total, in_time, *_ in made.wait_for((0, "met"), (1, "met")):
            assert total == 2.0 and in_time


def test_cut_while_forming(store: dist.TCPStore) -> None:
    with world() as made:
        start(made, store, group_bodies.too_few, ranks=LAST)
        made.wait_for((0, "forming"), (1, "forming"))
        store.set("cut", "now")
        assert made.wait_for((0, "met"), (1, "met")) == [LAST, LAST]


def test_connections_of_the_program_are_not_cut(store: dist.TCPStore) -> None:
    with world() as made:
        start(made, store, group_bodies.strangers, ranks=2)
        reports = made.wait_for((0, "alive"), (1, "alive"))
        # At least one end of a connection for each subgroup and for WORLD, and both connections to the store.
        assert sum(count for _, count, *_ in reports) >= reports[0][2] + 1 + 2
        for opened, _, _, refused in reports:
            assert opened
            assert refused == "ConnectionAbortedError"


def test_a_forked_child_holds_no_connection(store: dist.TCPStore) -> None:
    with world() as made:
        start(made, store, group_bodies.with_child, ranks=2)
        child, _ = made.wait_for((1, "child"), (0, "ready"))
        try:
            made.kill(1)
            assert re.search("closed|reset", made.wait_for((0, "noticed"))[0])
            os.kill(child, 0)
        finally:
            os.kill(child, signal.SIGKILL)


@pytest.mark.conformance
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["new_group", "ddp", "fsdp"])
def test_many_recoveries_leak_nothing(store: dist.TCPStore, kind: str) -> None:
    with world() as made:
        start(made, store, group_bodies.recoveries, kind, 80 if kind == "new_group" else 24)
        held = made.wait_for(*[(rank, "held") for rank in range(LAST + 1)], bound=300.0)
        for early, late in held:
            # Sockets, descriptors, threads; at times there is the connection that was made ahead.
            grown = [after - before for before, after in zip(early[:3], late[:3], strict=True)]
            assert max(grown) <= 2, grown
            assert late[3] - early[3] < 8 << 20
