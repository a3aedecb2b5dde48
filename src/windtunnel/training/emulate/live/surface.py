"""Completes ``torch.cuda`` on a CPU-only build, so that scripts see the target's devices.

A CPU-only build keeps all Python of ``torch.cuda`` but none of the C functions underneath. Those are supplied
here, so that the Python above them runs as it is. Streams and events become the generic ``torch.Stream`` and
``torch.Event``, which work on any registered device: what they do is written down by the device's guard, in
C++; an event's time is not known while capturing.

Storages of the absent device can be resized, created, copied, printed and saved. They have no bytes. What is
read from them on the host (``print``, ``torch.save``) are zeros, or the values of the small
tensors that the host put there.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from windtunnel.cluster.model import Device
from windtunnel.training.emulate.graph import EventKind
from windtunnel.training.emulate.live import names
from windtunnel.training.emulate.live.native_library import unrecorded
from windtunnel.training.emulate.live.patches import replaces


class DeviceProperties(SimpleNamespace):
    """``torch.cuda.get_device_properties()``: those of a device of the cluster, printed as CUDA's are."""

    def __init__(self, device: Device) -> None:
        super().__init__(
            name=device.torch_name, major=device.capability[0], minor=device.capability[1],
            total_memory=int(device.memory_bytes), multi_processor_count=device.sm_count,
            L2_cache_size=device.l2_bytes, warp_size=32, is_integrated=False, is_multi_gpu_board=False,
            max_threads_per_multi_processor=2048, max_threads_per_block=1024, regs_per_multiprocessor=65536,
            shared_memory_per_block=49152, shared_memory_per_block_optin=232448,
            shared_memory_per_multiprocessor=233472, gcnArchName="",
            uuid="GPU-00000000-0000-0000-0000-000000000000", pci_bus_id=0, pci_device_id=0, pci_domain_id=0,
        )  # fmt: skip

    def __repr__(self) -> str:
        words = f"name={self.name!r}, major={self.major}, minor={self.minor}"
        mib = f"total_memory={self.total_memory >> 20}MB, L2_cache_size={self.L2_cache_size >> 20}MB"
        return (
            f"_CudaDeviceProperties({words}, multi_processor_count={self.multi_processor_count}, {mib}, "
            f"uuid={self.uuid})"
        )


DO_NOTHING = (
    "_accelerator_emptyCache", "_accelerator_emptyHostCache", "_accelerator_resetAccumulatedStats",
    "_cuda_emptyCache", "_cuda_init", "_cuda_ipc_collect", "_cuda_lock_mutex", "_cuda_record_memory_history",
    "_cuda_resetAccumulatedHostMemoryStats", "_cuda_resetAccumulatedMemoryStats",
    "_cuda_resetPeakHostMemoryStats", "_cuda_sleep", "_cuda_unlock_mutex", "_host_emptyCache",
    "_nccl_all_reduce",
)  # fmt: skip
ANSWERS: dict[str, Any] = {
    "_accelerator_isAllocatorInitialized": True, "_can_use_cudnn_attention": False,
    "_cuda_canDeviceAccessPeer": True, "_cuda_cudaCachingAllocator_is_enabled": True,
    "_cuda_getAllocatorBackend": "native", "_cuda_getArchFlags": "sm_80 sm_90 sm_100",
    "_cuda_getCompiledVersion": 13000, "_cuda_getCublasLtWorkspaceSize": 32 << 20,
    "_cuda_getCublasWorkspaceSize": 32 << 20, "_cuda_isInBadFork": False,
    "_is_flash_attention_available": True, "_nccl_unique_id": bytes(128),
    "_nccl_version": (2 << 32) | (27 << 16) | 5, "_nccl_version_suffix": b"",
}  # fmt: skip
"""Functions of ``torch._C`` that always answer the same; the size of workspaces is that of Hopper. Some are
there only so that what stands above them can be refused (`names`)."""


def install(native: ctypes.CDLL, device: Device, count: int) -> None:
    """Give torch CUDA devices, so many. Call once in a process, after torch is imported, before the script
    runs."""
    for name, answer in {**_functions(native, device, count), **_lesser(native), **_streams(native)}.items():
        names.put(name, answer)
    # the functions that it works on are there now
    generators = tuple(_default_generator(native, index) for index in range(count))
    names.put("torch.cuda.default_generators", generators)
    _resize(native)
    _create()
    _print_from_host()
    _supply_tensor_types()


def _default_generator(native: ctypes.CDLL, index: int) -> torch.Generator:
    """The one that libtorch has for a device, as a Python object. `torch.cuda.random` works on these."""
    native.wt_default_generator_next()
    return torch.Generator(device=f"cuda:{index}")


