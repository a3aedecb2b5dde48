"""Groups whose engines, coordinators, connections and disks fail, from outside and at named points."""

from __future__ import annotations

import os
import random
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from math import inf
from pathlib import Path
from typing import Any

import pytest

from support.group import JOURNAL, SECRET, SIZE, Replicas, replicas
from support.linearizable import Operation, linearizable
from support.small_disk import small_disk
from support.waiting import until
from windtunnel.base.errors import HostError, LessError
from windtunnel.data.group import GroupHalted, Member, ReplicationGroup, start_engine
from windtunnel.data.group.live import client
from windtunnel.data.group.live.link import HEAD
from windtunnel.linux import mounts, processes

RECORD = 64
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")


@pytest.fixture
def three(tmp_path: Path) -> Iterator[Replicas]:
    with replicas(tmp_path) as three:
        yield three


def record(number: int) -> bytes:
    body = struct.pack("<Q", number) * 7 + bytes(4)
    return body + struct.pack("<I", zlib.crc32(body))


def worked(group: ReplicationGroup, count: int) -> tuple[set[int], int]:
    """Records at their places, each tenth one flushed, every third copied: those that were acknowledged, and
    the count of swaps that were."""
    done, swaps = set[int](), 0
    futures = []
    try:
        for number in range(count):
            futures.append(group.write((number + 1) * RECORD, record(number)))
            if number % 10 == 9:
                group.flush().result()
            if number % 3 == 0:
                group.memcpy((number + 1) * RECORD, (1 << 20) + number * RECORD, RECORD)
            swaps = max(swaps, group.cas(0, number, number + 1).result()[0] + 1)
    except GroupHalted:
        pass
    for number, future in enumerate(futures):
        if future.done() and future.exception() is None:
            done.add(number)
    return done, swaps


def nothing_lost(group: ReplicationGroup, done: set[int], swaps: int) -> None:
    contents = [group.read(member, 0, SIZE) for member in group.members]
    assert all(content == contents[0] for content in contents)
    (word,) = struct.unpack_from("<Q", contents[0])
    assert swaps <= word <= swaps + 1
    for number in range(max(done, default=0) + 2):
        held = contents[0][(number + 1) * RECORD :][:RECORD]
        assert held == record(number) or (number not in done and held == bytes(RECORD))


POINTS = [
    ("_apply", "before"), ("_apply", "after"), ("_put", "after"), ("_done", "before"), ("_done", "after"),
    ("_hand_on", "before"), ("_hand_on", "after"), ("_sync", "before"), ("_sync", "after"),
]  # fmt: skip


@pytest.mark.parametrize("name", ["m0", "m1", "m2"])
@pytest.mark.parametrize(("method", "when"), POINTS)
def test_an_engine_that_is_killed_at_a_point_loses_nothing(
    tmp_path: Path, name: str, method: str, when: str
) -> None:
    if name == "m2" and method == "_hand_on":
        method = "_tell"  # of the tail
    nth = random.Random(f"{name} {method} {when}").randrange(2, 5 if method == "_sync" else 40)
    with replicas(tmp_path) as copies:
        copies.engines[name].stop()
        copies.start(name, point=(method, when, nth))
        group = copies.group()
        done, swaps = worked(group, 60)
        assert copies.engines[name].process.wait(60) == -signal.SIGKILL
        with group.repair() as rest:
            assert len(rest.members) == 2
            nothing_lost(rest, done, swaps)
            rest.write(2 << 20, b"further").result()
        copies.start(name)
        with copies.group(epoch=rest.epoch + 1) as whole:
            assert len(whole.members) == 3
            nothing_lost(whole, done, swaps)


