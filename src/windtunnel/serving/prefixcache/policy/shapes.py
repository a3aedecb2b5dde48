"""What a model's layers hold and compute: bytes of KV a token, bytes of a state, FLOPs of a prefill.

From a Transformers config as a plain dict, for each kind of layer: attention (grouped queries, a window),
Mamba 1 and 2, gated delta nets, short convolutions, and the perceptrons, of which an expert layer computes
the active ones only. A multiply-add is two FLOPs; norms, activations and the output head are left out. States
of recurrences are float32 unless said otherwise, as Transformers' scans keep them; convolutions keep
``kernel`` columns in the model's own type. Layers with a window are held for all tokens, as prefixes of any
length are shared; their FLOPs know the window.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from windtunnel.base.errors import UserError


@dataclass(frozen=True, slots=True)
class LayerShape:
    """One layer, or a part of it. ``kv``: bytes a token; ``state``: bytes of a checkpoint; ``token``: FLOPs
    of a prefilled token, and ``pair`` those of each token that it attends to, of which there are at most
    ``window`` (0: any number)."""

    kv: int = 0
    state: int = 0
    token: float = 0.0
    pair: float = 0.0
    window: int = 0


@dataclass(frozen=True, slots=True)
class ModelShape:
    """All layers together, fields as in `LayerShape`; ``pairs``: (window, FLOPs of a pair). ``square``:
    pairs are counted as in the paper, all L² of them, not only those that a causal mask leaves."""

    kv: int
    state: int
    token: float
    pairs: tuple[tuple[int, float], ...] = ()
    square: bool = False

    @classmethod
    def of(cls, layers: Iterable[LayerShape], *, square: bool = False) -> ModelShape:
        forms = list(layers)
        pairs: dict[int, float] = {}
        for layer in forms:
            if layer.pair:
                pairs[layer.window] = pairs.get(layer.window, 0.0) + layer.pair
        return cls(
            sum(form.kv for form in forms), sum(form.state for form in forms),
            sum(form.token for form in forms),
            tuple(sorted(pairs.items())), square,
        )  # fmt: skip

    def flops(self, begin: int, end: int) -> float:
        """Of the prefill of tokens [begin, end) behind those before: what a hit at ``end`` saves beyond one
        at ``begin``."""
        total = self.token * (end - begin)
        for window, flops in self.pairs:
            total += flops * (self._pairs(end, window) - self._pairs(begin, window))
        return total

    def _pairs(self, length: int, window: int) -> float:
        if self.square:
            return float(length) * length
        near = min(length, window) if window else length
        return near * (near + 1) / 2 + (length - near) * near


def paper_hybrid(
    ssm: int = 24, attention: int = 4, mlp: int = 28, width: int = 4096, state: int = 128, *, kernel: int = 4,
    expand: int = 1, state_width: int = 2,
) -> ModelShape:  # fmt: skip
    """The paper's 7B hybrid by its own formulas (Marconi's artefact); its states are counted without the
    expansion and in two bytes. What Transformers would hold has ``expand=2, state_width=4``: 102 MB a
    checkpoint."""
    state_bytes = expand * width * state * state_width + 2 * (2 * width + 2 * state) * kernel
    layers = [LayerShape(state=state_bytes, token=12 * width**2 + 16 * width * state + 10 * width)] * ssm
    layers += [LayerShape(kv=4 * width, token=8 * width**2, pair=4 * width)] * attention
    layers += [LayerShape(token=16 * width**2)] * mlp
    return ModelShape.of(layers, square=True)


def shape(config: Mapping[str, Any], *, width: int = 2, state_width: int = 4) -> ModelShape:
    """Of a model with this config. ``width``: bytes of an element of KV, ``state_width``: of a recurrent
    state.

    Raises:
        UserError: a kind of layer whose bytes are not known here, or a field that it needs is missing.
    """
    return ModelShape.of(layers(config, width=width, state_width=state_width))


def layers(config: Mapping[str, Any], *, width: int = 2, state_width: int = 4) -> list[LayerShape]:
    """The parts of all layers, in their order; as `shape`."""
    fields = Fields(config)
    if fields.get("kv_lora_rank"):
        raise fields.wrong("kv_lora_rank", "attention with latent keys is not counted here")
    result = []
    for place, kind in enumerate(_kinds(fields)):
        if kind in ("linear_attention", "mamba", "hybrid"):
            result.append(_recurrent(fields, width, state_width))
        elif kind == "conv":
            size, kernel = fields.need("hidden_size"), fields.need("conv_L_cache")
            result.append(LayerShape(state=size * kernel * width, token=8 * size * size + 2 * size * kernel))
        if kind in ("full_attention", "sliding_attention", "attention", "hybrid"):
            result.append(_attention(fields, width, kind))
        elif kind not in ("linear_attention", "mamba", "conv", "mlp", "moe"):
            raise fields.wrong("layer_types", f"layers of kind {kind!r} are not counted here")
        result += [LayerShape(token=flops) for flops in _perceptrons(fields, place, kind)]
    return result


class Fields:
    """A config, of a model with several parts that of its text; what is needed and missing is refused by
    name."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._config = {**config, **(config.get("text_config") or {})}
        self.family = str(self._config.get("model_type", ""))

    def get(self, *names: str) -> Any:
        """The first of these that is there."""
        return next((self._config[name] for name in names if self._config.get(name) is not None), None)

    def need(self, *names: str) -> int:
        value = self.get(*names)
        if type(value) is not int or value <= 0:
            raise self.wrong(names[0], f"is {value!r}; accepted is a whole number above 0")
        return value

    def wrong(self, name: str, why: str) -> UserError:
        return UserError(f"model config of type {self.family!r}: field {name}: {why}")


