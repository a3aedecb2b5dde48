"""Optimisers and lists of tensors in one kernel: Apex's ``amp_C``, Transformer Engine's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch

from windtunnel.training.emulate.live.fused.kernel import launch, stands_in
from windtunnel.training.emulate.live.fused.precision import multiply
from windtunnel.training.emulate.live.names import refuse

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