@pytest.mark.parametrize(("method", "when"), [("_put", "before"), ("_hand_on", "before"), ("_done", "after")])
def test_an_engine_that_freezes_at_a_point_does_not_change_a_newer_epoch(
    tmp_path: Path, method: str, when: str
) -> None:
    with replicas(tmp_path) as copies:
        copies.engines["m0"].stop()
        copies.start("m0", point=(method, when, 25, "stop"))
        group = copies.group(patience=1.5)
        done, swaps = worked(group, 60)
        assert processes.state(copies.engines["m0"].pid) == "T"
        with group.repair([copies.member("m1"), copies.member("m2")]) as rest:
            rest.write(RECORD, b"\xff" * 60 * RECORD).result()
            before = copies.content("m1")
            os.kill(copies.engines["m0"].pid, signal.SIGCONT)
            until(lambda: copies.content("m0") != before and _quiet(copies.engines["m0"].pid))
            assert copies.content("m1") == copies.content("m2") == before
            assert rest.cas(0, swaps + 5, 9).result()[0] in (swaps, swaps + 1)
        with copies.group(epoch=9) as whole:
            assert {whole.read(member, 0, SIZE) for member in whole.members} == {before}
    assert done


def test_a_member_that_freezes_while_it_is_copied_to_is_given_up(
    three: Replicas, monkeypatch: pytest.MonkeyPatch
) -> None:
    with three.group() as group:
        three.engines["m1"].stop()
        with group.repair([three.member("m0"), three.member("m2")]) as rest:
            rest.write(0, os.urandom(SIZE)).result()
        three.start("m1", point=("_take", "after", 2, "stop"))  # a PATCH is too large for a socket
        monkeypatch.setattr(client, "LONG", 1.5)
        with pytest.raises(GroupHalted, match="m1 does not answer"):
            three.group(epoch=rest.epoch + 1, patience=2.0)
        three.engines["m1"].stop()
        three.start("m1")
        with three.group(epoch=rest.epoch + 2) as whole:
            assert len({whole.read(member, 0, SIZE) for member in whole.members}) == 1


def _quiet(pid: int) -> bool:
    """Waits in its poll: it has done all that lay in its sockets."""
    return "poll" in Path(f"/proc/{pid}/wchan").read_text()


@pytest.mark.parametrize("name", ["m0", "m1", "m2"])
def test_an_operation_that_fails_when_its_bytes_are_there_leaves_equal_regions(
    tmp_path: Path, name: str
) -> None:
    """Whoever failed has done as many operations as others have, and more bytes."""
    with replicas(tmp_path) as copies:
        copies.engines[name].stop()
        copies.start(name, point=("_put", "after", 30, "raise"))
        group = copies.group()
        done, swaps = worked(group, 60)
        with pytest.raises(GroupHalted, match=f"{name} fails: No space left on device"):
            group.flush()
        with group.repair(copies.members) as rest:
            assert len(rest.members) == 3
            nothing_lost(rest, done, swaps)


class Between:
    """Stands between an engine and all that connect to it; ``alter(connection, sent, data)`` gets what goes
    to the engine, and returns what arrives, or None: the connection breaks there."""

    def __init__(self, path: str, behind: str, alter: Callable[[int, int, bytes], bytes | None]) -> None:
        self.address, self._behind, self._alter, self._count = f"unix:{path}", behind, alter, 0
        self._server = socket.socket(socket.AF_UNIX)
        self._server.bind(path)
        self._server.listen()
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            here, _ = self._server.accept()
            there = socket.socket(socket.AF_INET)
            host, _, port = self._behind.rpartition(":")
            there.connect((host, int(port)))
            threading.Thread(target=self._carry, args=(self._count, here, there), daemon=True).start()
            threading.Thread(target=self._carry, args=(None, there, here), daemon=True).start()
            self._count += 1

    def _carry(self, connection: int | None, source: socket.socket, target: socket.socket) -> None:
        sent = 0
        try:
            while data := source.recv(1 << 16):
                arrives = data if connection is None else self._alter(connection, sent, data)
                sent += len(data)
                if arrives is None:
                    break
                target.sendall(arrives)
        except OSError:
            pass
        for sock in (source, target):
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)


BEGINS = 400  # bytes of handshake and joining, at most


def flipped(at: int) -> Callable[[int, int, bytes], bytes | None]:
    def alter(connection: int, sent: int, data: bytes) -> bytes | None:
        if connection == 1 and sent <= at < sent + len(data):
            data = data[: at - sent] + bytes([data[at - sent] ^ 4]) + data[at - sent + 1 :]
        return data

    return alter


def torn(at: int) -> Callable[[int, int, bytes], bytes | None]:
    return lambda connection, sent, data: None if connection == 1 and sent + len(data) > at else data


