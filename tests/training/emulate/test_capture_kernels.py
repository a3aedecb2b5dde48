"""Which kernel a call becomes, which copies make the host wait, and what streams wait for."""

from __future__ import annotations

import pytest
from capturing import capture

from windtunnel.training.emulate.graph import EventKind, Operator, Slice


@pytest.fixture(scope="module")
def slice_() -> Slice:
    return capture("kernels.py")[0]


def operators(slice_: Slice) -> list[tuple[int, Operator]]:
    """The operators with the place of their event."""
    ops = [(i, e) for i, e in enumerate(slice_.events) if e["kind"] == EventKind.OP]
    return [(i, slice_.operators[e["ref"]]) for i, e in ops]


def test_attention_becomes_the_kernel_that_the_device_would_choose(slice_: Slice) -> None:
    # sdp_utils.cpp of a CUDA build, in its order: flash, memory-efficient, else matrix products.
    names = [op.name for _, op in operators(slice_)]
    fused = [name.split(".")[1] for name in names if "scaled_dot_product" in name]
    flash, efficient = "_scaled_dot_product_flash_attention", "_scaled_dot_product_efficient_attention"
    assert fused == [flash, flash, efficient, efficient, efficient, flash]
    assert sum(name == "aten.bmm.default" for name in names) == 2, "grouped queries in float32 have no kernel"


def test_a_copy_makes_the_host_wait_as_cuda_would(slice_: Slice) -> None:
    waits: dict[tuple[str, int], bool] = {}
    for i, op in operators(slice_):
        if op.name == "aten.copy_.default" and op.inputs[0].device != op.inputs[1].device:
            kib = op.inputs[0].nbytes >> 10
            where = op.inputs[0].device + (" again" if ("cpu", kib) in waits else "")
            waits[where, kib] = slice_.events[i + 1]["kind"] == EventKind.SYNC
    assert waits == {
        ("cuda", 1): False,  # small enough to be staged at once
        ("cuda", 100): True,  # pageable memory, whatever was asked for
        ("cuda", 101): True,
        ("cuda", 200): False,  # pinned
        ("cuda", 201): True,  # pinned, but asked to block
        ("cpu", 300): False,
        ("cpu again", 300): True,
    }


def test_streams_wait_for_each_other(slice_: Slice) -> None:
    events = slice_.events
    (side,) = {int(s) for s in events["stream"] if s != 0}
    seven = [(i, op) for i, op in operators(slice_) if any(out.shape == (7,) for out in op.outputs)]
    on_side = next(i for i, op in seven if op.name.startswith("aten.mul"))
    after = next(i for i, op in seven if op.name.startswith("aten.add"))
    assert events[on_side]["stream"] == side and events[after]["stream"] == 0
    for begin, end, source, sink in ((0, on_side, 0, side), (on_side, after, side, 0)):
        part = events[begin:end]
        recorded = part[(part["kind"] == EventKind.RECORD) & (part["stream"] == source)]
        waited = part[(part["kind"] == EventKind.WAIT) & (part["stream"] == sink)]
        assert len(recorded) == 1 and recorded["ref"].tolist() == waited["ref"].tolist()
    kept = events[events["kind"] == EventKind.RECORD_STREAM]
    assert kept["stream"].tolist() == [side]


def test_an_operator_of_the_script_is_answered_by_its_fake_implementation(slice_: Slice) -> None:
    (own,) = [op for _, op in operators(slice_) if op.name == "mine.scale.default"]
    assert own.inputs[0].shape == own.outputs[0].shape == (5, 5) and own.inputs[1] == 2.0
