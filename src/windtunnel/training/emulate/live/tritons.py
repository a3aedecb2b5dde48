"""Triton without a compiler: kernels can be written, decorated and launched, and every launch is recorded.

A launch is written down as an operator of the kernel's name with its arguments. Its outputs are tensors that
the script has made and the kernel fills, so nothing has to be known of what it computes: it is costed by the
bytes of its tensors, each once. Autotuned kernels take their first configuration, as nothing is there to time
them on.

The CPU build of PyTorch comes without Triton. There the modules are made here: what a kernel's body names
(``tl.load``, ``tl.dot``) is never called, so that any name of ``triton.language`` is given. Where Triton is
installed, its own modules stay, and only what launches is replaced.

``find_spec("triton")`` finds it, as on a host with GPUs. ``torch.utils._triton.has_triton()`` says no: it is
asked by code which is about to compile, and a library that has another way takes it, in known operators.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

from windtunnel.training.emulate.graph import NoteKind
from windtunnel.training.emulate.live.kernels import Launches
from windtunnel.training.emulate.live.names import refuse
from windtunnel.training.emulate.live.observe import Observer

VERSION = "3.7.0"  # the one that PyTorch 2.13's CUDA build brings
MODULES = frozenset({
    "triton", "triton.language", "triton.language.extra", "triton.language.extra.cuda", "triton.runtime",
    "triton.runtime.jit", "triton.runtime.autotuner", "triton.runtime.driver", "triton.language.core",
    "triton.testing",
    "triton.compiler", "triton.backends", "triton.backends.nvidia", "triton.tools", "triton.experimental",
})  # fmt: skip
EXPORTED = ("JITFunction", "KernelInterface", "Config", "jit", "autotune", "heuristics")
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
    else:
        JITFunction.launch = staticmethod(launch)
        sys.meta_path.append(_Finder())  # type: ignore[arg-type]


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


# -- what is made where there is none


class KernelInterface:
    """What ``kernel[grid](...)`` is."""

    def run(self, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        raise NotImplementedError

    def __getitem__(self, grid: Any) -> Callable[..., Any]:
        return functools.partial(self.run, grid=grid, warmup=False)

    @classmethod
    def __class_getitem__(cls, parameters: Any) -> Any:
        return cls  # ``KernelInterface[T]``

    def warmup(self, *args: Any, grid: Any, **kwargs: Any) -> Any:
        return self.run(*args, grid=grid, warmup=True, **kwargs)


class KernelParam:
    """A parameter of a kernel, as tools ask after it."""

    def __init__(self, number: int, parameter: inspect.Parameter) -> None:
        self.num, self.name = number, parameter.name
        self.has_default, self.default = parameter.default is not parameter.empty, parameter.default
        self.annotation = str(getattr(parameter.annotation, "__name__", parameter.annotation))
        self.is_constexpr = "constexpr" in self.annotation


class JITFunction(KernelInterface):
    """A function decorated with ``triton.jit``: its body is never run."""

    launch: Callable[..., Any]

    def __init__(self, fn: Callable[..., Any], **options: Any) -> None:
        self.fn, self.options = fn, options
        self.signature = inspect.signature(fn)
        self.params = [KernelParam(*one) for one in enumerate(self.signature.parameters.values())]
        self.arg_names = list(self.signature.parameters)
        functools.update_wrapper(self, fn)

    def run(self, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        kwargs = {name: value for name, value in kwargs.items() if name in self.arg_names}
        bound = self.signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return self.launch(self.fn.__name__, bound.arguments, (0,) if warmup else grid)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("Cannot call @triton.jit'd outside of the scope of a kernel")


class Config:
    """One choice of an autotuned kernel."""

    def __init__(
        self, kwargs: dict[str, Any], num_warps: int = 4, num_stages: int = 3, num_ctas: int = 1,
        maxnreg: int | None = None, pre_hook: Callable[..., Any] | None = None, ir_override: Any = None,
    ) -> None:  # fmt: skip
        self.kwargs, self.pre_hook = kwargs, pre_hook
        self.num_warps, self.num_stages, self.num_ctas = num_warps, num_stages, num_ctas
        self.maxnreg, self.ir_override = maxnreg, ir_override

    def all_kwargs(self) -> dict[str, Any]:
        return {**self.kwargs, "num_warps": self.num_warps, "num_stages": self.num_stages}


class Autotuner(KernelInterface):
    """Runs the first of its configurations."""

    def __init__(self, fn: Any, arg_names: list[str], configs: list[Config], key: Any) -> None:
        self.fn, self.arg_names, self.key = fn, arg_names, key
        self.configs = configs or [Config({})]
        self.best_config = self.configs[0]

    def run(self, *args: Any, **kwargs: Any) -> Any:
        config = self.best_config
        if config.pre_hook is not None:
            config.pre_hook({**dict(zip(self.arg_names, args, strict=False)), **kwargs, **config.kwargs})
        return self.fn.run(*args, **{**kwargs, **config.all_kwargs()})


class Heuristics(KernelInterface):
    """Works out parameters from the others."""

    def __init__(self, fn: Any, arg_names: list[str], values: Mapping[str, Callable[..., Any]]) -> None:
        self.fn, self.arg_names, self.values = fn, arg_names, values

    def run(self, *args: Any, **kwargs: Any) -> Any:
        for name, work_out in self.values.items():
            kwargs[name] = work_out({**dict(zip(self.arg_names, args, strict=False)), **kwargs})
        return self.fn.run(*args, **kwargs)


def jit(fn: Any = None, **options: Any) -> Any:
    """``@triton.jit``, with and without options."""
    return JITFunction(fn, **options) if fn is not None else functools.partial(jit, **options)


def autotune(configs: list[Config], key: Any = (), **options: Any) -> Callable[[Any], Autotuner]:
    """``@triton.autotune``."""
    return lambda fn: Autotuner(fn, fn.arg_names, configs, key)


def heuristics(values: Mapping[str, Callable[..., Any]]) -> Callable[[Any], Heuristics]:
    """``@triton.heuristics``."""
    return lambda fn: Heuristics(fn, fn.arg_names, values)


def cdiv(x: int, y: int) -> int:
    """``x / y``, rounded up."""
    return -(-x // y)


def next_power_of_2(n: int) -> int:
    """The smallest power of two that is not below ``n``."""
    return 1 << (n - 1).bit_length() if n > 0 else 0


class constexpr:
    """A number that is known when a kernel is compiled."""

    def __init__(self, value: Any = None) -> None:
        self.value = getattr(value, "value", value)

    def __index__(self) -> int:
        return int(self.value)

    def __eq__(self, other: object) -> bool:
        return bool(self.value == getattr(other, "value", other))

    def __hash__(self) -> int:
        return hash(self.value)

    def __repr__(self) -> str:
        return f"constexpr[{self.value}]"


class _Named:
    """Whatever else Triton has a name for: it can be named, compared and decorated with."""

    def __init__(self, name: str) -> None:
        self.__name__ = self.__qualname__ = name

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Named(f"{self.__name__}.{name}")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return args[0] if len(args) == 1 and callable(args[0]) and not kwargs else self

    def __repr__(self) -> str:
        return self.__name__


class _Anything:
    """The base of classes that Triton has and nobody here knows."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        vars(self).update(kwargs)


