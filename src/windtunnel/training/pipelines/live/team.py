"""Who does what in one generation, and how gradients are summed over microbatches and pipelines.

Pipelines cut the model differently, so each layer has its own set of holders, one host of each pipeline,
and its own group. The loss of a microbatch is weighted by one over the number of all microbatches of the
step, so the sum over all of them is the gradient of the mean, however they are divided. How the sum is taken
(floating-point addition is not associative, so the grouping shows in the last bits):

- ``float``: each host adds up its microbatches, then the holders are summed. Fast; the result depends on
  the layout in the last bits.
- ``fixed``: gradients become 64-bit integers in steps of ``1 / scale``, whose sums are exact in any order.
  A run with failures ends with the same bits as one without. Costs: 8 bytes an element on the wire and in
  memory, a conversion for each microbatch; values below ``0.5 / scale`` (2^-41) vanish. A gradient so large
  that a sum could overflow is noticed before the sum is used.

A layer's sum starts when its last backward here is done, while earlier layers still compute.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from windtunnel.training.pipelines.live.layers import HostLayer
from windtunnel.training.pipelines.model import Layout, TemplateSet


@dataclass(frozen=True)
class Team:
    """The part of one rank. ``pipeline`` and ``stage`` are None for a host that is in no pipeline.

    ``layers``: indices of the layers here, ascending. ``microbatches``: this pipeline's, numbered within the
    step. ``before``, ``after``: neighbours' ranks. ``groups``: of torch.distributed, of the
    holders of each layer of the model; None where that is one rank.
    """

    rank: int
    world: int
    layout: Layout
    pipeline: int | None
    stage: int | None
    layers: tuple[int, ...]
    microbatches: range
    before: int | None
    after: int | None
    groups: Mapping[int, Any]


def assigned(set: TemplateSet, layout: Layout, ranks: Mapping[int, int]) -> dict[int, tuple[int, ...]]:
    """The layers of each rank that is in a pipeline, ascending. ``ranks``: by host."""
    return {
        ranks[host]: tuple(range(stage.first, stage.last))
        for pipeline in layout.pipelines
        for host, stage in zip(pipeline, set.of(len(pipeline)).stages, strict=True)
    }


def make_team(set: TemplateSet, layout: Layout, ranks: Mapping[int, int], rank: int) -> Team:
    """The team of ``rank``, with its groups. Called by all ranks at the same time, with the same layout."""
    layers = assigned(set, layout, ranks)
    lines = [tuple(ranks[host] for host in pipeline) for pipeline in layout.pipelines]
    shares: list[range] = []
    for count in layout.microbatches:
        begin = shares[-1].stop if shares else 0
        shares.append(range(begin, begin + count))
    count = max(layers[lines[0][-1]]) + 1
    # Holders of each layer, one of each pipeline.
    sets = [
        tuple(sorted(holder for holder, indices in layers.items() if index in indices))
        for index in range(count)
    ]
    groups_of = make_groups(sets, len(ranks))
    groups = {index: groups_of[holders] for index, holders in enumerate(sets)}
    mine = next(((p, line.index(rank)) for p, line in enumerate(lines) if rank in line), None)
    if mine is None:
        return Team(rank, len(ranks), layout, None, None, (), range(0), None, None, groups)
    number, stage = mine
    line = lines[number]
    return Team(
        rank,
        len(ranks),
        layout,
        number,
        stage,
        layers[rank],
        shares[number],
        line[stage - 1] if stage else None,
        line[stage + 1] if stage + 1 < len(line) else None,
        groups,
    )


Reduction = Literal["float", "fixed"]

SCALE = 2.0**40
_LIMIT = 2.0**62


def make_groups(layers: Sequence[tuple[int, ...]], world: int) -> dict[tuple[int, ...], Any]:
    """A group for each distinct set of holders (``layers``: ranks of each layer, ascending).

    Called by all ranks with the same argument: groups are made in the same order everywhere.
    """
    groups: dict[tuple[int, ...], Any] = {}
    for ranks in sorted(set(layers)):
        if len(ranks) == world > 1:
            groups[ranks] = dist.group.WORLD
        elif len(ranks) > 1:
            groups[ranks] = dist.new_group(list(ranks), backend="gloo")
        else:
            groups[ranks] = None
    return groups


@dataclass
class Sums:
    """The gradients of one step on this host.

    ``groups``: as of a `Team`. ``total``: microbatches of the whole step. ``overflow``:
    a gradient was too large for ``scale``; ``nonfinite``: one was no number and has no fixed-point value.
    """

    kind: Reduction
    groups: Mapping[int, Any]
    total: int
    scale: float = SCALE
    overflow: bool = False
    nonfinite: bool = False
    _own: dict[int, Tensor] = field(default_factory=dict)
    _works: dict[int, Any] = field(default_factory=dict)

    def add(self, layer: HostLayer, gradients: list[Tensor]) -> None:
        """Take in the gradients of the layer's parameters from one microbatch."""
        parts = [g.reshape(-1) for g in gradients]
        flat = torch.cat(parts) if len(parts) > 1 else parts[0]
        if flat.dtype in (torch.bfloat16, torch.float16):
            flat = flat.float()
        if self.kind == "fixed":
            flat = self._fixed(flat)
        if layer.index in self._own:
            self._own[layer.index] += flat
        else:
            # A single gradient may be memory that somebody else holds, too
            self._own[layer.index] = flat.clone() if len(gradients) == 1 else flat

    def start(self, layer: HostLayer) -> None:
        """All microbatches of this host are in: begin the sum over the holders."""
        group = self.groups[layer.index]
        own = self._own[layer.index] = self._own[layer.index].cpu()
        if group is not None:
            self._works[layer.index] = dist.all_reduce(own, group=group, async_op=True)

    def finish(self, layer: HostLayer) -> Tensor:
        """The layer's gradient summed over the whole step: flat, in the parameters' order, on their device,
        in single precision or better."""
        if (work := self._works.pop(layer.index, None)) is not None:
            work.wait()
        total = self._own.pop(layer.index)
        if self.kind == "fixed":
            double = any(p.dtype == torch.float64 for p in layer.parameters)
            total = total.double().div_(self.scale).to(torch.float64 if double else torch.float32)
        return total.to(layer.parameters[0].device)

    def _fixed(self, flat: Tensor) -> Tensor:
        scaled = flat.double().mul_(self.scale).round_()
        largest = float(scaled.abs().amax()) if scaled.numel() else 0.0
        if not largest * self.total < _LIMIT:  # also for NaN
            finite = largest < float("inf")
            self.overflow, self.nonfinite = self.overflow or finite, self.nonfinite or not finite
            scaled.zero_()  # its integers would mean nothing
        return scaled.to(torch.int64)
