"""Seconds of one operator on a device: measured where there is a profile, a roofline otherwise.

A profile is a list of operators with their measured seconds. An operator that was measured costs what was
measured. Another one costs what the roofline says, times the ratio of measured to modelled time of its
nearest neighbours among the measured (same operator and dtype first, same kind otherwise), the ratio
interpolated in the logarithm of the shape by inverse distance (Shepard, 1968). So a profile corrects the
model where it knows better and leaves extrapolation to it.

A profile is a JSON file: ``$WINDTUNNEL_HOME/profiles/DEVICE.json``, else one shipped with the package.

An operator is stored as text, which is also a key that equal calls share. A tensor is written
``bfloat16[128,256]``, with ``:256,1`` after it when its strides are not those of a contiguous tensor, and
``@cpu`` when it lies in host memory.

The *host* thread spends time on issuing an event, the reason why small jobs are launch-bound. On a GPU the
host runs ahead of the device and only its own speed limits how fast operators are issued. On a device of
kind "cpu" the host thread runs the operators itself: their measured time already holds the dispatch from
Python, and what comes on top is the autograd graph, modules and hooks, measured as so many seconds for each
operator in each phase (``DeviceProfile.host_overhead``).
"""

from __future__ import annotations

import json
import math
import re
from collections import defaultdict
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from windtunnel.calibration import profiles
from windtunnel.cluster.model import Cluster, Device
from windtunnel.training.emulate.graph import EventKind, Operator, Phase, Slice, TensorMeta
from windtunnel.training.emulate.twin.costs.roofline import GPU, HOST, roofline_seconds
from windtunnel.training.emulate.twin.costs.work import (
    Kind,
    attention_shapes,
    base_name,
    counted_flops,
    dtype_of,
    executed_flops,
    kind_of,
    matmul_shape,
    moved_bytes,
)

VERSION = 1
NEIGHBOURS = 4
SHIPPED = Path(__file__).parent / "profiles"
Series = list[tuple[tuple[float, ...], Operator, float]]


@dataclass
class DeviceProfile:
    """Measurements of one device.

    ``operators``: (operator, seconds of one call). ``host_overhead``: seconds for each operator by phase
    (``"forward"``, ``"backward"``, ``"optimizer"``) beyond the operator itself, and what FSDP2's Python adds
    for each tensor given to its operators (``"fsdp_tensor"``). ``collectives``: (kind,
    world, bytes, seconds) of gloo on this machine. ``provenance``: machine, date, torch version, threads.
    ``joules``: of one call by its `signature`, on a device that is only a drawing: all times are modelled
    then, none measured (``windtunnel mapper profile``).
    """

    device: str
    operators: list[tuple[Operator, float]] = field(default_factory=list)
    host_overhead: dict[str, float] = field(default_factory=dict)
    collectives: list[tuple[str, int, int, float]] = field(default_factory=list)
    provenance: dict[str, str] = field(default_factory=dict)
    joules: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Of an operator that was measured twice the second time counts."""
        self.operators = [*{signature(op): (op, seconds) for op, seconds in self.operators}.values()]

    @cached_property
    def _exact(self) -> dict[str, float]:
        return {signature(op): seconds for op, seconds in self.operators}

    @cached_property
    def _series(self) -> dict[tuple[str, str], Series]:
        """Those of one base name or kind, and dtype."""
        series: dict[tuple[str, str], Series] = defaultdict(list)
        for op, seconds in self.operators:
            if (kind := kind_of(op)) != "view":
                for name in (base_name(op.name), f"kind:{kind}"):
                    series[name, dtype_of(op)].append((coordinates(op, kind), op, seconds))
        return series

    def exact(self, op: Operator) -> float | None:
        """Measured seconds of this very operator (shapes, dtypes, strides, integer arguments), or None."""
        return self._exact.get(signature(op))

    def ratio(self, op: Operator, device: Device, pcie: float = GPU.pcie_bandwidth) -> float | None:
        """Measured over modelled time as the nearest measured operators have it; None without any."""
        kind = kind_of(op)
        series = self._series.get((base_name(op.name), dtype_of(op)))
        if not series:
            series = self._series.get((f"kind:{kind}", dtype_of(op)))
        if not series:
            return None
        here = coordinates(op, kind)
        near = sorted(series, key=lambda row: math.dist(here, row[0]))[:NEIGHBOURS]
        weighted = total = 0.0
        for there, other, seconds in near:
            weight = 1.0 / (math.dist(here, there) ** 2 + 1e-6)
            model = roofline_seconds(other, kind, device, pcie)
            weighted += weight * math.log(max(seconds, 1e-9) / model)
            total += weight
        return math.exp(weighted / total)


def coordinates(op: Operator, kind: Kind) -> tuple[float, ...]:
    """Where an operator lies among those of its kind: logarithms of what its time depends on."""
    if kind == "matmul":
        return tuple(math.log(max(1, size)) for size in matmul_shape(op))
    if kind == "attention":
        query, key, _, _, _ = attention_shapes(op)
        return tuple(math.log(max(1, size)) for size in (query[0] * query[1], query[2], key[2], query[3]))
    size = math.log(max(1.0, moved_bytes(op, kind)))
    return (math.log(max(1.0, executed_flops(op))), size) if kind == "conv" else (size,)


def save_profile(profile: DeviceProfile, path: Path) -> None:
    """Write ``profile``, whole or not at all; one operator a line."""
    content = {
        "device": profile.device,
        "provenance": profile.provenance,
        "host_overhead": profile.host_overhead,
        "collectives": profile.collectives,
    }
    rows = [[*encode(op), float(f"{seconds:.5g}")] for op, seconds in profile.operators]
    profiles.save(path, VERSION, content, ("operators", rows))


def read_profile(path: Path) -> DeviceProfile:
    """Read a profile. Raises `UserError` when the file is not one."""

    def make(data: dict[str, Any]) -> DeviceProfile:
        operators = [(decode(*row[:3]), [*map(float, row[3:])]) for row in data["operators"]]
        return DeviceProfile(
            device=data["device"],
            operators=[(op, figures[0]) for op, figures in operators],
            joules={signature(op): figures[1] for op, figures in operators if len(figures) > 1},
            host_overhead={key: float(value) for key, value in data["host_overhead"].items()},
            collectives=[(str(k), int(w), int(b), float(s)) for k, w, b, s in data["collectives"]],
            provenance=dict(data["provenance"]),
        )

    return profiles.read(path, "a device profile", VERSION, make)


def find_profile(device: str) -> DeviceProfile | None:
    """The profile of ``device``: the user's own, else the shipped one, else None."""
    path = profiles.find(device, SHIPPED)
    return None if path is None else read_profile(path)


