"""The only module that knows how Transformers' models keep what they have read.

A model is not changed. Its attention layers call a function that is registered here by name, which hands
queries to the step's own attention; its cache is a `StepCache`, which hands new keys and values on and gives
linear-attention layers the states of the step's rows. Which layer an attention call belongs to is told by the
cache update before it: a block that stands at several depths (Zamba) has no index of its own. A model whose
attention does not go this way is refused by name at its first step.

Attributes of the cache change between Transformers' minor versions: `families.check` holds each model that is
loaded against its own ``generate``.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from math import inf
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers.cache_utils import (
    Cache,
    DummyLayer,
    DynamicCache,
    LinearAttentionCacheLayerMixin,
    LinearAttentionLayer,
    get_layer_types_and_kwargs,
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from windtunnel.base.errors import UserError
from windtunnel.serving.engine.live.attention import AttentionPass

ATTENTION = "windtunnel"
KINDS = {
    "full_attention", "sliding_attention", "linear_attention", "conv", "hybrid", "hybrid_sliding", "dummy"
}  # fmt: skip
States = dict[tuple[str, int, int], Tensor]  # by kind ("conv", "recurrent"), layer and index: (rows, …)


@dataclass(frozen=True, slots=True)
class Ready:
    """A prepared model: ``layers``: how many states each has (None: it has attention alone), and its window;
    ``takes`` are its call's arguments; ``limits`` those of its scan's time steps, if they bound anything,
    which Transformers' single steps leave out: a state behind decoded tokens is another one then than that of
    a model that has read them. ``parameters``: how many weights it has."""

    model: Any
    config: PreTrainedConfig
    layers: tuple[tuple[int | None, int | None], ...]
    takes: frozenset[str]
    limits: tuple[float, float] | None
    parameters: int


class StepCache(Cache):  # type: ignore[misc]
    """Transformers' cache of one forward pass: it keeps nothing itself but the rows' linear-attention
    states."""

    def __init__(
        self, ready: Ready, step: AttentionPass, depth: int, states: States | None, reading: bool
    ) -> None:
        super().__init__(
            layers=[
                DummyLayer() if count is None else LinearAttentionLayer(number_of_states=count)
                for count, _ in ready.layers
            ]
        )
        self.windows = [window for _, window in ready.layers]
        self.step, self.depth, self.pending = step, depth, -1
        self.handed: tuple[torch.Size, torch.Size] | None = None
        self.limits = ready.limits if reading else None
        for (kind, layer, index), state in (states or {}).items():
            each = self.layers[layer]
            getattr(each, f"{kind}_states")[index] = state
            getattr(each, f"is_{kind}_states_initialized")[index] = True
            each.has_previous_state[index] = True
            if kind == "conv":
                each.conv_kernel_size[index] = state.shape[-1]
                each.dtype, each.device = state.dtype, state.device

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any) -> Any:
        """Hands them to the step; attention gets them as they are."""
        self.settled()
        self.pending, self.handed = layer_idx, (key_states.shape, value_states.shape)
        self.step.write(layer_idx, key_states, value_states)
        return key_states, value_states

    def settled(self) -> None:
        """Raises where a layer's keys were kept and its attention was made elsewhere."""
        if self.pending >= 0:
            raise UserError(f"layer {self.pending} does not make its attention through AttentionInterface")

    def states(self) -> States:
        """The states after the pass."""
        return {
            (kind, number, index): state
            for number, layer in enumerate(self.layers)
            if isinstance(layer, LinearAttentionLayer)
            for kind in ("conv", "recurrent")
            for index, state in getattr(layer, f"{kind}_states").items()
            if state is not None
        }

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens read before this pass."""
        return self.depth


_CACHE: ContextVar[StepCache | None] = ContextVar("windtunnel_step_cache", default=None)


def _attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
    scaling: float | None = None, **more: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    cache = _CACHE.get()
    name = type(module).__name__
    if cache is None or cache.pending < 0:
        raise UserError(f"{name} reads keys that another layer keeps: not supported")
    layer, cache.pending = cache.pending, -1
    if (key.shape, value.shape) != cache.handed:
        raise UserError(f"{name} keeps other keys and values than it reads: not supported")
    window, sliding_window = cache.windows[layer], more.get("sliding_window")
    if sliding_window is not None and sliding_window != window:
        raise UserError(
            f"{name} has a window of {sliding_window} tokens where its cache has one of {window}:"
            " not supported"
        )
    unknown = [each for each in ("position_bias", "indices", "block_mask") if more.get(each) is not None]
    if attention_mask is not None or unknown:
        raise UserError(f"{name} asks for {', '.join(unknown) or 'a mask'} in its attention: not supported")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return cache.step.attend(layer, query, scale, window, more.get("softcap"), more.get("s_aux")), None


def _limited(update: Callable[..., Any]) -> Callable[..., Any]:
    """Mamba's second form limits its time steps where it scans, and not where it takes a single step. A token
    that is read alone, at a prompt's end, is to give what it gives in a scan; one that is decoded what
    ``generate`` gives."""

    def limited(state: Tensor, hidden_states: Tensor, dt: Tensor, *args: Any, **named: Any) -> Any:
        cache = _CACHE.get()
        if cache is None or cache.limits is None:
            return update(state, hidden_states, dt, *args, **named)
        bias = named.pop("dt_bias", None)
        steps = dt if bias is None else dt + bias.to(dt.dtype)
        steps = F.softplus(steps) if named.pop("dt_softplus", False) else steps
        return update(state, hidden_states, steps.clamp(*cache.limits), *args, **named)

    return limited


def prepare(model: Any) -> Ready:
    """Makes ``model`` ready for `forward`. Raises `UserError` for what is known not to work, by name."""
    config = model.config.get_text_config(decoder=True)
    kinds, _ = get_layer_types_and_kwargs(config)
    if unknown := sorted(set(kinds) - KINDS):
        raise UserError(f"{config.model_type} has layers of the kind {', '.join(unknown)}: not supported")
    if rope := _lengthening(getattr(config, "rope_parameters", None)):
        raise UserError(
            f"{config.model_type} has {rope} position embeddings, by the longest row: not supported"
        )
    ALL_ATTENTION_FUNCTIONS.register(ATTENTION, _attention)
    model.eval().set_attn_implementation(ATTENTION)
    if config._attn_implementation != ATTENTION:
        raise UserError(
            f"{config.model_type} does not make its attention through AttentionInterface: not supported"
        )
    code, name = sys.modules[type(model).__module__], "mamba2_selective_state_update"
    plain = getattr(code, name, None)
    if plain is not None and plain.__module__ != __name__:
        setattr(code, name, _limited(plain))
    limits = {
        tuple(each.time_step_limit) for each in model.modules() if getattr(each, "time_step_limit", None)
    } - {(0.0, inf)}  # time steps are positive anyway
    takes = frozenset(inspect.signature(type(model).forward).parameters)
    layers = tuple(
        (
            each.number_of_states if isinstance(each, LinearAttentionCacheLayerMixin) else None,
            getattr(each, "sliding_window", None),
        )
        for each in DynamicCache(config=config).layers
    )
    count = sum(each.numel() for each in model.parameters())
    _pack(model)
    return Ready(model, config, layers, takes, limits.pop() if limits else None, count)


class _Packed(nn.Module):
    """A linear layer whose weights lie as oneDNN multiplies them. That multiplies up to twice as fast as MKL,
    which plain layers use, on processors that are not Intel's."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.bias, self._packed = linear.bias, torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach())

    @property
    def weight(self) -> Tensor:
        """A plain copy, for a model that reads it itself."""
        return self._packed.to_dense()

    def forward(self, tokens: Tensor) -> Tensor:
        product: Tensor = torch.ops.mkldnn._linear_pointwise(
            tokens.contiguous(), self._packed, self.bias, "none", [], ""
        )
        return product


