"""XXH64 of ids and texts, many at a time; of several ids the hash of one is the seed of the next."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from windtunnel.data.ingest import arrays


def xxh64(words: NDArray[np.uint64], seed: np.uint64 | NDArray[np.uint64]) -> NDArray[np.uint64]:
    """XXH64 of the 8 bytes of each word, [n]; a ``seed`` for all, or one each."""
    hashes, spare = np.empty(len(words), np.uint64), np.empty(min(len(words), _CHUNK), np.uint64)
    with np.errstate(over="ignore"):
        begin: Any = seed + _P5 + np.uint64(8)
        for start in range(0, len(words), _CHUNK):
            part = slice(start, start + _CHUNK)
            x = hashes[part]
            np.multiply(words[part], _P2, out=x)
            _turn(x, spare, 31)
            x *= _P1
            x ^= begin if np.ndim(begin) == 0 else begin[part]
            _turn(x, spare, 27)
            x *= _P1
            x += _P4
            for bits, factor in ((33, _P2), (29, _P3), (32, None)):
                x ^= np.right_shift(x, np.uint64(bits), out=spare[: len(x)])
                if factor is not None:
                    x *= factor
    return hashes


_CHUNK = 16_384
"""Words that are hashed at a time, in place: they stay in the cache."""
_P1, _P2, _P3, _P4, _P5 = (
    np.uint64(0x9E3779B185EBCA87), np.uint64(0xC2B2AE3D27D4EB4F), np.uint64(0x165667B19E3779F9),
    np.uint64(0x85EBCA77C2B2AE63), np.uint64(0x27D4EB2F165667C5),
)  # fmt: skip


def _turn(x: NDArray[np.uint64], spare: NDArray[np.uint64], bits: int) -> None:
    high = np.right_shift(x, np.uint64(64 - bits), out=spare[: len(x)])
    x <<= np.uint64(bits)
    x |= high


def hashed(ids: pa.Array, seed: np.uint64 | NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The hash of each id; of null, anything."""
    if not arrays.is_text(ids.type):
        return xxh64(arrays.whole(ids).astype(np.int64, copy=False).view(np.uint64), seed)
    import xxhash

    if np.ndim(seed):
        seeds: Any = seed
        hashes = [
            xxhash.xxh64_intdigest(value, int(own))
            for value, own in zip(pc.fill_null(ids.cast(pa.binary()), b"").to_pylist(), seeds, strict=True)
        ]
        return np.array(hashes, np.uint64)
    # text repeats: each is hashed once
    coded = ids.cast(pa.binary()).dictionary_encode()
    hashes = [xxhash.xxh64_intdigest(value, int(seed)) for value in coded.dictionary.to_pylist()]
    if not hashes:
        return np.zeros(len(ids), np.uint64)
    return np.array(hashes, np.uint64)[pc.fill_null(coded.indices, 0).to_numpy()]


def chained(ids: Sequence[pa.Array], rows: int | None, seed: int) -> pa.Array:
    """Hashes of several ids each, int64; null where one of them is."""
    hashes: Any = np.uint64(seed)
    for array in ids:
        hashes = hashed(array, hashes)
    hashes = below(hashes, rows) if rows else hashes.view(np.int64)
    null = np.zeros(len(hashes), bool)
    for array in ids:
        if array.null_count:
            null |= arrays.null(array)
    return pa.array(hashes, mask=null if null.any() else None)


def below(hashes: NDArray[np.uint64], rows: int) -> NDArray[np.int64]:
    if rows & (rows - 1) == 0:
        return (hashes & np.uint64(rows - 1)).view(np.int64)
    whole = hashes // np.uint64(rows)  # in vectors, which the remainder is not
    whole *= np.uint64(rows)
    return np.subtract(hashes, whole, out=whole).view(np.int64)
