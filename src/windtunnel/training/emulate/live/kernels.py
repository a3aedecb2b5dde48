"""Kernels that the script brings, for a device that is not there: recorded where they are launched.

Operators of the script (``torch.library.custom_op``) are answered by their fake implementation, which says
what comes out. Those made with ``torch.library.triton_op`` run as they are: what they launch is recorded.
Either is written down under its own name and costed by the bytes that it reads and writes.

*Triton*: kernels are written, decorated and launched. A launch is an operator of the kernel's name with its
arguments. Its outputs are tensors that the script has made and the kernel fills, so nothing has to be known
of what it computes. Triton has to be installed, which the CPU build of PyTorch does not bring with it.
``torch.utils._triton.has_triton()`` says no: it is asked by code which is about to compile, and a library
that has another way takes it, in known operators.

*DeepSpeed* calls nvcc when it first needs a kernel. A stand-in takes the compiled module's place where it is
known what its functions read and write, and the others are refused. Ops for the host are built as they are.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch._library.custom_ops import CustomOpDef

from windtunnel.base.importing import after_import
from windtunnel.training.emulate.graph import NoteKind
from windtunnel.training.emulate.live.host import tensors_of
from windtunnel.training.emulate.live.names import refuse
from windtunnel.training.emulate.live.observe import Observer
from windtunnel.training.emulate.live.patches import replaces

ON_DEVICE = (None, "cuda")  # device types for which an implementation may be registered that the device runs
RUN_AS_THEY_ARE = "torch._library.triton"
"""The module of the implementations that `torch.library.triton_op` makes."""


def install_operators(observer: Observer) -> None:
    """Let fake implementations stand for kernels wherever there is one. Call once."""

    def stand_in(operator: Any, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if not any(tensor.is_cuda for tensor in tensors_of((args, kwargs))):
                return real(*args, **kwargs)
            out = operator._abstract_fn(*args, **kwargs)
            observer.launches.record(str(operator._opoverload), (*args, *kwargs.values()), tensors_of(out))
            return out

        call.stands_in = True  # type: ignore[attr-defined]
        return call

    def replace(operator: Any) -> None:
        for kind in ON_DEVICE:
            real = operator._backend_fns.get(kind)
            if real is None or operator._abstract_fn is None:
                continue
            if not hasattr(real, "stands_in") and operator._init_fn.__module__ != RUN_AS_THEY_ARE:
                operator._backend_fns[kind] = stand_in(operator, real)

    @replaces(CustomOpDef)
    def register_fake(original: Any, self: Any, fn: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, fn, *args, **kwargs)
        replace(self)
        return result

    @replaces(CustomOpDef)
    def register_kernel(original: Any, self: Any, device_types: Any, fn: Any = None, /) -> Any:
        if fn is None:
            return lambda function: register_kernel(original, self, device_types, function)
        result = original(self, device_types, fn)
        replace(self)
        return result


BENCHES = ("do_bench", "do_bench_cudagraph")
NOT_TIMED = "kernels are timed on a device that is not there"
NOT_RUN = (
    "Triton kernels are not run: each is costed by the bytes of its tensors, and those that are autotuned "
    "take their first configuration"
)


def install_triton(observer: Observer) -> None:
    """Let Triton's kernels be launched. Call once, before the script runs."""
    utilities: Any = torch.utils._triton
    utilities.has_triton = utilities.has_triton_package = lambda: False
    launch = functools.partial(_launch, observer)
    if importlib.util.find_spec("triton") is not None:
        _take_over(launch)


def _launch(observer: Observer, name: str, values: Mapping[str, Any], grid: Any) -> SimpleNamespace:
    """``values``: of the kernel's parameters. Returns what stands for the compiled kernel."""
    compiled = SimpleNamespace(name=name, n_regs=0, n_spills=0, metadata=SimpleNamespace(shared=0, name=name))
    blocks = grid(dict(values)) if callable(grid) else grid
    if any(int(count) <= 0 for count in (blocks if isinstance(blocks, tuple | list) else (blocks,))):
        return compiled
    arguments = [
        getattr(value, "base", value) for value in values.values()
    ]  # of a descriptor, the tensor behind it
    tensors = [value for value in arguments if isinstance(value, torch.Tensor)]
    for position, value in enumerate(arguments):
        if isinstance(value, torch.Tensor) and not (value.is_cuda or value.is_pinned()):
            raise ValueError(f"Pointer argument (at {position}) cannot be accessed from Triton (cpu tensor?)")
    observer.launches.record(f"triton.{name}", arguments, (), tensors)
    observer.launches.forget(tensors)
    observer.note(NOT_RUN, NoteKind.APPROXIMATION)
    return compiled


