"""DDP's buckets, laid out once when DDP is made, and alike in every process that ever makes it.

A sum over ranks is taken in an order that depends on where in which bucket a gradient lies. DDP puts all
gradients into one bucket for its first step, then sorts them by the order in which they came, and goes on
with that: so a process that starts in the midst of a job sums its first step in another order than one that
went on, and the parameters differ in their last bits from there on.

Here both layouts are one. The parameters are handed to the reducer in the reverse of their order, which is
about the order in which gradients come, and it is told at once that this is the order in which they came: it
then makes the buckets that it would have made after the first step (the same limits, the small first bucket
too), says so to all ranks, and never sorts again. With ``find_unused_parameters`` (and no static graph) DDP
keeps the layout that it begins with, and is left alone.

`torch.nn.parallel.distributed` (2.13): ``DistributedDataParallel._ddp_init_helper`` and
``Reducer._rebuild_buckets``.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

_replicas: weakref.WeakSet[DistributedDataParallel] = weakref.WeakSet()
_plain = DistributedDataParallel._ddp_init_helper


def settle() -> None:
    """Have every DDP that this process makes from now on keep the buckets that it begins with."""
    DistributedDataParallel._ddp_init_helper = _begin  # type: ignore[method-assign]


def replicas() -> list[DistributedDataParallel]:
    """The modules wrapped in DDP since `settle` that are still there."""
    return list(_replicas)


def _begin(
    self: Any,
    parameters: list[torch.Tensor],
    sparse: list[bool],
    names: dict[int, str],
    static_graph: bool,
) -> None:
    _replicas.add(self)
    sorts = static_graph or not self.find_unused_parameters
    if not sorts or self._use_python_reducer:
        _plain(self, parameters, sparse, names, static_graph)
        return
    last = len(parameters) - 1
    _plain(self, parameters[::-1], sparse[::-1], {last - i: name for i, name in names.items()}, static_graph)
    if static_graph:
        self.reducer._set_static_graph()  # else one that looks for unused parameters does not sort
    self.reducer._push_all_rebuilt_params()
    self.reducer._rebuild_buckets()
