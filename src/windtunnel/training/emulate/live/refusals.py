"""What cannot be emulated, refused where the script asks for it.

A refusal is a `NotImplementedError` that begins with ``windtunnel:``; the worker puts the script's line
before it. Operators whose shape depends on data are refused in `shapes`, those without a shape function by
the native library.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch
import torch.cuda.graphs
import torch.distributed._symmetric_memory as symmetric
import torch.distributed.fsdp as fsdp
import torch.distributed.rpc as rpc

from windtunnel.training.emulate.live.failure import SIGN


def refuse(call: str, why: str) -> Callable[..., NoReturn]:
    """A function that refuses ``call``, in one sentence."""

    def refused(*args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError(f"{SIGN}{call} cannot be emulated because {why}")

    return refused


def install() -> None:
    """Refuse. Call once, before the script runs."""
    cuda: Any = torch.cuda
    why = "a graph replays work that the host does not issue; run the script without CUDA graphs"
    cuda.CUDAGraph = cuda.graphs.CUDAGraph = refuse("torch.cuda.CUDAGraph", why)
    cuda.graph = cuda.graphs.graph = refuse("torch.cuda.graph", why)
    cuda.make_graphed_callables = refuse("torch.cuda.make_graphed_callables", why)

    why = "its parameters and optimiser live in host memory, whose work is not modelled; leave offloading out"
    fsdp.CPUOffloadPolicy.__init__ = refuse("FSDP's CPUOffloadPolicy", why)  # type: ignore[method-assign]
    fsdp.CPUOffload.__setattr__ = _refuse_true("FSDP's CPUOffload(offload_params=True)", why)  # type: ignore

    why = "ranks would read each other's memory without a collective; leave symmetric memory (async TP) out"
    memory: Any = symmetric
    for name in ("enable_symm_mem_for_group", "empty", "rendezvous", "get_symm_mem_workspace"):
        if hasattr(memory, name):
            setattr(memory, name, refuse(f"torch.distributed._symmetric_memory.{name}", why))

    why = "remote calls run on ranks that are not there"
    remote: Any = rpc
    for name in ("init_rpc", "rpc_sync", "rpc_async", "remote"):
        if hasattr(remote, name):
            setattr(remote, name, refuse(f"torch.distributed.rpc.{name}", why))


def _refuse_true(call: str, why: str) -> Callable[..., None]:
    """For an option that is made by default, and refused only where it is set."""

    def assign(self: Any, name: str, value: Any) -> None:
        if value:
            refuse(call, why)()
        object.__setattr__(self, name, value)

    return assign
