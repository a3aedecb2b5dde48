"""What ``torch.compile`` saves: the traffic and launches of operators that become one kernel.

A declared approximation of what Inductor does. Within one run of a compiled region, what a fusable operator
(elementwise, norm, softmax, reduction, copy) writes and a later fusable one reads is neither written nor
read: Inductor keeps it in registers, moves the producer next to its reader, and its partitioner recomputes
cheap results in backward instead of saving them. What a matrix product or attention reads has to be
written. Operators in a slice do not say which tensor is which, and views between them change shapes, so an
input is taken for the latest earlier output of as many bytes; each output is consumed once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from windtunnel.training.emulate.graph import Operator, Phase, Slice
from windtunnel.training.emulate.twin.costs.kinds import FUSABLE, base_name, kind_of
from windtunnel.training.emulate.twin.costs.traffic import moved_bytes, stored_bytes

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