@pytest.mark.parametrize("harm", [flipped, torn])
@pytest.mark.parametrize("at", [BEGINS + 3, BEGINS + HEAD.size, BEGINS + 300, BEGINS + 2000])
def test_a_frame_that_is_harmed_on_its_way_is_not_done(tmp_path: Path, harm: Any, at: int) -> None:
    """Connections to the middle engine: the coordinator's is the first, its predecessor's the second."""
    with replicas(tmp_path, "abc", [(None, "127.0.0.1")] * 3) as copies:
        between = Between(f"{tmp_path}/between", copies.engines["m1"].address, harm(at))
        members = [copies.member("m0"), Member("m1", between.address, "b"), copies.member("m2")]
        group = ReplicationGroup(members, epoch=1, secret=SECRET, patience=20)
        assert [member.name for member in group.members] == ["m0", "m1", "m2"]
        done, swaps = worked(group, 60)
        words = (
            "m0 lost the member behind it" if harm is torn else None
        )  # a harmed length waits for its bytes
        with pytest.raises(GroupHalted, match=words):
            group.flush()
        with group.repair() as rest:  # the same way, on which no more is harmed: it is another connection
            assert len(rest.members) == 3
            nothing_lost(rest, done, swaps)
            worked(rest, 5)


@needs_root
def test_a_disk_that_is_full_is_told_when_an_engine_starts(tmp_path: Path) -> None:
    full = pytest.raises(HostError, match="does not start: No space left on device")
    with small_disk(tmp_path, 8 << 20, "-b", "4096") as (_, point), full:
        start_engine(point / "region", 2 * SIZE, listen=f"unix:{tmp_path}/sock", secret=SECRET)


@contextmanager
def in_memory(point: Path, size: str) -> Iterator[Path]:
    point.mkdir()
    mounts.mount("none", point, "tmpfs", options=f"size={size}")
    try:
        yield point
    finally:
        mounts.unmount(point)


@needs_root
@pytest.mark.parametrize("name", ["m0", "m1", "m2"])
def test_a_disk_that_fills_up_halts_the_group_and_acknowledges_nothing(tmp_path: Path, name: str) -> None:
    """One replica's file system lies on a disk that holds less than it says (thin provisioning)."""
    with (
        replicas(tmp_path) as copies,
        in_memory(tmp_path / "thin", "24m") as thin,
        small_disk(thin, 64 << 20, "-b", "4096") as (_, point),
    ):
        copies.engines[name].stop()
        copies.start(name, point / "region")
        group = copies.group()
        group.write(0, b"fits").result()
        group.flush().result()
        with (thin / "filler").open("wb") as filler, pytest.raises(OSError):
            while True:
                os.write(filler.fileno(), bytes(1 << 20))
        group.write(1 << 20, os.urandom(2 << 20))
        with pytest.raises(GroupHalted, match=f"{name} fails: (Input/output error|No space left)") as halted:
            group.flush().result()
        assert halted.value.members == (name,)
        with group.repair() as rest:
            assert len(rest.members) == 2
            rest.write(0, b"goes on").result()
            rest.flush().result()
        copies.engines[name].stop()


def test_histories_of_registers_are_linearizable_also_when_engines_die(tmp_path: Path) -> None:
    """Threads read, write and swap three registers; meanwhile two of four engines are killed, one by one."""
    with replicas(tmp_path, "abcd") as copies:
        turn = threading.Condition()
        groups = [copies.group()]
        histories: dict[int, list[Operation]] = {place: [] for place in range(3)}
        stop = threading.Event()

        def follow(failed: ReplicationGroup) -> ReplicationGroup:
            with turn:
                turn.wait_for(lambda: groups[-1] is not failed or stop.is_set())
                return groups[-1]

        def work(seed: int) -> None:
            draw, group = random.Random(seed), groups[0]
            for number in range(60):
                place, kind = draw.randrange(3), draw.choice(["read", "write", "cas"])
                new, expected = seed * 1000 + number + 1, draw.choice([values[place], 0])
                began, result, ended = time.monotonic(), None, inf
                try:
                    if kind == "read":
                        result = int.from_bytes(group.read(group.members[-1], place * 8, 8), "little")
                    elif kind == "write":
                        group.write(place * 8, struct.pack("<Q", new)).result()
                    else:
                        result = group.cas(place * 8, expected, new).result()[-1]
                    ended = time.monotonic()
                except GroupHalted:
                    group = follow(group)
                if kind != "read" or ended < inf:
                    histories[place].append(Operation(kind, began, ended, expected, new, result))
                values[place] = result if result is not None else values[place]

        values = [0, 0, 0]
        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for victim in ("m1", "m3"):
            until(lambda: sum(map(len, histories.values())) >= 60 * len(groups))
            copies.engines[victim].process.kill()
            groups[-1]._over.wait(60)
            with turn:
                groups.append(groups[-1].repair())
                turn.notify_all()
        for thread in threads:
            thread.join(90)
        stop.set()
        groups[-1].close()
    assert len(groups[-1].members) == 2
    assert sum(map(len, histories.values())) > 180
    for history in histories.values():
        assert linearizable(history)


