"""What `torch.cuda`'s lesser functions answer on the emulated cluster: memory pools, allocator statistics of
``torch.accelerator``, tuning, attention's checks, and the old tensor types. `names` says which name is which.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
import torch.cuda.memory
import torch.cuda.tunable
from torch.nn.attention import SDPBackend, sdpa_kernel


def install(native: ctypes.CDLL) -> None:
    """Supply them. Call once, after `surface.install`."""
    _supply_memory()
    _supply_tuning()
    _supply_attention(native)
    _supply_tensor_types()
    functions: dict[str, Callable[..., Any]] = {
        "_nccl_all_reduce": lambda *args: None,  # there, as a CUDA build has it; `names` refuses the call
        "_nccl_unique_id": lambda: bytes(128),
        "_cuda_sleep": lambda cycles: None,
    }
    for name, function in functions.items():
        setattr(torch._C, name, function)
    cuda: Any = torch.cuda
    cuda._cudart = _runtime(native)
    cuda.nvtx._nvtx = _Ranges()
    for name in ("utilization", "temperature", "power_draw", "clock_rate", "memory_usage"):
        setattr(cuda, name, lambda device=None: 0)
    cuda.device_memory_used = lambda device=None: native.wt_allocated(0)
    for module in (cuda, cuda.memory):
        module.list_gpu_processes = lambda device=None: (
            f"GPU:{cuda._utils._get_device_index(device, optional=True)}\nno processes are running"
        )


def _runtime(native: ctypes.CDLL) -> Any:
    """Stands for the CUDA runtime's module: what profilers and pinned memory ask of it succeeds."""

    class Status(int):  # ``cudaError``
        success = 0

    names = (
        "cudaProfilerStart", "cudaProfilerStop", "cudaHostRegister", "cudaHostUnregister", "cudaStreamCreate",
        "cudaStreamDestroy",
    )  # fmt: skip
    return SimpleNamespace(
        cudaError=Status,
        cudaGetErrorString=lambda code: f"error {int(code)}",
        cudaMemGetInfo=lambda device: torch.cuda.mem_get_info(device),
        **{name: (lambda *args: 0) for name in names},
    )


