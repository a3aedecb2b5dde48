"""Layers of ``transformer_engine.pytorch``: what they compute, send and keep.

A linear layer is one autograd function, as Transformer Engine's is: a norm before it, its casts to float8,
the tensor-parallel collectives that overlap with its products, and gradients that are added to ``main_grad``.
It keeps for its backward pass what that one keeps: what came in, the norm's statistics, and the product's
operand, in float8 where the product is. Where user buffers overlap a collective with the product that it
feeds or follows (``ub_overlap_*``), the two run side by side, as if in infinitely many pieces.
(``transformer_engine/pytorch/module/{linear,layernorm_linear}.py``, 2.6)
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist

from windtunnel.training.emulate.live.fused.kernel import (
    TE,
    FP8GlobalStateManager,
    Quantised,
    begin,
    multiply,
    note,
    quantise,
    stands_in,
)
from windtunnel.training.emulate.live.names import refuse

HARMLESS = ("name", "rng_tracker_name", "save_original_input", "ub_name", "ub_bulk_dgrad", "ub_bulk_wgrad")
"""Arguments that change nothing that is emulated, or say what is done anyway."""


def _gather(tensor: torch.Tensor, layer: Any, later: bool = True) -> tuple[torch.Tensor, Any]:
    """All ranks' parts of the sequence, and what is to be waited for; None where it has been."""
    out = tensor.new_empty(tensor.shape[0] * layer.tp_size, *tensor.shape[1:])
    return out, dist.all_gather_into_tensor(out, tensor.contiguous(), layer.tp_group, async_op=later)


