"""The library of the absent device that is shipped is that of its source and of the supported torch."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from support import preloaded, quick
from windtunnel.base.errors import UserError
from windtunnel.training.emulate.live import native_library


def written(folder: Path) -> list[str]:
    """The table of operators, as it is made anew."""
    native_library.write_operator_table(folder / "operators")
    return (folder / "operators").read_text().split()


def test_the_shipped_table_of_operators_is_that_of_torch(tmp_path: Path) -> None:
    names = native_library.operator_names().decode().split()
    table = written(tmp_path)
    assert names[: len(table)] == table
    more = [*native_library.MORE_OPERATORS]
    assert names == table + more or native_library.is_cuda_build(), "which may have registered more"
    assert {"mm", "add.out", "_fused_adamw_", "convolution", "embedding", "_flash_attention_forward"} <= set(
        names
    )
    assert "linear" not in names, "composite operators decompose before they reach a device"


@pytest.fixture
def wheel(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Path]:
    """Pretends that another torch is installed: its version, and which libraries its wheel holds."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def install(version: str, *libraries: str) -> Path:
        torch = tmp_path / "torch"
        (torch / "lib").mkdir(parents=True)
        for name in libraries:
            (torch / "lib" / name).touch()
        monkeypatch.setattr(native_library.importlib.metadata, "version", lambda name: version)
        monkeypatch.setattr(native_library, "torch_directory", lambda: torch)
        monkeypatch.delitem(sys.modules, "torch", raising=False)
        return torch

    return install


@pytest.mark.parametrize("version", ["2.13.0", "2.13.0+cpu", "2.13.0+cu130"])
def test_one_library_serves_the_builds_of_a_version(wheel: Callable[..., Path], version: str) -> None:
    wheel(version, "libtorch_cuda.so")
    assert native_library.is_at_hand()
    assert native_library.locate().parent == native_library.NATIVE


