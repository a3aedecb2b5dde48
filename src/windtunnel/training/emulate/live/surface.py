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
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from windtunnel.cluster.model import Device
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
    _supply_functions(native, device, count)
    install_streams(native)
    _resize(native)
    _create()
    _print_from_host()
    _supply_tensor_types()
    cuda: Any = torch.cuda
    cuda._initialized = True
    cuda.is_bf16_supported = lambda including_emulation=True: (
        device.capability >= (8, 0) or including_emulation
    )
    cuda.default_generators = tuple(_default_generator(native, index) for index in range(count))
    torch._utils._get_available_device_type = lambda: "cuda"  # type: ignore[assignment]
    torch.backends.cuda.is_built = lambda: True
    torch.version.cuda = "13.0"


def _default_generator(native: ctypes.CDLL, index: int) -> torch.Generator:
    """The one that libtorch has for a device, as a Python object. `torch.cuda.random` works on these."""
    native.wt_default_generator_next()
    return torch.Generator(device=f"cuda:{index}")


def _supply_functions(native: ctypes.CDLL, device: Device, count: int) -> None:
    memory = int(device.memory_bytes)
    properties = DeviceProperties(device)

    def exchange(index: int) -> int:
        _check(index)
        return int(native.wt_exchange_device(index))

    def current() -> int:
        return int(native.wt_exchange_device(-1))

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
        return native.wt_stream(), current() if index is None or index < 0 else index, 1

    def set_stream(stream_id: int, device_index: int, device_type: int) -> None:
        torch._C._accelerator_setStream(  # the guard writes it down, for C++ and Python alike
            torch.Stream(stream_id=stream_id, device_index=device_index, device_type=device_type)
        )

    def synchronize() -> None:
        native.wt_event(7, native.wt_stream(), -1, 0)

    def reset_peak(index: int) -> None:
        native.wt_reset_peak()

    mode, fraction = [0], [1.0]
    functions: dict[str, Callable[..., Any]] = {
        "_cuda_getDeviceCount": lambda: count,
        "_cuda_getDevice": current,
        "_cuda_setDevice": set_device,
        "_cuda_exchangeDevice": exchange,
        "_cuda_maybeExchangeDevice": exchange,
        "_cuda_getCurrentStream": stream_triple,
        "_cuda_getDefaultStream": lambda index: (0, index, 1),
        "_cuda_getCurrentRawStream": lambda index: native.wt_stream(),
        "_cuda_setStream": set_stream,
        "_cuda_synchronize": synchronize,
        "_cuda_memoryStats": stats,
        "_cuda_resetPeakMemoryStats": reset_peak,
        "_cuda_get_sync_debug_mode": lambda: mode[0],
        "_cuda_set_sync_debug_mode": lambda value: mode.__setitem__(0, value),
        "_cuda_memorySnapshot": lambda *args, **kwargs: {"segments": [], "device_traces": []},
        "_cuda_setMemoryFraction": lambda value, device: fraction.__setitem__(0, value),
        "_cuda_getMemoryFraction": lambda device: fraction[0],
        "_accelerator_hooks_set_current_device": set_device,
        "_accelerator_getDeviceStats": stats,
        "_accelerator_getMemoryInfo": lambda index: torch.cuda.mem_get_info(index),
        "_accelerator_resetPeakStats": reset_peak,
    }
    functions |= {name: (lambda *args, **kwargs: None) for name in DO_NOTHING}
    functions |= {name: (lambda *args, value=value: value) for name, value in ANSWERS.items()}
    for name, function in functions.items():
        setattr(torch._C, name, function)
    cuda: Any = torch.cuda
    cuda._exchange_device = cuda._maybe_exchange_device = exchange
    cudnn: Any = torch.backends.cudnn
    cudnn.is_available = lambda: True
    cudnn.version = lambda: 91002
    modes = {"RNN_RELU": 0, "RNN_TANH": 1, "LSTM": 2, "GRU": 3}
    cudnn.rnn.get_cudnn_mode = modes.__getitem__
    cudnn.is_acceptable = lambda tensor: tensor.is_cuda and tensor.dtype in cudnn.CUDNN_TENSOR_DTYPES
    cuda._get_device_properties = lambda index: properties
    cuda._CudaDeviceProperties = DeviceProperties
    cuda.device_count = lambda: count
    cuda.is_available = lambda: True
    cuda.memory.mem_get_info = cuda.mem_get_info = lambda device=None: (
        max(0, memory - native.wt_allocated(0)),
        memory,
    )


def install_streams(native: ctypes.CDLL) -> None:
    """Replace ``torch.cuda``'s streams and events. Call once."""

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
    cuda: Any = torch.cuda
    for module in (cuda, cuda.streams):
        module.Stream, module.Event, module.ExternalStream = DeviceStream, DeviceEvent, ExternalStream

    cuda.set_stream = lambda stream: None if stream is None else torch.accelerator.set_stream(stream)
    index = cuda._utils._get_device_index
    cuda.current_stream = lambda device=None: DeviceStream(
        stream_id=native.wt_stream(), device_index=index(device, optional=True), device_type=1
    )
    cuda.default_stream = lambda device=None: DeviceStream(
        stream_id=0, device_index=index(device, optional=True), device_type=1
    )


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