def _reduce(tensor: torch.Tensor, layer: Any, later: bool = True) -> tuple[torch.Tensor, Any]:
    """Partial sums added up: each rank gets its part of the sequence, or all of it."""
    if not layer.sequence_parallel:
        return tensor, dist.all_reduce(tensor, group=layer.tp_group, async_op=later)
    out = tensor.new_empty(tensor.shape[0] // layer.tp_size, *tensor.shape[1:])
    return out, dist.reduce_scatter_tensor(out, tensor, group=layer.tp_group, async_op=later)


def _wait(*works: Any) -> None:
    for work in works:
        if work is not None:
            work.wait()


class _Linear(torch.autograd.Function):
    """x (…, in) to (…, out), by weight (out, in)."""

    @staticmethod
    def forward(
        ctx: Any, layer: Any, x: Any, weight: Any, bias: Any, cached: Any, norm_weight: Any, norm_bias: Any
    ) -> Any:
        begin()
        flat = operand = x.reshape(-1, x.shape[-1])
        stats: Any = ()
        if layer.normalization == "RMSNorm":
            operand, *stats = torch.ops.aten._fused_rms_norm(flat, [flat.shape[1]], norm_weight, layer.eps)
        elif layer.normalization:
            operand, *stats = torch.native_layer_norm(
                flat, [flat.shape[1]], norm_weight, norm_bias, layer.eps
            )  # type: ignore
        saved_operand, right, work = operand, weight, None
        if cached is not None:
            # By columns it cannot be gathered: then the rows are kept, and turned in the backward pass.
            operand, columns = quantise(operand)
            saved_operand, right = operand if layer.gathers else columns, cached.rows
        if layer.gathers:
            operand, work = _gather(operand, layer, layer.ub_overlap_ag)
        out = flat.new_empty(operand.shape[0], weight.shape[0])
        sums = layer.parallel_mode == "row" and layer.tp_size > 1
        if sums and layer.ub_overlap_rs:
            (total, work), product = _reduce(out, layer), multiply(operand, right.t(), out)
        else:
            product = multiply(operand, right.t(), out)
            total = _reduce(product, layer, False)[0] if sums else product
        _wait(work)
        turned = None if cached is None else cached.columns
        saved_operand = saved_operand if weight.requires_grad else None
        ctx.save_for_backward(
            flat if stats else None, saved_operand, weight, turned, norm_weight, norm_bias, *stats
        )
        ctx.layer, ctx.shape, ctx.has_bias = layer, x.shape, bias is not None
        return total.view(-1, *x.shape[1:-1], total.shape[-1])

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        layer = ctx.layer
        flat, operand, weight, turned, norm_weight, norm_bias, *stats = ctx.saved_tensors
        grad = gradients[0].reshape(-1, weight.shape[0]).contiguous()
        gathered = reduced = dgrad = weight_grad = None
        if layer.parallel_mode == "row" and layer.sequence_parallel:
            grad, gathered = _gather(grad, layer, layer.ub_overlap_ag)
        bias_grad = grad.new_empty(weight.shape[0]) if ctx.has_bias else None
        left, across, right = grad, grad.t(), weight
        if turned is not None:
            (left, across), right = quantise(grad, gradient=True), turned.t()
        if operand is not None and layer.gathers:
            operand, gathered = _gather(operand, layer)
        if ctx.needs_input_grad[1] or stats:
            dgrad = multiply(left, right, grad.new_empty(grad.shape[0], weight.shape[1]))
        _wait(gathered)
        if dgrad is not None and layer.parallel_mode == "column" and layer.tp_size > 1:
            dgrad, reduced = _reduce(dgrad, layer)
        if operand is not None:
            if turned is not None:
                operand = (quantise(operand).columns if layer.gathers else operand).t()
            weight_grad = _weight_gradient(layer, weight, across, operand, grad.dtype)
        _wait(reduced)
        norms: list[Any] = [None, None]
        if stats and layer.normalization == "RMSNorm":
            backward = torch.ops.aten._fused_rms_norm_backward
            dgrad, norm_grad = backward(dgrad, flat, [flat.shape[1]], *stats, norm_weight, [True] * 2)
            norms = [norm_grad, None]
        elif stats:
            backward = torch.ops.aten.native_layer_norm_backward
            dgrad, *norms = backward(dgrad, flat, [flat.shape[1]], *stats, norm_weight, norm_bias, [True] * 3)
        return None, None if dgrad is None else dgrad.view(ctx.shape), weight_grad, bias_grad, None, *norms


_unread: dict[Any, torch.Tensor] = {}


def _weight_gradient(layer: Any, weight: Any, across: Any, operand: Any, dtype: Any) -> Any:
    """A gradient that was added to ``main_grad`` is told of by a tensor that nobody reads, the same for all
    weights of a shape."""
    if not layer.fuse_wgrad_accumulation:
        return multiply(across, operand, weight.new_empty(weight.shape, dtype=dtype))
    multiply(across, operand, weight.main_grad, add=True)
    if not hasattr(weight, "grad_added_to_main_grad"):
        return None
    weight.grad_added_to_main_grad = True
    key = (weight.shape, weight.dtype)
    if key not in _unread:
        _unread[key] = torch.empty_like(weight, requires_grad=False)
    return _unread[key].detach()


class TransformerEngineBaseModule(torch.nn.Module):
    """What the layers share."""

    def set_tensor_parallel_group(self, tp_group: Any) -> None:
        self.tp_group = tp_group


class Linear(TransformerEngineBaseModule):
    """``transformer_engine.pytorch.Linear``."""

    normalization: str | None = None

    def __init__(
        self, in_features: int, out_features: int, sequence_parallel: bool = False,
        fuse_wgrad_accumulation: bool = False, tp_group: Any = None, tp_size: int = 1,
        get_rng_state_tracker: Any = None, init_method: Any = None, bias: bool = True,
        return_bias: bool = False, params_dtype: Any = None, parallel_mode: str | None = None,
        device: Any = "cuda", ub_overlap_ag: bool = False, ub_overlap_rs: bool = False,
        ub_overlap_rs_dgrad: bool = False, **options: Any,
    ) -> None:  # fmt: skip
        super().__init__()
        for name, value in options.items():
            if value and name not in HARMLESS:
                refuse(f"{TE}'s {name}", "what its kernels do is not known; leave it out")()
        self.tp_group, self.parallel_mode = tp_group, parallel_mode
        self.tp_size = tp_size if tp_group is None else dist.get_world_size(tp_group)
        self.sequence_parallel = sequence_parallel and self.tp_size > 1
        self.gathers = parallel_mode == "column" and self.sequence_parallel
        self.ub_overlap_ag, self.ub_overlap_rs = ub_overlap_ag, ub_overlap_rs
        if ub_overlap_ag or ub_overlap_rs:
            note("user buffers: a collective and the product that it overlaps with run side by side")
        self.fuse_wgrad_accumulation, self.return_bias, self.use_bias = (
            fuse_wgrad_accumulation,
            return_bias,
            bias,
        )
        self.save_original_input, self._cached = False, None
        self.in_features = in_features // (self.tp_size if parallel_mode == "row" else 1)
        self.out_features = out_features // (self.tp_size if parallel_mode == "column" else 1)
        where = {"device": device, "dtype": params_dtype or torch.get_default_dtype()}
        self.weight = torch.nn.Parameter(torch.empty(self.out_features, self.in_features, **where))
        with nullcontext() if get_rng_state_tracker is None else get_rng_state_tracker().fork():
            (init_method or torch.nn.init.normal_)(self.weight)
        _split(self.weight, parallel_mode is not None, int(parallel_mode == "row"))
        self.bias: Any = torch.Tensor()
        if bias:
            self.bias = torch.nn.Parameter(torch.zeros(self.out_features, **where))
            _split(self.bias, parallel_mode == "column", 0)
            if parallel_mode == "row":
                self.bias.sequence_parallel = self.sequence_parallel

    def forward(self, inp: Any, is_first_microbatch: bool | None = None, **options: Any) -> Any:
        stands_in(TE, "Linear" if self.normalization is None else "LayerNormLinear")
        on = torch.is_autocast_enabled("cuda")
        dtype = torch.get_autocast_dtype("cuda") if on else self.weight.dtype
        parameters = (
            self.weight, self.bias if self.use_bias and not self.return_bias else None,
            getattr(self, "layer_norm_weight", None), getattr(self, "layer_norm_bias", None),
        )  # fmt: skip
        weight, *others = (tensor if tensor is None else tensor.to(dtype) for tensor in parameters)
        cached = None
        if FP8GlobalStateManager.is_fp8_enabled():
            cached = self._quantised(weight, is_first_microbatch)
            FP8GlobalStateManager.layers += 1
        out = _Linear.apply(self, inp.to(dtype), weight, others[0], cached, *others[1:])
        return (out, self.bias) if self.return_bias else out

    def _quantised(self, weight: Any, first: bool | None) -> Quantised:
        """The weight in float8: made for each call, or once for all micro-batches of a step."""
        with torch.no_grad():
            if first is None:
                return quantise(weight)
            if first or self._cached is None:
                self._cached = quantise(weight)  # type: ignore[assignment]
            return self._cached  # type: ignore[return-value]


class LayerNormLinear(Linear):
    """``transformer_engine.pytorch.LayerNormLinear``."""

    def __init__(
        self, in_features: int, out_features: int, eps: float = 1e-5, *, normalization: str = "LayerNorm",
        zero_centered_gamma: bool = False, device: Any = "cuda", params_dtype: Any = None, **options: Any,
    ) -> None:  # fmt: skip
        super().__init__(in_features, out_features, device=device, params_dtype=params_dtype, **options)
        self.normalization, self.eps = normalization, eps
        where = {"device": device, "dtype": params_dtype or torch.get_default_dtype()}
        for name in ("weight", "bias") if normalization == "LayerNorm" else ("weight",):
            parameter: Any = torch.nn.Parameter(torch.empty(in_features, **where).fill_(name == "weight"))
            parameter.sequence_parallel = self.sequence_parallel
            self.register_parameter(f"layer_norm_{name}", parameter)


def _split(parameter: Any, split: bool, dimension: int) -> None:
    """The marks by which Megatron knows a part of a parameter."""
    parameter.tensor_model_parallel, parameter.partition_dim = split, dimension if split else -1
    parameter.partition_stride = 1


class _Norm:
    """What the norms of Transformer Engine and Apex have beside PyTorch's, which are fused, too."""

    package, device = TE, "cuda"

    def __init__(
        self, normalized_shape: Any = None, eps: float = 1e-5, elementwise_affine: bool = True, *,
        hidden_size: Any = None, sequence_parallel: Any = None, params_dtype: Any = None, device: Any = None,
        **options: Any,
    ) -> None:  # fmt: skip
        shape = hidden_size if normalized_shape is None else normalized_shape
        where = {"device": device or self.device, "dtype": params_dtype}
        super().__init__(shape, eps, elementwise_affine, **where)  # type: ignore[call-arg]
        for parameter in self.parameters():  # type: ignore[attr-defined]
            parameter.sequence_parallel = bool(sequence_parallel)

    def forward(self, x: Any) -> Any:
        stands_in(self.package, type(self).__name__)
        return super().forward(x)  # type: ignore[misc]


class LayerNorm(_Norm, torch.nn.LayerNorm):
    """``transformer_engine.pytorch.LayerNorm``."""


class RMSNorm(_Norm, torch.nn.RMSNorm):
    """``transformer_engine.pytorch.RMSNorm``."""


class FusedLayerNorm(_Norm, torch.nn.LayerNorm):
    """``apex.normalization.FusedLayerNorm``."""

    package, device = "apex", "cpu"


class FusedRMSNorm(_Norm, torch.nn.RMSNorm):
    """``apex.normalization.FusedRMSNorm``."""

    package, device = "apex", "cpu"
