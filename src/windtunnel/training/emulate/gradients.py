"""What others may ask of an emulation: when its backward makes which gradient, and what collectives take.

Gradients are known by the blocks that backward allocates for them, which carry their parameters' names. Their
times are those of the operators before them, on the device and on the host that issues them, without any wait
for a collective: what a rank would do if communication took none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from windtunnel.base.errors import UserError
from windtunnel.cluster.model import Cluster
from windtunnel.training.emulate.emulation import EmulationResult, costs_of
from windtunnel.training.emulate.graph import DTYPE_BYTES, Category, EventKind, Phase, Slice
from windtunnel.training.emulate.twin.costs.collectives import collective_cost, sharing_of
from windtunnel.training.emulate.twin.emulate import event_seconds


@dataclass(frozen=True)
class Gradient:
    """Of the parameter ``name``; ``seconds``: of computing since the gradient before it was there."""

    name: str
    numel: int
    dtype: str
    seconds: float


@dataclass(frozen=True)
class Backward:
    """A steady step of one rank: seconds before its backward (forward, optimizer, all else, and what other
    steps of the period take more than the usual one, in the mean), the gradients in
    their order, and seconds of backward after the last of them."""

    before: float
    gradients: tuple[Gradient, ...]
    after: float


def backward_of(result: EmulationResult) -> Backward:
    """Of the class of ranks that rank 0 is in.

    Raises:
        UserError: no gradient is made in its steady step.
    """
    row = int(result.classes.rank_class[0])
    whole = result.classes.classes[row].slice
    costs = costs_of(result.classes, result.cluster, result.profile)

    def computed(slice_: Slice) -> NDArray[np.float64]:
        device, host = event_seconds(
            slice_, costs.operators[row], costs.host_operators[row], costs.host_events[row]
        )
        # operators begin when they are issued or, on a busy device, one after the other
        issued, done = np.cumsum(host), np.cumsum(device)
        ends: NDArray[np.float64] = done + np.maximum.accumulate(issued - (done - device))
        return ends

    usual = max(whole.kinds, key=whole.kinds.count)
    slice_ = whole.only(len(whole.steps) - whole.period + whole.kinds.index(usual))
    ends = computed(slice_)
    more = float(computed(whole)[-1]) / whole.period - float(ends[-1])  # that the mean step takes
    events = slice_.events[slice(*slice_.steady)]
    phases = events["phase"]
    allocations = _allocated(slice_)
    if not allocations:
        raise UserError(
            f"{result.program.name}: its step makes no gradients on {result.cluster.host.device.name}; "
            "a script whose parameters have gradients of their own there (DDP, no sharding) is accepted"
        )
    in_backward = np.flatnonzero((phases == Phase.BACKWARD) | (phases == Phase.RECOMPUTE))
    begin, end = float(ends[max(0, in_backward[0] - 1)]), float(ends[in_backward[-1]])
    # with several micro-batches gradients are made by the first and are whole with the last
    forwards = in_backward[0] + np.flatnonzero(phases[in_backward[0] :] == Phase.FORWARD)
    passes = forwards[forwards < in_backward[-1]]
    later = 0.0
    if len(passes):
        first_end = float(ends[max(int(end_pass) for end_pass in in_backward if end_pass < passes[0])])
        later = end - first_end
    begin += later
    gradients, before = [], begin
    for place, name, nbytes, dtype in allocations:
        after = np.flatnonzero(events["kind"][place:] == EventKind.OP)
        at = float(ends[place + int(after[0])] if len(after) else ends[-1]) + later
        numel = nbytes // DTYPE_BYTES.get(dtype, 4)
        gradients.append(Gradient(name, numel, dtype, max(0.0, at - before)))
        before = max(before, at)
    return Backward(float(ends[-1]) - (end - begin) + more, tuple(gradients), max(0.0, end - before))


def _allocated(slice_: Slice) -> list[tuple[int, str, int, str]]:
    """Of each gradient of the steady step: the event that allocates it, its name, bytes and dtype."""
    events = slice_.events[slice(*slice_.steady)]
    allocations, names = [], set()
    for place in np.flatnonzero(events["kind"] == EventKind.ALLOC):
        block = int(events["ref"][place])
        if slice_.block_category.get(block) != Category.GRADIENT or block not in slice_.block_name:
            continue
        name = slice_.block_name[block]
        if name not in names:
            names.add(name)
            nbytes = int(events["value"][place])
            allocations.append((int(place), name, nbytes, _dtype(slice_, int(place), nbytes)))
    return allocations


def _dtype(slice_: Slice, place: int, nbytes: int) -> str:
    """Of what the next operator writes there."""
    events = slice_.events[slice(*slice_.steady)]
    for row in events[place:][events["kind"][place:] == EventKind.OP]["ref"][:4]:
        for output in slice_.operators[int(row)].outputs:
            if output.nbytes == nbytes:
                return output.dtype
    return "float32"


def collective_times(
    cluster: Cluster, kind: str, ranks: Sequence[int], sizes: Sequence[int], *, alike: bool = False
) -> list[float]:
    """Seconds of a collective of ``ranks`` for each size in bytes, as nccl-tests counts it. ``alike``: the
    other ranks of the cluster do the same at once in groups of that shape."""
    placement = cluster.placement(ranks)
    backend = "gloo" if cluster.host.device.kind == "cpu" else "nccl"
    sharing = sharing_of(cluster, placement) if alike else 1.0
    return [
        collective_cost(kind, size, placement, cluster, backend=backend, sharing=sharing).seconds
        for size in sizes
    ]
