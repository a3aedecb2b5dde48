"""Loads the library of the absent device into this process, before torch is imported.

The library is C++ against libtorch without Python in it (source in ``native/``), so one build serves every
Python version of one torch version. A build for the supported torch lies beside the source; for another torch
it is compiled once with the system's C++ compiler and kept in the user's cache.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.metadata
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from windtunnel.base import paths
from windtunnel.base.errors import UserError

NATIVE = Path(__file__).parent / "native"
SOURCES = ("device", "pinned", "describe", "operators", "by_hand", "recurrent", "collectives")
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


def source_digest() -> str:
    """A digest of the library's source, which a build carries in its file name."""
    digest = hashlib.sha256()
    for path in sorted(NATIVE.glob("*.cpp")) + sorted(NATIVE.glob("*.h")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


def torch_version() -> str:
    """The installed torch's version without its build tag: ``"2.13.0"``."""
    return importlib.metadata.version("torch").split("+")[0]


def library_name(version: str) -> str:
    return f"absent-torch{version}-{platform.machine()}-{source_digest()}.so"


def build(target: Path) -> None:
    """Compile the library for the installed torch.

    Raises:
        UserError: there is no C++ compiler, or the compilation fails.
    """
    compiler = shutil.which(os.environ.get("CXX", "g++")) or shutil.which("clang++")
    if compiler is None:
        raise UserError(
            f"no library for torch {torch_version()} is shipped and no C++ compiler was found to build it: "
            "install torch==2.13.0, or a compiler (apt-get install g++)"
        )
    torch = torch_directory()
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        objects = []
        for name in SOURCES:
            objects.append(f"{scratch}/{name}.o")
            include = [f"-I{torch}/include", f"-I{torch}/include/torch/csrc/api/include"]
            defined = ["-DUSE_C10D", "-DUSE_DISTRIBUTED", "-DUSE_RPC"]
            # assertions name their files: by their place in torch or here, not on the machine that built this
            nameless = [f"-fmacro-prefix-map={torch}/=", f"-fmacro-prefix-map={NATIVE}/="]
            _run([
                compiler, "-O2", "-std=c++20", "-fPIC", "-w", *nameless, *include, *defined,
                "-c", str(NATIVE / f"{name}.cpp"), "-o", objects[-1],
            ])  # fmt: skip
        # Linked beside the target and renamed, so that two processes building at once do not see half a file.
        part = target.with_suffix(f".{os.getpid()}.part")
        _run([compiler, "-shared", "-s", "-o", str(part), *objects, f"-L{torch}/lib", "-ltorch_cpu", "-lc10"])
        os.replace(part, target)


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise UserError(f"building the absent device's library failed: {done.stderr.strip()[-800:]}")


def locate() -> Path:
    """The library for the installed torch: shipped, cached, or built now.

    Raises:
        UserError: it has to be built and cannot be.
    """
    name = library_name(torch_version())
    for path in (NATIVE / name, paths.cache() / name):
        if path.exists():
            return path
    target = paths.cache() / name
    build(target)
    return target


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
    native = ctypes.CDLL(str(locate()), mode=ctypes.RTLD_GLOBAL)
    native.wt_row.restype = ctypes.c_char_p
    native.wt_events.restype = ctypes.c_void_p
    native.wt_collective_blocks.restype = ctypes.c_void_p
    for name in ("wt_event_count", "wt_collective_block_count", "wt_allocated"):
        getattr(native, name).restype = ctypes.c_int64
    native.wt_storage_resize.argtypes = [ctypes.c_void_p, ctypes.c_int64]
    native.wt_storage_block.argtypes = [ctypes.c_void_p]
    native.wt_event.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64]
    if not native.wt_hooks_ready():
        raise RuntimeError("libtorch did not take the absent device's hooks")
    return native


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
    for old in NATIVE.glob("absent-torch*.so"):
        old.unlink()
    build(NATIVE / library_name(torch_version()))
    (NATIVE / f"operators-{torch_version()}.txt").write_bytes(read_operator_table())
    print(f"built {library_name(torch_version())}")


if __name__ == "__main__":
    main()
