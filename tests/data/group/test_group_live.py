"""Small groups of real engines: operations, errors of callers, losses, and an engine that comes back."""

from __future__ import annotations

import os
import signal
import struct
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from support.group import JOURNAL, SECRET, SIZE, Replicas, replicas
from support.waiting import until
from windtunnel.base.errors import HostError, UserError
from windtunnel.data.group import GroupHalted, Member, ReplicationGroup, StaleEpoch, start_engine
from windtunnel.data.group.live.link import Frame, FrameKind, connect
from windtunnel.data.group.policy import SLOT
from windtunnel.linux import network
from windtunnel.store.eventlog import EventLog, LogFailed, read


@pytest.fixture
def three(tmp_path: Path) -> Iterator[Replicas]:
    with replicas(tmp_path) as three:
        yield three


def everywhere(group: ReplicationGroup, offset: int, length: int) -> bytes:
    (content,) = {group.read(member, offset, length) for member in group.members}
    return content


def all_operations(group: ReplicationGroup) -> None:
    group.write(10, b"bytes").result()
    large = os.urandom(2 * SLOT + 100)
    group.write(JOURNAL + SLOT, large)
    group.memcpy(10, 12, 5)
    assert group.cas(64, 0, 5).result() == (0, 0, 0)
    first = group.members[0].name
    assert group.cas(64, 5, 6, execute=[first]).result() == (5, 5, 5)
    assert group.cas(64, 5, 7).result() == (6, 5, 5)
    assert group.cas(64, 6, 7, execute=[first]).result() == (6, 7, 7)
    group.flush().result()
    assert everywhere(group, 10, 7) == b"bybytes"
    assert everywhere(group, 64, 8) == struct.pack("<Q", 7)
    assert everywhere(group, JOURNAL + SLOT, len(large)) == large
    group.transaction([(300, b"one"), (400, memoryview(b"two"))])
    assert everywhere(group, 300, 3) + everywhere(group, 400, 3) == b"onetwo"
    assert everywhere(group, JOURNAL, 8) == bytes(8)
    assert group.write(7, b"").result() is None


def test_all_operations_on_one_host(three: Replicas) -> None:
    with three.group(journal=JOURNAL) as group:
        all_operations(group)
        expected = everywhere(group, 0, SIZE)
    assert {three.content(name) for name in three.engines} == {expected}


@pytest.mark.skipif(network.missing() is not None, reason=str(network.missing()))
def test_all_operations_between_hosts(tmp_path: Path) -> None:
    net = network.Network(f"group-{os.getpid()}")
    try:
        places = [net.add(f"h{number}") for number in range(3)]
        with replicas(tmp_path, "abc", places) as copies, copies.group(journal=JOURNAL) as group:
            all_operations(group)
            copies.engines["m1"].stop()
            with group.repair() as rest:
                assert [member.name for member in rest.members] == ["m0", "m2"]
                assert rest.cas(64, 7, 8).result() == (7, 7)
    finally:
        net.close()


def test_threads_share_a_group_and_a_small_window(three: Replicas) -> None:
    with three.group(window=2) as group, ThreadPoolExecutor(8) as pool:

        def work(place: int) -> int:
            return sum(group.cas(0, value, value + 1).result()[0] == value for value in range(40))

        wins = sum(pool.map(work, range(8)))
        assert everywhere(group, 0, 8) == struct.pack("<Q", wins)


def test_operations_complete_in_their_order(three: Replicas) -> None:
    order: list[int] = []
    with three.group() as group:
        futures: list[Future[None]] = []
        for number in range(200):
            futures.append(group.flush() if number % 50 == 7 else group.write(number, b"x"))
            futures[-1].add_done_callback(partial(lambda number, _: order.append(number), number))
        futures[-1].result()
        until(lambda: len(order) == 200)
    assert order == list(range(200))


