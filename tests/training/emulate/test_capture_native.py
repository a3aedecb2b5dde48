"""The library of the absent device that is shipped is that of its source and of the supported torch."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from windtunnel.base.errors import UserError
from windtunnel.training.emulate.live import native_library


def test_the_shipped_library_is_built_from_the_source_beside_it() -> None:
    name = native_library.library_name("2.13.0")
    assert (native_library.NATIVE / name).exists(), (
        "rebuild: python -m windtunnel.training.emulate.live.native_library"
    )
    assert native_library.locate() == native_library.NATIVE / native_library.library_name(
        native_library.torch_version()
    )
    assert {path.stem for path in native_library.NATIVE.glob("*.cpp")} == set(native_library.SOURCES)


def test_the_shipped_table_of_operators_is_that_of_torch() -> None:
    names = native_library.operator_names().decode().split()
    assert native_library.read_operator_table().decode().split() == names
    assert {"mm", "add.out", "_fused_adamw_", "convolution", "_flash_attention_forward"} <= set(names)
    assert "linear" not in names, "composite operators decompose before they reach a device"


def test_a_cuda_build_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "libtorch_cuda.so").touch()
    monkeypatch.setattr(native_library, "torch_directory", lambda: tmp_path)
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    with pytest.raises(UserError, match=r"CUDA build.* CPU build of torch"):
        native_library.load()


def test_the_library_comes_before_torch() -> None:
    import torch  # noqa: F401

    with pytest.raises(RuntimeError, match="before torch"):
        native_library.load()