_TENSOR = re.compile(r"^(\w+)\[([\d,]*)\](?::([-\d,]*))?(?:@(\w+))?$")


def contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides of a contiguous tensor."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(1, size)
    return tuple(reversed(strides))


def tensor_text(tensor: TensorMeta) -> str:
    """The text of a tensor."""
    text = f"{tensor.dtype}[{','.join(map(str, tensor.shape))}]"
    if tensor.stride and tensor.stride != contiguous(tensor.shape):
        text += ":" + ",".join(map(str, tensor.stride))
    return text if tensor.device == "cuda" else f"{text}@{tensor.device}"


def parse_tensor(text: str) -> TensorMeta:
    """The tensor that ``text`` tells. Raises `ValueError` for another text."""
    match = _TENSOR.match(text)
    if match is None:
        raise ValueError(f"{text!r} is not a tensor")
    dtype, sizes, strides, device = match.groups()
    shape = _ints(sizes)
    return TensorMeta(shape, dtype, _ints(strides) if strides else contiguous(shape), device or "cuda")


def encode(op: Operator) -> tuple[str, list[Any], list[str]]:
    """(name, arguments, outputs) as values of JSON."""
    return op.name, [_encode(arg) for arg in op.inputs], [tensor_text(out) for out in op.outputs]


def decode(name: str, inputs: list[Any], outputs: list[str]) -> Operator:
    """The operator that `encode` told. Raises `ValueError` or `TypeError` for other values."""
    return Operator(name, tuple(_decode(arg) for arg in inputs), tuple(parse_tensor(out) for out in outputs))


def signature(op: Operator) -> str:
    """A key: equal for calls that cost the same. Floats (learning rates, epsilons) and devices do not
    count."""
    return op.name + json.dumps([_encode(arg, blurred=True) for arg in op.inputs], separators=(",", ":"))


def _encode(arg: Any, *, blurred: bool = False) -> Any:
    if isinstance(arg, TensorMeta):
        text = tensor_text(arg)
        return {"t": text.partition("@")[0] if blurred else text}
    if isinstance(arg, (tuple, list)):
        return [_encode(item, blurred=blurred) for item in arg]
    return "float" if blurred and isinstance(arg, float) else arg