def test_the_library_for_another_version_is_built_once_and_kept(
    wheel: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    wheel("2.15.0+cu132", "libtorch_cuda.so")
    built: list[Path] = []

    def build(target: Path) -> None:
        built.append(target)
        target.write_text("a library")

    monkeypatch.setattr(native_library, "build", build)
    assert not native_library.is_at_hand()
    first = native_library.locate()
    assert first == native_library.locate() and len(built) == 1
    assert native_library.is_at_hand()
    assert first.is_relative_to(tmp_path / "cache") and "torch2.15.0-" in first.name


def test_without_a_compiler_another_version_is_a_sentence(
    wheel: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    wheel("2.14.1", "libtorch_cuda.so")
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(
        UserError, match=r"no library for torch 2\.14\.1 .* no C\+\+ compiler .*g\+\+"
    ) as caught:
        native_library.locate()
    assert "\n" not in str(caught.value)


def test_a_version_that_does_not_compile_is_a_sentence_that_calls_it_untried(
    wheel: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    wheel("2.10.0", "libtorch_cuda.so")
    compiler = tmp_path / "failing"
    compiler.write_text("#!/bin/sh\necho no such header >&2\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    with pytest.raises(
        UserError, match=r"torch 2\.10\.0 is untried here: 2\.11 to 2\.15 are.*failed: no such header"
    ):
        native_library.locate()
    assert list((tmp_path / "cache").rglob("*.so")) == [], "nothing is left of a build that failed"


@pytest.mark.parametrize(
    ("version", "is_tried"),
    [("2.10.1", False), ("2.11.0", True), ("2.13.1+cu130", True), ("2.15.0a0+git1", True), ("2.16.0", False),
     ("3.0.0", False)],
)  # fmt: skip
def test_versions_that_nobody_tried_are_told(
    wheel: Callable[..., Path], version: str, is_tried: bool
) -> None:
    wheel(version)
    assert (native_library.untried() == "") is is_tried
    if not is_tried:
        assert version.split("+")[0] in native_library.untried()


def test_a_cuda_build_is_kept_from_a_device_that_is_there(
    wheel: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    wheel("2.13.0+cu130", "libtorch_cuda.so")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    with pytest.raises(OSError, match="libtorch_global_deps"):  # the wheel of this test is empty
        native_library.load()
    assert os.environ["CUDA_VISIBLE_DEVICES"] == ""


def test_a_rocm_build_is_refused(wheel: Callable[..., Path]) -> None:
    wheel("2.13.0+rocm7.2", "libtorch_hip.so")
    with pytest.raises(UserError, match="ROCm build"):
        native_library.load()


def test_no_table_is_kept_that_was_not_written_to_its_end(
    wheel: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Another process would read it, and lack operators without a word."""

    def half(path: Path, content: bytes | str, *_: object, **__: object) -> None:
        path.touch()
        with open(path, "ab" if isinstance(content, bytes) else "a") as file:
            file.write(content[: len(content) // 2])
        raise OSError("no space left on the device")

    wheel("2.15.0")
    monkeypatch.setattr(Path, "write_bytes", half)
    monkeypatch.setattr(Path, "write_text", half)
    with pytest.raises(OSError, match="no space left"):
        native_library.operator_names()
    assert list((tmp_path / "cache").rglob("operators-*")) == []


def test_what_a_cuda_build_has_registered_beside_the_table_is_taken_over(
    wheel: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import torch

    there = [
        "aten::mm",
        "aten::a_new_one.out",
        "fsdp::a_kernel",
        "fsdp::in_python",
        "c10d::send",
        "symm_mem::x",
    ]
    monkeypatch.setattr(torch._C, "_dispatch_get_registrations_for_dispatch_key", lambda key: there)
    monkeypatch.setattr(torch.library, "_impls", {"fsdp/in_python/CUDA"})
    table = "\n".join([*written(tmp_path), ""]).encode()
    wheel("2.13.0+cu130", "libtorch_cuda.so")
    monkeypatch.setitem(sys.modules, "torch", torch)
    more = b"convolution\nembedding\na_new_one.out\nfsdp::a_kernel\n"
    assert native_library.operator_names() == table + more


def test_the_shipped_library_is_built_from_the_source_beside_it_for_what_make_installs() -> None:
    root = native_library.NATIVE.parents[5]
    pins = (root / "constraints.txt").read_text().splitlines()
    (line,) = (pin for pin in pins if pin.startswith("torch=="))
    shipped = native_library.NATIVE / native_library.library_name(line.removeprefix("torch=="))
    assert shipped.exists(), "rebuild: python -m windtunnel.training.emulate.live.native_library"
    version = native_library.torch_version()
    assert native_library.locate() == native_library.NATIVE / native_library.library_name(version)
    installing = [line for line in (root / "Makefile").read_text().splitlines() if "--editable" in line]
    assert installing and all(
        "--constraint $(LOCK)" in line or "--constraint constraints-edge.txt" in line for line in installing
    )
    assert "pip install" not in (root / ".ci" / "run").read_text()


@pytest.mark.slow
def test_kernels_that_are_there_already_are_overridden() -> None:
    """As over those of a CUDA build: registered a second time, with another operator's namespace."""
    code = """
from windtunnel.training.emulate.live import native_library
library = native_library.load()
import torch
library.wt_device(1, 90, 0)
torch.cuda._lazy_init = lambda: None
real = torch.library.Library("aten", "IMPL")
real.impl("add.Tensor", lambda a, b, alpha=1: 1 / 0, "CUDA")
own = torch.library.Library("wheel", "DEF")
own.define("twice(Tensor x) -> Tensor")
own.impl("twice", lambda x: 1 / 0, "CUDA")
own.impl("twice", lambda x: torch.empty_like(x), "Meta")
names = native_library.operator_names() + b"wheel::twice\\n" + b"not_there\\n"
count = library.wt_register_operators(names)
assert count == len(set(names.split())) - 1, (count, len(names.split()))
x = torch.empty(2, 3, device="cuda")
assert (x + x).shape == (2, 3) and torch.ops.wheel.twice(x).device.type == "cuda"
assert x.cpu().tolist() == [[0.0] * 3] * 2, "what is by hand stands over the one kernel"
assert library.wt_hooks_ready()
"""
    done = preloaded.run(["-c", code], modules=quick.ABSENT_DEVICE)
    assert done.returncode == 0, done.stderr


def test_the_library_comes_before_torch() -> None:
    import torch  # noqa: F401

    with pytest.raises(RuntimeError, match="before torch"):
        native_library.load()
