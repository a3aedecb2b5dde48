"""Pieces of shards, each kept once under the SHA-256 of its bytes, whichever steps and shards need it.

Shards are cut every `PIECE` bytes: tensors lie at the same place in each step, so what did not change
between two steps (frozen layers, embeddings that no sample touched) gives equal pieces, and these are not
written again. A file ``<sha256>.zst`` holds the piece compressed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import zstandard

from windtunnel.training.checkpoint.live.files import Files
from windtunnel.training.checkpoint.live.manifest import ChunkFile, StorageError

PIECE = 2 << 20
FOLDER = "chunks"
TRASH = "trash"


def pieces(data: memoryview) -> Iterator[memoryview]:
    """``data`` in pieces."""
    for begin in range(0, len(data), PIECE):
        yield data[begin : begin + PIECE]


def path(name: str) -> str:
    """Where a chunk lies."""
    return f"{FOLDER}/{name[:2]}/{name}"


def put(files: Files, piece: bytes, level: int | None) -> tuple[ChunkFile, bool]:
    """Write ``piece`` unless it is there; returns its file and whether it was written."""
    digest = hashlib.sha256(piece).hexdigest()
    for name in (digest, f"{digest}.zst"):
        size = files.size(path(name))
        # A plain file of another size was damaged from outside: it is written again.
        if size is not None and (name != digest or size == len(piece)):
            files.rely(path(name))
            return ChunkFile(name, len(piece)), False
    if level is None:
        files.write(path(digest), piece)
        return ChunkFile(digest, len(piece)), True
    name = f"{digest}.zst"
    files.write(path(name), zstandard.ZstdCompressor(level=level).compress(piece))
    return ChunkFile(name, len(piece)), True


def get(files: Files, chunk: ChunkFile) -> bytes:
    """The bytes of a chunk, checked.

    Raises:
        StorageError: it is missing or its bytes are not those of its name.
    """
    data = _fetch(files, chunk.name)
    if data is None:
        raise StorageError(f"chunk {path(chunk.name)} is missing")
    if chunk.name.endswith(".zst"):
        try:
            data = zstandard.ZstdDecompressor().decompress(data, max_output_size=chunk.nbytes)
        except zstandard.ZstdError as error:
            raise StorageError(f"chunk {path(chunk.name)} is damaged: {error}") from error
    if len(data) != chunk.nbytes or hashlib.sha256(data).hexdigest() != chunk.digest:
        raise StorageError(f"chunk {path(chunk.name)} is damaged: its bytes do not match its name")
    return data


def _fetch(files: Files, name: str) -> bytes | None:
    try:
        return files.read(path(name))
    except FileNotFoundError:
        pass
    # A prune may just be finding out that it is needed after all (see `prune`).
    for bin_ in files.names(TRASH):
        try:
            return files.read(f"{TRASH}/{bin_}/{name}")
        except FileNotFoundError:
            continue
    try:
        return files.read(path(name))
    except FileNotFoundError:
        return None