def _functions(native: ctypes.CDLL, device: Device, count: int) -> dict[str, Any]:
    """What is asked of the library underneath, and of a device's limits."""
    memory = int(device.memory_bytes)
    properties = DeviceProperties(device)

    def exchange(index: int) -> int:
        _check(index)
        return int(native.wt_exchange_device(index))

    def set_device(index: int) -> None:
        _check(index)
        native.wt_device(count, device.capability[0] * 10 + device.capability[1], index)

    def _check(index: int) -> None:
        if index >= count:
            raise RuntimeError(
                f"CUDA error: invalid device ordinal {index}: the emulated host has {count} devices"
            )

    def stats(index: int) -> dict[str, Any]:
        now, peak = native.wt_allocated(0), native.wt_allocated(1)
        used = {"current": now, "peak": peak, "allocated": peak, "freed": peak - now}
        unused = {"current": 0, "peak": 0, "allocated": 0, "freed": 0}
        pair = {"all": used, "large_pool": used, "small_pool": unused}
        zero = {"all": unused, "large_pool": unused, "small_pool": unused}
        same = ("allocated_bytes", "reserved_bytes", "active_bytes", "requested_bytes")
        none = ("segment", "allocation", "active", "inactive_split", "inactive_split_bytes")
        return {
            **dict.fromkeys(same, pair),
            **dict.fromkeys(none, zero),
            "oversize_allocations": unused, "oversize_segments": unused,
            "num_alloc_retries": 0, "num_ooms": 0, "num_device_alloc": 0, "num_device_free": 0,
            "max_split_size": -1,
        }  # fmt: skip

    def stream_triple(index: int) -> tuple[int, int, int]:
        return native.wt_stream(), exchange(-1) if index is None or index < 0 else index, 1

    def set_stream(stream_id: int, device_index: int, device_type: int) -> None:
        torch._C._accelerator_setStream(  # the guard writes it down, for C++ and Python alike
            torch.Stream(stream_id=stream_id, device_index=device_index, device_type=device_type)
        )

    mode, fraction = [0], [1.0]
    modes = {"RNN_RELU": 0, "RNN_TANH": 1, "LSTM": 2, "GRU": 3}
    dtypes: Any = torch.backends.cudnn.CUDNN_TENSOR_DTYPES
    below = {
        **dict.fromkeys(DO_NOTHING, lambda *args, **kwargs: None),
        **{name: (lambda *args, value=value: value) for name, value in ANSWERS.items()},
        "_cuda_getDeviceCount": lambda: count,
        "_cuda_getDevice": lambda: exchange(-1),
        "_cuda_setDevice": set_device,
        "_cuda_exchangeDevice": exchange,
        "_cuda_maybeExchangeDevice": exchange,
        "_cuda_getCurrentStream": stream_triple,
        "_cuda_getDefaultStream": lambda index: (0, index, 1),
        "_cuda_getCurrentRawStream": lambda index: native.wt_stream(),
        "_cuda_setStream": set_stream,
        "_cuda_synchronize": lambda: native.wt_event(int(EventKind.SYNC), native.wt_stream(), -1, 0),
        "_cuda_memoryStats": stats,
        "_cuda_resetPeakMemoryStats": lambda index: native.wt_reset_peak(),
        "_cuda_get_sync_debug_mode": lambda: mode[0],
        "_cuda_set_sync_debug_mode": lambda value: mode.__setitem__(0, value),
        "_cuda_memorySnapshot": lambda *args, **kwargs: {"segments": [], "device_traces": []},
        "_cuda_setMemoryFraction": lambda value, device: fraction.__setitem__(0, value),
        "_cuda_getMemoryFraction": lambda device: fraction[0],
        "_accelerator_hooks_set_current_device": set_device,
        "_accelerator_getDeviceStats": stats,
        "_accelerator_getMemoryInfo": lambda index: torch.cuda.mem_get_info(index),
        "_accelerator_resetPeakStats": lambda index: native.wt_reset_peak(),
        "_can_use_flash_attention": _usable(native, SDPBackend.FLASH_ATTENTION),
        "_can_use_mem_efficient_attention": _usable(native, SDPBackend.EFFICIENT_ATTENTION),
    }
    return {
        **{f"torch._C.{name}": function for name, function in below.items()},
        "torch._utils._get_available_device_type": lambda: "cuda",
        "torch.backends.cuda.is_built": lambda: True,
        "torch.backends.cudnn.is_acceptable": lambda tensor: tensor.is_cuda and tensor.dtype in dtypes,
        "torch.backends.cudnn.is_available": lambda: True,
        "torch.backends.cudnn.rnn.get_cudnn_mode": modes.__getitem__,
        "torch.backends.cudnn.version": lambda: 91002,
        "torch.cuda._CudaDeviceProperties": DeviceProperties,
        "torch.cuda._exchange_device": exchange,
        "torch.cuda._get_device_properties": lambda index: properties,
        "torch.cuda._initialized": True,
        "torch.cuda._maybe_exchange_device": exchange,
        "torch.cuda.device_count": lambda: count,
        "torch.cuda.is_available": lambda: True,
        "torch.cuda.is_bf16_supported": lambda including_emulation=True: (
            device.capability >= (8, 0) or including_emulation
        ),
        "torch.cuda.mem_get_info": lambda device=None: (max(0, memory - native.wt_allocated(0)), memory),
        "torch.version.cuda": "13.0",
    }