class _Module(ModuleType):
    """A module of Triton: what is not in it is made when it is asked for."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        full = f"{self.__name__}.{name}"
        if name[:1].isupper():
            wrong = name.endswith(("Error", "Exception", "OutOfResources"))
            value: Any = type(name, (Exception,) if wrong else (_Anything,), {"__module__": self.__name__})
        elif full in MODULES:
            value = importlib.import_module(full)
        else:
            value = _Named(full)
        setattr(self, name, value)
        return value


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


class _Finder:
    """Finds ``triton`` and its modules where none are installed."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name != "triton" and not name.startswith("triton."):
            return None
        return ModuleSpec(name, self, is_package=True)  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        runtime = {
            "JITFunction": JITFunction, "KernelInterface": KernelInterface, "Autotuner": Autotuner,
            "Heuristics": Heuristics, "Config": Config, "jit": jit, "autotune": autotune,
            "heuristics": heuristics, "driver": _driver(),
        }  # fmt: skip
        helpers = {"cdiv": cdiv, "next_power_of_2": next_power_of_2, "constexpr": constexpr}
        known: dict[str, dict[str, Any]] = {
            "triton": {
                "__version__": VERSION,
                **{name: runtime[name] for name in EXPORTED},
                **helpers,
            },
            "triton.runtime": runtime, "triton.runtime.jit": runtime, "triton.runtime.autotuner": runtime,
            "triton.runtime.driver": vars(runtime["driver"]),
            "triton.testing": {name: refuse(f"triton.testing.{name}", WHY) for name in BENCHES},
            "triton.language": {**helpers, "__version__": VERSION}, "triton.language.core": helpers,
        }  # fmt: skip
        vars(module).update(known.get(module.__name__, {}))


# -- what is replaced where there is one


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
