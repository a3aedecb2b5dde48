"""Chunks: what is put is got, and damage never passes."""

from __future__ import annotations

import hashlib
import tempfile
import uuid
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from windtunnel.store.objects import LocalFiles, ObjectError, chunks, open_files

levels = st.sampled_from([None, 1, 3])


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.binary(max_size=2000), levels), max_size=8), st.booleans())
def test_what_is_put_is_got(given_pieces: list[tuple[bytes, int | None]], memory: bool) -> None:
    with tempfile.TemporaryDirectory() as folder:
        files = open_files(f"memory://{uuid.uuid4().hex}" if memory else folder)
        names = [chunks.put(files, piece, level) for piece, level in given_pieces]
        assert names == [chunks.put(files, piece, level) for piece, level in given_pieces]
        assert list(chunks.get_all(files, names, 3)) == [piece for piece, _ in given_pieces]
        # each once, whether it is wanted compressed or not
        assert len(set(names)) == len({piece for piece, _ in given_pieces})


@settings(max_examples=100, deadline=None)
@given(st.binary(min_size=1, max_size=300), levels, st.floats(0, 1, exclude_max=True), st.integers(0, 8))
def test_no_flipped_bit_passes(piece: bytes, level: int | None, place: float, bit: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        files = LocalFiles(folder)
        name = chunks.put(files, piece, level)
        path = Path(folder) / chunks.path(name)
        data = bytearray(path.read_bytes())
        at = int(place * len(data))
        path.write_bytes(data[:at] if bit == 8 else data[:at] + bytes([data[at] ^ 1 << bit]) + data[at + 1 :])
        try:
            # a bit that zstd does not use may change; then the bytes must be right nevertheless
            assert chunks.get(files, name) == piece
        except ObjectError as error:
            assert str(path) in str(error)
            assert "damaged" in str(error)


def test_forged_chunks_are_refused(tmp_path: Path) -> None:
    files = LocalFiles(str(tmp_path))
    for name in ("../secret", "x" * 64, "a" * 64 + ".gz"):
        with pytest.raises(ObjectError, match="cannot be the name of a chunk"):
            chunks.get(files, name)
    with pytest.raises(ObjectError, match=r"chunk .*/aa/a{64} is missing"):
        chunks.get(files, "a" * 64)
    # a small frame that would fill the memory
    bomb = bytes(chunks.PIECE + 1)
    name = f"{hashlib.sha256(bomb).hexdigest()}.zst"
    files.write(chunks.path(name), zstandard.ZstdCompressor().compress(bomb))
    with pytest.raises(ObjectError, match="is damaged: another size"):
        chunks.get(files, name)


def test_a_plain_chunk_of_another_size_is_written_again(tmp_path: Path) -> None:
    files = LocalFiles(str(tmp_path))
    name = chunks.put(files, b"right")
    (tmp_path / chunks.path(name)).write_bytes(b"righ")
    assert chunks.put(files, b"right") == name
    assert chunks.get(files, name) == b"right"


def test_calls_beside_each_other_keep_their_order() -> None:
    assert list(chunks.in_order(lambda number: number * 2, range(50), 4)) == [
        2 * number for number in range(50)
    ]
    with pytest.raises(ZeroDivisionError):
        list(chunks.in_order(lambda number: 1 // (number - 20), range(50), 4))


def pieces_of(data: bytes, step: int) -> list[bytes]:
    pieces: list[bytes] = []
    cutter = chunks.Cutter(pieces.append)
    for at in range(0, len(data), step):
        cutter.write(data[at : at + step])
    cutter.finish()
    return pieces


def test_pieces_depend_on_the_bytes_alone_and_meet_again_after_an_insertion() -> None:
    block, least, most = chunks.BLOCK, chunks.LEAST, chunks.MOST
    data: Any = np.random.default_rng(3).bytes(20 * 2**20 + 100)
    pieces = pieces_of(data, 10_240)
    assert b"".join(pieces) == data
    assert pieces == pieces_of(data, 999_983)
    assert all(least * block <= len(piece) <= most * block <= chunks.PIECE for piece in pieces[:-2])
    moved = pieces_of(data[: 5 * 2**20] + b"n" * block * 3 + data[5 * 2**20 :], 10_240)
    assert sum(len(piece) for piece in set(moved) - set(pieces)) <= 2 * most * block
    assert len(pieces_of(bytes(9 * 2**20), 512)) == 5
