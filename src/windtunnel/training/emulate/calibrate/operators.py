"""Operators as calls: those that are measured, those that a piece of code dispatches, how to run one again.

A captured operator tells shapes, dtypes, strides and plain values in schema order, but no data. Tensors are
made with those strides and filled with positive numbers of ordinary size (no denormals, whose arithmetic is
slow); index tensors are filled with indices that their table has.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from windtunnel.training.emulate.graph import Operator, TensorMeta
from windtunnel.training.emulate.live.host import describe
from windtunnel.training.emulate.live.observe import read_operator
from windtunnel.training.emulate.twin.costs.profile import contiguous
from windtunnel.training.emulate.twin.costs.work import base_name

Shape = tuple[int, ...]


def tensor(shape: Shape, dtype: str, *, turned: bool = False) -> TensorMeta:
    """A contiguous tensor; ``turned``: the transpose of a contiguous matrix."""
    stride = contiguous(shape) if not turned else (1, shape[0])
    return TensorMeta(shape, dtype, stride)


def grid(quick: bool, torch_device: str) -> dict[str, list[Operator]]:
    """Operators by part of the calibration. ``quick`` takes fewer and smaller shapes."""
    gpu = torch_device == "cuda"
    dtypes = ("bfloat16", "float32")
    limit = (2e13 if gpu else 2e10) / (10 if quick else 1)
    sizes = (128, 512, 2048, 8192, 16384) if gpu else (16, 64, 256, 1024, 4096)
    lengths = (512, 2048, 8192) if gpu else (64, 256, 1024)
    counts = [1 << power for power in (range(12, 31, 3) if gpu else range(8, 25, 4 if quick else 2))]
    rows = [
        (count // width, width)
        for count in counts
        for width in ((4096,) if gpu else (64, 1024))
        if count >= width
    ]
    return {
        "matmul": [op for d in dtypes for op in _matmuls(d, sizes, limit)],
        "attention": [op for d in (dtypes[:1] if gpu else dtypes) for op in _attention(d, lengths, gpu)],
        "norm": [op for d, shape in product(dtypes, rows) for op in _norms(d, shape, gpu)],
        "elementwise": [op for d, count in product(dtypes, counts) for op in _elementwise(d, count)],
        "reduction": [op for d, shape in product(dtypes, rows) for op in _rows(d, shape)],
        "embedding": [
            op for d, shape in product(dtypes, rows[:: 1 if gpu else 2]) for op in _embeddings(d, shape)
        ],
        "optimizer": [op for count in counts for op in _optimizers(count)],
    }


def _matmuls(dtype: str, sizes: tuple[int, ...], limit: float) -> list[Operator]:
    """The three products of a linear layer: forward with the weight turned, both gradients."""
    operators = []
    for m, n, k in product(sizes, sizes, sizes):
        if 2.0 * m * n * k > limit:
            continue
        out = (tensor((m, n), dtype),)
        a, b = tensor((m, k), dtype), tensor((k, n), dtype)
        operators.append(Operator("aten.mm.default", (a, tensor((k, n), dtype, turned=True)), out))
        operators.append(Operator("aten.mm.default", (a, b), out))
        operators.append(Operator("aten.mm.default", (tensor((m, k), dtype, turned=True), b), out))
        if m == n:
            bias = tensor((n,), dtype)
            right = tensor((k, n), dtype, turned=True)
            operators.append(Operator("aten.addmm.default", (bias, a, right, 1, 1), out))
            left, batch = tensor((4, m, k), dtype), tensor((4, k, n), dtype)
            operators.append(Operator("aten.bmm.default", (left, batch), (tensor((4, m, n), dtype),)))
    return operators


def _attention(dtype: str, lengths: tuple[int, ...], gpu: bool) -> list[Operator]:
    operators = []
    for length, heads, width, causal in product(lengths, (4, 16), (64, 128), (True, False)):
        q = tensor((1, heads, length, width), dtype)
        sums = TensorMeta((1, heads, length), "float32", (heads * length, length, 1))
        base = "aten._scaled_dot_product_flash_attention"
        if gpu:
            forward = (q, q, q, 0.0, causal, False, None)
            seed = TensorMeta((2,), "int64", (1,))
            offset = TensorMeta((), "int64", ())
            backward = (q, q, q, q, q, sums, None, None, length, length, 0.0, causal, seed, offset, None)
            operators.append(Operator(f"{base}.default", forward, (q, sums)))
            operators.append(Operator(f"{base}_backward.default", backward, (q, q, q)))
        else:
            # The CPU kernel keeps its sums as (batch, sequence, heads) turned.
            sums = TensorMeta((1, heads, length), "float32", (heads * length, 1, heads))
            operators.append(
                Operator(f"{base}_for_cpu.default", (q, q, q, 0.0, causal, None, None), (q, sums))
            )
            operators.append(
                Operator(
                    f"{base}_for_cpu_backward.default",
                    (q, q, q, q, q, sums, 0.0, causal, None, None),
                    (q, q, q),
                )
            )
    return operators


def _norms(dtype: str, shape: Shape, gpu: bool) -> list[Operator]:
    x, weight = tensor(shape, dtype), tensor(shape[1:], dtype)
    # On a CPU the statistics have the dtype of the weight.
    sums = TensorMeta((shape[0], 1), "float32" if gpu else dtype, (1, 1))
    width = (shape[1],)
    return [
        Operator("aten.native_layer_norm.default", (x, width, weight, weight, 1e-5), (x, sums, sums)),
        Operator(
            "aten.native_layer_norm_backward.default",
            (x, x, width, sums, sums, weight, weight, (True, True, True)),
            (x, weight, weight),
        ),
        Operator("aten._fused_rms_norm.default", (x, width, weight, 1e-5), (x, sums)),
    ]


def _elementwise(dtype: str, count: int) -> list[Operator]:
    x = tensor((count,), dtype)
    other = tensor((count,), "float32" if dtype == "bfloat16" else "bfloat16")
    return [
        Operator("aten.add.Tensor", (x, x, 1), (x,)),
        Operator("aten.mul.Tensor", (x, x), (x,)),
        Operator("aten.silu.default", (x,), (x,)),
        Operator("aten.silu_backward.default", (x, x), (x,)),
        Operator("aten.gelu.default", (x, "none"), (x,)),
        Operator("aten.rsqrt.default", (x,), (x,)),
        Operator("aten.pow.Tensor_Scalar", (x, 2), (x,)),
        Operator("aten.add_.Tensor", (x, x, 1), (x,)),
        Operator("aten.copy_.default", (x, x, False), (x,)),
        Operator("aten.copy_.default", (x, other, False), (x,)),
        Operator("aten.clone.default", (x, None), (x,)),
        Operator("aten.fill_.Scalar", (x, 0), (x,)),
        Operator("aten.cat.default", ((x, x), 0), (tensor((2 * count,), dtype),)),
    ]


def _rows(dtype: str, shape: Shape) -> list[Operator]:
    x = tensor(shape, dtype)
    tensor_meta = tensor((shape[0], 1), dtype)
    target = TensorMeta((shape[0],), "int64", (1,))
    scalar = TensorMeta((), dtype, ())
    return [
        Operator("aten.sum.dim_IntList", (x, (0,), True, None), (tensor((1, shape[1]), dtype),)),
        Operator("aten.mean.dim", (x, (1,), True, None), (tensor_meta,)),
        Operator("aten._softmax.default", (x, 1, False), (x,)),
        Operator("aten._log_softmax.default", (x, 1, False), (x,)),
        Operator("aten._log_softmax_backward_data.default", (x, x, 1, 0), (x,)),
        Operator("aten.nll_loss_forward.default", (x, target, None, 1, -100), (scalar, scalar)),
        Operator("aten.nll_loss_backward.default", (scalar, x, target, None, 1, -100, scalar), (x,)),
    ]


def _embeddings(dtype: str, shape: Shape) -> list[Operator]:
    rows, width = shape
    table, indices = tensor((16384, width), dtype), TensorMeta((rows,), "int64", (1,))
    out = tensor(shape, dtype)
    return [
        Operator("aten.embedding.default", (table, indices, -1, False, False), (out,)),
        Operator("aten.embedding_dense_backward.default", (out, indices, 16384, -1, False), (table,)),
        Operator("aten.index_select.default", (table, 0, indices), (out,)),
    ]


def _optimizers(count: int) -> list[Operator]:
    x = (tensor((count,), "float32"),)
    step = (TensorMeta((), "float32", ()),)
    return [
        Operator(
            "aten._fused_adamw_.default",
            (x, x, x, x, (), step, 1e-4, 0.9, 0.95, 0.1, 1e-8, False, False, None, None),
            (*x, *x, *x),
        ),
        Operator("aten._foreach_mul_.Scalar", (x, 0.999), x),
        Operator("aten._foreach_add_.List", (x, x, 1), x),
        Operator("aten._foreach_addcdiv_.ScalarList", (x, x, x, (0.001,)), x),
    ]


INTEGERS = ("int64", "int32", "int16", "int8", "uint8")


@dataclass(frozen=True)
class OperatorCall:
    """How to call an operator: ``function``, its plain arguments, and where tensors go.

    ``positional`` and ``keywords`` hold a `TensorMeta` (or a tuple with some) wherever a tensor is wanted.
    """

    function: Callable[..., Any]
    positional: tuple[Any, ...]
    keywords: dict[str, Any]
    index_limit: int


def plan_call(op: Operator, device: str) -> OperatorCall | None:
    """How to run ``op`` on ``device`` (``"cpu"`` or ``"cuda"``); None where PyTorch has no such operator or
    the operator was captured without its arguments (views)."""
    function = find_operator(op.name)
    if function is None or not op.inputs:
        return None
    positional: list[Any] = []
    keywords: dict[str, Any] = {}
    for argument, value in zip(function._schema.arguments, op.inputs, strict=False):
        argument_plan = _plain(argument.name, str(argument.type), value, op, device)
        if argument.kwarg_only:
            keywords[argument.name] = argument_plan
        else:
            positional.append(argument_plan)
    return OperatorCall(function, tuple(positional), keywords, _index_limit(op))


def find_operator(name: str) -> Any:
    """``"aten.mm.default"`` as ``torch.ops`` has it, or None."""
    namespace, _, rest = name.partition(".")
    base, _, overload = rest.partition(".")
    try:
        packet = getattr(getattr(torch.ops, namespace), base)
        return getattr(packet, overload or "default")
    except (AttributeError, RuntimeError):
        return None


def make_tensor(meta: TensorMeta, device: str, index_limit: int = 1) -> torch.Tensor:
    """A tensor like ``meta`` on ``device``, filled as the module says."""
    dtype = getattr(torch, meta.dtype)
    stride = meta.stride if len(meta.stride) == len(meta.shape) else None
    if stride is None:
        flat = torch.empty(meta.shape, dtype=dtype, device=device)
        return _fill(flat, meta.dtype, index_limit)
    extent = 1 + sum((size - 1) * step for size, step in zip(meta.shape, stride, strict=True))
    flat = torch.empty(max(1, extent) if meta.numel else 0, dtype=dtype, device=device)
    return torch.as_strided(_fill(flat, meta.dtype, index_limit), meta.shape, stride)


def _fill(flat: torch.Tensor, dtype: str, index_limit: int) -> torch.Tensor:
    if dtype in INTEGERS:
        return flat.random_(0, max(1, min(index_limit, 127 if dtype in ("int8", "uint8") else index_limit)))
    if dtype == "bool":
        return flat.random_(0, 2)
    if dtype.startswith("float8"):
        return flat.copy_(torch.full_like(flat, 0.5, dtype=torch.float32).to(flat.dtype))
    if dtype.startswith("complex"):
        return flat.fill_(0.5)
    return flat.uniform_(0.1, 1.0)


def _index_limit(op: Operator) -> int:
    """Indices below this are valid in every integer tensor of ``op``."""
    base = base_name(op.name)
    tensors = [arg for arg in op.inputs if isinstance(arg, TensorMeta)]
    if base == "embedding_dense_backward":
        return int(op.inputs[2])
    if base in ("nll_loss_forward", "nll_loss2d_forward"):
        return tensors[0].shape[-1] if len(tensors[0].shape) == 1 else tensors[0].shape[1]
    if base in ("nll_loss_backward", "nll_loss2d_backward"):
        return tensors[1].shape[-1] if len(tensors[1].shape) == 1 else tensors[1].shape[1]
    if base in (
        "index_select",
        "gather",
        "scatter",
        "scatter_",
        "scatter_add",
        "scatter_add_",
        "index_add_",
        "index_add",
    ):
        return tensors[0].shape[int(op.inputs[1])] if tensors[0].shape else 1
    if base in (
        "embedding",
        "index",
        "_unsafe_index",
        "index_put_",
        "_index_put_impl_",
        "index_put",
        "_embedding_bag",
    ):
        return (
            min(tensors[0].shape) if base.startswith(("index", "_index", "_unsafe")) else tensors[0].shape[0]
        )
    return 2


def _plain(name: str, kind: str, value: Any, op: Operator, device: str) -> Any:
    """A captured value as the Python call wants it."""
    if value is None:
        return None
    if name == "dtype":
        return getattr(torch, op.outputs[0].dtype) if op.outputs else None
    if name in ("layout", "pin_memory"):
        return None
    if name == "memory_format":
        formats = (
            torch.contiguous_format,
            torch.preserve_format,
            torch.channels_last,
            torch.channels_last_3d,
        )
        return formats[value] if isinstance(value, int) else None
    if "Device" in kind:
        return device
    if isinstance(value, str) and ("number" in kind or "float" in kind):
        return float(value)
    return value


def map_tensors(value: Any, make: Callable[[TensorMeta], torch.Tensor]) -> Any:
    """``value`` with every `TensorMeta` in it replaced by ``make`` of it; tuples become lists."""
    if isinstance(value, TensorMeta):
        return make(value)
    if isinstance(value, tuple):
        return [map_tensors(item, make) for item in value]
    return value


class OperatorRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Collects every operator dispatched while it is entered, in ``operators``, below autograd."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operators: list[Operator] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        row = describe(func, args, kwargs or {}, result)
        self.operators.append(read_operator(json.dumps(row)))
        return result
