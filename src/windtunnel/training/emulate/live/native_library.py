"""Loads the library of the absent device into this process, before torch is imported.

The library is C++ against libtorch without Python in it (source in ``native/``), so one build serves every
Python version of one torch version, and its CPU and CUDA builds alike. One for torch 2.13.0 lies beside the
source; for another torch it is compiled once with the system's C++ compiler and kept in the user's cache.

A CUDA build of torch brings hooks, a guard, an allocator and kernels of its own. What the library registers
stands before them: its hooks are registered first and preferred, the rest is put over what libtorch_cuda
registers when it is loaded. No driver and no device is asked for anything.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import ctypes
import importlib.metadata
import importlib.util
import os
import platform
import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from windtunnel.base import native, paths
from windtunnel.base.errors import UserError

NATIVE = Path(__file__).parent / "native"
MORE_OPERATORS = ("convolution", "embedding")
"""Recorded whole, as cost tables know them, though a CUDA build takes them apart first."""
TRIED = ((2, 11), (2, 15))
"""The first and the last minor version of torch that was tried, as CPU or CUDA build."""


def torch_directory() -> Path:
    """Where torch is installed, found without importing it.

    Raises:
        UserError: torch is not installed.
    """
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        raise UserError("PyTorch is not installed: pip install 'windtunnel[train]'")
    return Path(spec.origin).parent


def torch_version() -> str:
    """The installed torch's version without its build tag: ``"2.13.0"``."""
    return importlib.metadata.version("torch").split("+")[0]


def untried() -> str:
    """One sentence where nobody has tried the installed torch, else nothing."""
    version = torch_version()
    first, last = (".".join(map(str, minor)) for minor in TRIED)
    minor = tuple(int(number) for number in re.findall(r"\d+", version)[:2])
    return "" if TRIED[0] <= minor <= TRIED[1] else f"torch {version} is untried here: {first} to {last} are"


def is_cuda_build() -> bool:
    """Whether the installed torch has CUDA kernels of its own.

    Raises:
        UserError: it has those of another make of device, which also go by the name of CUDA.
    """
    lib = torch_directory() / "lib"
    if (lib / "libtorch_hip.so").exists():
        raise UserError(
            f"the installed torch {torch_version()} is a ROCm build, which has not been made to run without"
            " its devices: emulate from an environment with a CPU or a CUDA build"
        )
    return (lib / "libtorch_cuda.so").exists()


def library_name(version: str) -> str:
    """Of a build for that torch; it carries a digest of the library's source."""
    digest = native.digest([*sorted(NATIVE.glob("*.cpp")), *sorted(NATIVE.glob("*.h"))])
    return f"absent-torch{version}-{platform.machine()}-{digest}.so"


def build(target: Path) -> None:
    """Compile the library for the installed torch.

    Raises:
        UserError: there is no C++ compiler, or the compilation fails.
    """
    version = torch_version()
    otherwise = (
        f"no library for torch {version} is shipped and no C++ compiler was found to build it: "
        "install torch==2.13.0, or a compiler (apt-get install g++)"
    )
    compiler = native.compiler("CXX", "g++", "clang++", otherwise)
    torch = torch_directory()
    what = f"the absent device's library ({untried() or f'torch {version}'})"
    include = [f"-I{torch}/include", f"-I{torch}/include/torch/csrc/api/include"]
    defined = ["-DUSE_C10D", "-DUSE_DISTRIBUTED", "-DUSE_RPC"]
    # assertions name their files: by their place in torch or here, not on the machine that built this
    nameless = [f"-fmacro-prefix-map={torch}/=", f"-fmacro-prefix-map={NATIVE}/="]
    options = ["-O2", "-std=c++20", "-fPIC", "-w", *nameless, *include, *defined]

    def compile_source(source: Path) -> str:
        compiled = f"{scratch}/{source.stem}.o"
        native.compiled([compiler, *options, "-c", str(source), "-o", compiled], what)
        return compiled

    with (
        tempfile.TemporaryDirectory() as scratch,
        concurrent.futures.ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool,
    ):
        objects = list(pool.map(compile_source, sorted(NATIVE.glob("*.cpp"))))
        libraries = [f"-L{torch}/lib", "-ltorch_cpu", "-lc10"]
        native.compiled([compiler, "-shared", "-s", "-o", str(target), *objects, *libraries], what)


def locate() -> Path:
    """The library for the installed torch: shipped, cached, or built now.

    Raises:
        UserError: it has to be built and cannot be.
    """
    return native.located(NATIVE, library_name(torch_version()), build)


def is_at_hand() -> bool:
    """Whether the library for the installed torch need not be built."""
    name = library_name(torch_version())
    return any((folder / name).exists() for folder in (NATIVE, paths.cache()))