RANGES = (
    "rangePushA", "rangePop", "rangeStartA", "rangeEnd", "markA", "deviceRangeStart", "deviceRangeEnd",
)  # fmt: skip
"""What NVTX's module has; nobody sees them."""


def _lesser(native: ctypes.CDLL) -> dict[str, Any]:
    """What is seldom asked: of the runtime, NVTX, what only a driver knows."""
    numbers = itertools.count(1)
    index: Any = torch.cuda._utils._get_device_index  # type: ignore[attr-defined]
    unknown = [name for name, why in names.STOOD_IN.items() if why == names.NOBODY]
    return {
        **dict.fromkeys(unknown, lambda device=None: 0),
        "torch.backends.cuda.cuFFTPlanCache.clear": lambda self: None,
        "torch.backends.cuda.cuFFTPlanCache.max_size": 4096,
        "torch.backends.cuda.cuFFTPlanCache.size": 0,
        "torch.cuda._cudart": _runtime(native),
        "torch.cuda.device_memory_used": lambda device=None: native.wt_allocated(0),
        "torch.cuda.graphs._cuda_isCurrentStreamCapturing": lambda: False,
        "torch.cuda.graphs._graph_pool_handle": lambda: (0, next(numbers)),
        "torch.cuda.list_gpu_processes": lambda device=None: (
            f"GPU:{index(device, optional=True)}\nno processes are running"
        ),
        "torch.cuda.nvtx._nvtx": SimpleNamespace(**dict.fromkeys(RANGES, lambda *args: 0)),
    }


def _runtime(native: ctypes.CDLL) -> Any:
    """Stands for the CUDA runtime's module: what profilers and pinned memory ask of it succeeds."""

    class CudaStatus(int):  # ``cudaError``
        success = 0

    names = (
        "cudaProfilerStart", "cudaProfilerStop", "cudaHostRegister", "cudaHostUnregister", "cudaStreamCreate",
        "cudaStreamDestroy",
    )  # fmt: skip
    return SimpleNamespace(
        cudaError=CudaStatus,
        cudaGetErrorString=lambda code: f"error {int(code)}",
        cudaMemGetInfo=lambda device: torch.cuda.mem_get_info(device),
        **{name: (lambda *args: 0) for name in names},
    )


def _usable(native: ctypes.CDLL, backend: SDPBackend) -> Callable[..., bool]:
    """Whether a kernel of attention could be used is asked of what chooses the kernels (`device.cpp`)."""

    def can_use(params: Any, debug: bool = False) -> bool:
        with unrecorded(native), sdpa_kernel(backend):
            chosen = torch._fused_sdp_choice(
                params.query, params.key, params.value, params.attn_mask, params.dropout, params.is_causal,
                enable_gqa=params.enable_gqa,
            )  # fmt: skip
        return bool(chosen == backend.value)

    return can_use


