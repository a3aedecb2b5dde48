"""Loads the library of the absent device into this process, before torch is imported.

The library is C++ against libtorch without Python in it (source in ``native/``), so one build serves every
Python version of one torch version. A build for the supported torch lies beside the source; for another torch
it is compiled once with the system's C++ compiler and kept in the user's cache.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import importlib.util
import platform
import sys
import tempfile
from pathlib import Path

from windtunnel.base import native, paths
from windtunnel.base.errors import UserError

NATIVE = Path(__file__).parent / "native"
SOURCES = ("device", "generator", "pinned", "describe", "operators", "by_hand", "recurrent", "collectives")
MORE_OPERATORS = ("convolution",)
"""Recorded whole, as cost tables know them, though a CUDA build takes them apart first."""


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


def library_name(version: str) -> str:
    """Of a build for that torch; it carries a digest of the library's source."""
    digest = native.digest([*sorted(NATIVE.glob("*.cpp")), *sorted(NATIVE.glob("*.h"))])
    return f"absent-torch{version}-{platform.machine()}-{digest}.so"


def build(target: Path) -> None:
    """Compile the library for the installed torch.

    Raises:
        UserError: there is no C++ compiler, or the compilation fails.
    """
    otherwise = (
        f"no library for torch {torch_version()} is shipped and no C++ compiler was found to build it: "
        "install torch==2.13.0, or a compiler (apt-get install g++)"
    )
    compiler = native.compiler("CXX", "g++", "clang++", otherwise)
    torch, what = torch_directory(), "the absent device's library"
    with tempfile.TemporaryDirectory() as scratch:
        objects = []
        for name in SOURCES:
            objects.append(f"{scratch}/{name}.o")
            include = [f"-I{torch}/include", f"-I{torch}/include/torch/csrc/api/include"]
            defined = ["-DUSE_C10D", "-DUSE_DISTRIBUTED", "-DUSE_RPC"]
            # assertions name their files: by their place in torch or here, not on the machine that built this
            nameless = [f"-fmacro-prefix-map={torch}/=", f"-fmacro-prefix-map={NATIVE}/="]
            options = ["-O2", "-std=c++20", "-fPIC", "-w", *nameless, *include, *defined]
            source = str(NATIVE / f"{name}.cpp")
            native.compiled([compiler, *options, "-c", source, "-o", objects[-1]], what)
        libraries = [f"-L{torch}/lib", "-ltorch_cpu", "-lc10"]
        native.compiled([compiler, "-shared", "-s", "-o", str(target), *objects, *libraries], what)


def locate() -> Path:
    """The library for the installed torch: shipped, cached, or built now.

    Raises:
        UserError: it has to be built and cannot be.
    """
    return native.located(NATIVE, library_name(torch_version()), build)


def load() -> ctypes.CDLL:
    """Load libtorch and the absent device. Must come before ``import torch``: libtorch asks for its hooks
    once.

    Raises:
        RuntimeError: torch is imported already.
        UserError: torch is a CUDA build; or see `locate`.
    """
    if "torch" in sys.modules:
        raise RuntimeError("the absent device must be loaded before torch is imported")
    lib = torch_directory() / "lib"
    if (lib / "libtorch_cuda.so").exists():
        raise UserError(
            "the installed PyTorch is a CUDA build, which brings a device layer of its own: emulate from an"
            f" environment with the CPU build of torch {torch_version()}"
        )
    for name in ("libtorch_global_deps.so", "libc10.so", "libtorch_cpu.so"):
        ctypes.CDLL(str(lib / name), mode=ctypes.RTLD_GLOBAL)
    library = ctypes.CDLL(str(locate()), mode=ctypes.RTLD_GLOBAL)
    library.wt_row.restype = ctypes.c_char_p
    library.wt_events.restype = ctypes.c_void_p
    library.wt_collective_blocks.restype = ctypes.c_void_p
    for name in ("wt_event_count", "wt_collective_block_count", "wt_allocated"):
        getattr(library, name).restype = ctypes.c_int64
    library.wt_storage_resize.argtypes = [ctypes.c_void_p, ctypes.c_int64]
    library.wt_storage_block.argtypes = [ctypes.c_void_p]
    library.wt_forget.argtypes = [ctypes.c_void_p]
    library.wt_event.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64]
    if not library.wt_hooks_ready():
        raise RuntimeError("libtorch did not take the absent device's hooks")
    return library


def operator_names() -> bytes:
    """The operators for which a CUDA build has a kernel of its own, one a line (``mm``, ``add.out``).

    Read from the operator table that ships with torch, because which operators decompose before they reach
    the device, and into what, is decided by it.
    """
    file = f"operators-{torch_version()}.txt"
    cached = paths.cache() / file
    for path in (NATIVE / file, cached):
        if path.exists():
            return path.read_bytes()
    names = read_operator_table()
    cached.parent.mkdir(parents=True, exist_ok=True)
    cached.write_bytes(names)
    return names


def read_operator_table() -> bytes:
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
    return "\n".join([*names, *MORE_OPERATORS, ""]).encode()


def main() -> None:
    """``python -m windtunnel.training.emulate.live.native_library``: rebuild what is shipped beside the
    source."""
    native.rebuilt(NATIVE, library_name(torch_version()), "absent-torch*.so", build)
    (NATIVE / f"operators-{torch_version()}.txt").write_bytes(read_operator_table())


if __name__ == "__main__":
    main()
