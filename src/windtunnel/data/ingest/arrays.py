"""Columns of numbers, texts and lists, as transforms take them apart and put them together again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from windtunnel.store.columns import is_list


def lengths_of(column: pa.Array) -> NDArray[np.int64]:
    """Of the lists of a column; of null, 0."""
    if pa.types.is_fixed_size_list(column.type):
        lengths = np.full(len(column), column.type.list_size, np.int64)
    else:
        lengths = np.diff(np.from_dlpack(column.offsets)).astype(np.int64)
    if column.null_count:
        lengths[null(column)] = 0
    return lengths


def is_text(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_binary(kind))


def scalar(values: pa.Array) -> pa.Array:
    """``values``, which are numbers."""
    kind = values.type
    if pa.types.is_boolean(kind):
        return values.cast(pa.int8())
    if pa.types.is_integer(kind) or pa.types.is_floating(kind):
        return values
    raise TypeError(f"is of {kind}, accepted are numbers")


def plain(values: pa.Array) -> NDArray[Any]:
    """As NumPy of the same type; null is 0."""
    return np.from_dlpack(pc.fill_null(values, pa.scalar(0, values.type)) if values.null_count else values)


def null(values: pa.Array) -> NDArray[np.bool_]:
    return np.from_dlpack(values.is_null().cast(pa.uint8())).view(bool)


def whole(values: pa.Array) -> NDArray[Any]:
    kind = values.type
    if pa.types.is_null(kind):
        return np.zeros(len(values), np.int64)
    if not (pa.types.is_integer(kind) or pa.types.is_boolean(kind)):
        raise TypeError(f"is of {kind}, accepted are ids (whole numbers)")
    return plain(scalar(values))


def real(x: NDArray[Any]) -> NDArray[Any]:
    return x if x.dtype.kind == "f" and x.dtype.itemsize >= 4 else x.astype(np.float32)


def with_nulls(values: pa.Array, filled: NDArray[Any]) -> pa.Array:
    """``filled``, with the nulls of ``values``."""
    return pa.array(filled, mask=null(values) if values.null_count else None)


def numbers(column: pa.Array, function: Callable[[NDArray[Any]], NDArray[Any]]) -> pa.Array:
    def numbers_of(values: pa.Array) -> pa.Array:
        return with_nulls(values, function(plain(scalar(values))))

    return each(column, numbers_of)


def each(column: pa.Array, function: Callable[[pa.Array], pa.Array]) -> pa.Array:
    """``function`` of a column's values, or of those in its lists."""
    if not is_list(column.type):
        return function(column)
    lengths, values = lists(column)
    return listed(lengths, function(values), column.is_null())


def lists(column: pa.Array) -> tuple[NDArray[np.int64], pa.Array]:
    """Lengths of lists, and their elements one after the other."""
    lengths = lengths_of(column)
    if not pa.types.is_fixed_size_list(column.type):
        first, last = column.offsets[0].as_py(), column.offsets[-1].as_py()
        if last - first == lengths.sum():  # what is null holds nothing: nothing need be copied
            return lengths, column.values.slice(first, last - first)
    return lengths, column.flatten()


def listed(lengths: NDArray[np.int64], values: pa.Array, null: pa.BooleanArray | None = None) -> pa.Array:
    """Lists of such lengths, ``null`` where that is true."""
    mask = null if null is not None and null.true_count else None
    ends = np.zeros(len(lengths) + 1, np.int32)
    np.cumsum(lengths, out=ends[1:])
    return pa.ListArray.from_arrays(pa.array(ends), values, mask=mask)


def starts(lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    return np.cumsum(lengths) - lengths


def cut(values: pa.Array, lengths: NDArray[np.int64], new_lengths: NDArray[np.int64]) -> pa.Array:
    """The first ``new_lengths`` elements of each list; the last of all may be missing in ``values``."""
    runs = np.stack([new_lengths, lengths - new_lengths], axis=1).ravel()
    within = np.repeat(np.tile([True, False], len(new_lengths)), runs)[: len(values)]
    kind = values.type
    if values.null_count or not (pa.types.is_integer(kind) or pa.types.is_floating(kind)):
        return values.filter(pa.array(within))
    return pa.array(np.from_dlpack(values)[within])  # the same, faster
