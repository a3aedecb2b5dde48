"""The log: whole frames in order or nothing, whatever else lies in the ring."""

from __future__ import annotations

from mmap import PAGESIZE
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from windtunnel.data.files.log import LogFrame, LogRing, Superblocks, frame, parse
from windtunnel.data.files.model import Operation, OperationKind, Position

RING = 4096


def operation(number: int) -> Operation:
    return Operation(OperationKind.WRITE, f"/file{number % 3}", "", number, 1.5, 9, number)


def fill(ring: LogRing, start: Position, lengths: list[int], epoch: int) -> list[Position]:
    """Frames from ``start`` on; the positions behind each."""
    ends = []
    for number, length in enumerate(lengths):
        framed = frame(operation(number), bytes([number % 251]) * length, epoch, start.sequence)
        ring.write(start.offset, framed)
        start = Position(start.sequence + 1, start.offset + len(framed), epoch)
        ends.append(start)
    return ends


@pytest.fixture
def ring(tmp_path: Path) -> LogRing:
    (tmp_path / "ring").write_bytes(bytes(RING + PAGESIZE))
    return LogRing(tmp_path / "ring", RING)


def sequences(ring: LogRing, start: Position) -> list[int]:
    return [entry.sequence for entry in ring.entries(start)]


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.integers(0, 300), max_size=8), st.integers(0, 10_000))
def test_what_was_written_is_read_wherever_the_ring_wraps(
    ring: LogRing, lengths: list[int], offset: int
) -> None:
    ring.clear()
    start = Position(1 + offset, offset)
    ends = fill(ring, start, lengths, 1)
    entries = list(ring.entries(start))
    assert [entry.after for entry in entries] == ends
    assert [len(entry.data) for entry in entries] == lengths
    assert [entry.operation for entry in entries] == [operation(number) for number in range(len(lengths))]


@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_a_flipped_bit_ends_the_log_before_its_frame(ring: LogRing, data: st.DataObject) -> None:
    ring.clear()
    ends = fill(ring, Position(), [50] * 6, 1)
    place = data.draw(st.integers(0, ends[-1].offset - 1))
    byte = ring.read(place, 1)[0] ^ 1 << data.draw(st.integers(0, 7))
    ring.write(place, bytes([byte]))
    damaged = next(number for number, end in enumerate(ends) if place < end.offset)
    assert sequences(ring, Position()) == list(range(1, 1 + damaged))


def test_a_torn_frame_and_what_lies_behind_it_is_none_of_the_log(ring: LogRing) -> None:
    ends = fill(ring, Position(), [50] * 4, 1)
    ring.write(ends[1].offset - 20, bytes(20))  # the second one's end never came to the disk; the third did
    assert sequences(ring, Position()) == [1]


def test_frames_of_an_earlier_lap_are_none_of_this_one(ring: LogRing) -> None:
    first = fill(ring, Position(), [100] * 26, 1)
    lap = first[-1]
    assert lap.offset > RING
    fill(ring, lap, [100], 1)
    assert sequences(ring, lap) == [lap.sequence]


def test_what_a_deposed_primary_left_behind_the_tail_is_none_of_the_log(ring: LogRing) -> None:
    ends = fill(ring, Position(), [50] * 4, 1)
    fill(ring, ends[0], [50], 2)  # the next primary goes on behind the first frame, with one as long
    assert sequences(ring, Position()) == [1, 2]


def test_a_frame_is_whole_or_none() -> None:
    framed = frame(operation(1), b"data", 1, 7)
    for end in range(len(framed)):
        assert list(parse(framed[:end], Position(7))) == []
    (entry,) = parse(framed + b"more", Position(7))
    assert entry == LogFrame(operation(1), b"data", 7, Position(8, len(framed), 1))
    assert list(parse(framed, Position(6))) == []


def test_the_newer_superblock_that_is_whole_counts(tmp_path: Path) -> None:
    path = tmp_path / "superblocks"
    blocks = Superblocks(path)
    assert (blocks.turn, blocks.published) == (0, Position())
    positions = [Position(n, n * 100, 1) for n in range(2, 6)]
    for position in positions:
        blocks.write(position)
    blocks.close()
    assert Superblocks(path).published == positions[-1]
    with path.open("r+b") as file:  # the newest (turn 4, the first place) was torn
        file.seek(10)
        file.write(b"\xff\xff")
    assert (Superblocks(path).turn, Superblocks(path).published) == (3, positions[-2])
