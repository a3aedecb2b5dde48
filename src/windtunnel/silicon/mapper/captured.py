"""The operators of a captured run as loop nests: matrix products, convolutions, attention, their gradients.

What each row of ``operators.json`` holds is told by `windtunnel.training.emulate.exports`. Attention is its
products, not fused, so the scores pass through memory; a causal one takes the share that is computed. In the
gradient of a convolution batch, channels and sides change places; that of a strided one is taken as dense.
"""

import math
import re
from collections.abc import Iterable, Sequence
from typing import Any

from windtunnel.silicon.mapper.model import Layer
from windtunnel.silicon.mapper.spec import gemm


def nests(row: Sequence[Any]) -> list[tuple[Layer, float]]:
    """The nests of an operator, and how many times each is computed, which may be a part; none of one that
    only streams."""
    name, arguments, outputs, facts = row
    if not facts["flops"] or facts["kind"] not in ("matmul", "attention", "conv"):
        return []
    if facts["kind"] == "conv":
        return [(layer, 1.0) for layer in _convolution(name, arguments, outputs)]
    if facts["kind"] == "matmul":
        groups, m, n, k = facts["shape"]
        layers = [_product(m, n, k, groups)]
    else:
        layers = [*_attention(*facts["shape"])]
    share = facts["flops"] / (2.0 * sum(layer.macs for layer in layers))
    return [(layer, share) for layer in layers]


def _product(m: int, n: int, k: int, groups: int) -> Layer:
    return gemm(f"{m}x{n}x{k}" + (f" x{groups}" if groups > 1 else ""), m, n, k, groups)


def _attention(
    query: Sequence[int], key: Sequence[int], value: Sequence[int], _: bool, backward: bool
) -> Iterable[Layer]:
    groups, rows, width, columns, out = query[0] * query[1], query[2], query[3], key[2], value[3]
    products = [(rows, columns, width), (rows, out, columns)]
    if backward:  # scores again, then the gradients of value, probabilities, query and key
        products = [(rows, columns, width), (columns, out, rows), (rows, columns, out)]
        products += [(rows, width, columns), (columns, width, rows)]
    return (_product(*product, groups) for product in products)


def _convolution(name: str, arguments: Sequence[Any], outputs: Sequence[str]) -> list[Layer]:
    tensors = [_shape(argument["t"]) for argument in arguments if isinstance(argument, dict)]
    backward = "backward" in name
    out, x, weight = tensors[:3] if backward else (_shape(outputs[0]), *tensors[:2])
    # Lists of as many numbers as sides: stride, padding and dilation, and that of output padding.
    sides = [
        argument for argument in arguments if isinstance(argument, list) and len(argument) == len(weight) - 2
    ]
    stride = next((side[0] for side in sides if type(side[0]) is int), 1)
    groups, each, batch = max(1, x[1] // weight[1]), weight[1], x[0]
    outs = weight[0] // groups
    fx, fy, ox, oy = weight[-1], math.prod(weight[2:-1]), out[-1], math.prod(out[2:-1])
    label = f"{x[1]}>{weight[0]} {fy}x{fx}/{stride}"
    if not backward:
        return [Layer(label, (fx, fy, ox, oy, each, outs, batch), stride, groups)]
    mask = next(
        (argument for argument in arguments if isinstance(argument, list) and type(argument[0]) is bool),
        [True, True],
    )
    to_input = Layer(f"{label} dx", (fx, fy, ox, oy, outs, each, batch), 1, groups)
    to_weight = Layer(f"{label} dw", (ox, oy, fx, fy, batch, outs, each), 1, groups)
    return [layer for layer, wanted in zip((to_input, to_weight), mask, strict=False) if wanted]


def _shape(text: str) -> list[int]:
    match = re.search(r"\[([\d,]*)\]", text)
    return [int(part) for part in match[1].split(",") if part] if match else []