def _kinds(fields: Fields) -> list[str]:
    """The kind of each layer."""
    listed = fields.get("layer_types", "layers_block_type")
    count = len(listed) if listed else fields.need("num_hidden_layers", "n_layer")
    if fields.family == "falcon_h1":
        return ["hybrid"] * count
    if listed:
        return list(listed)
    if fields.family in ("mamba", "mamba2", "falcon_mamba"):
        return ["mamba"] * count
    if period := fields.get("attn_layer_period"):
        offset = fields.get("attn_layer_offset") or 0
        return ["attention" if place % period == offset else "mamba" for place in range(count)]
    if (chosen := fields.get("attn_layer_indices")) is not None or fields.get("mamba_d_state"):
        return ["attention" if place in (chosen or ()) else "mamba" for place in range(count)]
    windowed = fields.get("sliding_window") and fields.get("use_sliding_window") is not False
    return ["sliding_attention" if windowed else "full_attention"] * count


def _attention(fields: Fields, width: int, kind: str) -> LayerShape:
    size, heads = fields.need("hidden_size", "n_embd"), fields.need("num_attention_heads", "n_head")
    groups = fields.get("num_key_value_heads") or heads
    head = fields.get("attention_head_dim", "head_dim") or size // heads
    inner = fields.get("attention_hidden_size") or size  # what a shared block reads beside the layer's input
    queries = 2 if fields.family.startswith(("qwen3_next", "qwen3_5")) else 1  # a gate as large as they are
    return LayerShape(
        kv=2 * groups * head * width,
        token=2 * inner * (queries * heads + 2 * groups) * head + 2 * heads * head * size,
        pair=4 * heads * head,
        window=fields.need("sliding_window") if kind == "sliding_attention" else 0,
    )  # fmt: skip


def _recurrent(fields: Fields, width: int, state_width: int) -> LayerShape:
    size = fields.need("hidden_size")
    if fields.get("linear_key_head_dim"):  # gated delta net
        keys = fields.need("linear_num_key_heads") * fields.need("linear_key_head_dim")
        values = fields.need("linear_num_value_heads") * fields.need("linear_value_head_dim")
        kernel, cells = fields.need("linear_conv_kernel_dim"), values * fields.need("linear_key_head_dim")
        through = 2 * keys + 2 * values + 2 * fields.need("linear_num_value_heads")
        return LayerShape(
            state=cells * state_width + (2 * keys + values) * kernel * width,
            token=2 * size * (through + values) + 2 * (2 * keys + values) * kernel + 7 * cells,
        )  # fmt: skip
    count = fields.need("mamba_d_state", "ssm_state_size", "state_size")
    kernel = fields.need("mamba_d_conv", "conv_kernel")
    heads = fields.get("mamba_n_heads", "n_mamba_heads", "mamba_num_heads", "num_heads")
    if heads is None:  # Mamba 1
        inner = size * (fields.get("mamba_expand", "expand") or 2)
        rank = fields.get("mamba_dt_rank", "time_step_rank") or -(-size // 16)
        return LayerShape(
            state=inner * count * state_width + inner * kernel * width,
            token=6 * size * inner + 2 * inner * (kernel + 2 * rank + 2 * count) + 9 * inner * count,
        )  # fmt: skip
    inner = heads * fields.need("mamba_d_head", "mamba_headdim", "mamba_head_dim", "head_dim")
    mixed = inner + 2 * (fields.get("mamba_n_groups", "mamba_ngroups", "n_groups") or 1) * count
    return LayerShape(
        state=inner * count * state_width + mixed * kernel * width,
        token=2 * size * (inner + mixed + heads) + 2 * mixed * kernel + 5 * inner * count + 2 * inner * size,
    )  # fmt: skip


def _perceptrons(fields: Fields, place: int, kind: str) -> Iterable[float]:
    """FLOPs of a token, of the layer's perceptron or of its active experts."""
    family = fields.family
    if family in ("mamba", "mamba2", "falcon_mamba") or (family == "zamba2" and kind != "hybrid"):
        return
    if family == "nemotron_h" and kind not in ("mlp", "moe"):
        return
    size = fields.need("hidden_size", "n_embd")
    gated = 4 if fields.get("mlp_hidden_act") == "relu2" or family in ("gpt2", "codegen") else 6
    if not _sparse(fields, place, kind):
        dense = fields.get("intermediate_size", "n_inner") or 4 * size
        if fields.get("block_auto_adjust_ff_dim"):  # LFM2
            grain = fields.need("block_multiple_of")
            dense = -(-int(2 * dense / 3) // grain) * grain
        yield gated * size * (fields.get("shared_intermediate_size") or dense)
        return
    experts = fields.need("num_local_experts", "num_experts", "n_routed_experts")
    expert = fields.get("moe_intermediate_size") or fields.need("intermediate_size")
    yield gated * size * expert * fields.need("num_experts_per_tok") + 2 * size * experts
    shared = fields.get("shared_expert_intermediate_size", "shared_intermediate_size")
    if fields.get("n_shared_experts"):
        shared = fields.get("moe_shared_expert_intermediate_size") or expert * fields.get("n_shared_experts")
    if shared:
        yield gated * size * shared


def _sparse(fields: Fields, place: int, kind: str) -> bool:
    """Whether the layer has experts."""
    if fields.family == "nemotron_h":
        return kind == "moe"
    if not fields.get("num_local_experts", "num_experts", "n_routed_experts"):
        return False
    if period := fields.get("expert_layer_period"):
        return bool(place % period == (fields.get("expert_layer_offset") or 0))
    if place in (fields.get("mlp_only_layers") or ()) or place < (
        fields.get("num_dense_layers", "first_k_dense_replace") or 0
    ):
        return False
    return bool((place + 1) % (fields.get("decoder_sparse_step") or 1) == 0)
