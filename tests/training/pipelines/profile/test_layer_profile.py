"""Profiles of layers: files and their errors, GPT shapes, and an emulated graph."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from windtunnel.base.errors import UserError
from windtunnel.cluster.load import load_cluster
from windtunnel.training.emulate.graph import EVENT, Category, EventKind, Operator, Phase, Slice
from windtunnel.training.pipelines.model import LayerProfile
from windtunnel.training.pipelines.policy.planner import plan
from windtunnel.training.pipelines.profile import (
    gpt_profile,
    profile_of_slice,
    read_profile,
    write_profile,
)

FILE = """
layers:
  - {name: embedding, forward: 1.0e-4, backward: 2e-4, state_bytes: 4.1e+9}
  - {name: block, repeat: 2, forward: 0.011, backward: 0.022, in_host: {4: 1.3e-4, 2: 1.1e-4}}
"""


def test_a_file(tmp_path: Path) -> None:
    path = tmp_path / "layers.yaml"
    path.write_text(FILE)
    inside = ((2, 1.1e-4), (4, 1.3e-4))
    assert read_profile(path) == (
        LayerProfile("embedding", 1e-4, 2e-4, 4.1e9),
        LayerProfile("block.0", 0.011, 0.022, in_host=inside),
        LayerProfile("block.1", 0.011, 0.022, in_host=inside),
    )
    again = tmp_path / "again.yaml"
    again.write_text(write_profile(read_profile(path)))
    assert read_profile(again) == read_profile(path)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "holds None, accepted is a mapping"),
        ("layers: []", "field layers is .*, accepted is a list of at least one layer"),
        ("other: 1", "field layers is missing"),
        (
            "layers: [{name: a, forward: 1}]",
            r"layers\[0\].backward is missing, accepted is a number",
        ),
        (
            "layers: [{name: a, forward: -1, backward: 1}]",
            r"layers\[0\].forward is -1, accepted is a num",
        ),
        ("layers: [{name: a, forward: .nan, backward: 1}]", r"layers\[0\].forward is nan"),
        ("layers: [{name: a, forward: true, backward: 1}]", r"layers\[0\].forward is True"),
        (
            "layers: [{name: a, forward: 1, backward: 1, repeat: 0}]",
            "repeat is 0, accepted is a whole",
        ),
        ("layers: [{name: a, forward: 1, backward: 1, speed: 2}]", r"layers\[0\].speed is unknown"),
        ("layers: [{name: a, forward: 1, backward: 1, in_host: {1: 2}}]", "in_host.* accepted is a mapping"),
        ("layers: [3]", r"layers\[0\] is 3, accepted is a mapping of the fields"),
        ("layers: [{name: a, name: b}]", "given twice"),
        ("layers: [", "not valid YAML"),
    ],
)
def test_files_that_are_refused(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "layers.yaml"
    path.write_text(text)
    with pytest.raises(UserError, match=says) as error:
        read_profile(path)
    assert str(error.value).startswith(str(path))


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="there is no such file"):
        read_profile(tmp_path / "none.yaml")


def test_the_shape_of_gpt3() -> None:
    device = load_cluster("a100-80:1x8").host.device
    layers = gpt_profile(96, 12288, 2048, 1, device)
    assert [layer.name for layer in layers[:2]] == ["embedding", "block.0"] and layers[-1].name == "head"
    assert len(layers) == 98
    # 175 billion parameters, 16 bytes each; the head's table is counted beside the embedding's.
    parameters = sum(layer.state_bytes for layer in layers) / 16
    assert parameters == pytest.approx(175e9, rel=0.01)
    # Six FLOP a parameter and token, and attention on top.
    flop = (
        sum(layer.forward + layer.backward for layer in layers) * device.peak("bfloat16") * device.sustained
    )
    assert 1.0 < flop * 0.75 / (6 * 174e9 * 2048) < 1.1
    again = gpt_profile(96, 12288, 2048, 1, device, recompute=True)
    assert again[1].backward == pytest.approx(1.5 * layers[1].backward)
    assert again[1].activation_bytes == layers[1].activation_bytes / 17


def test_a_gpt_is_planned_inside_hosts() -> None:
    cluster = load_cluster("h100-sxm:4x4")
    host = cluster.host
    layers = gpt_profile(8, 4096, 2048, 1, host.device, intra=host.intra, devices_per_host=4)
    assert [devices for devices, _ in layers[1].in_host] == [2, 4]
    found = plan(layers, 2, 4, host.device.memory_bytes)
    assert found is not None and sum(stage.devices for stage in found.stages) == 8


def slice_of(rows: list[tuple[EventKind, Phase, str, int, int]], categories: dict[int, int]) -> Slice:
    scopes = sorted({scope for _, _, scope, _, _ in rows} | {""})
    events = np.zeros(len(rows), EVENT)
    for i, (kind, phase, scope, ref, value) in enumerate(rows):
        events[i] = (kind, phase, 0, scopes.index(scope), ref, value)
    operators = [Operator(f"aten.op{i}.default", (), ()) for i in range(3)]
    return Slice(
        0, 1, "cuda", operators, [], [], [], events, [(0, 0), (0, len(rows))], scopes, [], categories
    )


OP, ALLOC = EventKind.OP, EventKind.ALLOC


def test_layers_of_an_emulated_step() -> None:
    rows = [
        (OP, Phase.FORWARD, "layers.1", 0, 0),
        (OP, Phase.FORWARD, "layers.1.mlp", 1, 0),
        (ALLOC, Phase.FORWARD, "layers.1.mlp", 10, 600),
        (ALLOC, Phase.FORWARD, "layers.1.mlp", 11, 7000),
        (OP, Phase.FORWARD, "layers.10", 2, 0),
        (OP, Phase.BACKWARD, "", 1, 0),  # The loss: it counts for the last layer.
        (OP, Phase.BACKWARD, "layers.10", 2, 0),
        (ALLOC, Phase.BACKWARD, "layers.10", 12, 50),
        (OP, Phase.RECOMPUTE, "layers.1", 0, 0),
        (OP, Phase.BACKWARD, "layers.1.mlp", 1, 0),
        (ALLOC, Phase.BACKWARD, "layers.1.mlp", 13, 100),
        (ALLOC, Phase.BACKWARD, "layers.1", 14, 90),
        (OP, Phase.BACKWARD, "", 0, 0),
        (OP, Phase.OPTIMIZER, "", 2, 0),
    ]
    kinds = {10: Category.ACTIVATION, 11: Category.TEMPORARY}
    kinds |= dict.fromkeys((12, 13, 14), Category.GRADIENT)
    seconds = np.array([1.0, 10.0, 100.0])
    found = profile_of_slice(slice_of(rows, kinds), seconds, ["layers.1", "layers.10"], microbatches=2)
    assert found == (
        LayerProfile("layers.1", 5.5, 6.0, 400.0, 300.0, 100.0),
        LayerProfile("layers.10", 50.0, 55.0, 200.0, 0.0, 50.0),
    )


def test_parameters_that_are_known() -> None:
    made = slice_of([(OP, Phase.FORWARD, "a", 0, 0), (OP, Phase.FORWARD, "b", 0, 0)], {})
    found = profile_of_slice(made, np.ones(3), ["a", "b"], parameter_bytes=[5.0, 7.0], state_factor=8.0)
    assert [(layer.state_bytes, layer.gradient_bytes) for layer in found] == [(40.0, 5.0), (56.0, 7.0)]


def test_paths_that_are_refused() -> None:
    made = slice_of([(OP, Phase.FORWARD, "a.b", 0, 0)], {})
    with pytest.raises(UserError, match="runs in layer 'c'"):
        profile_of_slice(made, np.ones(3), ["a", "c"])
    with pytest.raises(UserError, match=r"layer a.b lies within layer a"):
        profile_of_slice(made, np.ones(3), ["a", "a.b"])
