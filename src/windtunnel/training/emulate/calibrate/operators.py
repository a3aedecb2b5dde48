"""Operators as calls: those that are measured, those that a piece of code dispatches, how to run one again.

A captured operator tells shapes, dtypes, strides and plain values in schema order, but no data. Tensors are
made with those strides and filled with positive numbers of ordinary size (no denormals, whose arithmetic is
slow); index tensors are filled with indices that their table has.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from windtunnel.training.emulate.graph import Operator, TensorMeta
from windtunnel.training.emulate.live.host import describe
from windtunnel.training.emulate.live.observe import read_operator
from windtunnel.training.emulate.twin.costs.profile import contiguous
from windtunnel.training.emulate.twin.costs.work import base_name, kind_of

Shape = tuple[int, ...]
aten = torch.ops.aten


def empty(*shape: int, dtype: str) -> torch.Tensor:
    return torch.empty(shape, dtype=getattr(torch, dtype), device="meta")


def grid(quick: bool, torch_device: str) -> dict[str, list[Operator]]:
    """Operators by part of the calibration, as calls of them on tensors without memory are recorded.
    ``quick`` takes fewer and smaller shapes."""
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
    operators: dict[str, list[Operator]] = {}

    def part(name: str, call: Callable[..., None], *choices: Iterable[Any]) -> None:
        with OperatorRecorder() as recorder:
            for chosen in product(*choices):
                call(*chosen)
        operators[name] = [op for op in recorder.operators if kind_of(op) != "view"]

    part(
        "matmul",
        _matmuls,
        dtypes,
        [shape for shape in product(sizes, repeat=3) if 2.0 * prod(shape) <= limit],
    )
    part(
        "attention",
        _attention,
        [gpu],
        dtypes[:1] if gpu else dtypes,
        lengths,
        (4, 16),
        (64, 128),
        (True, False),
    )
    part("norm", _norms, [gpu], dtypes, rows)
    part("elementwise", _elementwise, dtypes, counts)
    part("reduction", _rows, dtypes, rows)
    part("embedding", _embeddings, dtypes, rows[:: 1 if gpu else 2])
    part("optimizer", _optimizers, counts)
    for dtype, shape in product(dtypes, rows):  # which is taken apart where no kernel of it runs
        x, weight = (TensorMeta(size, dtype, contiguous(size)) for size in (shape, shape[1:]))
        sums = TensorMeta((shape[0], 1), "float32" if gpu else dtype, (1, 1))
        norm = Operator("aten._fused_rms_norm.default", (x, shape[1:], weight, 1e-5), (x, sums))
        operators["norm"].append(norm)
    return operators


def _matmuls(dtype: str, shape: Shape) -> None:
    """The three products of a linear layer: forward with the weight turned, both gradients."""
    m, n, k = shape
    a, b = empty(m, k, dtype=dtype), empty(k, n, dtype=dtype)
    right = empty(n, k, dtype=dtype).t()
    aten.mm(a, right)
    aten.mm(a, b)
    aten.mm(empty(k, m, dtype=dtype).t(), b)
    if m == n:
        aten.addmm(empty(n, dtype=dtype), a, right)
        aten.bmm(empty(4, m, k, dtype=dtype), empty(4, k, n, dtype=dtype))


def _attention(gpu: bool, dtype: str, length: int, heads: int, width: int, causal: bool) -> None:
    q = empty(1, heads, length, width, dtype=dtype)
    if gpu:
        out, sums = aten._scaled_dot_product_flash_attention(q, q, q, 0.0, causal)[:2]
        seed, offset = empty(2, dtype="int64"), empty(dtype="int64")
        aten._scaled_dot_product_flash_attention_backward(
            q, q, q, q, out, sums, None, None, length, length, 0.0, causal, seed, offset
        )
    else:
        out, sums = aten._scaled_dot_product_flash_attention_for_cpu(q, q, q, 0.0, causal)
        aten._scaled_dot_product_flash_attention_for_cpu_backward(q, q, q, q, out, sums, 0.0, causal)


def _norms(gpu: bool, dtype: str, shape: Shape) -> None:
    x, weight, width = empty(*shape, dtype=dtype), empty(shape[1], dtype=dtype), shape[1:]
    # On a CPU the statistics have the dtype of the weight.
    sums = empty(shape[0], 1, dtype="float32" if gpu else dtype)
    aten.native_layer_norm(x, width, weight, weight, 1e-5)
    aten.native_layer_norm_backward(x, x, width, sums, sums, weight, weight, [True] * 3)


def _elementwise(dtype: str, count: int) -> None:
    x = empty(count, dtype=dtype)
    for call in (aten.silu, aten.gelu, aten.rsqrt, aten.clone):
        call(x)
    for call in (aten.add, aten.mul, aten.silu_backward, aten.add_, aten.copy_):
        call(x, x)
    aten.pow(x, 2)
    aten.copy_(x, empty(count, dtype="float32" if dtype == "bfloat16" else "bfloat16"))
    aten.fill_(x, 0)
    aten.cat([x, x])


def _rows(dtype: str, shape: Shape) -> None:
    x, target, number = empty(*shape, dtype=dtype), empty(shape[0], dtype="int64"), empty(dtype=dtype)
    aten.sum(x, [0], True)
    aten.mean(x, [1], True)
    aten._softmax(x, 1, False)
    aten._log_softmax(x, 1, False)
    aten._log_softmax_backward_data(x, x, 1, x.dtype)
    aten.nll_loss_forward(x, target, None, 1, -100)
    aten.nll_loss_backward(number, x, target, None, 1, -100, number)


def _embeddings(dtype: str, shape: Shape) -> None:
    rows, width = shape
    table, indices = empty(16384, width, dtype=dtype), empty(rows, dtype="int64")
    aten.embedding(table, indices)
    aten.embedding_dense_backward(empty(rows, width, dtype=dtype), indices, 16384, -1, False)
    aten.index_select(table, 0, indices)


def _optimizers(count: int) -> None:
    x, step = [empty(count, dtype="float32")], [empty(dtype="float32")]
    options = {"lr": 1e-4, "beta1": 0.9, "beta2": 0.95, "weight_decay": 0.1, "eps": 1e-8}
    aten._fused_adamw_(x, x, x, x, [], step, **options, amsgrad=False, maximize=False)
    aten._foreach_mul_(x, 0.999)
    aten._foreach_add_(x, x)
    aten._foreach_addcdiv_(x, x, x, [0.001])


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
    stride = meta.stride if len(meta.stride) == len(meta.shape) else contiguous(meta.shape)
    extent = 1 + sum((size - 1) * step for size, step in zip(meta.shape, stride, strict=True))
    dtype = getattr(torch, meta.dtype)
    low, high = 0.1, 1.0
    if dtype is torch.bool:
        low, high = 0, 2
    elif not (dtype.is_floating_point or dtype.is_complex):
        low, high = 0, max(1, min(index_limit, torch.iinfo(dtype).max))
    count = max(1, extent) if meta.numel else 0
    flat = torch.testing.make_tensor(count, dtype=dtype, device=device, low=low, high=high)
    return torch.as_strided(flat, meta.shape, stride)


def _index_limit(op: Operator) -> int:
    """Indices below this are valid in every integer tensor of ``op``: all that its table has, since what is
    read again and again lies in the caches."""
    base, tensors = base_name(op.name), op.tensors()
    if base == "embedding_dense_backward":
        return int(op.inputs[2])
    if base.startswith("nll_loss"):
        scores = tensors["backward" in base].shape
        return scores[-1] if len(scores) == 1 else scores[1]
    if base in ("embedding", "_embedding_bag"):
        return tensors[0].shape[0]
    if base.startswith(("index_select", "index_add", "gather", "scatter")):
        return tensors[0].shape[int(op.inputs[1])] if tensors[0].shape else 1
    if base.startswith(("index", "_index_put", "_unsafe_index")):
        return min(tensors[0].shape)
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
