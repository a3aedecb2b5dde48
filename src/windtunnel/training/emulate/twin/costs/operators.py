"""Seconds of one operator on a device: measured where there is a profile, a roofline otherwise.

The roofline: an operator takes as long as its arithmetic at the rate that its kind and shape allow, or as
its memory traffic at the bandwidth that its kind reaches, whichever is longer, and no less than the
shortest kernel. For matrix products the rate follows from how tiles fill the multiprocessors in waves; for
attention from the kernel's published throughput and the length of the sequence. Williams, Waterman and
Patterson, "Roofline", CACM 2009.

*Fusion* is what ``torch.compile`` saves, the traffic and launches of operators that become one kernel: a
declared approximation of what Inductor does. Within one run of a compiled region, what a fusable operator
(elementwise, norm, softmax, reduction, copy) writes and a later fusable one reads is neither written nor
read: Inductor keeps it in registers, moves the producer next to its reader, and its partitioner recomputes
cheap results in backward instead of saving them. What a matrix product or attention reads has to be written.
Operators in a slice do not say which tensor is which, and views between them change shapes, so an input is
taken for the latest earlier output of as many bytes; each output is consumed once.

The *host* thread spends time on issuing an event, the reason why small jobs are launch-bound. On a GPU the
host runs ahead of the device and only its own speed limits how fast operators are issued. On a device of
kind "cpu" the host thread runs the operators itself: their measured time already holds the dispatch from
Python, and what comes on top is the autograd graph, modules and hooks, measured as so many seconds for each
operator in each phase (``DeviceProfile.host_overhead``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from windtunnel.cluster.model import Cluster, Device
from windtunnel.training.emulate.graph import EventKind, Operator, Phase, Slice
from windtunnel.training.emulate.twin.costs.parameters import DEFAULT, CostParameters
from windtunnel.training.emulate.twin.costs.profile import DeviceProfile
from windtunnel.training.emulate.twin.costs.roofline import roofline_seconds
from windtunnel.training.emulate.twin.costs.work import (
    FUSABLE,
    Kind,
    base_name,
    counted_flops,
    kind_of,
    moved_bytes,
    stored_bytes,
)


@dataclass(frozen=True, slots=True)
class OpCost:
    """Cost of one call. ``flops`` as PyTorch counts them, ``bytes`` through device memory, ``seconds`` on the
    device. ``source``: ``"free"``, ``"measured"``, ``"interpolated"`` or ``"roofline"``."""

    kind: Kind
    flops: float
    bytes: float
    seconds: float
    source: str


def cost_of(
    op: Operator, device: Device, profile: DeviceProfile | None = None, params: CostParameters = DEFAULT
) -> OpCost:
    """The cost of ``op`` on ``device``.

    An exact measurement in ``profile`` wins, then one interpolated from its neighbours, then the roofline;
    views are free. All three tell the time of the operator by itself; on a GPU it is stretched by
    ``params.gpu.in_job`` to what it takes inside a training job.
    """
    kind = kind_of(op)
    slowdown = 1.0 / params.gpu.in_job if device.kind == "gpu" else 1.0
    if profile is not None:
        exact = profile.exact(op)
        if exact is not None:
            return OpCost(kind, counted_flops(op), moved_bytes(op, kind), exact * slowdown, "measured")
    if kind == "view" or _is_empty(op):
        return OpCost(kind, 0.0, 0.0, 0.0, "free")
    model = roofline_seconds(op, kind, device, params)
    source = "roofline"
    if profile is not None:
        ratio = profile.ratio(op, device, params)
        if ratio is not None:
            model, source = model * ratio, "interpolated"
    return OpCost(kind, counted_flops(op), moved_bytes(op, kind), model * slowdown, source)


def _is_empty(op: Operator) -> bool:
    """Whether the operator has nothing to do: all outputs have no elements."""
    return bool(op.outputs) and all(out.numel == 0 for out in op.outputs)


def fuse(
    ops: Sequence[Operator], device: Device, profile: DeviceProfile | None = None,
    params: CostParameters = DEFAULT, regions: Sequence[int] | None = None,
) -> list[OpCost]:  # fmt: skip
    """Costs of a sequence of operators, those inside ``torch.compile`` regions as the compiler would join
    them.

    ``regions``: the region of each operator, 0 for none (default: as the operators say). What stays on the
    chip costs nothing, and an operator that joins an earlier one's kernel pays for no launch. See
    `windtunnel.training.emulate.twin.costs.operators` for the approximation made. The result is aligned with
    ``ops``.
    """
    known: dict[Operator, OpCost] = {}
    costs = [known.get(op) or known.setdefault(op, cost_of(op, device, profile, params)) for op in ops]
    latency = params.gpu.kernel_seconds if device.kind == "gpu" else params.cpu.operator_seconds
    for index, share in traffic_of_fused(ops, regions or [op.region for op in ops]).items():
        cost = costs[index]
        if cost.seconds <= 0.0 or cost.bytes <= 0.0:
            continue
        launch = min(latency, cost.seconds)
        work = (cost.seconds - launch) * share.bytes / cost.bytes
        costs[index] = replace(cost, bytes=share.bytes, seconds=work + (launch if share.first else 0.0))
    return costs


def operator_seconds(
    slice_: Slice, cluster: Cluster, profile: DeviceProfile | None = None, params: CostParameters = DEFAULT
) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """Seconds of each row of a slice's operator table, float64[len(slice_.operators)].

    Where the script compiles, a row gets the mean of its fused costs over the steady step, since the same row
    may be fused here and stand alone there: the sum over the step is what counts. The host's own PCIe link
    replaces the parameter's.
    """
    params = replace(params, gpu=replace(params.gpu, pcie_bandwidth=cluster.host.pcie.bandwidth))
    device = cluster.host.device
    seconds = np.array([cost_of(op, device, profile, params).seconds for op in slice_.operators], np.float64)
    if not any(op.region for op in slice_.operators):
        return seconds
    first, last = slice_.steady
    events = slice_.events[first:last]
    events = events[events["kind"] == EventKind.OP]
    rows = events["ref"]
    regions = regions_of(slice_, events)
    fused = fuse([slice_.operators[row] for row in rows], device, profile, params, regions)
    total = np.bincount(rows, [cost.seconds for cost in fused], minlength=len(seconds))
    count = np.bincount(rows, minlength=len(seconds))
    seen = count > 0
    seconds[seen] = total[seen] / count[seen]
    return seconds


# FSDP's packing and unpacking runs in hooks, between compiled regions.
NEVER_FUSED = frozenset({"split_with_sizes_copy", "_chunk_cat", "_local_scalar_dense"})


@dataclass(frozen=True, slots=True)
class Share:
    """What is left of an operator inside a fused kernel: ``bytes``, and whether it pays for the launch."""

    bytes: float
    first: bool


def traffic_of_fused(ops: Sequence[Operator], regions: Sequence[int]) -> dict[int, Share]:
    """The `Share` of each fusable operator whose region (0: none) is given, by its position in ``ops``."""
    moved: dict[int, float] = {}
    joined: set[int] = set()
    pending: dict[int, list[int]] = {}  # bytes of an output that nobody has read yet -> who wrote it
    current = 0
    for index, (op, region) in enumerate(zip(ops, regions, strict=True)):
        if region != current:
            pending, current = {}, region
        if not region:
            continue
        kind = kind_of(op)
        if kind == "view":
            continue
        fusable = kind in FUSABLE and base_name(op.name) not in NEVER_FUSED
        if fusable:
            moved[index] = moved_bytes(op, kind)
        for tensor in op.tensors():
            size = stored_bytes(tensor)
            writers = pending.get(size)
            if not writers:
                continue
            writer = writers.pop()
            if fusable:
                moved[index] -= size
                moved[writer] -= size
                joined.add(index)
        if fusable:
            for tensor in op.outputs:
                pending.setdefault(stored_bytes(tensor), []).append(index)
    return {index: Share(max(0.0, left), index not in joined) for index, left in moved.items()}


def regions_of(slice_: Slice, events: np.ndarray[tuple[int], np.dtype[np.void]]) -> list[int]:
    """The compiled region of each of ``events`` (operators), 0 for none; a region's forward, recomputation
    and backward are three.

    A slice marks the forward operators of a region. Its backward is compiled too: an operator of the backward
    pass belongs to the region that the same module's forward lies in.
    """
    rows = [slice_.operators[row].region for row in events["ref"]]
    modules = {
        int(scope): region
        for scope, region, phase in zip(events["scope"], rows, events["phase"], strict=True)
        if region and phase == Phase.FORWARD
    }
    found = []
    for scope, region, phase in zip(events["scope"], rows, events["phase"], strict=True):
        if phase in (Phase.BACKWARD, Phase.RECOMPUTE):
            region = region or modules.get(int(scope), 0)
        found.append(region * len(Phase) + int(phase) if region else 0)
    return found


def host_seconds(
    kind: EventKind, phase: Phase, device: Device, profile: DeviceProfile | None = None,
    params: CostParameters = DEFAULT, *, view: bool = False,
) -> float:  # fmt: skip
    """Host seconds of one event of ``kind`` issued in ``phase``.

    ``view``: the operator is free on the device. On a CPU device only operators cost, and only what
    ``profile`` measured; zero without a profile.
    """
    host = params.host
    if device.kind == "cpu":
        if kind != EventKind.OP or profile is None:
            return 0.0
        return profile.host_overhead.get("view" if view else phase.name.lower(), 0.0)
    if kind == EventKind.OP:
        if view and phase != Phase.BACKWARD:
            return host.view
        return {
            Phase.BACKWARD: host.backward_operator if not view else 0.5 * host.view,
            Phase.OPTIMIZER: host.optimizer_operator,
            Phase.RECOMPUTE: host.recompute_operator,
        }.get(phase, host.forward_operator)
    return {
        EventKind.ALLOC: host.allocation,
        EventKind.FREE: host.allocation,
        EventKind.COLLECTIVE: host.collective,
        EventKind.WORK_WAIT: host.event,
        EventKind.RECORD: host.event,
        EventKind.WAIT: host.event,
        EventKind.RECORD_STREAM: host.event,
        EventKind.SYNC: host.sync,
    }.get(kind, 0.0)


def host_table(
    operators: list[Operator],
    device: Device,
    profile: DeviceProfile | None = None,
    params: CostParameters = DEFAULT,
) -> tuple[
    np.ndarray[tuple[int, int], np.dtype[np.float64]], np.ndarray[tuple[int, int], np.dtype[np.float64]]
]:
    """Host seconds as two tables: of operators, float64[len(operators), phases], and of the other events,
    float64[event kinds, phases]."""
    rows = np.zeros((len(operators), len(Phase)))
    others = np.zeros((len(EventKind), len(Phase)))
    views = np.array([kind_of(op) == "view" for op in operators], bool)
    sharding = np.array([len(op.tensors()) if op.name.startswith("fsdp.") else 0 for op in operators])
    for phase in Phase:
        solid = host_seconds(EventKind.OP, phase, device, profile, params)
        light = host_seconds(EventKind.OP, phase, device, profile, params, view=True)
        rows[:, phase] = np.where(views, light, solid)
        if device.kind == "cpu" and profile is not None:
            rows[:, phase] += sharding * profile.host_overhead.get("fsdp_tensor", 0.0)
        for kind in EventKind:
            if kind != EventKind.OP:
                others[kind, phase] = host_seconds(kind, phase, device, profile, params)
    return rows, others
