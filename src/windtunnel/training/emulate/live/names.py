"""What becomes of every name of ``torch.cuda``, ``torch.accelerator`` and CUDA's back ends, and of what else
needs a device that is there, as one table.

A name is *real* (PyTorch's own Python, which works on the functions that `surface` and `answers` supply, and
says what holds on the emulated cluster), *stood in for* (it answers what no absent device can know, and the
report has a sentence), or *refused* where the script calls it, in a sentence that names the call and the
way out. A refusal is a `NotImplementedError` that begins with ``windtunnel:``; the worker puts the script's
line before it. Classes stay classes, for annotations, ``isinstance`` and subclasses. A name is listed once,
where PyTorch documents it: ``torch.cuda.memory.MemPool`` is ``torch.cuda.MemPool``.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from types import ModuleType
from typing import Any, NoReturn

import torch
from torch.distributed.fsdp import CPUOffload

from windtunnel.training.emulate.graph import NoteKind
from windtunnel.training.emulate.live.failure import SIGN

REAL = {
    "torch.cuda": """
        AcceleratorError CudaError DeferredCudaCallError OutOfMemoryError cudaStatus check_error Event
        Stream StreamContext current_stream default_stream set_stream stream synchronize _set_stream_by_id
        BFloat16Storage BoolStorage ByteStorage CharStorage ComplexDoubleStorage ComplexFloatStorage
        DoubleStorage FloatStorage HalfStorage IntStorage LongStorage ShortStorage BFloat16Tensor
        BoolTensor ByteTensor CharTensor DoubleTensor FloatTensor HalfTensor IntTensor LongTensor
        ShortTensor _is_compiled _is_in_bad_fork _lazy_call _lazy_init init ipc_collect is_available
        is_initialized can_device_access_peer current_device cudart device device_count device_of
        get_arch_list get_device_capability get_device_name get_device_properties get_gencode_flags
        has_half has_magma is_bf16_supported is_tf32_supported set_device get_sync_debug_mode
        set_sync_debug_mode default_generators get_rng_state get_rng_state_all initial_seed manual_seed
        manual_seed_all seed seed_all set_rng_state set_rng_state_all caching_allocator_alloc
        caching_allocator_delete empty_cache get_allocator_backend get_per_process_memory_fraction
        max_memory_allocated max_memory_cached max_memory_reserved mem_get_info memory_allocated
        memory_cached memory_reserved memory_stats memory_stats_as_nested_dict memory_summary
        device_memory_used reset_accumulated_memory_stats reset_accumulated_host_memory_stats
        reset_max_memory_allocated reset_max_memory_cached reset_peak_memory_stats
        reset_peak_host_memory_stats _POOL_HANDLE graph_pool_handle is_current_stream_capturing
        """,
    "torch.cuda.memory": "_record_memory_history",
    "torch.cuda._utils": "_get_device_index",
    "torch.cuda.amp": "GradScaler amp_definitely_not_available autocast custom_bwd custom_fwd",
    "torch.cuda.amp.common": "amp_definitely_not_available",
    "torch.cuda.nccl": "is_available unique_id version",
    "torch.cuda.nvtx": "mark range range_end range_pop range_push range_start",
    "torch.cuda.profiler": "profile start stop",
    "torch.cuda.tunable": """
        get_filename get_max_tuning_duration get_max_tuning_iterations get_results
        get_rotating_buffer_size get_validators is_enabled record_untuned_is_enabled set_filename
        set_max_tuning_duration set_max_tuning_iterations set_numerical_check_tolerances
        set_rotating_buffer_size tuning_is_enabled
        """,
    "torch.accelerator": """
        current_accelerator current_device_idx current_device_index current_stream device_count
        device_index empty_cache empty_host_cache get_device_capability get_memory_info is_available
        max_memory_allocated max_memory_reserved memory_allocated memory_reserved memory_stats
        reset_accumulated_memory_stats reset_peak_memory_stats set_device_idx set_device_index set_stream
        synchronize
        """,
    "torch.backends.cuda": """
        SDPAParams blas_workspace_size cuBLASModule cuFFTPlanCache cuFFTPlanCacheAttrContextProp
        cuFFTPlanCacheManager preferred_rocm_fa_library allow_fp16_bf16_reduction_math_sdp
        can_use_cudnn_attention can_use_efficient_attention can_use_flash_attention cublas_workspace_size
        cublaslt_workspace_size cudnn_sdp_enabled cufft_plan_cache enable_cudnn_sdp enable_flash_sdp
        enable_math_sdp enable_mem_efficient_sdp flash_sdp_enabled fp16_bf16_reduction_math_sdp_allowed
        is_built is_ck_sdpa_available is_flash_attention_available math_sdp_enabled matmul
        mem_efficient_sdp_enabled preferred_blas_library preferred_linalg_library sdp_kernel
        """,
    "torch.backends.cudnn": """
        allow_tf32 benchmark benchmark_limit deterministic enabled flags is_acceptable is_available rnn
        version
        """,
    "torch.backends.cusparselt": "is_available version get_max_alg_id",
}

_NOBODY = "no device is there to ask: 0 stands for it"
_HISTORY = "it is empty here; the report shows what lies in memory, and when"
_PINNED = "pinned memory is not counted: 0 stands for it"
_UNTUNED = "kernels are costed as the library chooses them, untuned"
STOOD_IN = {
    "torch.cuda.Event.elapsed_time": "no time is known while a job is captured: 1 ms stands for each",
    "torch.cuda.utilization": _NOBODY,
    "torch.cuda.temperature": _NOBODY,
    "torch.cuda.power_draw": _NOBODY,
    "torch.cuda.clock_rate": _NOBODY,
    "torch.cuda.memory_usage": _NOBODY,
    "torch.cuda.list_gpu_processes": "no process but this one is told",
    "torch.cuda.memory_snapshot": _HISTORY,
    "torch.cuda.memory._snapshot": _HISTORY,
    "torch.cuda.memory._dump_snapshot": _HISTORY,
    "torch.cuda.host_memory_stats": _PINNED,
    "torch.cuda.host_memory_stats_as_nested_dict": _PINNED,
    "torch.cuda.set_per_process_memory_fraction": "whether the job fits is said of the device's whole memory",
    "torch.cuda.MemPool": "a pool's blocks are emulated as those of the common pool",
    "torch.cuda.use_mem_pool": "a pool's blocks are emulated as those of the common pool",
    "torch.cuda._sleep": "it takes no time",
    "torch.cuda.tunable.enable": _UNTUNED,
    "torch.cuda.tunable.tuning_enable": _UNTUNED,
    "torch.cuda.tunable.record_untuned_enable": _UNTUNED,
}

_GRAPH = "a graph replays work that the host does not issue; run the script without CUDA graphs"
_FOREIGN = "work that another library puts there is not seen; use torch.cuda.Stream"
_ALLOCATOR = "memory is emulated as PyTorch's own caching allocator has it; leave its allocator in place"
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
    "torch.cuda.CUDAPluggableAllocator": _ALLOCATOR,
    "torch.cuda.change_current_allocator": _ALLOCATOR,
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
    "torch.cuda.tunable.read_file": _UNTUNED,
    "torch.cuda.tunable.tune_gemm_in_file": _UNTUNED,
    "torch.cuda.tunable.mgpu_tune_gemm_in_file": _UNTUNED,
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


def real() -> list[str]:
    """The names of `REAL`, whole."""
    return [f"{module}.{name}" for module, names in REAL.items() for name in names.split()]


def listed(name: str) -> str:
    """A name as the table has it: ``torch.cuda.MemPool`` for ``torch.cuda.memory.MemPool``."""
    module, _, last = name.rpartition(".")
    shown = f"{SAME.get(module, module)}.{last}"
    return name if name in STOOD_IN or name in REFUSED or name in real() else shown


def refuse(call: str, why: str) -> Callable[..., NoReturn]:
    """A function that refuses ``call``, in one sentence."""

    def refused(*args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError(f"{SIGN}{call} cannot be emulated because {why}")

    return refused


def find(name: str) -> tuple[Any, str] | None:
    """The module or class that holds a name, and the name in it; None where this PyTorch has none."""
    holder: Any = torch
    done = "torch"
    *parts, last = name.split(".")[1:]
    for part in parts:
        done += f".{part}"
        if not hasattr(holder, part):
            try:
                importlib.import_module(done)
            except ImportError:
                return None
        holder = getattr(holder, part)
    return (holder, last) if hasattr(holder, last) else None


def install(note: Callable[[str, NoteKind], None]) -> None:
    """Refuse, and tell of what is stood in for. ``note`` takes a sentence for the report. Call once, when all
    else is in place and before the script runs."""
    for name, why in REFUSED.items():
        _change(name, functools.partial(_refused, name, why))
    _refuse_offload()
    for name, sentence in STOOD_IN.items():
        _change(name, functools.partial(_told, f"{name}: {sentence}", note))


def _change(name: str, change: Callable[[Any], Any]) -> None:
    """Put ``change`` of what a name means in its place, wherever PyTorch has it."""
    found = find(name)
    if found is None:
        return
    holder, last = found
    before = getattr(holder, last)
    after = change(before)
    module = holder.__name__ if isinstance(holder, ModuleType) else ""
    also = [importlib.import_module(other) for other, same in SAME.items() if same == module]
    places = [holder, *(place for place in also if getattr(place, last, None) is before)]
    for place in places:
        setattr(place, last, after)


def _refuse_offload() -> None:
    """It is made by default, and refused only where it is set."""

    def assign(self: Any, name: str, value: Any) -> None:
        if value:
            refuse("torch.distributed.fsdp.CPUOffload(offload_params=True)", _OFFLOADED)()
        object.__setattr__(self, name, value)

    CPUOffload.__setattr__ = assign  # type: ignore[method-assign, assignment]


def _refused(name: str, why: str, before: Any) -> Any:
    if not isinstance(before, type):
        return refuse(name, why)
    before.__new__ = refuse(name, why)  # type: ignore[method-assign]
    return before


def _told(sentence: str, note: Callable[[str, NoteKind], None], before: Any) -> Any:
    function = before.__init__ if isinstance(before, type) else before  # type: ignore[misc]

    @functools.wraps(function)
    def told(*args: Any, **kwargs: Any) -> Any:
        note(sentence, NoteKind.APPROXIMATION)
        return function(*args, **kwargs)

    if not isinstance(before, type):
        return told
    before.__init__ = told  # type: ignore[misc]
    return before
