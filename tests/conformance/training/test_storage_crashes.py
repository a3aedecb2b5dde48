"""Storage under kills, power losses, full disks and failing fsyncs, at every call; and prune beside
writers."""

from __future__ import annotations

import errno
import itertools
from collections.abc import Callable, Iterator
from functools import partial

import pytest
import xxhash

from support.disk import Crash, Disk, Killed
from windtunnel.store.objects import LocalFiles, ObjectError
from windtunnel.training.checkpoint.live import storage
from windtunnel.training.checkpoint.live.storage import (
    complete_step,
    layout,
    prune,
    read_shard,
    steps,
    write_shard,
)
from windtunnel.training.checkpoint.model import Shard

LAYOUT = b"what lies where"


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(storage, "PART", 32)
    yield


def content(step: int, rank: int) -> bytes:
    """Three parts."""
    return bytes([step, rank]) * 16 + bytes([100, rank]) * 16 + bytes([7] * 20)


def shard(step: int, rank: int, generation: int) -> Shard:
    data, digest = content(step, rank), xxhash.xxh3_128_hexdigest(LAYOUT)
    checksum = xxhash.xxh3_128_hexdigest(data)
    return Shard(f"rank{rank}", step, 2, False, generation, digest, len(data), checksum)


def save(files: LocalFiles, step: int, generation: int = 1) -> None:
    written = [
        write_shard(files, shard(step, rank, generation), memoryview(content(step, rank)), transfers=1)
        for rank in range(2)
    ]
    complete_step(files, written, {xxhash.xxh3_128_hexdigest(LAYOUT): LAYOUT})


def good(files: LocalFiles) -> list[int]:
    """The complete steps, each read and verified in whole."""
    checkpoints = [checkpoint for checkpoint in steps(files) if not checkpoint.bad]
    for checkpoint in checkpoints:
        for rank, it in enumerate(checkpoint.shards):
            into = bytearray(it.nbytes)
            read_shard(files, it, memoryview(into), transfers=1)
            assert bytes(into) == content(checkpoint.step, rank)
            assert layout(files, it) == LAYOUT
    return [checkpoint.step for checkpoint in checkpoints]


def started(*saved: int) -> Disk:
    disk = Disk()
    files = LocalFiles("/store", disk)
    for step in saved:
        save(files, step)
    return disk.after("kill")


def kill_at(disk: Disk, number: int) -> None:
    def before(call: str, count: int) -> None:
        if count == number:
            raise Killed

    disk.before = before


@pytest.mark.parametrize("crash", ["kill", "power", "names"])
def test_killed_between_any_two_calls(crash: Crash) -> None:
    """What is left is the old checkpoint or the new one, never neither; and saving goes on."""
    number = 0
    states = set()
    while True:
        number += 1
        disk = started(1)
        kill_at(disk, number)
        files = LocalFiles("/store", disk)
        done = False
        try:
            save(files, 2)
            done = True
            prune(files, 1)
        except Killed:
            pass
        else:
            break
        disk = disk.after(crash)
        files = LocalFiles("/store", disk)
        left = good(files)
        states.add(tuple(left))
        assert left in ([1], [1, 2], [2])
        if done:
            assert left[-1] == 2
        save(files, 2)
        assert good(LocalFiles("/store", disk.after("power")))[-1] == 2
        save(files, 3, generation=2)
        assert good(files)[-1] == 3
        prune(files, 1)
        assert good(files) == [3]
        assert good(LocalFiles("/store", disk.after("power"))) == [3]
    assert states == {(1,), (1, 2), (2,)}
    assert number > 100


@pytest.mark.parametrize("crash", ["kill", "power"])
def test_killed_again_at_the_repair(crash: Crash) -> None:
    """A second kill, while what the first left is saved and swept."""
    for first in range(5, 400, 23):
        for second in range(3, 300, 41):
            disk = started(1)
            for number, step in ((first, 2), (second, 3)):
                kill_at(disk, disk.calls + number)
                try:
                    save(LocalFiles("/store", disk), step)
                    prune(LocalFiles("/store", disk), 1)
                except Killed:
                    pass
                disk = disk.after(crash)
                assert good(LocalFiles("/store", disk))


@pytest.mark.parametrize(
    ("calls", "number"),
    [
        ({"write", "mkdir", "open"}, errno.ENOSPC),
        ({"fsync"}, errno.EIO),
        ({"replace"}, errno.EIO),
        ({"close"}, errno.EDQUOT),
    ],
)
def test_a_disk_that_fails_at_any_call(calls: set[str], number: int) -> None:
    """A clear error, the old checkpoint unharmed, and the next save succeeds."""
    for at in itertools.count(1):
        disk = started(1)
        hits = 0

        def before(call: str, count: int, at: int = at) -> None:
            nonlocal hits
            hits += call in calls
            if call in calls and hits == at:
                raise OSError(number, "injected")

        disk.before = before
        files = LocalFiles("/store", disk)
        try:
            save(files, 2)
        except ObjectError as error:
            full = number in (errno.ENOSPC, errno.EDQUOT)
            assert ("what was stored before is unharmed" in str(error)) == full
            assert "step 2" in str(error)
        else:
            assert hits < at  # no failure is passed over
            break
        disk.before = lambda call, count: None
        assert good(files) in ([1], [1, 2])
        save(files, 2)
        assert good(files) == [1, 2]
        assert good(LocalFiles("/store", disk.after("power"))) == [1, 2]
    assert at > 5


def within(disk: Disk, at: int, work: Callable[[], object]) -> list[int]:
    """Before call number ``at`` of the disk ``work`` is done; the list holds that number once it was."""
    entered: list[int] = []

    def before(call: str, count: int) -> None:
        if count == at and not entered:
            entered.append(count)
            work()

    disk.before = before
    return entered


def test_a_writer_between_any_two_calls_of_a_prune() -> None:
    for number in itertools.count(1):
        disk = started(0, 1, 2)
        files = LocalFiles("/store", disk)
        entered = within(disk, number, partial(save, LocalFiles("/store", disk), 3))
        prune(files, 1)
        if not entered:
            break
        assert good(files)[-1] == 3


def test_a_prune_between_any_two_calls_of_a_writer() -> None:
    for number in itertools.count(1):
        disk = started(0, 1, 2)
        files = LocalFiles("/store", disk)
        entered = within(disk, number, partial(prune, LocalFiles("/store", disk), 1))
        save(files, 3)
        if not entered:
            break
        assert good(files) == [2, 3] or good(files) == [3]