def _decode(arg: Any) -> Any:
    if isinstance(arg, dict):
        return parse_tensor(arg["t"])
    return tuple(_decode(item) for item in arg) if isinstance(arg, list) else arg


def _ints(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(",") if part)


@dataclass(frozen=True, slots=True)
class OpCost:
    """Cost of one call. ``flops`` as PyTorch counts them, ``bytes`` through device memory, ``seconds`` on the
    device. ``source``: ``"free"``, ``"measured"``, ``"modelled"``, ``"interpolated"`` or ``"roofline"``."""

    kind: Kind
    flops: float
    bytes: float
    seconds: float
    source: str


def cost_of(
    op: Operator, device: Device, profile: DeviceProfile | None = None, *,
    pcie: float = GPU.pcie_bandwidth,
) -> OpCost:  # fmt: skip
    """The cost of ``op`` on ``device``, which is joined to its host at ``pcie`` bytes/s.

    An exact measurement in ``profile`` wins, then one interpolated from its neighbours, then the roofline;
    views are free. All three tell the time of the operator by itself; on a GPU it is stretched to what it
    takes inside a training job.
    """
    kind = kind_of(op)
    share = GPU.in_job_matmul if kind in ("matmul", "conv") else GPU.in_job
    source = "modelled" if profile is not None and profile.joules else "measured"
    slowdown = 1.0 / share if device.kind == "gpu" and source == "measured" else 1.0
    if profile is not None:
        exact = profile.exact(op)
        if exact is not None:
            return OpCost(kind, counted_flops(op), moved_bytes(op, kind), exact * slowdown, source)
    if kind == "view" or _is_empty(op):
        return OpCost(kind, 0.0, 0.0, 0.0, "free")
    model = roofline_seconds(op, kind, device, pcie)
    source = "roofline"
    if profile is not None:
        ratio = profile.ratio(op, device, pcie)
        if ratio is not None:
            model, source = model * ratio, "interpolated"
    return OpCost(kind, counted_flops(op), moved_bytes(op, kind), model * slowdown, source)


def _is_empty(op: Operator) -> bool:
    """Whether the operator has nothing to do: all outputs have no elements."""
    return bool(op.outputs) and all(out.numel == 0 for out in op.outputs)


def operator_seconds(
    slice_: Slice, cluster: Cluster, profile: DeviceProfile | None = None
) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """Seconds of each row of a slice's operator table, float64[len(slice_.operators)]."""
    device, pcie = cluster.host.device, cluster.host.pcie.bandwidth
    return np.array([cost_of(op, device, profile, pcie=pcie).seconds for op in slice_.operators], np.float64)


Table = np.ndarray[tuple[int, int], np.dtype[np.float64]]


def host_table(
    operators: list[Operator], device: Device, profile: DeviceProfile | None = None
) -> tuple[Table, Table]:
    """Host seconds as two tables: of operators, float64[len(operators), phases], and of the other events,
    float64[event kinds, phases].

    On a CPU device only operators cost, and only what ``profile`` measured. Views are free on the device.
    """
    others = np.zeros((len(EventKind), len(Phase)))
    views = np.array([kind_of(op) == "view" for op in operators], bool)[:, None]
    if device.kind == "cpu":
        overhead = profile.host_overhead if profile is not None else {}
        solid = [overhead.get(phase.name.lower(), 0.0) for phase in Phase]
        sharding = np.array([len(op.tensors()) if op.name.startswith("fsdp.") else 0 for op in operators])
        rows = np.where(views, overhead.get("view", 0.0), solid)
        return rows + sharding[:, None] * overhead.get("fsdp_tensor", 0.0), others
    own = {
        Phase.BACKWARD: HOST.backward_operator, Phase.OPTIMIZER: HOST.optimizer_operator,
        Phase.RECOMPUTE: HOST.recompute_operator,
    }  # fmt: skip
    solid = [own.get(phase, HOST.forward_operator) for phase in Phase]
    light = [HOST.view * (0.5 if phase == Phase.BACKWARD else 1.0) for phase in Phase]
    for seconds, kinds in (
        (HOST.allocation, (EventKind.ALLOC, EventKind.FREE)), (HOST.collective, EventKind.COLLECTIVE),
        (HOST.event, (EventKind.WORK_WAIT, EventKind.RECORD, EventKind.WAIT, EventKind.RECORD_STREAM)),
        (HOST.sync, EventKind.SYNC),
    ):  # fmt: skip
        others[kinds, :] = seconds
    return np.where(views, light, solid), others
