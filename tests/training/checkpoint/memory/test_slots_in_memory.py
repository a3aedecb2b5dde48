"""Slots as files: what a reader believes, after a writer died at any point or while one writes."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from memory_cluster import DIGEST, content, fill

from support.slots import read_header
from support.waiting import PATIENCE
from windtunnel.training.checkpoint.live import slot as slots
from windtunnel.training.checkpoint.live.slot import (
    HEADER,
    CopyError,
    Header,
    SlotFile,
    checksum_of,
    file_name,
    load,
)
from windtunnel.training.checkpoint.model import Shard

N = 5000


def new_slot(folder: Path, nbytes: int = N, index: int = 0) -> SlotFile:
    return SlotFile.create(folder / file_name("rank3", 4, nbytes, index), "rank3", 4, nbytes)


def test_a_round_trip(tmp_path: Path) -> None:
    slot = new_slot(tmp_path)
    assert slot.header == Header(Shard("rank3", -1, 4, False, -1, "", 0), N)
    assert slot.path.stat().st_size == HEADER + N <= 512 * slot.path.stat().st_blocks  # taken
    checksum = fill(slot, "rank3", 7, N - 3, 4, 2, has_shared=True)
    into = memoryview(bytearray(N - 3))
    shard = load(slot.path, into, step=7)
    assert bytes(into) == content("rank3", 7, N - 3)
    header = read_header(slot.path)
    assert header is not None and header == slot.header and header.shard == shard
    assert shard == Shard("rank3", 7, 4, True, 2, DIGEST, N - 3, checksum)
    slot.close()
    again = SlotFile.open(slot.path)
    assert again.header == header and again.data == into
    again.close()


def test_what_is_refused(tmp_path: Path) -> None:
    slot = new_slot(tmp_path)
    with pytest.raises(CopyError, match="no step is being written"):
        slot.complete("")
    with pytest.raises(ValueError, match="do not fit"):
        slot.begin(Shard("rank3", 0, 1, False, 0, "", N + 1))
    with pytest.raises(ValueError, match="is no slot of rank4"):
        slot.begin(Shard("rank4", 0, 4, False, 0, "", N))
    with pytest.raises(FileExistsError):
        new_slot(tmp_path)
    with pytest.raises(ValueError, match="name"):
        file_name("a/b", 1, 1, 0)
    fill(slot, "rank3", 7, N, 4, 2)
    into = memoryview(bytearray(N))
    with pytest.raises(CopyError, match="no complete step 8"):
        load(slot.path, into, step=8)
    with pytest.raises(CopyError, match="5000 bytes"):
        load(slot.path, into[1:])
    slot.begin(Shard("rank3", 8, 4, False, 0, "", N))
    with pytest.raises(CopyError, match="no complete step"):
        load(slot.path, into)
    (tmp_path / "x").write_bytes(b"x")
    with pytest.raises(CopyError, match="no slot"):
        SlotFile.open(tmp_path / "x")
    assert read_header(tmp_path / "x") is None and read_header(tmp_path / "y") is None


def test_a_truncated_slot_is_no_slot(tmp_path: Path) -> None:
    slot = new_slot(tmp_path)
    fill(slot, "rank3", 7, N, 4, 2)
    os.truncate(slot.path, HEADER + N - 1)
    assert read_header(slot.path) is None
    with pytest.raises(CopyError, match="truncated"):
        load(slot.path, memoryview(bytearray(N)))


@settings(max_examples=60, deadline=None)
@given(at=st.integers(0, slots.SIZE + N - 1), bit=st.integers(0, 7))
def test_any_flipped_bit_is_noticed(tmp_path_factory: pytest.TempPathFactory, at: int, bit: int) -> None:
    slot = new_slot(tmp_path_factory.mktemp("flip"))
    fill(slot, "rank3", 7, N, 4, 2)
    place = at if at < slots.SIZE else HEADER + at - slots.SIZE
    with slot.path.open("r+b") as file:
        file.seek(place)
        (byte,) = file.read(1)
        file.seek(place)
        file.write(bytes([byte ^ 1 << bit]))
    with pytest.raises(CopyError):
        load(slot.path, memoryview(bytearray(N)))
    slot.close()


@settings(max_examples=60, deadline=None)
@given(kept=st.integers(0, slots.SIZE), which=st.integers(0, 1))
def test_a_writer_that_dies_within_a_header_leaves_no_complete_slot(
    tmp_path_factory: pytest.TempPathFactory, kept: int, which: int
) -> None:
    """Of the new header only the first bytes are there: dirty over complete, and complete over dirty."""
    slot = new_slot(tmp_path_factory.mktemp("torn"))
    fill(slot, "rank3", 7, N, 4, 2)
    old = slot.path.read_bytes()[: slots.SIZE]
    slot.begin(Shard("rank3", 9, 4, False, 3, DIGEST, N))
    dirty = slot.path.read_bytes()[: slots.SIZE]
    if which:
        data = slot.data
        data[: N // 2] = content("rank3", 9, N // 2)  # torn
    before, after = (old, dirty) if which == 0 else (dirty, dirty)
    with slot.path.open("r+b") as file:
        file.write(after[:kept] + before[kept:])
    header = read_header(slot.path)
    if header is not None and header.complete:
        assert header.shard.step == 7 and which == 0
        load(slot.path, memoryview(bytearray(N)))
    else:
        # Whoever comes next can use it.
        slot.begin(Shard("rank3", 10, 4, False, 4, DIGEST, N))
        slot.data[:] = content("rank3", 10, N)
        slot.complete(checksum_of(slot.data))
        assert load(slot.path, memoryview(bytearray(N))).name == "rank3"
    slot.close()


def test_readers_beside_a_writer_never_get_a_torn_slot(tmp_path: Path) -> None:
    size = 200_000
    slot = new_slot(tmp_path, size)
    fill(slot, "rank3", 0, size, 4, 1)
    ended = threading.Event()
    wrong: list[object] = []
    steps: set[int] = set()

    def read() -> None:
        into = memoryview(bytearray(size))
        while not ended.is_set() or not steps:
            try:
                step = load(slot.path, into).step
            except CopyError:
                continue
            steps.add(step)
            if bytes(into) != content("rank3", step, size):
                wrong.append(step)

    readers = [threading.Thread(target=read) for _ in range(2)]
    for reader in readers:
        reader.start()
    for step in range(1, 50):
        slot.begin(Shard("rank3", step, 4, False, 1, DIGEST, size))
        data = content("rank3", step, size)
        for at in range(0, size, 20_000):
            slot.data[at : at + 20_000] = data[at : at + 20_000]
        slot.complete(checksum_of(slot.data))
    ended.set()
    for reader in readers:
        reader.join(PATIENCE)
        assert not reader.is_alive()
    assert steps and not wrong
    slot.close()