def _pack(model: Any) -> None:
    """Makes linear layers of float32 on a CPU `_Packed` ones. An embedding that one is tied to stays."""
    if not torch.backends.mkldnn.is_available():
        return
    packed: dict[nn.Linear, _Packed] = {}  # a layer may stand at several places
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear and child.weight.is_cpu and child.weight.dtype == torch.float32:
                if child not in packed:
                    packed[child] = _Packed(child)
                setattr(parent, name, packed[child])


def _lengthening(rope: Any) -> str:
    """The kind of position embedding whose frequencies depend on the longest row of a batch, if any."""
    if not isinstance(rope, dict):
        return ""
    kind = str(rope.get("rope_type", ""))
    return (
        kind if kind in ("dynamic", "longrope") else next(filter(None, map(_lengthening, rope.values())), "")
    )


def forward(
    ready: Ready, tokens: Tensor, positions: Tensor, step: AttentionPass, depth: int, states: States | None,
    reading: bool, last: Tensor | None = None,
) -> tuple[Tensor, States]:  # fmt: skip
    """One pass over ``tokens``, shape (rows, tokens of each), at ``positions``, the same shape. ``depth``:
    tokens that were read before (of one row's pass). ``states`` are updated in place; without, they begin
    anew. ``reading``: the tokens are of a prompt, not decoded. Returns the logits of each row's last token,
    (rows, vocabulary), and the states. The rows of a model without states may stand one after another in the
    only row of ``tokens``, each ending at its place in ``last``."""
    takes, cache = ready.takes, StepCache(ready, step, depth, states, reading)
    # the cache's name differs between families, and some begin positions anew where they are not told
    name = next(each for each in ("cache", "past_key_values", "cache_params") if each in takes)
    named: dict[str, Any] = {name: cache}
    if "position_ids" in takes:
        named["position_ids"] = positions
    if "logits_to_keep" in takes:
        named["logits_to_keep"] = 1 if last is None else last
    reset_token = _CACHE.set(cache)
    try:
        logits: Tensor = ready.model(input_ids=tokens, use_cache=True, **named).logits
    finally:
        _CACHE.reset(reset_token)
    cache.settled()
    if last is None:
        return logits[:, -1], cache.states()
    return logits[0] if "logits_to_keep" in takes else logits[0, last], cache.states()
