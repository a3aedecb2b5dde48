"""What all stand-ins share, and what is no layer: launches that are written down, attention, float8, lists.

*Float8*: what ``transformer_engine`` calls recipes and quantisation, which products run in float8, and its
casts. A quantised tensor is held twice, by rows and by columns, as a float8 product on Hopper takes its
operands; what is kept for the backward pass is the one by columns. Current scaling looks through the tensor
first. (``transformer_engine/pytorch/{quantization,tensor/float8_tensor}.py``, 2.6)

*Lists*: optimisers and lists of tensors in one kernel, Apex's ``amp_C`` and Transformer Engine's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from enum import Enum
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from windtunnel.training.emulate.graph import NoteKind
from windtunnel.training.emulate.live.names import refuse
from windtunnel.training.emulate.live.native_library import unrecorded
from windtunnel.training.emulate.live.observe import Observer

Views = Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor]]
"""From the tensors of a call to query (B, Hq, L, E), key (B, Hkv, S, E) and value (B, Hkv, S, Ev), without a
copy; their gradients are laid out as the tensors are."""

TE = "transformer_engine"
_observers: list[Observer] = []


def install(observer: Observer) -> None:
    """Where launches and notes go. Call once, before the script runs."""
    _observers[:] = [observer]


def launch(name: str, inputs: Sequence[Any], outputs: Sequence[torch.Tensor]) -> None:
    """One kernel ``name`` (``"package.kernel"``) that reads ``inputs`` and writes ``outputs``, on the current
    stream. Where an output is among the inputs it is updated, and what the host knew of it is forgotten."""
    launches = _observers[0].launches
    launches.record(f"{name}.default", inputs, outputs)
    launches.forget(outputs)


def note(text: str, of: str = "") -> None:
    """Tell in the report of an approximation."""
    _observers[0].note(text, NoteKind.APPROXIMATION, of)


def stands_in(package: str, name: str) -> None:
    """Tell in the report that ``name`` of a package that is not installed was used."""
    note(
        f"{package} is not installed: stand-ins are costed as its kernels are by what they read and compute",
        name,
    )


def begin() -> None:
    """At the beginning of an autograd function's forward: its backward belongs to the module that runs."""
    _observers[0].native.wt_note_node()


def aside() -> AbstractContextManager[None]:
    """What is done within is none of the script's."""
    return unrecorded(_observers[0].native)


def values_of(tensor: Any) -> list[int] | None:
    """The values of a tensor of offsets, None where they are not known."""
    with aside(), torch.no_grad():
        readable = bool((tensor >= 0).all().item())
        return [int(value) for value in tensor.tolist()] if readable else None


class Attention(torch.autograd.Function):
    """A fused attention kernel and its gradient; ``share``: of the scores, how many its mask leaves, the
    causal half apart. It keeps its inputs, its output, and a float32 for each row."""

    @staticmethod
    def forward(ctx: Any, kernel: str, causal: bool, share: float, views: Views, *tensors: Any) -> Any:
        with aside(), torch.no_grad():
            query, key, value = views(tensors)
        same = query.shape[-1] == value.shape[-1]
        out = torch.empty_like(query) if same else query.new_empty(*query.shape[:-1], value.shape[-1])
        lse = query.new_empty(query.shape[:-1], dtype=torch.float32)
        begin()
        launch(kernel, (query, key, value, causal, share), (out, lse))
        ctx.save_for_backward(*tensors, out, lse)
        ctx.options = kernel, causal, share, views
        ctx.mark_non_differentiable(lse)
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        kernel, causal, share, views = ctx.options
        *tensors, out, lse = ctx.saved_tensors
        results = [torch.empty_like(tensor) for tensor in tensors]
        with aside(), torch.no_grad():
            query, key, value = views(tensors)
            written = views(results)
        delta = torch.empty_like(lse)  # the sums of the output and its gradient, which the kernel takes
        arguments = (query, key, value, out, lse, delta, gradients[0], causal, share)
        launch(f"{kernel}_backward", arguments, written)
        return None, None, None, None, *results


Format = Enum("Format", ("E4M3", "E5M2", "HYBRID"))


class ScalingRecipe:
    """How tensors are scaled; ``delayed()`` and its like say which recipe it is."""

    kind = ""

    def __init__(self, fp8_format: Any = Format.HYBRID, **options: Any) -> None:
        self.fp8_format, self.reduce_amax, self.fp8_dpa, self.fp8_mha = fp8_format, True, False, False
        vars(self).update(options)

    def __getattr__(self, name: str) -> Any:
        if name not in KINDS:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return lambda: name == self.kind


KINDS = {
    "delayed": "DelayedScaling", "float8_current_scaling": "Float8CurrentScaling",
    "float8_block_scaling": "Float8BlockScaling", "mxfp8": "MXFP8BlockScaling",
}  # fmt: skip
RECIPES: dict[str, Any] = {name: type(name, (ScalingRecipe,), {"kind": kind}) for kind, name in KINDS.items()}
DelayedScaling = RECIPES["DelayedScaling"]


class FP8GlobalStateManager:
    """Which recipe is in force."""

    recipe: Any = None
    layers = 0  # that have run since the outermost region began

    @classmethod
    def is_fp8_enabled(cls) -> bool:
        return cls.recipe is not None

    @classmethod
    def is_fp8_calibration(cls) -> bool:
        return False

    @classmethod
    def get_fp8_recipe(cls) -> Any:
        return cls.recipe or DelayedScaling()