def test_what_callers_may_not_ask_is_told(three: Replicas, tmp_path: Path) -> None:
    with three.group() as group:
        asks: list[tuple[Callable[[], object], str]] = [
            (lambda: group.write(SIZE - 1, b"ab"), r"`offset` is 4194303, for 2 bytes; accepted is within"),
            (lambda: group.memcpy(0, SIZE, 1), "accepted is within"),
            (lambda: group.cas(4, 0, 1), "accepted are words of 64 bits"),
            (lambda: group.read("m9", 0, 1), "`member` is 'm9'; accepted are m0, m1, m2"),
            (lambda: group.transaction([(0, b"x")]), "`journal` is not given"),
        ]
        for ask, words in asks:
            with pytest.raises(UserError, match=words):
                ask()
        assert group.write(0, b"goes on").result() is None
    with pytest.raises(UserError, match="`secret` is not that of m0"):
        ReplicationGroup(three.members, epoch=9, secret=b"another secret")
    with pytest.raises(UserError, match="`members` are 2 of 1 names"):
        ReplicationGroup([three.member("m0")] * 2, epoch=9, secret=SECRET)
    with pytest.raises(UserError, match="`listen` is 'tcp:here'"):
        start_engine(tmp_path / "x", SIZE, listen="tcp:here", secret=SECRET)
    with pytest.raises(HostError, match="another engine has the region"):
        start_engine(three.region("m0"), SIZE, listen=f"unix:{tmp_path}/x", secret=SECRET)


def test_a_group_goes_on_after_a_loss_and_takes_back_who_was_away(three: Replicas, tmp_path: Path) -> None:
    log = EventLog(tmp_path / "events.jsonl")
    with three.group(log=log) as group:
        group.write(0, b"before").result()
        three.engines["m1"].stop()
        with pytest.raises(GroupHalted):
            for _ in range(1000):
                group.write(0, b"during").result()
        with pytest.raises(GroupHalted):
            group.flush()
        rest = group.repair()
    assert [member.name for member in rest.members] == ["m0", "m2"]
    rest.write(3 << 20, b"after").result()
    three.start("m1")
    with three.group(epoch=rest.epoch + 1, log=log) as whole:
        assert everywhere(whole, 0, SIZE)[3 << 20 :].startswith(b"after")
        with pytest.raises(StaleEpoch, match="epoch 2 is refused: 3 is the newest"):
            for _ in range(1000):
                rest.write(0, b"too late").result()
        with pytest.raises(StaleEpoch):
            rest.repair()
        assert everywhere(whole, 0, 8) != b"too late"
    copied = [event["copied"] for event in read(log.path) if event["kind"] == "effect"]
    (halted,) = (event for event in read(log.path) if event["kind"] == "halted" and event["epoch"] == 1)
    assert "m1 is gone" in halted["why"] or "m0 lost the member behind it" in halted["why"]
    # what m0 had performed and m1 not yet handed on is copied to m2
    assert copied[0] == {} and copied[1] in ({}, {"m2": 1})
    assert set(copied[2]) == {"m1"} and 1 <= copied[2]["m1"] <= 2


class FullLog(EventLog):
    def append(self, kind: str, **fields: Any) -> Any:
        if kind == "halted":
            raise LogFailed("no space is left")
        return super().append(kind, **fields)


def test_a_log_that_fails_keeps_nobody_waiting(three: Replicas, tmp_path: Path) -> None:
    log = FullLog(tmp_path / "events.jsonl")
    with ReplicationGroup([three.member("m0")], epoch=1, secret=SECRET, log=log, patience=200) as group:
        os.kill(three.engines["m0"].pid, signal.SIGSTOP)
        pending = group.write(0, b"x")
        three.engines["m0"].stop()
        with pytest.raises(GroupHalted, match="m0 is gone"):
            pending.result(60)


def test_frames_of_another_epoch_are_refused_and_told(three: Replicas) -> None:
    with three.group(epoch=5) as group:
        for kind, epoch in (
            (FrameKind.WRITE, 4),
            (FrameKind.WRITE, 5),
            (FrameKind.READ, 4),
            (FrameKind.JOIN, 6),
        ):
            stranger = connect(group.members[0].address, SECRET, 20)
            stranger.sock.sendall(stranger.pack(Frame(kind, epoch, 1, 0, 5, payload=b"wrong")))
            answer = stranger.receive()
            assert (answer.kind, answer.a) == (FrameKind.STALE, 5)
            stranger.close()
        assert everywhere(group, 0, 5) == bytes(5)
        with pytest.raises(StaleEpoch):
            ReplicationGroup(three.members, epoch=5, secret=SECRET)
        assert group.write(0, b"goes on").result() is None
        predecessor = connect(group.members[0].address, SECRET, 20)
        predecessor.join(5, 4)
        predecessor.sock.sendall(predecessor.pack(Frame(FrameKind.WRITE, 4, 2, 0, payload=b"wrong")))
        answer = predecessor.receive()
        assert (answer.kind, answer.a) == (FrameKind.STALE, 5)
        assert everywhere(group, 0, 7) == b"goes on"


