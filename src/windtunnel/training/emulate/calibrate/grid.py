"""The operators that a calibration measures: the kinds that training spends its time in, over shapes and
dtypes."""

from __future__ import annotations

from itertools import product

from windtunnel.training.emulate.graph import Operator, TensorMeta
from windtunnel.training.emulate.twin.costs.profile import contiguous

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
    found = []
    for m, n, k in product(sizes, sizes, sizes):
        if 2.0 * m * n * k > limit:
            continue
        out = (tensor((m, n), dtype),)
        a, b = tensor((m, k), dtype), tensor((k, n), dtype)
        found.append(Operator("aten.mm.default", (a, tensor((k, n), dtype, turned=True)), out))
        found.append(Operator("aten.mm.default", (a, b), out))
        found.append(Operator("aten.mm.default", (tensor((m, k), dtype, turned=True), b), out))
        if m == n:
            bias = tensor((n,), dtype)
            right = tensor((k, n), dtype, turned=True)
            found.append(Operator("aten.addmm.default", (bias, a, right, 1, 1), out))
            left, batch = tensor((4, m, k), dtype), tensor((4, k, n), dtype)
            found.append(Operator("aten.bmm.default", (left, batch), (tensor((4, m, n), dtype),)))
    return found


def _attention(dtype: str, lengths: tuple[int, ...], gpu: bool) -> list[Operator]:
    found = []
    for length, heads, width, causal in product(lengths, (4, 16), (64, 128), (True, False)):
        q = tensor((1, heads, length, width), dtype)
        sums = TensorMeta((1, heads, length), "float32", (heads * length, length, 1))
        base = "aten._scaled_dot_product_flash_attention"
        if gpu:
            forward = (q, q, q, 0.0, causal, False, None)
            seed = TensorMeta((2,), "int64", (1,))
            offset = TensorMeta((), "int64", ())
            backward = (q, q, q, q, q, sums, None, None, length, length, 0.0, causal, seed, offset, None)
            found.append(Operator(f"{base}.default", forward, (q, sums)))
            found.append(Operator(f"{base}_backward.default", backward, (q, q, q)))
        else:
            # The CPU kernel keeps its sums as (batch, sequence, heads) turned.
            sums = TensorMeta((1, heads, length), "float32", (heads * length, 1, heads))
            found.append(Operator(f"{base}_for_cpu.default", (q, q, q, 0.0, causal, None, None), (q, sums)))
            found.append(
                Operator(
                    f"{base}_for_cpu_backward.default",
                    (q, q, q, q, q, sums, 0.0, causal, None, None),
                    (q, q, q),
                )
            )
    return found


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
    one = tensor((shape[0], 1), dtype)
    target = TensorMeta((shape[0],), "int64", (1,))
    scalar = TensorMeta((), dtype, ())
    return [
        Operator("aten.sum.dim_IntList", (x, (0,), True, None), (tensor((1, shape[1]), dtype),)),
        Operator("aten.mean.dim", (x, (1,), True, None), (one,)),
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
