"""Tensors as the Open Inference Protocol names them: what models take and give, and requests hold."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field

from windtunnel.base.errors import UserError

Arrays = Mapping[str, NDArray[Any]]
"""Inputs by name, in the model's order."""
Outputs = Sequence[NDArray[Any]]
"""In the model's order, too."""
DATATYPES: dict[str, Any] = {
    "FP32": np.float32, "FP64": np.float64, "FP16": np.float16, "INT64": np.int64, "INT32": np.int32,
    "INT16": np.int16, "INT8": np.int8, "UINT64": np.uint64, "UINT32": np.uint32, "UINT16": np.uint16,
    "UINT8": np.uint8, "BOOL": np.bool_, "BYTES": np.object_,
}  # fmt: skip
ACCEPTED = {"f": "iuf", "i": "iu", "u": "iu", "b": "b"}
"""Kinds of NumPy that may stand for a kind in JSON: no fraction for a whole number, no word for a number."""


@dataclass(frozen=True)
class TensorSpec:
    """``shape``: -1 where it may be any number."""

    name: str
    datatype: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Signature:
    """``batched``: the first axis of all tensors counts items, so requests may be run together."""

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    batched: bool

    def items(self, inputs: Arrays) -> int:
        """How many they are."""
        return len(inputs[self.inputs[0].name]) if self.batched else 1


class Sizes(BaseModel):
    """``binary_data_size``: bytes of the tensor that follow the JSON."""

    model_config = ConfigDict(strict=True)
    binary_data_size: Annotated[int, Field(ge=0)] | None = None


class InferTensor(BaseModel):
    """A tensor as the protocol writes it."""

    model_config = ConfigDict(strict=True)
    name: str
    datatype: Annotated[str, Field(json_schema_extra={"enum": [*DATATYPES]})]
    shape: list[Annotated[int, Field(ge=0)]]
    parameters: Sizes = Sizes()
    data: list[Any] | None = None


def checked(infer_inputs: Sequence[InferTensor], raw: Mapping[str, bytes], signature: Signature) -> Arrays:
    """What came, as arrays. ``raw``: of those by name that came as bytes.

    Raises:
        UserError: one is missing, doubled, of another name, type or shape, or has other values than it says.
    """
    names = [tensor.name for tensor in infer_inputs]
    if sorted(names) != sorted(tensor.name for tensor in signature.inputs):
        expected = ", ".join(repr(tensor.name) for tensor in signature.inputs)
        raise UserError(f"field inputs: {str(names)[:200]} is not accepted; use each of {expected} once")
    arrays = {
        tensor.name: _array(infer_inputs[names.index(tensor.name)], raw.get(tensor.name), tensor)
        for tensor in signature.inputs
    }
    counts = {tensor.shape[:1] for tensor in arrays.values()}
    if signature.batched and (len(counts) > 1 or (0,) in counts):
        raise UserError(f"inputs of {' and '.join(str(count[0]) for count in sorted(counts))} items are not"
                        " accepted; use the same number in each, 1 at least")  # fmt: skip
    return arrays


def _array(infer_input: InferTensor, raw: bytes | None, spec: TensorSpec) -> NDArray[Any]:
    shape, tensor = infer_input.shape, f"input {spec.name}"
    if infer_input.datatype != spec.datatype:
        raise UserError(f"{tensor} of {infer_input.datatype[:50]!r} is not accepted; use {spec.datatype!r}")
    if len(shape) != len(spec.shape) or any(
        size not in (-1, has) for size, has in zip(spec.shape, shape, strict=True)
    ):
        raise UserError(f"{tensor}: shape {str(shape)[:200]} is not accepted; use {list(spec.shape)}")
    try:
        values = _values(infer_input.data, spec.datatype) if raw is None else _unpacked(raw, spec)
        if values.size != math.prod(shape) or (values.ndim > 1 and list(values.shape) != shape):
            raise ValueError(f"{values.size} values came")
        return values.reshape(shape)
    except (ValueError, TypeError, OverflowError) as fault:
        words = str(fault)[:200]
        raise UserError(f"{tensor}: data is not accepted for shape {str(shape)[:200]}: {words}") from fault


def _values(data: Any, datatype: str) -> NDArray[Any]:
    kind = np.dtype(DATATYPES[datatype])
    if data is None:
        raise ValueError("there is none")
    if kind == np.object_:
        words = np.array(data, object)
        if not all(isinstance(word, str | bytes) for word in words.flat):
            raise ValueError("not all are strings")
        texts = [word.decode() if isinstance(word, bytes) else word for word in words.flat]
        return np.array(texts, object).reshape(words.shape)
    read = np.array(data)
    if kind == np.uint64 and all(type(item) is int for item in np.array(data, object).flat):
        read = np.array(data, kind)  # by itself NumPy makes floats of whole numbers on both sides of 2^63
    if read.size and read.dtype.kind not in ACCEPTED[kind.kind]:
        raise ValueError(f"not all are of {datatype}")
    with np.errstate(over="ignore"):
        converted = read.astype(kind)
    if (kind.kind == "f" and not np.isfinite(converted).all()) or (
        kind.kind in "iu" and (converted != read).any()
    ):
        raise ValueError(f"not all are within {datatype}")
    return converted


def _unpacked(raw: bytes, spec: TensorSpec) -> NDArray[Any]:
    if spec.datatype != "BYTES":
        return np.frombuffer(raw, DATATYPES[spec.datatype])
    words, at = [], 0
    while at < len(raw):
        end = at + 4 + int.from_bytes(raw[at : at + 4], "little")
        if end > len(raw):
            raise ValueError("a string is longer than what came")
        words.append(raw[at + 4 : end].decode())
        at = end
    return np.array(words, object)


def packed(array: NDArray[Any]) -> bytes:
    """As the protocol's raw contents: strings behind their length."""
    if array.dtype.kind not in "OU":
        return array.tobytes()
    words = [str(item).encode() for item in array.flat]
    return b"".join(len(word).to_bytes(4, "little") + word for word in words)


def joined(parts: Sequence[Arrays]) -> Arrays:
    """Several requests' inputs as those of one batch; they agree in all axes but the first."""
    if len(parts) == 1:
        return parts[0]
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def parted(outputs: Outputs, counts: Sequence[int]) -> list[Outputs]:
    """The outputs of a batch, for each of its requests with so many items."""
    if len(counts) == 1:
        return [outputs]
    ends = np.cumsum(counts)
    return [
        [array[end - count : end] for array in outputs]
        for end, count in zip(ends.tolist(), counts, strict=True)
    ]


def lengths(inputs: Arrays) -> tuple[tuple[int, ...], ...]:
    """The axes but the first: requests that agree in these may be joined."""
    return tuple(array.shape[1:] for array in inputs.values())
