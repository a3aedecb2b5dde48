"""How long a step of a published model takes on a device of the catalogue, and how much KV fits beside it.

A roofline, kernel by kernel: matrices are read once a step or computed at the device's sustained rate,
whichever takes longer; KV and states are read; attention of a prefill is computed; after each of the two
halves of a layer tensor parallel devices sum up what they have, as long as the emulator's model of
collectives says. `StepTime` is the plane through these times over the steps that the limits allow. How much
of its memory bandwidth and sustained rate a kernel reaches, and what a step costs before any work, are
inference: a profile measured by ``windtunnel calibrate serving.engine`` needs none of it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from windtunnel.base.errors import UserError
from windtunnel.base.units import amount
from windtunnel.cluster.model import Cluster
from windtunnel.serving.engine.model import StepTime
from windtunnel.serving.engine.profile import fit
from windtunnel.serving.prefixcache.policy.shapes import Fields, ModelShape, shape
from windtunnel.training.emulate.gradients import collective_times

BANDWIDTH, RATE = 0.85, 0.75
"""Shares of the memory bandwidth and of the sustained rate that kernels of serving reach."""
OVERHEAD = 1e-3
"""Seconds of a step for scheduling, launching and sampling."""
MEMORY = 0.9
"""Share of the memory that weights and KV may take; the rest is for activations and the runtime."""
WIDTH = 2
"""Bytes of a weight and of an element of KV (bfloat16)."""


def _dense(family: str, size: int, layers: int, heads: int, groups: int, inner: int, vocabulary: int,
           head: int = 128, tied: bool = False) -> dict[str, Any]:  # fmt: skip
    return {
        "model_type": family, "hidden_size": size, "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": groups, "intermediate_size": inner, "vocab_size": vocabulary, "head_dim": head,
        "tie_word_embeddings": tied,
    }  # fmt: skip


MODELS: Mapping[str, Mapping[str, Any]] = {
    "llama-2-7b": _dense("llama", 4096, 32, 32, 32, 11008, 32000),
    "llama-3-8b": _dense("llama", 4096, 32, 32, 8, 14336, 128256),
    "llama-3-70b": _dense("llama", 8192, 80, 64, 8, 28672, 128256),
    "qwen3-8b": _dense("qwen3", 4096, 36, 32, 8, 12288, 151936),
    "qwen3-32b": _dense("qwen3", 5120, 64, 64, 8, 25600, 151936),
    "nemotron-h-8b": {
        **_dense("nemotron_h", 4096, 52, 32, 8, 21504, 131072), "mlp_hidden_act": "relu2",
        "mamba_num_heads": 128, "mamba_head_dim": 64, "ssm_state_size": 128, "n_groups": 8, "conv_kernel": 4,
        "layers_block_type": [
            {"M": "mamba", "-": "mlp", "*": "attention"}[kind]
            for kind in "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-"
        ],
    },
}  # fmt: skip
"""As their authors published them: the fields of their configs that sizes and FLOPs depend on."""


@dataclass(frozen=True)
class Model:
    """``weights``: bytes of all, ``read``: of those that each step reads (without a table of embeddings);
    ``head``: FLOPs of the logits of one token; ``layers`` and ``size``: of hidden states."""

    name: str
    shape: ModelShape
    weights: float
    read: float
    head: float
    layers: int
    size: int
    groups: int

    def state_tokens(self) -> int:
        """KV tokens that take as many bytes as a state."""
        return -(-self.shape.state // self.shape.kv) if self.shape.kv else 0


def model_like(name: str) -> Model:
    """One of `MODELS`, or a model's folder or ``config.json``.

    Raises:
        UserError: neither, or a kind of model whose step times are not known here.
    """
    config: Mapping[str, Any] | None = MODELS.get(name)
    if config is None:
        path = Path(name) / "config.json" if Path(name).is_dir() else Path(name)
        try:
            config = json.loads(path.read_text())
        except (OSError, ValueError) as error:
            raise UserError(
                f"`model_like`: {name!r} is neither a model known here nor a config.json ({error}); known are"
                f" {', '.join(MODELS)}"
            ) from None
    if not isinstance(config, dict):
        raise UserError(f"`model_like`: {name}: a config.json is one JSON object")
    fields, form = Fields(config), shape(config, width=WIDTH)
    if experts := fields.get("num_experts", "num_local_experts", "n_routed_experts"):
        raise UserError(
            f"`model_like`: {name} has {experts} experts; which of them a step reads is not modelled;"
            " accepted are models without experts, and profiles measured on real steps"
        )
    size, heads = fields.need("hidden_size", "n_embd"), fields.need("num_attention_heads", "n_head")
    table = size * fields.need("vocab_size")
    read = WIDTH * (form.token / 2 + table)
    return Model(
        name, form, read + (0 if fields.get("tie_word_embeddings") else WIDTH * table), read, 2.0 * table,
        fields.need("num_hidden_layers", "n_layer"), size, fields.get("num_key_value_heads") or heads,
    )  # fmt: skip


def kv_tokens(model: Model, cluster: Cluster) -> int:
    """Tokens of KV that fit into the devices of one host beside the weights.

    Raises:
        UserError: not even the weights do.
    """
    devices, room = cluster.devices_per_host, cluster.host.device.memory_bytes * MEMORY
    copies = max(1.0, devices / model.groups)  # a head of keys cannot be split
    left = room * devices - model.weights
    tokens = int(left / (max(1, model.shape.kv) * copies))
    if tokens < 1:
        raise UserError(
            f"`model_like`: the weights of {model.name} take {amount(model.weights)}, {cluster.name} has"
            f" {amount(room * devices)} for them on a host; accepted are more devices a host, or larger ones"
        )
    return tokens


def roofline(
    model: Model, cluster: Cluster, rows: int, read: int, prefilled: int = 0, context: int = 0
) -> float:
    """Seconds of a step on the devices of one host: ``rows`` that read ``read`` KV tokens beside a chunk of
    ``prefilled`` tokens with ``context`` tokens at its end."""
    device, parts, tokens = cluster.host.device, cluster.devices_per_host, rows + prefilled
    rate = device.peak("bfloat16") * device.sustained * RATE * parts
    bandwidth = device.memory_bandwidth * BANDWIDTH * parts
    logits = rows + (1 if prefilled else 0)
    computed = (model.shape.token * tokens + model.head * logits) / rate
    copies = max(1.0, parts / model.groups)
    moved = model.shape.kv * copies * (read + tokens) + 2 * model.shape.state * rows
    pairs = model.shape.flops(context - prefilled, context) - model.shape.token * prefilled
    summed = 0.0
    if tokens and parts > 1:
        [each] = collective_times(cluster, "all_reduce", [*range(parts)], [WIDTH * model.size * tokens])
        summed = 2 * model.layers * each
    return OVERHEAD + max(model.read / bandwidth, computed) + moved / bandwidth + pairs / rate + summed


def step_time(model: Model, cluster: Cluster, rows: int, chunk: int, kv: int) -> tuple[StepTime, float]:
    """The plane through the rooflines of steps with up to ``rows`` rows and ``chunk`` prefilled tokens where
    ``kv`` tokens fit, and how far they are from it: the mean of their relative differences."""
    points = []
    for count in sorted({1, rows // 8, rows // 4, rows // 2, rows} - {0}):
        for each in (256, 1024, 4096):
            read = min(kv, count * each)
            points += [(count, read, tokens, each) for tokens in (0, chunk // 4, chunk)]
    points += [(0, 0, tokens, context) for tokens in (chunk // 4, chunk) for context in (chunk, 4096, 16384)]
    points = [(n, read, part, max(part, context)) for n, read, part, context in points if n + part]
    times = [roofline(model, cluster, *point) for point in points]
    return fit([(n, k, ((p, context),) if p else ()) for n, k, p, context in points], times, True)
