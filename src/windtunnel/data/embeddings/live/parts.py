"""Pooled tables that are summed where their rows lie (`Exchange.partial_sums`): sums cross, not rows.

A *part* is what a bag has on a rank. Who asks sends the places of its rows, part by part, the first of each
marked (as -1 - place), and gets a sum for each part. When tables step it sends a gradient for each part, by
its number among those that it has asked that rank for since the last step; the rank knows their rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from windtunnel.data.embeddings.live.tiers import Tiers


@dataclass(frozen=True)
class Cut:
    """Marked ``places`` [n] and to which rank each goes, ``to`` [n]; of each part its rank and its bag."""

    places: Tensor
    to: Tensor
    ranks: Tensor
    bags: Tensor


def cut(places: Tensor, to: Tensor, offsets: Tensor) -> Cut:
    """Rows of the bags that begin at ``offsets``, as parts."""
    lengths = torch.cat([offsets, offsets.new_tensor([len(places)])]).diff()
    bags = torch.repeat_interleave(lengths)
    by = torch.argsort(to, stable=True)
    places, to, bags = places[by], to[by], bags[by]
    first = torch.ones(len(to), dtype=torch.bool)
    first[1:] = (to.diff() != 0) | (bags.diff() != 0)
    return Cut(torch.where(first, -1 - places, places), to, to[first], bags[first])


class RowRequests:
    """Of one table what this rank has asked others for, and they it, since the last step."""

    def __init__(self, world: int) -> None:
        self.world = world
        self._requests = torch.zeros(self.world, dtype=torch.long)
        none = torch.empty(0, dtype=torch.long)
        self._passes = [(none, none, none)]  # of each pass who asked and how many rows, by part; their places

    def numbered(self, ranks: Tensor) -> Tensor:
        """A key for each part asked for, whose ranks ascend: its number times the world, and its rank."""
        counts = torch.bincount(ranks, minlength=self.world)
        first = self._requests - counts.cumsum(0) + counts
        self._requests += counts
        return (first[ranks] + torch.arange(len(ranks))) * self.world + ranks

    def answer(
        self, tiers: Tiers, marked: Tensor, sources: Tensor, training: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Sums of the parts that came, and how many came from each rank; [world] of them are ``training``."""
        first = marked < 0
        places, begins = torch.where(first, -1 - marked, marked), first.nonzero()[:, 0]
        asking, lengths = sources[begins], torch.cat([begins, begins.new_tensor([len(marked)])]).diff()
        later = training[asking]
        self._passes.append((asking[later], lengths[later], places[training[sources]]))
        at = tiers.places(places)
        sums = functional.embedding_bag(at, tiers.weight, begins.to(at.device), mode="sum").cpu()
        return sums, torch.bincount(asking, minlength=self.world)

    def places_of(self, sources: Tensor, numbers: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Places of rows and their gradients, of parts with these ``numbers`` and gradients."""
        asking, lengths, places = (torch.cat(some) for some in zip(*self._passes, strict=True))
        counts = torch.bincount(asking, minlength=self.world)
        part = torch.argsort(asking, stable=True)[(counts.cumsum(0) - counts)[sources] + numbers]
        many = lengths[part]
        begins = (lengths.cumsum(0) - lengths)[part] - (many.cumsum(0) - many)
        rows = begins.repeat_interleave(many) + torch.arange(int(many.sum()))
        return places[rows], values.repeat_interleave(many, 0)