@contextmanager
def fp8_autocast(
    enabled: bool = True, calibrating: bool = False, fp8_recipe: Any = None, fp8_group: Any = None,
    _graph: bool = False,
) -> Iterator[None]:  # fmt: skip
    """Delayed scaling reduces its largest values over the group where the outermost one ends."""
    state, before = FP8GlobalStateManager, FP8GlobalStateManager.recipe
    state.recipe = (fp8_recipe or DelayedScaling()) if enabled else None
    state.layers = state.layers if before else 0
    try:
        yield
        recipe = state.recipe
        outermost = before is None and torch.is_grad_enabled() and dist.is_initialized()
        if recipe is not None and recipe.delayed() and recipe.reduce_amax and outermost:
            dist.all_reduce(torch.empty(3 * state.layers, device="cuda"), dist.ReduceOp.MAX, fp8_group)
    finally:
        state.recipe = before


class Quantised(NamedTuple):
    """A tensor (n, m) in float8, by rows and, in memory of its own, by columns (m, n)."""

    rows: torch.Tensor
    columns: torch.Tensor


def quantise(tensor: torch.Tensor, gradient: bool = False) -> Quantised:
    """``tensor`` (n, m) by the recipe in force."""
    recipe = FP8GlobalStateManager.get_fp8_recipe()
    if recipe.float8_current_scaling():
        launch("transformer_engine.amax", (tensor,), (tensor.new_empty(1, dtype=torch.float32),))
    wide = gradient and recipe.fp8_format == Format.HYBRID
    dtype = torch.float8_e5m2 if wide else torch.float8_e4m3fn
    copies = [tensor.new_empty(size, dtype=dtype) for size in (tensor.shape, tensor.shape[::-1])]
    launch("transformer_engine._to_copy", (tensor,), copies)
    return Quantised(*copies)


def multiply(left: torch.Tensor, right: torch.Tensor, out: torch.Tensor, add: bool = False) -> torch.Tensor:
    """``out`` = ``left`` (m, k) @ ``right`` (k, n), on top of what it holds where ``add``; what cuBLAS's
    epilogue does to the bias is part of it."""
    base = "_scaled_mm" if left.dtype.itemsize == 1 else "mm"
    launch(f"transformer_engine.{base}", (left, right, *((out,) if add else ())), (out,))
    return out


Lists = Sequence[Sequence[torch.Tensor]]


def multi_tensor_applier(op: Callable[..., Any], noop_flag: Any, tensor_lists: Lists, *args: Any) -> Any:
    return op(2048 * 32, noop_flag, tensor_lists, *args)


def multi_tensor_scale(chunk_size: int, noop_flag: Any, tensor_lists: Lists, scale: Any) -> None:
    """The second list is the first, scaled."""
    source, target = tensor_lists
    launch("apex._foreach_scale", (list(source),), target)


def multi_tensor_l2norm(chunk_size: int, noop_flag: Any, tensor_lists: Lists, per_tensor: Any = False) -> Any:
    """The norm of all tensors of the first list, and of each where that is asked."""
    tensors = tensor_lists[0]
    every = tensors[0].new_empty(1, dtype=torch.float32)
    each = every.new_empty(len(tensors) if per_tensor else 0)
    launch("apex._foreach_norm", (list(tensors),), (every, each))
    return every, each


class FusedAdam(torch.optim.Adam):
    """``FusedAdam`` of Apex and Transformer Engine."""

    def __init__(
        self, params: Any, lr: float = 1e-3, bias_correction: bool = True, betas: Any = (0.9, 0.999),
        eps: float = 1e-8, adam_w_mode: bool = True, weight_decay: float = 0.0, amsgrad: bool = False,
        set_grad_none: bool = True, capturable: bool = False, **options: Any,
    ) -> None:  # fmt: skip
        for name, value in options.items():
            if value not in (None, False, torch.float32):
                refuse(
                    f"FusedAdam's {name}", "only a float32 state beside the parameters is known; leave it out"
                )()
        super().__init__(
            params, lr, betas, eps, weight_decay, amsgrad, fused=True, decoupled_weight_decay=adam_w_mode
        )

    def step(self, closure: Any = None, *args: Any, **kwargs: Any) -> Any:
        stands_in("apex or transformer_engine", "FusedAdam")
        return super().step(closure)


FusedSGD = torch.optim.SGD


def wgrad_gemm_accum_fp32(input: torch.Tensor, grad_output: torch.Tensor, main_grad: torch.Tensor) -> None:
    """Of ``fused_weight_gradient_mlp_cuda``: a weight's gradient, added to ``main_grad`` (out, in)."""
    stands_in("apex", "wgrad_gemm_accum_fp32")
    multiply(grad_output.flatten(0, -2).t(), input.flatten(0, -2), main_grad, add=True)


wgrad_gemm_accum_fp16 = wgrad_gemm_accum_fp32


class FusedLayerNormAffineFunction:
    """Of ``apex.normalization``, called as the autograd function that it is there."""

    @staticmethod
    def apply(x: Any, weight: Any, bias: Any, shape: Any, eps: float, memory_efficient: bool = False) -> Any:
        stands_in("apex", "FusedLayerNormAffineFunction")
        return torch.nn.functional.layer_norm(x, list(shape), weight, bias, eps)


def checkpoint(
    function: Any, *args: Any, distribute_saved_activations: bool = False, get_rng_state_tracker: Any = None,
    tp_group: Any = None, use_reentrant: bool = True, **kwargs: Any,
) -> Any:  # fmt: skip
    """Transformer Engine's, which is ``torch.utils.checkpoint``'s with more to be told."""
    return torch.utils.checkpoint.checkpoint(function, *args, use_reentrant=use_reentrant, **kwargs)


def activation_recompute_forward(*args: Any, **options: Any) -> Any:
    """Its mark that a forward pass is done again."""
    return nullcontext()
