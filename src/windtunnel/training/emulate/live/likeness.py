"""What tells whether micro-batches can be alike: inputs, what the host counts, what they leave behind."""

from __future__ import annotations

import itertools
import random
from typing import Any

import numpy as np
import torch
import torch.utils._pytree as pytree
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from windtunnel.training.emulate.live import failure

other = itertools.count()
"""Numbers for what is like nothing else."""


def signature(given: Any) -> list[Any]:
    """What a forward may do depends on this of its inputs; those on the host are like nothing else."""

    def of(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            local = leaf._local_tensor if isinstance(leaf, DTensor) else leaf
            return (leaf.shape, local.shape, local.stride(), leaf.dtype) if leaf.is_cuda else next(other)
        return repr(leaf) if leaf is None or isinstance(leaf, bool | int | float | str) else id(leaf)

    return [of(leaf) for leaf in pytree.tree_leaves(given)]


def keeps_parameters(module: torch.nn.Module) -> bool:
    """Whether a micro-batch leaves parameters and gradients as it found them, and no hook of the user's is
    there."""
    for part in module.modules():
        if isinstance(part, DistributedDataParallel | FullyShardedDataParallel):
            return False
        if isinstance(part, FSDPModule):
            groups = part._get_fsdp_state()._fsdp_param_groups
            if any(group.post_forward_mesh_info is not None for group in groups):
                return False
        hooks = (part._forward_hooks, part._forward_pre_hooks, part._backward_hooks, part._backward_pre_hooks)
        for hook in itertools.chain(*(each.values() for each in hooks)):
            code = getattr(getattr(hook, "func", hook), "__code__", None)
            if code is not None and failure.is_own(code.co_filename):
                return False
    return True


def host_state(module: torch.nn.Module) -> Any:
    """What a program may go by that counts micro-batches, or draws what each does."""
    kept = [
        (name, value if isinstance(value, int | float | str) else len(value))
        for part in module.modules()
        for name, value in vars(part).items()
        if isinstance(value, int | float | str | list | dict)
    ]
    return (
        kept,
        random.getstate(),
        np.random.get_state(legacy=False)["state"]["pos"],
        torch.get_rng_state().tolist(),
    )
