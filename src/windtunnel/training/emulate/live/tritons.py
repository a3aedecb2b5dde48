"""Triton without a device: kernels are written, decorated and launched, and every launch is recorded.

A launch is written down as an operator of the kernel's name with its arguments. Its outputs are tensors that
the script has made and the kernel fills, so nothing has to be known of what it computes: it is costed by the
bytes of its tensors, each once. Autotuned kernels take their first configuration, as nothing is there to time
them on.

Triton has to be installed, which the CPU build of PyTorch does not bring with it; only what launches is
replaced. ``torch.utils._triton.has_triton()`` says no: it is asked by code which is about to compile, and a
library that has another way takes it, in known operators.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import torch

from windtunnel.training.emulate.graph import NoteKind
from windtunnel.training.emulate.live.kernels import Launches
from windtunnel.training.emulate.live.names import refuse
from windtunnel.training.emulate.live.observe import Observer

BENCHES = ("do_bench", "do_bench_cudagraph")
WHY = "kernels are timed on a device that is not there"
TOLD = (
    "Triton kernels are not run: each is costed by the bytes of its tensors, and those that are autotuned "
    "take their first configuration"
)


def install(observer: Observer, launches: Launches) -> None:
    """Let Triton's kernels be launched. Call once, before the script runs."""
    utilities: Any = torch.utils._triton
    utilities.has_triton = utilities.has_triton_package = lambda: False
    launch = functools.partial(_launch, observer, launches)
    if importlib.util.find_spec("triton") is not None:
        _take_over(launch)


def _launch(
    observer: Observer, launches: Launches, name: str, values: Mapping[str, Any], grid: Any
) -> SimpleNamespace:
    """``values``: of the kernel's parameters. Returns what stands for the compiled kernel."""
    compiled = SimpleNamespace(name=name, n_regs=0, n_spills=0, metadata=SimpleNamespace(shared=0, name=name))
    blocks = grid(dict(values)) if callable(grid) else grid
    if any(int(count) <= 0 for count in (blocks if isinstance(blocks, tuple | list) else (blocks,))):
        return compiled
    given = [
        getattr(value, "base", value) for value in values.values()
    ]  # of a descriptor, the tensor behind it
    tensors = [value for value in given if isinstance(value, torch.Tensor)]
    for position, value in enumerate(given):
        if isinstance(value, torch.Tensor) and not (value.is_cuda or value.is_pinned()):
            raise ValueError(f"Pointer argument (at {position}) cannot be accessed from Triton (cpu tensor?)")
    launches.record(f"triton.{name}", given, (), tensors)
    launches.forget(tensors)
    observer.note(TOLD, NoteKind.APPROXIMATION)
    return compiled


def _multiprocessors(index: int) -> dict[str, int]:
    known: Any = torch.cuda.get_device_properties(index)
    return {
        "max_shared_mem": known.shared_memory_per_block_optin, "max_num_regs": known.regs_per_multiprocessor,
        "multiprocessor_count": known.multi_processor_count, "warpSize": known.warp_size,
        "sm_clock_rate": 1_700_000, "mem_clock_rate": 2_600_000, "mem_bus_width": 5120,
    }  # fmt: skip


def _target() -> SimpleNamespace:
    major, minor = torch.cuda.get_device_capability()
    return SimpleNamespace(backend="cuda", arch=10 * major + minor, warp_size=32)


def _driver() -> SimpleNamespace:
    """What scripts ask of the driver: the kind of device and its limits."""
    active = SimpleNamespace(
        get_current_target=_target, get_current_device=torch.cuda.current_device,
        get_current_stream=lambda index=None: torch.cuda.current_stream().stream_id,
        get_active_torch_device=lambda: torch.device("cuda", torch.cuda.current_device()),
        get_device_interface=lambda: torch.cuda, is_active=lambda: True,
        utils=SimpleNamespace(get_device_properties=_multiprocessors),
    )  # fmt: skip
    return SimpleNamespace(active=active, default=active, set_active=lambda driver: None)


def _take_over(launch: Callable[..., Any]) -> None:
    """Triton's own kernels, launched without its driver."""
    runtime: Any = importlib.import_module("triton.runtime")
    testing = importlib.import_module("triton.testing")
    function, tuner = runtime.jit.JITFunction, runtime.autotuner.Autotuner

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        signature = inspect.signature(self.fn)
        kwargs = {name: value for name, value in kwargs.items() if name in signature.parameters}
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return launch(self.fn.__name__, bound.arguments, (0,) if warmup else grid)

    def first(self: Any, *args: Any, **kwargs: Any) -> Any:
        config = self.best_config = self.configs[0]
        if config.pre_hook is not None:
            config.pre_hook({**dict(zip(self.arg_names, args, strict=False)), **kwargs, **config.kwargs})
        return self.fn.run(*args, **{**kwargs, **config.all_kwargs()})

    function.run, tuner.run = run, first
    for name in BENCHES:
        setattr(testing, name, refuse(f"triton.testing.{name}", WHY))
    runtime.driver.set_active(_driver().active)
