"""Collectives that take no time, for a step's own time in the world in which it runs otherwise.

PyTorch calls them as operators ``c10d::…``, which are replaced on CPU tensors: each returns at once, with a
call that gloo has done in a group of one rank. What is gathered are copies of the own part, what is scattered
is a part of the own; all else stays as it is. Groups must be there already: no rank hears another any more.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch._C._distributed_c10d import HashStore, ProcessGroupGloo

NAMES = (
    "_allgather_base_", "_reduce_scatter_base_", "allgather_", "allgather_coalesced_",
    "allgather_into_tensor_coalesced_", "allreduce_", "allreduce_coalesced_", "alltoall_", "alltoall_base_",
    "barrier", "broadcast_", "gather_", "monitored_barrier_", "recv_", "recv_any_source_", "reduce_",
    "reduce_scatter_", "reduce_scatter_tensor_coalesced_", "scatter_", "send",
)  # fmt: skip
_library = torch.library.Library("c10d", "IMPL")


def silence() -> None:
    """From now on, in this process."""
    alone = ProcessGroupGloo(HashStore(), 0, 1, timedelta(seconds=60))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that operators are replaced
        for name in NAMES:
            _library.impl(name, _silent(name, alone), "CPU")


def _silent(name: str, alone: Any) -> Callable[..., Any]:
    returns = len(getattr(torch.ops.c10d, name).default._schema.returns)

    def call(outputs: Any, inputs: Any, *_: Any) -> Any:
        if name == "_allgather_base_":
            outputs.view(-1, inputs.numel()).copy_(inputs.reshape(1, -1).clone())  # it may be a part of them
        elif name == "_reduce_scatter_base_":
            outputs.view(-1).copy_(inputs.reshape(-1)[: outputs.numel()].clone())
        elif name == "allgather_":
            for parts, source in zip(outputs, inputs, strict=True):
                for part in parts:
                    part.copy_(source)
        # DDP takes the tensors from the future of the call
        work = alone.allreduce(outputs) if name == "allreduce_" else alone.barrier()
        return (outputs, work.boxed()) if returns == 2 else work.boxed() if returns else None

    return call
