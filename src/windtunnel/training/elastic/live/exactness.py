"""What keeps the results of a process that trains the same each time, and what can be seen of the rest.

DDP's buckets are laid out once when DDP is made, and alike in every process that ever makes it. A sum over
ranks is taken in an order that depends on where in which bucket a gradient lies. DDP puts all gradients into
one bucket for its first step, then sorts them by the order in which they came, and goes on with that: so a
process that starts in the midst of a job sums its first step in another order than one that went on, and the
parameters differ in their last bits from there on.

Here both layouts are one (`settle`). The parameters are handed to the reducer in the reverse of their order,
which is about the order in which gradients come, and it is told at once that this is the order in which they
came: it then makes the buckets that it would have made after the first step (the same limits, the small first
bucket too), says so to all ranks, and never sorts again. With ``find_unused_parameters`` (and no static
graph) DDP keeps the layout that it begins with, and is left alone.

`torch.nn.parallel.distributed` (2.13): ``DistributedDataParallel._ddp_init_helper`` and
``Reducer._rebuild_buckets``.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

_replicas: weakref.WeakSet[DistributedDataParallel] = weakref.WeakSet()
_plain = DistributedDataParallel._ddp_init_helper


def settle() -> None:
    """Have every DDP that this process makes from now on keep the buckets that it begins with."""
    DistributedDataParallel._ddp_init_helper = _begin  # type: ignore[method-assign]


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


# States of DDP's communication hooks that change nothing from step to step.
_STATELESS = ("_AllreduceUpcastHookState", "MixedPrecisionPolicy")


def doubts() -> list[str]:
    """Sentences, each of which says why a step that is done again may give other bits; as far as it is seen
    now."""
    reasons = []
    fixed = torch.are_deterministic_algorithms_enabled()
    cuda = torch.cuda.is_available() and torch.cuda.is_initialized()
    if cuda and not fixed:
        reasons.append("kernels of CUDA may sum in any order (torch.use_deterministic_algorithms is not on)")
    if cuda and torch.backends.cudnn.benchmark and not fixed:
        reasons.append("torch.backends.cudnn.benchmark chooses kernels by how long they take")
    if not cuda and not fixed and torch.get_num_threads() > 1:
        reasons.append(
            f"{torch.get_num_threads()} threads of an operator may add up in any order "
            "(torch.use_deterministic_algorithms is not on)"
        )
    for replica in _replicas:
        if getattr(replica, "_has_rebuilt_buckets", False) or replica._use_python_reducer:
            reasons.append("DDP sorts its gradients by the time at which they come")
        for hook, state in getattr(replica, "_comm_hooks", ()):
            if state is not None and not isinstance(state, dist.ProcessGroup):
                kind = type(state).__name__
                if kind not in _STATELESS and not getattr(state, "saved", False):
                    name = getattr(hook, "__name__", kind)
                    reasons.append(f"the {kind} of DDP's communication hook {name} is not saved")
    return list(dict.fromkeys(reasons))
