"""What each layer of a model costs: from a file, from an emulated execution graph, or from a GPT's shape.

A file (YAML or JSON) lists the layers in order, with the fields of `LayerProfile` in seconds and bytes.
``repeat`` stands for so many equal layers, named ``name.0``, ``name.1``, ..

    layers:
      - {name: embedding, forward: 1.0e-4, backward: 2.0e-4, state_bytes: 4.1e+9}
      - {name: block, repeat: 24, forward: 0.011, backward: 0.022, state_bytes: 3.2e+9,
         activation_bytes: 5.6e+8, gradient_bytes: 4.0e+8, in_host: {2: 1.1e-4, 4: 1.3e-4}}

Layers measured on the host at hand come from `live.profiler`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from windtunnel.base.errors import UserError
from windtunnel.base.strict_yaml import StrictLoader
from windtunnel.training.emulate.graph import Category, EventKind, Phase, Slice
from windtunnel.training.pipelines.model import LayerProfile

if TYPE_CHECKING:
    from windtunnel.cluster.model import Device, Link

ADAM_STATE = 16.0
"""Bytes of state a parameter, in mixed precision with Adam: bfloat16 parameter and gradient, and float32
parameter, mean and variance (Rajbhandari et al., ZeRO, SC 2020, section 3.1)."""

MATMUL_EFFICIENCY = 0.75
"""What large matrix products reach of a device's sustained rate inside a training job. An estimate."""


def _no_bool(value: object) -> object:
    if isinstance(value, bool):
        raise ValueError("not a number")
    return value


Amount = Annotated[float, BeforeValidator(_no_bool), Field(ge=0, allow_inf_nan=False)]


class _Layer(BaseModel):
    model_config = ConfigDict(extra="forbid")

    name: str
    forward: Amount
    backward: Amount
    state_bytes: Amount = 0.0
    activation_bytes: Amount = 0.0
    gradient_bytes: Amount = 0.0
    in_host: dict[Annotated[int, Field(ge=2)], Amount] = {}
    repeat: Annotated[int, Field(ge=1, strict=True)] = 1


class _File(BaseModel):
    model_config = ConfigDict(extra="forbid")

    layers: Annotated[list[_Layer], Field(min_length=1)]


ACCEPTED = {
    "layers": "a list of at least one layer",
    "name": "text",
    "in_host": "a mapping of devices (2, 4, ..) to seconds from 0 up",
    "repeat": "a whole number from 1 up",
}


def read_profile(path: Path) -> tuple[LayerProfile, ...]:
    """The layers that a file lists.

    Raises:
        UserError: it cannot be read, or a field is wrong: file, field, value and what is accepted.
    """
    try:
        document = yaml.load(path.read_text(encoding="utf-8"), StrictLoader)
    except FileNotFoundError:
        raise UserError(f"{path}: there is no such file, accepted is a profile of layers (YAML)") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read ({error}), accepted is a profile of layers (YAML)") from None
    except yaml.YAMLError as error:
        reason = " ".join(str(error).split())
        raise UserError(f"{path}: not valid YAML ({reason}), accepted is a profile of layers") from None
    try:
        layers = _File.model_validate(document).layers
    except ValidationError as error:
        raise UserError(f"{path}: {_sentence(error)}") from None
    found = []
    for layer in layers:
        fields = layer.model_dump(exclude={"repeat", "in_host"})
        made = LayerProfile(**fields, in_host=tuple(sorted(layer.in_host.items())))
        count = layer.repeat
        found += [made] if count == 1 else [replace(made, name=f"{made.name}.{i}") for i in range(count)]
    return tuple(found)


def write_profile(layers: Sequence[LayerProfile]) -> str:
    """The text of a file that `read_profile` reads."""
    listed: list[dict[str, Any]] = []
    for layer in layers:
        fields: dict[str, Any] = {
            "name": layer.name,
            "forward": layer.forward,
            "backward": layer.backward,
            "state_bytes": layer.state_bytes,
            "activation_bytes": layer.activation_bytes,
            "gradient_bytes": layer.gradient_bytes,
        }
        if layer.in_host:
            fields["in_host"] = dict(layer.in_host)
        listed.append(fields)
    return yaml.safe_dump({"layers": listed}, sort_keys=False)