def _streams(native: ctypes.CDLL) -> dict[str, Any]:
    """The streams and events of ``torch.cuda``."""

    class DeviceStream(torch.Stream):
        """``torch.cuda.Stream`` on the absent device."""

        _priority: int = 0

        def __new__(cls, device: Any = None, priority: int = 0, **kwargs: Any) -> DeviceStream:
            if "stream_id" in kwargs:
                return super().__new__(cls, **kwargs)
            stream = super().__new__(cls, device="cuda" if device is None else device, priority=priority)
            stream._priority = priority
            return stream

        def wait_event(self, event: Any) -> None:
            event.wait(self)

        def record_event(self, event: Any = None) -> Any:
            event = DeviceEvent() if event is None else event
            event.record(self)
            return event

        @staticmethod
        def priority_range() -> tuple[int, int]:
            return 0, -5

        @property
        def priority(self) -> int:
            return self._priority

        @property
        def cuda_stream(self) -> int:
            return self.stream_id

        @property
        def _as_parameter_(self) -> ctypes.c_void_p:
            return ctypes.c_void_p(self.cuda_stream)

        def __repr__(self) -> str:
            return f"<torch.cuda.Stream device={self.device} cuda_stream={self.cuda_stream:#x}>"

        def __eq__(self, other: object) -> bool:
            return isinstance(other, torch.Stream) and other.stream_id == self.stream_id

        def __hash__(self) -> int:
            return hash(("absent", self.stream_id))

    class ExternalStream(DeviceStream):
        """A stream of another library's: a class to ask for, refused where one is made (`names`)."""

    class DeviceEvent(torch.Event):
        """``torch.cuda.Event`` on the absent device. Elapsed time is not known while capturing: 1 ms."""

        def __new__(
            cls, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False, **_: Any
        ) -> DeviceEvent:
            return super().__new__(cls, device="cuda", enable_timing=enable_timing)

        def record(self, stream: Any = None) -> None:
            super().record(torch.cuda.current_stream() if stream is None else stream)

        def wait(self, stream: Any = None) -> None:
            super().wait(torch.cuda.current_stream() if stream is None else stream)

        @property
        def cuda_event(self) -> int:
            return self.event_id

        def elapsed_time(self, end_event: Any) -> float:
            return 1.0

    DeviceStream.__name__, DeviceEvent.__name__ = "Stream", "Event"  # as a script may print them
    index: Any = torch.cuda._utils._get_device_index  # type: ignore[attr-defined]

    def stream(number: int, device: Any) -> DeviceStream:
        return DeviceStream(stream_id=number, device_index=index(device, optional=True), device_type=1)

    return {
        "torch.cuda.Event": DeviceEvent,
        "torch.cuda.ExternalStream": ExternalStream,
        "torch.cuda.Stream": DeviceStream,
        "torch.cuda.current_stream": lambda device=None: stream(native.wt_stream(), device),
        "torch.cuda.default_stream": lambda device=None: stream(0, device),
        "torch.cuda.set_stream": lambda stream: (
            None if stream is None else torch.accelerator.set_stream(stream)
        ),
    }


def _resize(native: ctypes.CDLL) -> None:
    """FSDP frees and re-allocates gathered parameters with ``storage.resize_``, which no dispatcher sees."""

    @replaces(torch.UntypedStorage)
    def resize_(original: Any, self: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
        if self.device.type == "cuda":
            native.wt_storage_resize(self._cdata, int(size))
            return self
        original(self, size)
        return self


def _create() -> None:
    """A CPU-only build refuses to create a storage on a CUDA device, which ``copy.deepcopy`` and
    ``torch.load`` do."""

    @replaces(torch.UntypedStorage, "__new__")
    def new(original: Any, cls: type, *args: Any, device: Any = None, **kwargs: Any) -> Any:
        if device is not None and torch.device(device).type == "cuda":
            size = args[0] if args else kwargs.get("size", 0)
            return torch.empty(int(size), dtype=torch.uint8, device=device).untyped_storage()
        if device is not None:
            kwargs["device"] = device
        return original(cls, *args, **kwargs)


def _print_from_host() -> None:
    """Formatting looks at the values to choose digits, which is not possible on the device."""

    @replaces(torch._tensor_str)
    def _tensor_str(original: Any, tensor: torch.Tensor, indent: int) -> Any:
        return original(tensor.detach().cpu() if tensor.is_cuda else tensor, indent)


class _TensorType(type):
    """``torch.cuda.FloatTensor`` and its like: made by calling, asked of by ``isinstance``."""

    dtype: torch.dtype
    is_cuda = True
    is_sparse = False
    layout = torch.strided

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, torch.Tensor) and instance.is_cuda and instance.dtype == cls.dtype

    def __call__(cls, *contents: Any, device: Any = "cuda") -> torch.Tensor:
        if len(contents) == 1 and not isinstance(contents[0], int | torch.Size):
            return torch.as_tensor(contents[0], dtype=cls.dtype, device=device)
        return torch.empty(*contents or (0,), dtype=cls.dtype, device=device)


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
    on_device = False

    @replaces(torch)
    def set_default_tensor_type(original: Any, tensor_type: Any) -> None:
        nonlocal on_device
        name = tensor_type if isinstance(tensor_type, str) else getattr(tensor_type, "__name__", "")
        if name.startswith("torch.cuda."):
            torch.set_default_dtype(types[name.rpartition(".")[2]])
            torch.set_default_device("cuda")
            on_device = True
            return
        original(tensor_type)
        if on_device:
            torch.set_default_device(None)
            on_device = False
