"""The operators of a captured run as loop nests: matrix products, convolutions, attention, with their gradients.

What each row of ``operators.json`` holds is told by `windtunnel.training.emulate.operators`. Attention is
its products, not fused, so the scores pass through memory; a causal one takes the share that is computed. In the
gradient of a convolution batch, channels and sides change places; that of a strided one is taken as dense.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

from windtunnel.silicon.mapper.model import Layer
from windtunnel.silicon.mapper.spec import gemm

Nests = list[tuple[Layer, float]]
"""Layers, and how many times each is computed, which may be a part."""
Shape = Sequence[int]


def nests(row: Sequence[Any]) -> Nests:
    """The nests of an operator; none of one that only streams."""
    name, arguments, outputs, facts = row
    kind, shape = facts["kind"], facts["shape"]
    if not facts["flops"]:
        return []
    if kind == "matmul":
        batch, m, n, k = shape
        return [(_product(m, n, k, batch), 1.0)]
    if kind == "attention":
        query, key, value, _, backward = shape
        found = _attention(query, key, value, backward)
        share = facts["flops"] / (2.0 * sum(layer.macs for layer in found))
        return [(layer, share) for layer in found]
    if kind == "conv":
        return [(layer, 1.0) for layer in _convolution(name, arguments, outputs)]
    return []


def _product(m: int, n: int, k: int, groups: int = 1) -> Layer:
    return gemm(f"{m}x{n}x{k}" + (f" x{groups}" if groups > 1 else ""), m, n, k, groups)


def _attention(query: Shape, key: Shape, value: Shape, backward: bool) -> list[Layer]:
    heads, rows, width = math.prod(query[:2]), query[2], query[3]
    columns, out = key[2], value[3]
    scores = _product(rows, columns, width, heads)
    if not backward:
        return [scores, _product(rows, out, columns, heads)]
    # Scores again, then the gradients of value, probabilities, query and key.
    return [
        scores, _product(columns, out, rows, heads), _product(rows, columns, out, heads),
        _product(rows, width, columns, heads), _product(columns, width, rows, heads),
    ]  # fmt: skip


def _convolution(name: str, arguments: Sequence[Any], outputs: Sequence[str]) -> list[Layer]:
    tensors = [_shape(one["t"]) for one in arguments if isinstance(one, dict)]
    backward = "backward" in name
    lists = [one for one in arguments if isinstance(one, list) and all(type(n) is int for n in one)]
    # Of the backward the first list is the sizes of the bias, where there is one.
    stride = next((one[0] for one in lists[-4:] if len(one) == len(tensors[1]) - 2), 1)
    out, x, weight = tensors[:3] if backward else (_shape(outputs[0]), *tensors[:2])
    groups = max(1, x[1] // weight[1])
    fy, fx = _two(weight)
    oy, ox = _two(out)
    each, outs, batch = weight[1], weight[0] // groups, x[0]
    label = f"{groups * each}>{weight[0]} {fy}x{fx}/{stride}"
    if not backward:
        return [Layer(label, (fx, fy, ox, oy, each, outs, batch), stride, groups)]
    mask = next(
        (one for one in arguments if isinstance(one, list) and one and type(one[0]) is bool), [True, True]
    )
    found = []
    if mask[0]:
        found.append(Layer(f"{label} dx", (fx, fy, ox, oy, outs, each, batch), 1, groups))
    if mask[1]:
        found.append(Layer(f"{label} dw", (ox, oy, fx, fy, batch, outs, each), 1, groups))
    return found


def _two(shape: Shape) -> tuple[int, int]:
    """Rows and columns; of three dimensions the first two are one."""
    sides = list(shape[2:])
    return (math.prod(sides[:-1]), sides[-1])


def _shape(text: str) -> list[int]:
    found = re.search(r"\[([\d,]*)\]", text)
    return [int(part) for part in found[1].split(",") if part] if found else []