def _sentence(error: ValidationError) -> str:
    first = error.errors()[0]
    loc = [part for part in first["loc"] if part != "[key]"]
    field = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in loc).lstrip(".")
    if not loc:
        return f"holds {first['input']!r}, accepted is a mapping with the field layers"
    if first["type"] == "missing":
        return f"field {field} is missing, accepted is {_accepted(loc)}"
    if first["type"] == "extra_forbidden":
        return f"field {field} is unknown, accepted are {', '.join(_Layer.model_fields)} in a list layers"
    return f"field {field} is {first['input']!r}, accepted is {_accepted(loc)}"


def _accepted(loc: Sequence[int | str]) -> str:
    if len(loc) == 2:
        return "a mapping of the fields of a layer"
    field = str(loc[0] if len(loc) == 1 else loc[2])
    return ACCEPTED.get(field, "a number from 0 up (seconds or bytes)")


def profile_of_slice(
    slice_: Slice,
    seconds: np.ndarray[Any, Any],
    layers: Sequence[str],
    *,
    microbatches: int = 1,
    parameter_bytes: Sequence[float] | None = None,
    state_factor: float = 4.0,
) -> tuple[LayerProfile, ...]:
    """Layers out of the steady step of an emulated rank that runs the whole model.

    ``seconds``: of each row of the operator table (`emulate.cost.operators.operator_seconds`). ``layers``:
    module paths in order; what runs in a path or below it belongs to it, and what backward does outside all
    of them to the layer before it in backward. ``microbatches``: in the captured step. A recomputed forward
    counts as backward. Communication is not in it.

    ``parameter_bytes``: of each layer. Unless given, the gradients that backward allocates below a layer
    stand for them, since parameters are made before any layer runs; an embedding that comes first shows none
    there. ``state_factor``: bytes of state for each of these (4 for Adam in one precision: parameter,
    gradient, two moments).

    Raises:
        UserError: no forward of the step runs in one of the paths, or two paths overlap.
    """
    for one in layers:
        for other in layers:
            if one is not other and _below(one, other):
                raise UserError(f"layer {one} lies within layer {other}; layers must not overlap")
    first, last = slice_.steady
    events = slice_.events[first:last]
    layer_of = np.full(len(slice_.scopes) + 1, -1, np.int64)  # The last one serves scopes that are unknown.
    inside = np.zeros(len(slice_.scopes) + 1, bool)
    for i, path in enumerate(layers):
        for j, scope in enumerate(slice_.scopes):
            if _below(scope, path):
                layer_of[j] = i
                inside[j] = scope != path
    scope = np.clip(events["scope"], -1, len(slice_.scopes))
    layer, phase, kind = layer_of[scope], events["phase"], events["kind"]
    stray = (layer < 0) & (phase == Phase.BACKWARD)
    layer = np.where(stray, _layer_before(layer, phase, len(layers) - 1), layer)
    here = layer >= 0

    def total(chosen: np.ndarray[Any, Any], weight: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        return np.bincount(layer[chosen], weight, minlength=len(layers))

    ops = here & (kind == EventKind.OP)
    forward = ops & (phase == Phase.FORWARD)
    backward = ops & ((phase == Phase.BACKWARD) | (phase == Phase.RECOMPUTE))
    forward_s = total(forward, seconds[events["ref"][forward]]) / microbatches
    backward_s = total(backward, seconds[events["ref"][backward]]) / microbatches
    for i, path in enumerate(layers):
        if not (forward & (layer == i)).any():
            raise UserError(
                f"no operator of the captured step runs in layer {path!r}; a module's path is needed"
            )
    made = here & (kind == EventKind.ALLOC)
    category = np.array(
        [slice_.block_category.get(int(block), Category.TEMPORARY) for block in events["ref"][made]], np.int64
    )
    activations = made.copy()
    activations[made] = (category == Category.ACTIVATION) & (phase[made] == Phase.FORWARD)
    kept = total(activations, events["value"][activations]) / microbatches
    gradients = made.copy()
    gradients[made] = (category == Category.GRADIENT) & (phase[made] == Phase.BACKWARD) & ~stray[made]
    # A sharded module allocates its gradients again, flat, in its own path: what is below it counts, if any
    # is.
    deeper = total(gradients & inside[scope], events["value"][gradients & inside[scope]])
    whole = total(gradients, events["value"][gradients])
    gradient = np.where(deeper > 0, deeper, whole) if parameter_bytes is None else np.array(parameter_bytes)
    return tuple(
        LayerProfile(
            path,
            float(forward_s[i]),
            float(backward_s[i]),
            float(state_factor * gradient[i]),
            float(kept[i]),
            float(gradient[i]),
        )
        for i, path in enumerate(layers)
    )


def _layer_before(
    layer: np.ndarray[Any, Any], phase: np.ndarray[Any, Any], last: int
) -> np.ndarray[Any, Any]:
    """For each event, the layer of the latest event of backward up to it; ``last`` before there is one."""
    known = (layer >= 0) & ((phase == Phase.BACKWARD) | (phase == Phase.RECOMPUTE))
    at = np.maximum.accumulate(np.where(known, np.arange(len(layer)), -1))
    return np.where(at >= 0, layer[at], last)


def _below(path: str, other: str) -> bool:
    return path == other or path.startswith(f"{other}.")


def gpt_profile(
    layers: int,
    hidden: int,
    seq: int,
    microbatch: int,
    device: Device,
    *,
    vocabulary: int = 51_200,
    recompute: bool = False,
    intra: Link | None = None,
    devices_per_host: int = 1,
) -> tuple[LayerProfile, ...]:
    """A GPT of so many transformer layers on ``device``, with its embedding before and its head after them.

    A layer has ``12 h^2 + 13 h`` parameters and takes ``24 b s h^2 + 4 b s^2 h`` FLOP forward, twice that
    backward, the head ``2 b s h V`` (Narayanan et al., SC 2021, appendix). Kept activations are ``34 s b h``
    bytes a layer where attention does not keep its matrix (Korthikanti et al., MLSys 2023, section 4.1), or
    ``2 s b h`` with ``recompute``, whose forward is run again. Rates: bfloat16 peak x sustained x
    `MATMUL_EFFICIENCY`. ``intra``: the link inside a host, for two all-reduces of the activations each
    way on 2, 4, .. ``devices_per_host`` devices.
    """
    tokens = microbatch * seq
    rate = device.peak("bfloat16") * device.sustained * MATMUL_EFFICIENCY
    wide = 2.0 * tokens * hidden  # Bytes of one activation in bfloat16.

    def reduced(times: int) -> tuple[tuple[int, float], ...]:
        if intra is None:
            return ()
        speed = intra.bandwidth * intra.efficiency
        found, d = [], 2
        while d <= devices_per_host:
            # A ring: each of d devices sends (d - 1) / d of the bytes twice, in 2 (d - 1) messages.
            found.append((d, times * 2 * (d - 1) * (wide / d / speed + intra.latency)))
            d *= 2
        return tuple(found)

    def layer(
        name: str, parameters: float, seconds: float, kept: float, all_reduces: int, again: bool
    ) -> LayerProfile:
        return LayerProfile(
            name,
            seconds,
            (3.0 if again else 2.0) * seconds,
            ADAM_STATE * parameters,
            kept,
            2.0 * parameters,
            reduced(all_reduces),
        )

    block_flop = 24.0 * tokens * hidden**2 + 4.0 * tokens * seq * hidden
    block_parameters = 12.0 * hidden**2 + 13.0 * hidden
    block_kept = wide if recompute else 17.0 * wide
    table = float(vocabulary * hidden)
    lookup = 2.0 * wide / device.memory_bandwidth
    return (
        layer("embedding", table + seq * hidden, lookup, 0.0, 1, False),
        *(
            layer(f"block.{i}", block_parameters, block_flop / rate, block_kept, 2, recompute)
            for i in range(layers)
        ),
        # The head keeps its input and the logits in float32.
        layer("head", table, 2.0 * tokens * table / rate, wide + 4.0 * tokens * vocabulary, 1, False),
    )