def _multiprocessors(index: int) -> dict[str, int]:
    properties: Any = torch.cuda.get_device_properties(index)
    return {
        "max_shared_mem": properties.shared_memory_per_block_optin,
        "max_num_regs": properties.regs_per_multiprocessor,
        "multiprocessor_count": properties.multi_processor_count, "warpSize": properties.warp_size,
        "sm_clock_rate": 1_700_000, "mem_clock_rate": 2_600_000, "mem_bus_width": 5120,
    }  # fmt: skip


def _target() -> SimpleNamespace:
    major, minor = torch.cuda.get_device_capability()
    return SimpleNamespace(backend="cuda", arch=10 * major + minor, warp_size=32)


def _driver() -> SimpleNamespace:
    """What scripts ask of the driver: the kind of device and its limits."""
    return SimpleNamespace(
        get_current_target=_target, get_current_device=torch.cuda.current_device,
        get_current_stream=lambda index=None: torch.cuda.current_stream().stream_id,
        get_active_torch_device=lambda: torch.device("cuda", torch.cuda.current_device()),
        get_device_interface=lambda: torch.cuda, is_active=lambda: True,
        utils=SimpleNamespace(get_device_properties=_multiprocessors),
    )  # fmt: skip


def _take_over(launch: Callable[..., Any]) -> None:
    """Triton's own kernels, launched without its driver."""
    runtime: Any = importlib.import_module("triton.runtime")
    testing = importlib.import_module("triton.testing")

    @replaces(runtime.jit.JITFunction)
    def run(_: Any, self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        signature = inspect.signature(self.fn)
        kwargs = {name: value for name, value in kwargs.items() if name in signature.parameters}
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return launch(self.fn.__name__, bound.arguments, (0,) if warmup else grid)

    @replaces(runtime.autotuner.Autotuner, "run")
    def first(_: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        config = self.best_config = self.configs[0]
        if config.pre_hook is not None:
            config.pre_hook({**dict(zip(self.arg_names, args, strict=False)), **kwargs, **config.kwargs})
        return self.fn.run(*args, **{**kwargs, **config.all_kwargs()})

    for name in BENCHES:
        setattr(testing, name, refuse(f"triton.testing.{name}", NOT_TIMED))
    runtime.driver.set_active(_driver())


BUILDERS = "deepspeed.ops.op_builder.builder"
NOT_COMPILED = (
    "DeepSpeed's FusedAdam is not compiled: its kernel is costed by the bytes that it reads and writes"
)
NOT_KNOWN = "DeepSpeed compiles it for the device when it is needed, and what it does to tensors is not known"


def install_deepspeed(observer: Observer) -> None:
    """Let DeepSpeed's builders load stand-ins. Call once, before the script runs."""

    def multi_tensor_adam(chunk_size: int, flag: Any, lists: Sequence[Sequence[Any]], *numbers: Any) -> None:
        """Apex's signature: gradients, parameters, first and second moments; all but the first are updated.
        (csrc/adam/multi_tensor_adam.cu)"""
        written = [tensor for updated in lists[1:] for tensor in updated]
        given = [list(tensors) for tensors in lists]
        observer.launches.record("deepspeed.multi_tensor_adam", given, written)
        observer.launches.forget(written)

    def replace(module: ModuleType) -> None:
        builders: Any = module

        @replaces(builders.OpBuilder, "load")
        def stand_in(load: Any, self: Any, verbose: bool = False) -> Any:
            if not isinstance(self, builders.CUDAOpBuilder):
                return load(self, verbose)
            if self.name != "fused_adam":
                refuse(f"DeepSpeed's op {self.name}", NOT_KNOWN)()
            observer.note(NOT_COMPILED, NoteKind.APPROXIMATION)
            return SimpleNamespace(multi_tensor_adam=multi_tensor_adam)

    after_import(BUILDERS, replace)