COORDINATOR = """
import sys
from pathlib import Path
from support.group import JOURNAL, SECRET
from windtunnel.data.group import ReplicationGroup, Member
from windtunnel.linux.faults import inject_at
members = [Member(*words.split("|")) for words in sys.argv[1:4]]
group = ReplicationGroup(members, epoch=1, secret=SECRET, patience=20, journal=JOURNAL)
inject_at(ReplicationGroup, {method!r}, {when!r}, {nth!r})
group.transaction([(100, b"A" * 50), (200, b"B" * 60)])
"""


@pytest.mark.parametrize(
    ("method", "when", "nth"),
    [("cas", "after", 1), ("write", "after", 1), ("flush", "before", 1), ("flush", "after", 1),
     ("memcpy", "before", 1), ("memcpy", "after", 1), ("memcpy", "after", 2), ("flush", "after", 2),
     ("cas", "before", 2), ("cas", "after", 2)],
)  # fmt: skip
def test_a_coordinator_that_dies_in_a_transaction_leaves_all_of_it_or_nothing(
    three: Replicas, method: str, when: str, nth: int
) -> None:
    code = COORDINATOR.format(method=method, when=when, nth=nth)
    words = [f"{member.name}|{member.address}|{member.domain}" for member in three.members]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", code, *words], env=environment, timeout=90)
    assert done.returncode == -signal.SIGKILL
    with three.group(epoch=2, journal=JOURNAL) as group:
        for member in group.members:
            held = group.read(member, 100, 50), group.read(member, 200, 60)
            assert held in ((b"A" * 50, b"B" * 60), (bytes(50), bytes(60)))
            assert group.read(member, JOURNAL, 8) == bytes(8)
            if (method, nth) in {("memcpy", 2), ("flush", 2), ("cas", 2)}:
                assert held[0]
        group.transaction([(100, b"next")])


def test_a_lock_is_held_by_one_and_a_part_of_it_is_given_back(three: Replicas) -> None:
    with three.group(journal=JOURNAL) as group:
        owners: set[int] = set()
        overlaps: list[int] = []

        def work(seed: int) -> None:
            for number in range(6):
                value = struct.pack("<Q", seed * 100 + number)
                group.transaction([(0, value), (1 << 20, value)])

        plain = group.write

        def watched(offset: int, data: Any) -> Any:
            if offset == JOURNAL + 8:  # a record: its owner has the lock
                owners.add(threading.get_ident())
                overlaps.append(int.from_bytes(group.read(group.members[-1], JOURNAL, 8), "little"))
                assert overlaps[-1] == int.from_bytes(bytes(data[:8]), "little")
            return plain(offset, data)

        group.write = watched  # type: ignore[method-assign]
        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(90)
        assert len(owners) == 3 and len(set(overlaps)) == 18
        assert group.read("m2", 0, 8) == group.read("m2", 1 << 20, 8)
        group.cas(JOURNAL, 0, 77, execute=["m1"]).result()
        with pytest.raises(LessError, match="the lock is held by 0x4d"):
            group.transaction([(0, b"x")], patience=0.05)
        words = [int.from_bytes(group.read(name, JOURNAL, 8), "little") for name in ("m0", "m1", "m2")]
        assert words == [0, 77, 0]
        group.cas(JOURNAL, 77, 0, execute=["m1"]).result()
        group.transaction([(0, b"x")])