def test_a_region_that_was_changed_while_its_engine_was_away_is_put_right(three: Replicas) -> None:
    """Its engine says where it was, and that it was away: what it has is compared."""
    with three.group() as group:
        group.write(0, b"as it was").result()
        three.engines["m1"].stop()
        with three.region("m1").open("r+b") as file:
            file.seek(3 << 20)
            file.write(b"torn by a kill")
    three.start("m1")
    with three.group(epoch=2) as whole:
        assert everywhere(whole, 0, SIZE)[:9] == b"as it was"
        assert everywhere(whole, 3 << 20, 14) == bytes(14)


def test_an_engine_that_was_only_copied_to_in_part_is_no_source(three: Replicas) -> None:
    with three.group() as group:
        group.write(0, b"whole").result()
    link = connect(three.engines["m2"].address, SECRET, 20)
    for frame in (Frame(FrameKind.FENCE, 2, 1), Frame(FrameKind.PATCH, 2, 2, 1 << 20, payload=b"half")):
        link.sock.sendall(link.pack(frame))
        assert link.receive().kind == FrameKind.ANSWER
    link.close()
    three.engines["m2"].stop()
    three.start("m2")  # that it is torn stands in its file
    with pytest.raises(GroupHalted, match="none has a whole region"):
        ReplicationGroup([three.member("m2")], epoch=3, secret=SECRET)
    with three.group(epoch=4) as group:
        assert everywhere(group, 0, SIZE)[: 1 << 20].startswith(b"whole")


def test_a_frozen_member_is_found_out_and_changes_nothing_later(three: Replicas) -> None:
    group = three.group(patience=1.5)
    frozen = three.engines["m1"].pid
    os.kill(frozen, signal.SIGSTOP)
    pending = [group.write(number, b"x") for number in range(20)]
    with pytest.raises(GroupHalted) as halted:
        pending[-1].result()
    assert halted.value.members == ("m1",)
    with group.repair() as rest:
        assert [member.name for member in rest.members] == ["m0", "m2"]
        rest.write(0, b"y" * 30).result()
        os.kill(frozen, signal.SIGCONT)
        with three.group(epoch=3) as whole:
            assert everywhere(whole, 0, 31) == b"y" * 30 + b"\0"


def test_the_tail_has_what_is_acknowledged_and_the_head_may_be_ahead(three: Replicas) -> None:
    with three.group() as group:
        os.kill(three.engines["m1"].pid, signal.SIGSTOP)
        pending = group.write(0, b"new")
        until(lambda: group.read("m0", 0, 3) == b"new")
        assert group.read("m2", 0, 3) == bytes(3) and not pending.done()
        os.kill(three.engines["m1"].pid, signal.SIGCONT)
        pending.result()
        assert group.read("m2", 0, 3) == b"new"


def test_an_engine_says_that_it_has_no_real_time_priority(tmp_path: Path) -> None:
    """Which of both it is depends on the host; a thread's policy is what it says."""
    engine = start_engine(tmp_path / "r", SIZE, listen=f"unix:{tmp_path}/r.sock", secret=SECRET, cores=[0])
    try:
        real = os.sched_getscheduler(engine.pid) == os.SCHED_FIFO
        assert real == (engine.refused == "")
        assert os.sched_getaffinity(engine.pid) == {0}
    finally:
        engine.stop()


def test_an_engine_ends_with_who_started_it(tmp_path: Path) -> None:
    engine = start_engine(tmp_path / "r", SIZE, listen=f"unix:{tmp_path}/r.sock", secret=SECRET)
    assert engine.process.stdin is not None
    engine.process.stdin.close()
    assert engine.process.wait(60) == 0
    with pytest.raises(GroupHalted, match="0 of 1 members answer"):
        ReplicationGroup([Member("m0", engine.address)], epoch=1, secret=SECRET)