class _Ranges:
    """Stands for NVTX: ranges are numbered, and nobody sees them."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self._depth = 0

    def rangePushA(self, name: str) -> int:
        self._depth += 1
        return self._depth - 1

    def rangePop(self) -> int:
        self._depth -= self._depth > 0
        return self._depth

    def rangeStartA(self, name: str, *stream: Any) -> int:
        return next(self._numbers)

    def rangeEnd(self, number: int) -> None:
        pass

    def markA(self, name: str) -> None:
        pass

    deviceRangeStart, deviceRangeEnd = rangeStartA, rangeEnd


class MemPool:
    """``torch.cuda.MemPool``: a number. Its blocks are those of the common pool."""

    _numbers = itertools.count(1)

    def __init__(self, allocator: Any = None, use_on_oom: bool = False, no_split: bool = False) -> None:
        self.allocator = allocator
        self.id = (0, next(self._numbers))

    def use_count(self) -> int:
        return 1

    def snapshot(self, include_traces: bool = True) -> list[Any]:
        return []


def _supply_memory() -> None:
    taken: dict[int, torch.UntypedStorage] = {}  # by caching_allocator_alloc, by address

    def allocate(size: int, stream: int) -> int:
        storage = torch.empty(size, dtype=torch.uint8, device="cuda").untyped_storage()
        taken[storage.data_ptr()] = storage
        return storage.data_ptr()

    def host_statistics() -> dict[str, Any]:
        none = {"current": 0, "peak": 0, "allocated": 0, "freed": 0}
        times = {"total": 0, "max": 0, "min": 0, "count": 0, "avg": 0}
        return {
            **dict.fromkeys(("allocations", "segments", "allocated_bytes", "reserved_bytes"), none),
            **dict.fromkeys(("host_alloc_time", "host_free_time"), times),
            "num_host_alloc": 0, "num_host_free": 0,
        }  # fmt: skip

    functions: dict[str, Callable[..., Any]] = {
        "_cuda_cudaCachingAllocator_raw_alloc": allocate,
        "_cuda_cudaCachingAllocator_raw_delete": taken.__delitem__,
        "_cuda_cudaCachingAllocator_is_enabled": lambda: True,
        "_cuda_hostMemoryStats": host_statistics,
        "_cuda_resetAccumulatedHostMemoryStats": lambda: None,
        "_cuda_resetPeakHostMemoryStats": lambda: None,
        "_host_emptyCache": lambda: None,
        "_accelerator_isAllocatorInitialized": lambda: True,
        "_accelerator_emptyCache": lambda: None,
        "_accelerator_emptyHostCache": lambda: None,
        "_accelerator_getDeviceStats": torch._C._cuda_memoryStats,
        "_accelerator_getMemoryInfo": lambda index: torch.cuda.mem_get_info(index),
        "_accelerator_resetAccumulatedStats": lambda index: None,
        "_accelerator_resetPeakStats": torch._C._cuda_resetPeakMemoryStats,
        "_cuda_getCublasWorkspaceSize": lambda: 32 << 20,  # bytes, of Hopper
        "_cuda_getCublasLtWorkspaceSize": lambda: 32 << 20,
    }
    for name, function in functions.items():
        setattr(torch._C, name, function)
    fraction = {"set": 1.0}
    torch._C._cuda_setMemoryFraction = lambda value, device: fraction.update(set=value)  # type: ignore[assignment]
    torch._C._cuda_getMemoryFraction = lambda device: fraction["set"]

    @contextmanager
    def use_mem_pool(pool: Any, device: Any = None) -> Any:
        yield

    cuda: Any = torch.cuda
    for module in (cuda, cuda.memory):
        module.MemPool, module.use_mem_pool = MemPool, use_mem_pool
    numbers = itertools.count(1)
    cuda.graphs._graph_pool_handle = lambda: (0, next(numbers))
    cuda.graphs._cuda_isCurrentStreamCapturing = lambda: False
    cache: Any = torch.backends.cuda.cuFFTPlanCache
    cache.size, cache.max_size, cache.clear = 0, 4096, lambda self: None


def _supply_tuning() -> None:
    """``torch.cuda.tunable`` remembers what it is told."""
    kept: dict[str, Any] = {
        "enable": False, "tuning_enable": True, "filename": "tunableop_results.csv",
        "max_tuning_duration": 30, "max_tuning_iterations": 100, "rotating_buffer_size": -1,
    }  # fmt: skip
    native: Any = torch._C

    def keep(key: str) -> Callable[..., None]:
        return lambda value, *more: kept.update({key: value})

    for key in kept:
        prefix = "set_" if not key.endswith("enable") else ""
        setattr(native, f"_cuda_tunableop_{prefix}{key}", keep(key))
        setattr(native, f"_cuda_tunableop_get_{key}", lambda key=key: kept[key])
    native._cuda_tunableop_is_enabled = lambda: kept["enable"]
    native._cuda_tunableop_tuning_is_enabled = lambda: kept["tuning_enable"]
    native._cuda_record_untuned_enable = keep("record")
    native._cuda_record_untuned_is_enabled = lambda: kept.get("record", False)
    native._cuda_tunableop_set_numerical_check_tolerances = keep("tolerances")
    native._cuda_tunableop_get_results = native._cuda_tunableop_get_validators = tuple


def _supply_attention(native: ctypes.CDLL) -> None:
    """Whether a kernel could be used is asked of what chooses the kernels (`device.cpp`)."""

    def usable(backend: SDPBackend) -> Callable[..., bool]:
        def can_use(params: Any, debug: bool = False) -> bool:
            native.wt_pause(1)
            try:
                with sdpa_kernel(backend):
                    chosen = torch._fused_sdp_choice(
                        params.query, params.key, params.value, params.attn_mask, params.dropout,
                        params.is_causal, enable_gqa=params.enable_gqa,
                    )  # fmt: skip
            finally:
                native.wt_pause(-1)
            return bool(chosen == backend.value)

        return can_use

    below: Any = torch._C
    below._can_use_flash_attention = usable(SDPBackend.FLASH_ATTENTION)
    below._can_use_mem_efficient_attention = usable(SDPBackend.EFFICIENT_ATTENTION)
    below._can_use_cudnn_attention = lambda params, debug=False: False
    below._is_flash_attention_available = lambda: True


class _TensorType(type):
    """``torch.cuda.FloatTensor`` and its like: made by calling, asked of by ``isinstance``."""

    dtype: torch.dtype
    is_cuda = True
    is_sparse = False
    layout = torch.strided

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, torch.Tensor) and instance.is_cuda and instance.dtype == cls.dtype

    def __call__(cls, *given: Any, device: Any = "cuda") -> torch.Tensor:
        if len(given) == 1 and not isinstance(given[0], int | torch.Size):
            return torch.as_tensor(given[0], dtype=cls.dtype, device=device)
        return torch.empty(*given or (0,), dtype=cls.dtype, device=device)


def _supply_tensor_types() -> None:
    types = {
        "BFloat16Tensor": torch.bfloat16, "BoolTensor": torch.bool, "ByteTensor": torch.uint8,
        "CharTensor": torch.int8, "DoubleTensor": torch.float64, "FloatTensor": torch.float32,
        "HalfTensor": torch.float16, "IntTensor": torch.int32, "LongTensor": torch.int64,
        "ShortTensor": torch.int16,
    }  # fmt: skip
    for name, dtype in types.items():
        # libtorch reads a type's whole name, as ``tensor.type(torch.cuda.HalfTensor)`` gives it
        setattr(torch.cuda, name, _TensorType(f"torch.cuda.{name}", (), {"dtype": dtype}))
    original = torch.set_default_tensor_type
    on_device = False

    def set_default_tensor_type(given: Any) -> None:
        nonlocal on_device
        name = given if isinstance(given, str) else getattr(given, "__name__", "")
        if name.startswith("torch.cuda."):
            torch.set_default_dtype(types[name.rpartition(".")[2]])
            torch.set_default_device("cuda")
            on_device = True
            return
        original(given)
        if on_device:
            torch.set_default_device(None)
            on_device = False

    torch.set_default_tensor_type = set_default_tensor_type
