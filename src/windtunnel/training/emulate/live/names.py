"""What becomes of every name of ``torch.cuda``, ``torch.accelerator`` and CUDA's back ends, and of what else
needs a device that is there, as two tables.

A name is *real* where it is in neither table (PyTorch's own Python, which works on the functions that
`surface` supplies, and says what holds on the emulated cluster), *stood in for* (it
answers what no absent device can know, and the report has a sentence), or *refused* where the script calls
it, in a sentence that names the call and the way out. A refusal is a `NotImplementedError` that begins with
``windtunnel:``; the worker puts the script's line before it. Classes stay classes, for annotations,
``isinstance`` and subclasses. A name is listed once, where PyTorch documents it:
``torch.cuda.memory.MemPool`` is ``torch.cuda.MemPool``.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from types import ModuleType
from typing import Any, NoReturn

import torch
import torch.cuda.memory
import torch.cuda.tunable
from torch.distributed.fsdp import CPUOffload

from windtunnel.training.emulate.graph import NoteKind
from windtunnel.training.emulate.live.failure import SIGN
from windtunnel.training.emulate.live.patches import replaces

NOBODY = "no device is there to ask: 0 stands for it"
_HISTORY = "it is empty here; the report shows what lies in memory, and when"
STOOD_IN = {
    "torch.cuda.Event.elapsed_time": "no time is known while a job is captured: 1 ms stands for each",
    "torch.cuda.utilization": NOBODY,
    "torch.cuda.temperature": NOBODY,
    "torch.cuda.power_draw": NOBODY,
    "torch.cuda.clock_rate": NOBODY,
    "torch.cuda.memory_usage": NOBODY,
    "torch.cuda.list_gpu_processes": "no process but this one is told",
    "torch.cuda.memory_snapshot": _HISTORY,
    "torch.cuda.memory._snapshot": _HISTORY,
    "torch.cuda.memory._dump_snapshot": _HISTORY,
    "torch.cuda.set_per_process_memory_fraction": "whether the job fits is said of the device's whole memory",
    "torch.cuda._sleep": "it takes no time",
}

_GRAPH = "a graph replays work that the host does not issue; run the script without CUDA graphs"
_FOREIGN = "work that another library puts there is not seen; use torch.cuda.Stream"
_ALLOCATOR = "memory is emulated as PyTorch's own caching allocator has it; leave its allocator in place"
_POOL = "its blocks would be apart from the common pool's; leave pools of your own out"
_PINNED = "pinned memory is not counted; leave the question out"
_UNTUNED = "kernels are costed as the library chooses them, untuned"
_HANDLE = "a library that is called past PyTorch is not seen; use PyTorch's operators"
_SEVERAL = "a rank drives one device; use torch.distributed, with a process for each device"
_DIRECT = "there is no memory that a disk could reach; use torch.save"
_OFFLOADED = (
    "its parameters and optimiser live in host memory, whose work is not modelled; leave offloading out"
)
_SYMMETRIC = (
    "ranks would read each other's memory without a collective; leave symmetric memory (async TP) out"
)
_REMOTE = "remote calls run on ranks that are not there"
_SHARED = "another process would reach into this one's device; let each rank have what it needs"
REFUSED = {
    "torch.cuda.CUDAGraph": _GRAPH,
    "torch.cuda.graph": _GRAPH,
    "torch.cuda.make_graphed_callables": _GRAPH,
    "torch.accelerator.Graph": _GRAPH,
    "torch.cuda.ExternalStream": _FOREIGN,
    "torch.cuda.get_stream_from_external": _FOREIGN,
    "torch.cuda.GreenContext": "a kernel has the whole device here; use torch.cuda.Stream",
    "torch.cuda.Event.ipc_handle": _SHARED,
    "torch.cuda.Event.from_ipc_handle": _SHARED,
    "torch.cuda.MemPool": _POOL,
    "torch.cuda.use_mem_pool": _POOL,
    "torch.cuda.CUDAPluggableAllocator": _ALLOCATOR,
    "torch.cuda.change_current_allocator": _ALLOCATOR,
    "torch.cuda.caching_allocator_alloc": _HANDLE,
    "torch.cuda.caching_allocator_delete": _HANDLE,
    "torch.cuda.host_memory_stats": _PINNED,
    "torch.cuda.host_memory_stats_as_nested_dict": _PINNED,
    "torch.cuda.caching_allocator_enable": _ALLOCATOR,
    "torch.cuda.caching_allocator_disabled": _ALLOCATOR,
    "torch.cuda.memory._set_allocator_settings": "its settings are read before the script starts; set "
    "PYTORCH_CUDA_ALLOC_CONF in the environment",
    "torch._C._accelerator_setAllocatorSettings": "its settings are read before the script starts; set "
    "PYTORCH_CUDA_ALLOC_CONF in the environment",
    "torch.cuda.current_blas_handle": _HANDLE,
    "torch.cuda.current_solver_handle": _HANDLE,
    "torch.cuda.jiterator._create_jit_fn": "a kernel from its source has no cost; use PyTorch's operators",
    "torch.cuda.jiterator._create_multi_output_jit_fn": "a kernel from its source has no cost; use PyTorch's "
    "operators",
    **{f"torch.cuda.tunable.{name}": _UNTUNED for name in torch.cuda.tunable.__all__},
    "torch.cuda.gds.GdsFile": _DIRECT,
    "torch.cuda.gds.gds_register_buffer": _DIRECT,
    "torch.cuda.gds.gds_deregister_buffer": _DIRECT,
    "torch.cuda.nccl.init_rank": _SEVERAL,
    **{
        f"torch.cuda.{name}": _SEVERAL
        for name in (
            "nccl.all_gather", "nccl.all_reduce", "nccl.broadcast", "nccl.reduce", "nccl.reduce_scatter",
            "comm.broadcast", "comm.broadcast_coalesced", "comm.gather", "comm.reduce_add",
            "comm.reduce_add_coalesced", "comm.scatter",
        )
    },
    "torch.distributed.fsdp.CPUOffloadPolicy": _OFFLOADED,
    **{
        f"torch.distributed._symmetric_memory.{name}": _SYMMETRIC
        for name in ("enable_symm_mem_for_group", "empty", "rendezvous", "get_symm_mem_workspace")
    },
    **{
        f"torch.distributed.rpc.{name}": _REMOTE for name in ("init_rpc", "rpc_sync", "rpc_async", "remote")
    },
}  # fmt: skip

SAME = {
    "torch.cuda.memory": "torch.cuda", "torch.cuda.random": "torch.cuda", "torch.cuda.streams": "torch.cuda",
    "torch.cuda.graphs": "torch.cuda", "torch.cuda.green_contexts": "torch.cuda",
    "torch.accelerator.memory": "torch.accelerator", "torch.accelerator.graphs": "torch.accelerator",
    "torch.nn.parallel.comm": "torch.cuda.comm",
}  # fmt: skip
"""Modules whose names are those of another, where that has them too."""


def refuse(call: str, why: str) -> Callable[..., NoReturn]:
    """A function that refuses ``call``, in one sentence."""

    def refused(*args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError(f"{SIGN}{call} cannot be emulated because {why}")

    return refused


def find(name: str) -> tuple[Any, str] | None:
    """The module or class that holds a name, and the name in it; None where this PyTorch has none."""
    holder = _holder(name)
    last = name.rpartition(".")[2]
    return (holder, last) if hasattr(holder, last) else None


def _holder(name: str) -> Any:
    """What holds a name, or would; None where this PyTorch has not that either."""
    holder: Any = torch
    done = "torch"
    for part in name.split(".")[1:-1]:
        done += f".{part}"
        if not hasattr(holder, part):
            try:
                importlib.import_module(done)
            except ImportError:
                return None
        holder = getattr(holder, part)
    return holder


def put(name: str, value: Any) -> None:
    """Let a name mean this, wherever PyTorch has what it means."""
    holder, last = _holder(name), name.rpartition(".")[2]
    before = getattr(holder, last, value)
    module = holder.__name__ if isinstance(holder, ModuleType) else ""
    also = [importlib.import_module(other) for other, same in SAME.items() if same == module]
    for place in (holder, *(place for place in also if getattr(place, last, None) is before)):
        setattr(place, last, value)


def install(note: Callable[[str, NoteKind], None]) -> None:
    """Refuse, and tell of what is stood in for. ``note`` takes a sentence for the report. Call once, when all
    else is in place and before the script runs."""
    for name, why in REFUSED.items():
        if (target := find(name)) is not None:
            put(name, _refused(name, why, getattr(*target)))
    _refuse_offload()
    _scatter_to_one()
    for name, sentence in STOOD_IN.items():
        if (target := find(name)) is not None:
            put(name, _reporting(f"{name}: {sentence}", note, getattr(*target)))


def _refuse_offload() -> None:
    """It is made by default, and refused only where it is set."""

    @replaces(CPUOffload, "__setattr__")
    def assign(original: Any, self: Any, name: str, value: Any) -> None:
        if value:
            refuse("torch.distributed.fsdp.CPUOffload(offload_params=True)", _OFFLOADED)()
        original(self, name, value)


def _scatter_to_one() -> None:
    """``DataParallel`` on the one device of a rank puts there what it is given, and calls its module."""
    several = refuse("torch.cuda.comm.scatter", _SEVERAL)

    def scatter(tensor: Any = None, devices: Any = None, *args: Any, **kwargs: Any) -> Any:
        if devices is None or len(devices) != 1:
            several()
        return (tensor.to(torch.device("cuda", devices[0]), non_blocking=True),)

    put("torch.cuda.comm.scatter", scatter)


def _refused(name: str, why: str, before: Any) -> Any:
    if not isinstance(before, type):
        return refuse(name, why)
    before.__new__ = refuse(name, why)  # type: ignore[method-assign]
    return before


def _reporting(sentence: str, note: Callable[[str, NoteKind], None], before: Any) -> Any:
    function = before.__init__ if isinstance(before, type) else before  # type: ignore[misc]

    @functools.wraps(function)
    def reported_init(*args: Any, **kwargs: Any) -> Any:
        note(sentence, NoteKind.APPROXIMATION)
        return function(*args, **kwargs)

    if not isinstance(before, type):
        return reported_init
    before.__init__ = reported_init  # type: ignore[misc]
    return before
