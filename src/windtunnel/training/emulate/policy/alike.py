"""When two ranks did the same, and in a few words where they did not.

Two slices are alike when their events are equal after every name that belongs to one rank has been replaced
by one that does not: a group by its family, the peer of a message by its distance in the group (round the
end), a root by its place in the group, streams, blocks, event records and work handles by the order in which
they first appear. Left out is what changes neither time nor messages: module paths and call sites, plain
numbers among an operator's arguments (the first index of a rank's part of the vocabulary), and the places of
frees, which come early or late with Python's garbage collector. Such a slice can stand for all ranks that are
like it.
"""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
from numpy.typing import NDArray

from windtunnel.training.emulate.graph import (
    COMM_STREAM,
    Category,
    Collective,
    EventKind,
    Operator,
    Slice,
    TensorMeta,
)
from windtunnel.training.emulate.policy.groups import CallRow, Families, call_rows

Longs = NDArray[np.int64]
Events = np.ndarray[Any, np.dtype[Any]]

_BLOCKS = (EventKind.ALLOC, EventKind.RECORD_STREAM)
_HANDLES = (EventKind.COLLECTIVE, EventKind.WORK_WAIT)


def digest(slice_: Slice, families: Families) -> str:
    """A name of what the rank did: equal for two ranks exactly when one can stand for the other."""
    columns = canonical(slice_, families)
    return hashlib.blake2b(columns.tobytes(), digest_size=16).hexdigest()


def canonical(slice_: Slice, families: Families, *, reads: bool = True) -> Longs:
    """The events that count, one row each, in names that belong to no rank; int64[n, 6]. ``reads``: also
    those by which the host sees what the device has."""
    events = _counted(slice_, reads)
    kind = events["kind"]
    ref = events["ref"].astype(np.int64)
    value = np.zeros(len(events), np.int64)

    out_ref = np.zeros(len(events), np.int64)
    operators = kind == EventKind.OP
    if operators.any():
        names = np.array([_hash(_operator_text(operator)) for operator in slice_.operators], np.int64)
        out_ref[operators] = names[ref[operators]]
    collectives = kind == EventKind.COLLECTIVE
    if collectives.any():
        out_ref[collectives] = _collective_names(slice_, families)[ref[collectives]]
    _rename(np.isin(kind, _BLOCKS), ref, out_ref)
    synced = kind == EventKind.SYNC
    _rename(np.isin(kind, (EventKind.RECORD, EventKind.WAIT)) | (synced & (ref >= 0)), ref, out_ref)
    out_ref[synced & (ref < 0)] = ref[synced & (ref < 0)]
    _rename(np.isin(kind, _HANDLES) | (synced & (ref == -3)), events["value"], value)
    allocated = kind == EventKind.ALLOC
    value[allocated] = events["value"][allocated]

    category = np.zeros(len(events), np.int64)
    default = int(Category.TEMPORARY)
    category[allocated] = [slice_.block_category.get(block, default) for block in ref[allocated].tolist()]
    columns = (kind, events["phase"], streams_in_order(events), out_ref, value, category)
    return np.stack([np.asarray(column, np.int64) for column in columns], axis=1)


def difference(first: Slice, other: Slice, families: Families) -> str:
    """In a few words, what ``other`` does that ``first`` does not, for who wants to know why; nothing
    where the words would be the same, or one of them only reads (a loss to print)."""
    ours, theirs = _parameter_bytes(first), _parameter_bytes(other)
    if _mebibytes(ours) != _mebibytes(theirs):
        size = "smaller" if theirs < ours else "larger"
        return f"a {size} shard ({_mebibytes(theirs)} of parameters instead of {_mebibytes(ours)})"
    a, b = (canonical(slice_, families, reads=False) for slice_ in (first, other))
    shared = min(len(a), len(b))
    events = _counted(first, reads=False), _counted(other, reads=False)
    for row in np.flatnonzero((a[:shared] != b[:shared]).any(axis=1)).tolist():
        was, is_now = _words(first, events[0][row]), _words(other, events[1][row])
        if was != is_now:
            return f"another graph ({is_now} instead of {was})"
    return f"{len(b)} events instead of {len(a)}" if len(a) != len(b) else ""


def _mebibytes(size: int) -> str:
    return f"{size / 2**20:.2f} MiB"


def _counted(slice_: Slice, reads: bool = True) -> Events:
    events = slice_.events
    counted = ~np.isin(events["kind"], (EventKind.CALL, EventKind.FREE))
    if not reads:
        reading = np.array([only_reads(operator) for operator in slice_.operators] or [False], np.bool_)
        operators = events["kind"] == EventKind.OP
        counted &= ~((events["kind"] == EventKind.SYNC) | (operators & reading[events["ref"] * operators]))
    return events[counted]


def only_reads(operator: Operator) -> bool:
    """Whether it only lets the host see what the device has."""
    into = {tensor.device for tensor in operator.outputs if isinstance(tensor, TensorMeta)}
    copies = "cuda" not in into and any(tensor.device == "cuda" for tensor in operator.tensors())
    return copies or operator.name in ("aten.detach.default", "aten._local_scalar_dense.default")


def _operator_text(operator: Operator) -> str:
    inputs = ["number" if type(arg) in (int, float) else arg for arg in operator.inputs]
    return repr((operator.name, inputs, operator.outputs, operator.region))


def _words(slice_: Slice, event: Any) -> str:
    kind, ref = EventKind(int(event["kind"])), int(event["ref"])
    if kind == EventKind.OP:
        return slice_.operators[ref].name
    if kind == EventKind.COLLECTIVE:
        row = slice_.collectives[ref]
        return f"{row.kind} of {max(row.in_bytes, row.out_bytes)} bytes"
    if kind == EventKind.ALLOC:
        return f"{_mebibytes(int(event['value']))} of memory"
    return kind.name.lower().replace("_", " ")


def _parameter_bytes(slice_: Slice) -> int:
    events = slice_.events[slice_.events["kind"] == EventKind.ALLOC]
    is_parameter = [
        slice_.block_category.get(block) == Category.PARAMETER for block in events["ref"].tolist()
    ]
    return int(events["value"][np.array(is_parameter, np.bool_)].sum())


def _collective_names(slice_: Slice, families: Families) -> Longs:
    def name(row: Collective, where: CallRow) -> int:
        return _hash(repr((row.kind, row.in_bytes, row.out_bytes, row.dtype, row.backend, where)))

    wheres = call_rows(slice_, families)
    return np.array([name(*pair) for pair in zip(slice_.collectives, wheres, strict=True)], np.int64)


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little", signed=True)


def _first_appearance(names: Longs) -> Longs:
    _, first, inverse = np.unique(names, return_index=True, return_inverse=True)
    order = np.empty(len(first), np.int64)
    order[np.argsort(first)] = np.arange(len(first))
    return order[inverse]


def _rename(where: NDArray[np.bool_], names: Longs, out: Longs) -> None:
    out[where] = _first_appearance(names[where])


def streams_in_order(events: Events) -> Longs:
    """Names of the events' streams by the order in which they first appear."""
    stream = events["stream"].astype(np.int64)
    # Stream 0 keeps its meaning, and a process group's stream is never taken for a user's.
    return np.where(stream == 0, 0, 2 * _first_appearance(stream) + 2 + (stream >= COMM_STREAM))
