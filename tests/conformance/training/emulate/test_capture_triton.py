"""Kernels written in Triton are launched without a device, and recorded."""

from __future__ import annotations

from pathlib import Path

import pytest

from training.emulate.capturing import capture, operator_names, session, steady_events
from windtunnel.base.errors import ScriptError
from windtunnel.training.emulate.graph import NoteKind, Slice
from windtunnel.training.emulate.twin.costs.work import counted_flops, moved_bytes

pytest.importorskip("triton")
N, WIDTH = 4096, 1024


@pytest.fixture(scope="module")
def slice_() -> Slice:
    return capture(str(Path(__file__).parent / "programs" / "triton_kernels.py"))[0]


def test_every_launch_is_an_operator_of_the_kernels_name(slice_: Slice) -> None:
    names = [name for name in operator_names(slice_, steady_events(slice_)) if name.startswith("triton")]
    assert names == ["triton.add_kernel", "triton.scale_kernel", "triton._rms_norm_fwd"]


def test_a_kernel_moves_the_bytes_of_its_tensors(slice_: Slice) -> None:
    by_name = {op.name: op for op in slice_.operators if op.inputs and op.name.startswith("triton")}
    each = N * WIDTH * 4
    moved = {name: moved_bytes(op) for name, op in by_name.items() if name != "triton.add_kernel"}
    assert moved == {"triton.scale_kernel": each, "triton._rms_norm_fwd": 2 * each + WIDTH * 4}
    large = [op for op in slice_.operators if op.name == "triton.add_kernel"]
    assert [moved_bytes(op) for op in large] == [3 * 4 * 8, 3 * each]
    assert not any(counted_flops(op) for op in by_name.values())


def test_it_is_said_once(slice_: Slice) -> None:
    said = [
        note.text for note in slice_.notes if note.kind == NoteKind.APPROXIMATION and "Triton" in note.text
    ]
    assert len(said) == 1


PROBE = """
import torch

torch.ones(1, device="cuda")
assert not torch.utils._triton.has_triton()
import triton
from triton.compiler.errors import CompilationError
from triton.language.extra.cuda import libdevice
from triton.runtime.jit import JITFunction
assert tuple(int(part) for part in triton.__version__.split(".")[:2]) >= (3, 0)
assert issubclass(CompilationError, Exception)


@triton.jit
def kernel(x):
    pass


assert isinstance(kernel, JITFunction)
import torch._inductor.runtime.triton_heuristics, torch._inductor.codegen.triton


{end}
"""


def run(tmp_path: Path, end: str) -> None:
    script = tmp_path / "probe.py"
    script.write_text(PROBE.replace("{end}", end))
    with session(str(script)) as capture_session:
        capture_session.capture([0])


def test_what_is_only_named_works(tmp_path: Path) -> None:
    run(tmp_path, "")


def test_a_kernel_refuses_what_triton_would(tmp_path: Path) -> None:
    with pytest.raises(ScriptError, match=r"Pointer argument \(at 0\) cannot be accessed from Triton"):
        run(tmp_path, "kernel[(1,)](torch.ones(4))")
