"""What the host thread spends on issuing an event: the reason why small jobs are launch-bound.

On a GPU the host runs ahead of the device and only its own speed limits how fast operators are issued. On a
device of kind "cpu" the host thread runs the operators itself: their measured time already holds the dispatch
from Python, and what comes on top is the autograd graph, modules and hooks, measured as so many seconds for
each operator in each phase (``Profile.host_overhead``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from windtunnel.cluster.model import Device
from windtunnel.training.emulate.graph import EventKind, Operator, Phase
from windtunnel.training.emulate.twin.costs.kinds import kind_of
from windtunnel.training.emulate.twin.costs.parameters import DEFAULT, CostParameters

if TYPE_CHECKING:
    from windtunnel.training.emulate.twin.costs.profile import Profile


def host_seconds(
    kind: EventKind,
    phase: Phase,
    device: Device,
    profile: Profile | None = None,
    params: CostParameters = DEFAULT,
    *,
    view: bool = False,
    dtensor: bool = False,
) -> float:
    """Host seconds of one event of ``kind`` issued in ``phase``.

    ``view``: the operator is free on the device. ``dtensor``: it was dispatched by DTensor. On a CPU device
    only operators cost, and only what ``profile`` measured; zero without a profile.
    """
    host = params.host
    if device.kind == "cpu":
        if kind != EventKind.OP or profile is None:
            return 0.0
        return profile.host_overhead.get("view" if view else phase.name.lower(), 0.0)
    if kind == EventKind.OP:
        extra = host.dtensor_operator if dtensor else 0.0
        if view and phase != Phase.BACKWARD:
            return host.view + extra
        return extra + {
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
    profile: Profile | None = None,
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
