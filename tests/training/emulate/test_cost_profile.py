"""Profiles: what was measured is what an operator costs, neighbours are corrected, files survive."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from windtunnel.base.errors import UserError
from windtunnel.cluster.load import load_cluster
from windtunnel.training.emulate.graph import EventKind, Operator, Phase, TensorMeta
from windtunnel.training.emulate.twin.costs.profile import (
    DeviceProfile,
    contiguous,
    cost_of,
    decode,
    encode,
    find_profile,
    host_table,
    read_profile,
    save_profile,
    signature,
)
from windtunnel.training.emulate.twin.costs.roofline import GPU as PARAMETERS
from windtunnel.training.emulate.twin.costs.roofline import parameter_rows, roofline_seconds
from windtunnel.training.emulate.twin.costs.work import kind_of

GPU = load_cluster("h100-sxm:1x1").host.device
CPU = load_cluster("cpu:1x1").host.device


def t(*shape, dtype="bfloat16", stride=None, device="cuda"):
    return TensorMeta(shape, dtype, contiguous(shape) if stride is None else stride, device)


def mm(m, n, k):
    return Operator("aten.mm.default", (t(m, k), t(k, n)), (t(m, n),))


def roofline(op):
    return roofline_seconds(op, kind_of(op), GPU)


def test_a_measured_operator_costs_what_was_measured():
    profile = DeviceProfile("h100-sxm", [(mm(64, 64, 64), 1.25e-3)])
    cost = cost_of(mm(64, 64, 64), GPU, profile)
    assert (cost.seconds, cost.source) == (pytest.approx(1.25e-3 / PARAMETERS.in_job_matmul), "measured")
    assert cost.flops == 2 * 64**3
    # A learning rate or the device does not make it another operator; a stride does.
    same = Operator("aten.mm.default", (t(64, 64, device="cpu"), t(64, 64)), (t(64, 64),))
    assert cost_of(same, GPU, profile).source == "measured"
    turned = Operator("aten.mm.default", (t(64, 64, stride=(1, 64)), t(64, 64)), (t(64, 64),))
    assert cost_of(turned, GPU, profile).source == "interpolated"


def test_measuring_again_replaces():
    profile = DeviceProfile("h100-sxm", [(mm(64, 64, 64), 1.0), (mm(64, 64, 64), 2.0)])
    assert len(profile.operators) == 1
    assert profile.exact(mm(64, 64, 64)) == 2.0
    assert profile.ratio(mm(64, 64, 64), GPU) == pytest.approx(2.0 / roofline(mm(64, 64, 64)))


@settings(max_examples=40, deadline=None)
@given(m=st.integers(1, 9000), n=st.integers(1, 9000), k=st.integers(1, 9000), slower=st.floats(0.2, 5.0))
def test_a_device_that_is_slower_everywhere_is_slower_in_between(m, n, k, slower):
    points = [mm(a, b, c) for a in (16, 512, 8192) for b in (16, 8192) for c in (16, 8192)]
    profile = DeviceProfile("h100-sxm", [(op, slower * roofline(op)) for op in points])
    op = mm(m, n, k)
    assert cost_of(op, GPU, profile).seconds == pytest.approx(slower * cost_of(op, GPU).seconds)


def test_interpolation_lies_between_its_neighbours_and_nearer_to_the_nearest():
    small, large = mm(256, 256, 256), mm(8192, 8192, 8192)
    profile = DeviceProfile("h100-sxm", [(small, 3 * roofline(small)), (large, roofline(large))])
    ratios = [profile.ratio(mm(size, size, size), GPU) for size in (257, 1024, 8000)]
    assert 3.0 > ratios[0] > ratios[1] > ratios[2] > 1.0
    assert ratios[0] > 2.9
    assert ratios[2] < 1.1


def test_other_operators_of_a_kind_are_corrected_and_other_kinds_and_dtypes_are_not():
    x = t(1 << 20)
    profile = DeviceProfile("h100-sxm", [(Operator("aten.exp.default", (x,), (x,)), 1.0)])
    assert cost_of(Operator("aten.sin.default", (x,), (x,)), GPU, profile).source == "interpolated"
    assert cost_of(mm(64, 64, 64), GPU, profile).source == "roofline"
    y = t(1 << 20, dtype="float32")
    assert cost_of(Operator("aten.exp.default", (y,), (y,)), GPU, profile).source == "roofline"


dims = st.lists(st.integers(0, 9), max_size=4).map(tuple)
tensors = st.builds(
    lambda shape, dtype, where, turned: TensorMeta(
        shape, dtype, contiguous(shape)[::-1] if turned else contiguous(shape), where
    ),
    dims,
    st.sampled_from(["bfloat16", "int64", "float8_e4m3fn"]),
    st.sampled_from(["cuda", "cpu"]),
    st.booleans(),
)
plain = st.one_of(
    st.none(), st.booleans(), st.integers(-5, 5), st.floats(0, 1), st.sampled_from(["none", "tanh"])
)
lists = st.lists(st.one_of(tensors, plain), max_size=3).map(tuple)


@given(inputs=st.lists(st.one_of(tensors, plain, lists), max_size=5), outputs=st.lists(tensors, max_size=2))
def test_operators_survive_as_json(inputs, outputs):
    op = Operator("aten.thing.default", tuple(inputs), tuple(outputs))
    back = decode(*json.loads(json.dumps(encode(op))))
    assert back == op
    assert signature(back) == signature(op)


def test_profiles_survive_as_files(tmp_path):
    profile = DeviceProfile(
        "h100-sxm",
        [
            (mm(64, 32, 16), 1.5e-6),
            (Operator("aten._foreach_mul_.Scalar", ((t(3), t(4)), 0.5), (t(3),)), 2e-6),
        ],
        host_overhead={"forward": 5e-6},
        collectives=[("all_reduce", 2, 1024, 1e-4)],
        provenance={"machine": "a", "measured": "yes"},
    )
    save_profile(profile, tmp_path / "deep" / "h100-sxm.json")
    back = read_profile(tmp_path / "deep" / "h100-sxm.json")
    assert (back.operators, back.host_overhead, back.collectives, back.provenance) == (
        profile.operators,
        profile.host_overhead,
        profile.collectives,
        profile.provenance,
    )
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["h100-sxm.json"]


def test_profiles_are_found_at_home(tmp_path, monkeypatch):
    monkeypatch.setenv("WINDTUNNEL_HOME", str(tmp_path))
    assert find_profile("nothing-like-it") is None
    save_profile(DeviceProfile("b200", [(mm(8, 8, 8), 1.0)]), tmp_path / "profiles" / "b200.json")
    profile = find_profile("b200")
    assert profile is not None
    assert profile.exact(mm(8, 8, 8)) == 1.0


HEAD = '{"version": 1, "device": "x", "provenance": {}, "host_overhead": {}, "collectives": [], '


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        '{"version": 1}',
        '{"version": 99}',
        HEAD + '"operators": [["aten.mm.default", [{"t": "bad"}], [], 1]]}',
    ],
)
def test_what_is_not_a_profile_is_refused_in_one_sentence(tmp_path, text):
    path = tmp_path / "x.json"
    path.write_text(text)
    with pytest.raises(UserError) as error:
        read_profile(path)
    assert str(path) in str(error.value)
    assert "accepted is" in str(error.value)
    assert "\n" not in str(error.value)


def test_every_parameter_has_a_source():
    for part in (GPU, CPU):
        rows = parameter_rows(part)
        assert rows
        assert all(source for _, _, source in rows)


def test_a_cpu_host_pays_only_what_was_measured_and_a_gpu_host_pays_for_launches():
    view = Operator("aten.view.default", (), ())
    gathered = Operator("fsdp.split_with_sizes_copy.default", (t(4), t(4)), (t(4),))
    measured = {"forward": 4e-6, "backward": 2e-6, "view": 1e-6, "fsdp_tensor": 3e-6}
    for profile, solid, light, sharded in (
        (None, 0, 0, 0),
        (DeviceProfile("cpu", [], measured), 4, 1, 4 + 6),
    ):
        rows, others = host_table([mm(8, 8, 8), view, gathered], CPU, profile)
        assert rows[:, Phase.FORWARD] == pytest.approx([1e-6 * solid, 1e-6 * light, 1e-6 * sharded])
        assert rows[0, Phase.OPTIMIZER] == 0 and not others.any()
    rows, others = host_table([mm(8, 8, 8), view], GPU)
    (solid, backward), (light, less) = rows[:, [Phase.FORWARD, Phase.BACKWARD]]
    assert 6e-6 <= solid <= 10e-6 and solid > backward > 0 and solid > light == 2 * less > 0
    assert (others[EventKind.COLLECTIVE] > others[EventKind.SYNC]).all() and not others[EventKind.OP].any()
    assert (others[EventKind.FREE] == others[EventKind.ALLOC]).all() and not others[EventKind.STEP].any()
