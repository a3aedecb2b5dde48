"""Seconds of one operator on a device: measured where there is a profile, a roofline otherwise.

The roofline: an operator takes as long as its arithmetic at the rate that its kind and shape allow, or as
its memory traffic at the bandwidth that its kind reaches, whichever is longer, and no less than the
shortest kernel. For matrix products the rate follows from how tiles fill the multiprocessors in waves; for
attention from the kernel's published throughput and the length of the sequence. Williams, Waterman and
Patterson, "Roofline", CACM 2009.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from windtunnel.cluster.model import Cluster, Device
from windtunnel.training.emulate.graph import EventKind, Operator, Slice
from windtunnel.training.emulate.twin.costs.flops import counted_flops
from windtunnel.training.emulate.twin.costs.fusion import regions_of, traffic_of_fused
from windtunnel.training.emulate.twin.costs.kinds import Kind, kind_of
from windtunnel.training.emulate.twin.costs.parameters import DEFAULT, CostParameters
from windtunnel.training.emulate.twin.costs.roofline import roofline_seconds
from windtunnel.training.emulate.twin.costs.traffic import moved_bytes

if TYPE_CHECKING:
    from windtunnel.training.emulate.twin.costs.profile import Profile


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
    op: Operator, device: Device, profile: Profile | None = None, params: CostParameters = DEFAULT
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
    ops: Sequence[Operator],
    device: Device,
    profile: Profile | None = None,
    params: CostParameters = DEFAULT,
    regions: Sequence[int] | None = None,
) -> list[OpCost]:
    """Costs of a sequence of operators, those inside ``torch.compile`` regions as the compiler would join
    them.

    ``regions``: the region of each operator, 0 for none (default: as the operators say). What stays on the
    chip costs nothing, and an operator that joins an earlier one's kernel pays for no launch. See
    `windtunnel.training.emulate.twin.costs.fusion` for the approximation made. The result is aligned with
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
    slice_: Slice, cluster: Cluster, profile: Profile | None = None, params: CostParameters = DEFAULT
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
