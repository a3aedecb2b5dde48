"""Seconds of one operator on a device: measured where there is a profile, a roofline otherwise.

The roofline: an operator takes as long as its arithmetic at the rate that its kind and shape allow, or as
its memory traffic at the bandwidth that its kind reaches, whichever is longer, and no less than the
shortest kernel. For matrix products the rate follows from how tiles fill the multiprocessors in waves; for
attention from the kernel's published throughput and the length of the sequence. Williams, Waterman and
Patterson, "Roofline", CACM 2009.

The *host* thread spends time on issuing an event, the reason why small jobs are launch-bound. On a GPU the
host runs ahead of the device and only its own speed limits how fast operators are issued. On a device of
kind "cpu" the host thread runs the operators itself: their measured time already holds the dispatch from
Python, and what comes on top is the autograd graph, modules and hooks, measured as so many seconds for each
operator in each phase (``DeviceProfile.host_overhead``).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from windtunnel.cluster.model import Cluster, Device
from windtunnel.training.emulate.graph import EventKind, Operator, Phase, Slice
from windtunnel.training.emulate.twin.costs.profile import DeviceProfile
from windtunnel.training.emulate.twin.costs.roofline import DEFAULT, CostParameters, roofline_seconds
from windtunnel.training.emulate.twin.costs.work import (
    Kind,
    counted_flops,
    kind_of,
    moved_bytes,
)


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
    op: Operator, device: Device, profile: DeviceProfile | None = None, params: CostParameters = DEFAULT
) -> OpCost:
    """The cost of ``op`` on ``device``.

    An exact measurement in ``profile`` wins, then one interpolated from its neighbours, then the roofline;
    views are free. All three tell the time of the operator by itself; on a GPU it is stretched by
    ``params.gpu`` to what it takes inside a training job.
    """
    kind = kind_of(op)
    share = params.gpu.in_job_matmul if kind in ("matmul", "conv") else params.gpu.in_job
    source = "modelled" if profile is not None and profile.joules else "measured"
    slowdown = 1.0 / share if device.kind == "gpu" and source == "measured" else 1.0
    if profile is not None:
        exact = profile.exact(op)
        if exact is not None:
            return OpCost(kind, counted_flops(op), moved_bytes(op, kind), exact * slowdown, source)
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


def operator_seconds(
    slice_: Slice, cluster: Cluster, profile: DeviceProfile | None = None, params: CostParameters = DEFAULT
) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """Seconds of each row of a slice's operator table, float64[len(slice_.operators)].

    The host's own PCIe link replaces the parameter's.
    """
    params = replace(params, gpu=replace(params.gpu, pcie_bandwidth=cluster.host.pcie.bandwidth))
    device = cluster.host.device
    return np.array([cost_of(op, device, profile, params).seconds for op in slice_.operators], np.float64)


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
