"""An operator as text: a key that equal calls share, and the compact form in which profiles are stored.

A tensor is written ``bfloat16[128,256]``, with ``:256,1`` after it when its strides are not those of a
contiguous tensor, and ``@cpu`` when it lies in host memory.
"""

from __future__ import annotations

import json
import re
from typing import Any

from windtunnel.training.emulate.graph import Operator, TensorMeta

_TENSOR = re.compile(r"^(\w+)\[([\d,]*)\](?::([-\d,]*))?(?:@(\w+))?$")


def contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides of a contiguous tensor."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(1, size)
    return tuple(reversed(strides))


def tensor_text(tensor: TensorMeta) -> str:
    """The text of a tensor."""
    text = f"{tensor.dtype}[{','.join(map(str, tensor.shape))}]"
    if tensor.stride and tensor.stride != contiguous(tensor.shape):
        text += ":" + ",".join(map(str, tensor.stride))
    return text if tensor.device == "cuda" else f"{text}@{tensor.device}"


def parse_tensor(text: str) -> TensorMeta:
    """The tensor that ``text`` tells. Raises `ValueError` for another text."""
    match = _TENSOR.match(text)
    if match is None:
        raise ValueError(f"{text!r} is not a tensor")
    dtype, sizes, strides, device = match.groups()
    shape = _ints(sizes)
    return TensorMeta(shape, dtype, _ints(strides) if strides else contiguous(shape), device or "cuda")


def encode(op: Operator) -> tuple[str, list[Any], list[str]]:
    """(name, arguments, outputs) as values of JSON."""
    return op.name, [_encode(arg) for arg in op.inputs], [tensor_text(out) for out in op.outputs]


def decode(name: str, inputs: list[Any], outputs: list[str]) -> Operator:
    """The operator that `encode` told. Raises `ValueError` or `TypeError` for other values."""
    return Operator(name, tuple(_decode(arg) for arg in inputs), tuple(parse_tensor(out) for out in outputs))


def signature(op: Operator) -> str:
    """A key: equal for calls that cost the same. Floats (learning rates, epsilons) and devices do not
    count."""
    return op.name + json.dumps([_blur(arg) for arg in op.inputs], separators=(",", ":"))


def _blur(arg: Any) -> Any:
    if isinstance(arg, TensorMeta):
        return tensor_text(arg).partition("@")[0]
    if isinstance(arg, (tuple, list)):
        return [_blur(item) for item in arg]
    return "float" if isinstance(arg, float) else arg


def _encode(arg: Any) -> Any:
    if isinstance(arg, TensorMeta):
        return {"t": tensor_text(arg)}
    return [_encode(item) for item in arg] if isinstance(arg, (tuple, list)) else arg


def _decode(arg: Any) -> Any:
    if isinstance(arg, dict):
        return parse_tensor(arg["t"])
    return tuple(_decode(item) for item in arg) if isinstance(arg, list) else arg


def _ints(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(",") if part)