def load() -> ctypes.CDLL:
    """Load libtorch and the absent device. Must come before ``import torch``: libtorch asks for its hooks
    once.

    Raises:
        RuntimeError: torch is imported already.
        UserError: the library does not fit torch; or see `is_cuda_build`, `locate`.
    """
    if "torch" in sys.modules:
        raise RuntimeError("the absent device must be loaded before torch is imported")
    if is_cuda_build():
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # a real device, should there be one, is asked by nobody
    lib = torch_directory() / "lib"
    for name in ("libtorch_global_deps.so", "libc10.so", "libtorch_cpu.so"):
        ctypes.CDLL(str(lib / name), mode=ctypes.RTLD_GLOBAL)
    try:
        library = ctypes.CDLL(str(locate()), mode=ctypes.RTLD_GLOBAL)
    except OSError as error:
        raise UserError(f"the absent device does not load: {untried() or torch_version()}: {error}") from None
    library.wt_row.restype = ctypes.c_char_p
    library.wt_events.restype = ctypes.c_void_p
    library.wt_collective_blocks.restype = ctypes.c_void_p
    library.wt_flows.restype = ctypes.c_void_p
    counts = ("wt_event_count", "wt_collective_block_count", "wt_allocated", "wt_flow_count", "wt_flow")
    for name in (*counts, "wt_take"):
        getattr(library, name).restype = ctypes.c_int64
    library.wt_take.argtypes = [ctypes.c_int, ctypes.c_int64]
    library.wt_append.argtypes = [ctypes.c_void_p, ctypes.c_int64]
    library.wt_communicated.argtypes = [ctypes.c_void_p, ctypes.c_int64]
    library.wt_adopt.argtypes = [ctypes.c_void_p, ctypes.c_int]
    library.wt_storage_resize.argtypes = [ctypes.c_void_p, ctypes.c_int64]
    library.wt_recorded.argtypes = [ctypes.c_void_p]
    library.wt_storage_block.argtypes = [ctypes.c_void_p]
    library.wt_unknown.argtypes = [ctypes.c_void_p]
    library.wt_forget.argtypes = [ctypes.c_void_p]
    library.wt_touch.argtypes = [ctypes.c_void_p, ctypes.c_int64]
    library.wt_event.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64]
    if not library.wt_hooks_ready():
        raise RuntimeError("libtorch did not take the absent device's hooks")
    return library


@contextlib.contextmanager
def unrecorded(native: ctypes.CDLL) -> Iterator[None]:
    """What is done within is none of the script's, and is not recorded."""
    native.wt_pause(1)
    try:
        yield
    finally:
        native.wt_pause(-1)


def operator_names() -> bytes:
    """The operators for which a CUDA build has a kernel of its own, one a line (``mm``, ``add.out``). Call
    after torch is imported.

    Which operators decompose before they reach the device, and into what, is decided by them: they are read
    from the operator table that ships with torch. A CUDA build may have registered more.
    """
    table = native.located(NATIVE, f"operators-{torch_version()}.txt", write_operator_table)
    names = dict.fromkeys([*table.read_text().split(), *MORE_OPERATORS])
    if is_cuda_build():
        names |= dict.fromkeys(registered_operators())
    return "".join(f"{name}\n" for name in names).encode()


def registered_operators() -> list[str]:
    """Those that libtorch_cuda has registered in this process.

    Kernels in Python are left out, as they are written over other operators, or with Triton for some shapes
    that they look for first; collectives, which are recorded elsewhere; and symmetric memory, whose shape
    functions hide what ranks say to each other.
    """
    import torch

    in_python = getattr(torch.library, "_impls", ())
    names: list[str] = torch._C._dispatch_get_registrations_for_dispatch_key("CUDA")
    return sorted(
        name.removeprefix("aten::")
        for name in names
        if not name.startswith(("c10d::", "symm_mem::"))
        and f"{name.replace('::', '/')}/CUDA" not in in_python
    )


def write_operator_table(target: Path) -> None:
    """Derive `operator_names` from torchgen's ``native_functions.yaml``."""
    import yaml

    spec = importlib.util.find_spec("torchgen")
    if spec is None or spec.origin is None:
        raise UserError("torchgen, which ships with PyTorch, is missing: reinstall torch")
    path = Path(spec.origin).parent / "packaged/ATen/native/native_functions.yaml"
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    functions = {entry["func"].split("(")[0]: entry for entry in yaml.load(path.read_text(), Loader=loader)}

    def has_cuda(entry: dict[str, object]) -> bool:
        if "structured_delegate" in entry:
            entry = functions[str(entry["structured_delegate"])]
        if "ufunc_inner_loop" in entry:  # pointwise operators whose kernels are generated for CPU and CUDA
            return True
        dispatch = entry.get("dispatch") or {}
        assert isinstance(dispatch, dict)
        return "CUDA" in [key.strip() for keys in dispatch for key in keys.split(",")]

    names = [name for name, entry in functions.items() if has_cuda(entry)]
    target.write_text("\n".join([*names, ""]))


def main() -> None:
    """``python -m windtunnel.training.emulate.live.native_library``: rebuild what is shipped beside the
    source."""
    native.rebuilt(NATIVE, library_name(torch_version()), "absent-torch*.so", build)
    write_operator_table(NATIVE / f"operators-{torch_version()}.txt")


if __name__ == "__main__":
    main()
