"""Random execution graphs, and a plain reader of protobuf's wire format that knows no schema."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import strategies as st

from windtunnel.report.chakra import GraphNodes

VALUES = st.one_of(
    st.booleans(),
    st.integers(-(2**62), 2**62),
    st.floats(allow_nan=False),
    st.text(max_size=5),
    st.lists(st.integers(0, 2**40), max_size=4),
)


def graph(
    types: list[int],
    durations: list[float],
    data: list[list[int]],
    attributes: list[dict[str, Any]],
    names: list[str] | None = None,
    ctrl: list[list[int]] | None = None,
) -> GraphNodes:
    """Node i has id 10 * i; dependencies are places."""
    n = len(types)
    ctrl = ctrl or [[] for _ in range(n)]
    return GraphNodes(
        id=np.arange(n, dtype=np.int64) * 10,
        name=np.arange(n, dtype=np.int32),
        names=names or [f"node {i}" for i in range(n)],
        type=np.array(types, np.int32),
        duration=np.array(durations, np.float64),
        data_ptr=np.cumsum([0, *map(len, data)]).astype(np.int64),
        data_deps=np.array([10 * place for dependencies in data for place in dependencies], np.int64),
        ctrl_ptr=np.cumsum([0, *map(len, ctrl)]).astype(np.int64),
        ctrl_deps=np.array([10 * place for dependencies in ctrl for place in dependencies], np.int64),
        attribute=np.arange(n, dtype=np.int32),
        attributes=attributes,
        metadata={"rank": 3, "world_size": 8},
    )


@st.composite
def graphs(draw: st.DrawFn) -> GraphNodes:
    n = draw(st.integers(1, 12))
    earlier = [draw(st.lists(st.integers(0, i - 1), max_size=3, unique=True)) if i else [] for i in range(n)]
    return graph(
        types=[draw(st.integers(1, 7)) for _ in range(n)],
        durations=[draw(st.floats(0, 10)) for _ in range(n)],
        data=[dependencies[:2] for dependencies in earlier],
        ctrl=[dependencies[2:] for dependencies in earlier],
        attributes=[draw(st.dictionaries(st.sampled_from(["a", "b", "pg"]), VALUES)) for _ in range(n)],
    )


def varint(data: bytes, at: int) -> tuple[int, int]:
    """The number that begins at ``at``, and where it ends."""
    value = shift = 0
    while True:
        value |= (data[at] & 0x7F) << shift
        shift += 7
        at += 1
        if data[at - 1] < 0x80:
            return value, at


def wire(message: bytes) -> list[tuple[int, int, Any]]:
    """The fields of a message: (number, wire type, value)."""
    fields, at = [], 0
    while at < len(message):
        key, at = varint(message, at)
        number, kind = key >> 3, key & 7
        value: Any
        if kind == 0:
            value, at = varint(message, at)
        elif kind == 1:
            value, at = message[at : at + 8], at + 8
        else:
            assert kind == 2
            length, at = varint(message, at)
            value, at = message[at : at + length], at + length
        fields.append((number, kind, value))
    return fields
