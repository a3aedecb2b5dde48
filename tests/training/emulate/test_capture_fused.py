"""Fused kernels of packages that are not installed: what is recorded, kept, said, and what it costs."""

from __future__ import annotations

import numpy as np
import pytest
from capturing import capture

from windtunnel.cluster.load import load_cluster
from windtunnel.training.emulate.graph import (
    EventKind,
    Operator,
    Phase,
    Slice,
    TensorMeta,
)
from windtunnel.training.emulate.live.failure import sentence
from windtunnel.training.emulate.twin.costs.profile import cost_of
from windtunnel.training.emulate.twin.costs.work import counted_flops, executed_flops, kind_of, moved_bytes

ALL = ("flash", "hopper", "hub", "float8", "core", "refused", "parallel", "apex")


@pytest.fixture(scope="module")
def slice_() -> Slice:
    return capture("fused.py", *ALL)[0]


def kernels(slice_: Slice, package: str) -> list[tuple[Phase, str, Operator]]:
    events = slice_.events[slice_.events["kind"] == EventKind.OP]
    rows = [(Phase(e["phase"]), slice_.operators[e["ref"]]) for e in events]
    return [(phase, op.name.split(".")[1], op) for phase, op in rows if op.name.startswith(f"{package}.")]


def test_flash_attention_is_one_kernel_each_way_of_the_scores_that_its_mask_leaves(slice_: Slice) -> None:
    launches = kernels(slice_, "flash_attn")
    assert [name for _, name, _ in launches] == 3 * ["flash_attention", "flash_attention_backward"] + 3 * [
        "flash_attention"
    ]
    grouped, back, _, _, in_a_row, _, sliding, unknown, _ = (op for _, _, op in launches)
    assert [t.shape for t in grouped.outputs] == [(2, 8, 256, 64), (2, 8, 256)]
    assert [t.shape for t in back.outputs] == [(2, 8, 256, 64), (2, 2, 256, 64), (2, 2, 256, 64)]
    products = 2 * 2 * 8 * 256 * 256 * 64
    assert counted_flops(grouped) == 2 * products and counted_flops(back) == 5 * products
    assert executed_flops(grouped) == pytest.approx(products, rel=0.01)
    lengths = (10, 30, 60)
    assert counted_flops(in_a_row) == pytest.approx(4 * 8 * 64 * sum(n * n for n in lengths))
    left = sum(min(row + 1, 128) for row in range(512))
    assert executed_flops(sliding) == pytest.approx(4 * 4 * 64 * left)
    assert counted_flops(unknown) == pytest.approx(4 * 8 * 64 * 4 * 25 * 25), "equally long, which is said"


def test_flash_attention_3_is_costed_as_cudnn_s_on_hopper_wherever_it_comes_from(slice_: Slice) -> None:
    launches = kernels(slice_, "flash_attn_interface")
    assert [name for _, name, _ in launches] == [
        "cudnn_attention", "cudnn_attention_backward", *3 * ["cudnn_attention"]
    ]  # fmt: skip
    grouped, _, in_a_row, sliding, _ = (op for _, _, op in launches)
    assert counted_flops(grouped) == 2 * 2 * 2 * 8 * 256 * 256 * 128
    assert counted_flops(in_a_row) == pytest.approx(4 * 8 * 64 * sum(n * n for n in (10, 30, 60)))
    assert executed_flops(sliding) == pytest.approx(4 * 4 * 64 * sum(min(row + 1, 32) for row in range(64)))
    texts = [note.text for note in slice_.notes]
    assert sum("kernels-community/activation cannot be loaded here" in text for text in texts) == 1


def test_products_in_float8_run_at_its_peak_and_a_weight_is_cast_once_a_step(slice_: Slice) -> None:
    device = load_cluster("h100-sxm:1x8").host.device
    names = [name for _, name, _ in kernels(slice_, "transformer_engine")]
    assert names.count("_scaled_mm") == 2 * 3
    assert names.count("_to_copy") == 1 + 2 * 2, "the weight, and for each micro-batch input and gradient"

    def seconds(base: str, dtype: str) -> float:
        a, b = (TensorMeta((8192, 8192), dtype, (8192, 1)) for _ in range(2))
        op = Operator(f"transformer_engine.{base}.default", (a, b), (TensorMeta(a.shape, "bfloat16"),))
        assert kind_of(op) == "matmul"
        return cost_of(op, device).seconds

    faster = seconds("mm", "bfloat16") / seconds("_scaled_mm", "float8_e4m3fn")
    assert faster == pytest.approx(device.peak("float8_e4m3fn") / device.peak("bfloat16"), rel=0.05)


def test_attention_of_transformer_engine_is_cudnn_s_on_hopper(slice_: Slice) -> None:
    forward, backward = (row for row in kernels(slice_, "transformer_engine") if "attention" in row[1])
    assert (forward[1], backward[1]) == ("cudnn_attention", "cudnn_attention_backward")
    assert forward[2].outputs[0].shape == (2, 8, 128, 64)


def test_tensor_parallel_layers_send_what_they_send_and_add_to_the_main_gradient(slice_: Slice) -> None:
    calls = [slice_.collectives[e["ref"]] for e in slice_.events if e["kind"] == EventKind.COLLECTIVE]
    part, whole = 8 * 64 * 2, 64 * 64 * 2
    assert [(call.kind, call.in_bytes) for call in calls[:-1]] == [
        ("all_gather", part), ("reduce_scatter", whole), ("all_gather", part), ("all_gather", part),
        ("reduce_scatter", whole),
    ]  # fmt: skip
    *_, added, _ = (op for _, _, op in kernels(slice_, "transformer_engine"))
    assert added.outputs[0].dtype == "float32" and added.inputs[2] == added.outputs[0]
    assert moved_bytes(added) == (32 * 64 + 64 * 64) * 2 + 2 * 32 * 64 * 4, "read, and written"


def test_user_buffers_run_a_collective_beside_its_product(slice_: Slice) -> None:
    events = slice_.events
    products = [i for i in np.flatnonzero(events["kind"] == EventKind.OP)
                if slice_.operators[events[i]["ref"]].name == "transformer_engine.mm.default"]  # fmt: skip
    sent, waited = (
        np.flatnonzero(events["kind"] == kind)[-1] for kind in (EventKind.COLLECTIVE, EventKind.WORK_WAIT)
    )
    assert sent < products[-1] < waited
    assert slice_.collectives[events[sent]["ref"]].in_bytes == 64 * 48 * 2


def test_a_package_can_be_left_out_and_what_is_not_there_is_named() -> None:
    slice_ = capture("fused.py", "without")[0]
    assert "aten.native_layer_norm.default" in [op.name for op in slice_.operators]
    error = ModuleNotFoundError("No module named 'flash_attn.ops'", name="flash_attn.ops")
    assert "flash_attn.ops cannot be emulated" in sentence(error)
    error = ImportError("cannot import name 'TransformerLayerX' from 'transformer_engine.pytorch'",
                        name="transformer_engine.pytorch")  # fmt: skip
    assert "transformer_engine.pytorch.TransformerLayerX cannot be emulated" in sentence(error)
