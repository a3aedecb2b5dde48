"""Reads the rows that the native library writes: distinct operators and collectives, as JSON."""

from __future__ import annotations

import json
from typing import Any

from windtunnel.training.emulate.graph import Collective, Group, Operator, TensorMeta


def read_operator(text: bytes) -> Operator:
    """A row of the operator table."""
    row = json.loads(text)
    return Operator(
        name=row["n"],
        inputs=tuple(_argument(value) for value in row["i"]),
        outputs=tuple(_argument(value) for value in row["o"]),
        region=row["r"],
    )


def _argument(value: Any) -> Any:
    if isinstance(value, dict):
        return TensorMeta(
            tuple(value["s"]), value["t"], tuple(value["d"]), "cpu" if value.get("c") else "cuda"
        )
    if isinstance(value, list):
        return tuple(_argument(item) for item in value)
    return value


_DTYPES = {
    "Float": "float32", "Double": "float64", "Half": "float16", "BFloat16": "bfloat16", "Long": "int64",
    "Int": "int32", "Byte": "uint8", "Bool": "bool", "Char": "int8",
}  # fmt: skip


def read_collective(text: bytes, rows: dict[str, int], groups: list[Group]) -> Collective:
    """A row of the collective table; ``rows``: c10d's group name to the index in ``groups``."""
    row = json.loads(text)
    index = rows[row["g"]]
    peer = row["p"]
    return Collective(
        kind=row["k"], group=index, in_bytes=row["i"], out_bytes=row["o"],
        dtype=_DTYPES.get(row["t"], row["t"].lower()),
        peer=groups[index].ranks[peer] if peer >= 0 else -1, backend="gloo" if row["h"] else "nccl",
    )  # fmt: skip
