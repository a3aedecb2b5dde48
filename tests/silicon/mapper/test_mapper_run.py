"""Files, captured operators, and the ways in: what is kept, what is written, and what is refused."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

import windtunnel as wt
from support import quick
from support.programs import train
from windtunnel.base.errors import UserError
from windtunnel.calibration import profiles
from windtunnel.cli.main import app
from windtunnel.cluster.load import load_cluster
from windtunnel.replay import replay
from windtunnel.silicon.mapper import Observation, decide, read_accelerator, read_layers
from windtunnel.silicon.mapper.captured import nests
from windtunnel.silicon.mapper.run import allocate, profile, search
from windtunnel.silicon.mapper.spec import CATALOGUE, accelerator, gemm, layers, shipped
from windtunnel.silicon.mapper.twin import cost, price, stream
from windtunnel.store.eventlog import NAME
from windtunnel.store.runs import Store
from windtunnel.training.emulate.graph import Operator, TensorMeta
from windtunnel.training.emulate.twin.costs.profile import cost_of, encode, find_profile, signature

MM = Operator(
    "aten.mm.default",
    (TensorMeta((64, 32), "float32", (32, 1)), TensorMeta((32, 48), "float32", (48, 1))),
    (TensorMeta((64, 48), "float32", (48, 1)),),
)
SUM = TensorMeta((64, 48), "float32", (48, 1))
ADD = Operator("aten.add_.Tensor", (SUM,), (SUM,))
PRODUCT = {"kind": "matmul", "count": 3, "ranks": 2, "shape": [1, 64, 48, 32], "flops": 2.0 * 64 * 48 * 32}
STREAM = {"kind": "elementwise", "count": 4, "ranks": 1, "shape": [], "flops": 0.0}
ROWS = [[*encode(MM), PRODUCT | {"bytes": 4e4}], [*encode(ADD), STREAM | {"bytes": 24576.0}]]


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("WINDTUNNEL_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("WINDTUNNEL_STORE", raising=False)
    return tmp_path / "home"


@pytest.fixture
def emulated() -> str:
    """What an emulation leaves."""
    run = Store.open().begin("training.emulate", {})
    profiles.save(run.directory / "operators.json", 1, {"period": 2}, ("operators", ROWS))
    facts = {"nic": "ib-400", "intra": "nvlink-4", "hosts": 1, "devices_per_host": 2}
    run.finish({"cluster": facts, "world_size": 2})
    return run.id


@pytest.mark.parametrize("name", CATALOGUE)
def test_the_catalogue_says_where_its_figures_come_from(name: str) -> None:
    chip = read_accelerator(name)
    assert len(shipped(name)["source"]) > 40
    assert all(level.energy > 0 for level in chip.levels)
    energies = [level.energy for level in chip.levels]
    assert energies == sorted(energies)
    assert all(table["source"] and len(table["at"]) > 1 for table in shipped("energies").values())


def test_networks_have_the_work_that_is_known_of_them() -> None:
    assert sum(layer.macs for layer in read_layers("alexnet")) == pytest.approx(16 * 724e6, rel=0.01)
    assert sum(layer.macs for layer in read_layers("vgg16")) == pytest.approx(16 * 15.47e9, rel=0.01)
    assert read_layers("alexnet.conv2")[0].bounds == (5, 5, 27, 27, 48, 128, 16)


def test_a_file_of_layers_becomes_nests(tmp_path: Path) -> None:
    file = tmp_path / "own.yaml"
    file.write_text(
        "batch: 2\nlayers:\n  a: {inputs: 4, outputs: 6, size: [5, 7], kernel: [3, 1], stride: 2}\n"
        "  b: {n: 8, k: 16}\n  c: {heads: 3, queries: 10, keys: 20, dimension: 4}\n"
    )
    conv, product, scores, context = read_layers(str(file))
    assert (conv.bounds, conv.stride) == ((1, 3, 7, 5, 4, 6, 2), 2)
    assert product == gemm("b", 2, 8, 16)
    assert (scores.bounds[4:], scores.groups) == ((4, 20, 10), 6)
    assert (context.bounds[4:], context.groups) == ((20, 4, 10), 6)


PE, OUT = {"energy": 1, "capacity": 8, "per_pe": True}, {"energy": 2}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"wrod": 2}, "field wrod is unknown, did you mean word"),
        ({"word": True}, "field word is True, accepted is a whole number from 1 up"),
        ({"array": [16]}, r"field array.* accepted is PEs along both axes"),
        ({"levels": {"a": PE}}, "field levels is .* accepted is two to six"),
        ({"levels": {"a": {"energy": 1, "capacity": 8}, "b": OUT}}, "level a has per_pe False"),
        ({"levels": {"a": PE | {"holds": "W"}, "b": OUT}}, "level a has holds W"),
        ({"levels": {"a": {"energy": "rf", "per_pe": True}, "b": OUT}}, "level a has no capacity"),
        ({"levels": {"a": PE | {"energy": "rm"}, "b": OUT}}, "level a has energy 'rm', accepted is pJ"),
        (
            {"levels": {"a": PE | {"holds": "X"}, "b": OUT}},
            "field levels.a.holds is 'X', accepted is letters",
        ),
        ({"clock": -1}, "field clock is -1, accepted is Hz"),
    ],
)
def test_what_is_wrong_with_an_accelerator_is_one_sentence(change: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=f"^mine.yaml: {words}") as error:
        accelerator(shipped("eyeriss") | change, "mine.yaml")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("layer", "words"),
    [
        ({}, "layer a is of no kind, accepted are"),
        ({"inputs": 4, "outputs": 6, "groups": 4}, "layer a has 4 inputs and 6 outputs in 4 groups"),
        ({"n": 0, "k": 1}, r"field layers\.a\.n is 0, accepted is a whole number"),
    ],
)
def test_what_is_wrong_with_a_layer_is_one_sentence(layer: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        layers({"layers": {"a": layer}}, "mine.yaml")


@pytest.mark.parametrize("shape", [(1, 64, 48, 32), (3, 64, 48, 32)])
def test_a_product_is_its_nest(shape: tuple[int, ...]) -> None:
    facts = {"kind": "matmul", "shape": list(shape), "flops": 2.0 * math.prod(shape)}
    ((layer, times),) = nests(["aten.bmm.default", [], [], facts])
    assert (layer.macs, times) == (math.prod(shape), 1.0)


@pytest.mark.parametrize("backward", [False, True])
def test_attention_is_its_products_and_a_causal_one_a_part_of_them(backward: bool) -> None:
    query, key, value = [2, 4, 16, 8], [2, 4, 32, 8], [2, 4, 32, 6]
    terms = (8 + 6) if not backward else (8 + 6 + 6 + 8 + 8)
    flops = 2.0 * 8 * 16 * 32 * terms
    facts = {"kind": "attention", "shape": [query, key, value, True, backward], "flops": flops / 2}
    layers = nests(["aten._flash_attention.default", [], [], facts])
    assert len(layers) == (5 if backward else 2)
    assert sum(2.0 * layer.macs for layer, _ in layers) == flops
    assert {times for _, times in layers} == {0.5}


def test_a_convolution_and_its_gradients_do_the_same_work() -> None:
    x, weight, out = "float32[2,6,9,9]", "float32[8,3,3,3]", "float32[2,8,4,4]"
    rest = [[2, 2], [0, 0], [1, 1], False, [0, 0], 2]
    facts = {"kind": "conv", "shape": [], "flops": 1.0}
    ((forward, _),) = nests(
        ["aten.convolution.default", [{"t": x}, {"t": weight}, None, *rest], [out], facts]
    )
    assert (forward.bounds, forward.stride, forward.groups) == ((3, 3, 4, 4, 3, 4, 2), 2, 2)
    given = [{"t": out}, {"t": x}, {"t": weight}, [8], *rest, [True, True, False]]
    back = [layer for layer, _ in nests(["aten.convolution_backward.default", given, [x, weight], facts])]
    assert [layer.macs for layer in back] == [forward.macs] * 2
    given[-1] = [False, True, False]
    (only,) = nests(["aten.convolution_backward.default", given, [x, weight], facts])
    assert only[0] == back[1]


def test_a_run_keeps_its_decisions_and_they_are_made_again() -> None:
    rows = search(read_layers("mlp")[3:], read_accelerator("eyeriss"))
    run = Store.open().get("last")
    assert (run.capability, run.status) == ("silicon.mapper", "done")
    assert run.summary["joules"] == pytest.approx(sum(row.cost.joules for row in rows))
    (part,) = replay(run.directory / NAME).parts
    assert (part.decisions, part.same) == (1, 1)
    assert part.recorded_cost["joules"] == pytest.approx(rows[0].cost.joules)
    (other,) = replay(run.directory / NAME, "fastest").parts
    assert other.replayed_cost["seconds"] <= part.recorded_cost["seconds"]


def test_the_twin_counts_anew_what_was_decided() -> None:
    observation = Observation(read_layers("mlp.fc4")[0], read_accelerator("tpu"))
    decision = decide(observation)
    priced = price(observation, decision)
    assert priced.joules == pytest.approx(decision.energy)
    assert priced.seconds == pytest.approx(decision.cycles / observation.accelerator.clock)
    assert cost(observation, decision)["bytes of memory"] == priced.bytes[-1]


def test_what_only_streams_is_bound_by_the_slowest_level() -> None:
    chip = read_accelerator("eyeriss")
    transfer = stream(chip, 1e6)
    assert transfer.seconds == pytest.approx(max(1e6 / 3.2e9, 2e6 / 12.8e9))
    words, levels = 1e6 / 2, chip.levels
    each = levels[0].energy + 2 * levels[1].energy + levels[2].energy + chip.hop
    assert transfer.joules == pytest.approx(words * each)


def test_memories_are_sized_and_the_gain_is_told() -> None:
    reply = CliRunner().invoke(app, ["mapper", "allocate", "-a", "eyeriss", "-l", "mlp.fc4", "--json"])
    report = json.loads(reply.output)
    again = allocate(read_layers("mlp.fc4"), read_accelerator("eyeriss"), "C|K")
    assert (
        report["energy_gain"]
        == pytest.approx(report["base"]["energy"] / report["best"]["energy"])
        == again.gain
    )
    assert report["energy_gain"] >= 1


def test_a_run_becomes_a_device_that_emulate_prices_by(emulated: str, tmp_path: Path) -> None:
    chip, out = read_accelerator("tpu"), tmp_path / "tpu.yaml"
    search(read_layers("mlp.fc4"), chip)  # a later run, which last passes over
    mapped = profile("last", chip, out)
    cluster = load_cluster(out)
    assert (cluster.world_size, cluster.host.device.name) == (2, "tpu-drawn")
    assert cluster.host.device.peak("bfloat16") == 2 * 256 * 256 * 700e6
    known = find_profile(cluster.host.device.name)
    matmul, add = (cost_of(op, cluster.host.device, known) for op in (MM, ADD))
    assert matmul.source == add.source == "modelled"
    # calls of all ranks in a step, of two ranks and two steps of a period
    assert mapped.kinds["matmul"].seconds == pytest.approx(matmul.seconds * 3 * 2 / 2 / 2)
    assert mapped.kinds["elementwise"].seconds == pytest.approx(add.seconds * 4 * 1 / 2 / 2)
    assert mapped.kinds["elementwise"].joules == pytest.approx(known.joules[signature(ADD)])
    assert mapped.step.joules == pytest.approx(sum(kind.joules for kind in mapped.kinds.values()))


@pytest.mark.conformance
def test_a_job_flies_on_the_drawing_and_says_its_joules(home: Path, tmp_path: Path) -> None:
    out = tmp_path / "tpu.yaml"
    with quick.captures():
        wt.emulate(train, 256, cluster="h100-sxm:1x2", report=False)
        mapped = profile("last", read_accelerator("tpu"), out)
        run = wt.emulate(train, 256, cluster=str(out), report=False)
    assert run.summary.joules_per_iteration == pytest.approx(2 * mapped.step.joules)
    assert run.summary.critical_path["compute"] == pytest.approx(mapped.step.seconds)
    assert {operator.source for operator in run.summary.operators} == {"modelled"}


def test_a_run_without_operators_or_on_a_link_of_its_own_is_refused(emulated: str, tmp_path: Path) -> None:
    chip, out = read_accelerator("tpu"), tmp_path / "chip.yaml"
    search(read_layers("mlp.fc4"), chip)
    mapped = Store.open().get("last").id
    with pytest.raises(UserError, match=r"of silicon.mapper has no operators.json, accepted are runs of"):
        profile(mapped, chip, out)
    own = Store.open().begin("training.emulate", {})
    profiles.save(own.directory / "operators.json", 1, {"period": 1}, ("operators", ROWS))
    own.finish({"cluster": {"nic": "mine", "intra": "nvlink-4"}, "world_size": 1})
    with pytest.raises(UserError, match="the run's nic is 'mine', accepted are"):
        profile(own.id, chip, out)
    with pytest.raises(UserError, match=r"`out`: .* cannot be written"):
        profile(emulated, chip, tmp_path / "none" / "chip.yaml")
    assert not out.exists()
    assert Store.open().get("last").status == "failed"


def test_the_command_line_shows_a_table_and_a_schedule(tmp_path: Path) -> None:
    run = CliRunner()
    reply = run.invoke(app, ["mapper", "search", "-a", "eyeriss", "-l", "mlp.fc4"])
    assert reply.exit_code == 0
    assert "O.reorder(" in reply.output and "eyeriss, emulated" in reply.output
    plain = json.loads(run.invoke(app, ["mapper", "search", "-a", "cpu", "-l", "mlp.fc4", "--json"]).stdout)
    assert plain["levels"] == ["registers", "L1", "L2", "DRAM"]
    assert plain["details"][0]["decision"]["exact"] is False
    assert [*plain["costs"]] == [f"fc4  {plain['details'][0]['decision']['mapping']['dataflow']}"]
    assert "together" in run.invoke(app, ["mapper", "search", "-a", "eyeriss", "-l", "mlp"]).output
    for words, wrong in (
        (["-a", "eyeris", "-l", "mlp"], "--accelerator: 'eyeris' is unknown, did you mean eyeriss"),
        (["-a", "eyeriss", "-l", "mlp.fc9"], "--layer: mlp has no 'fc9'"),
        (["-a", "eyeriss", "-l", "mlp", "--dataflow", "X|K"], "--dataflow: 'X|K' is not understood"),
        (["-a", "eyeriss", "-l", "mlp", "--policy", "slow"], "--policy: 'slow' is unknown"),
        (["-a", str(tmp_path / "none.yaml"), "-l", "mlp"], "there is no such file"),
    ):
        error = run.invoke(app, ["mapper", "search", *words]).exception
        assert isinstance(error, UserError) and wrong in str(error)


def test_an_accelerator_of_a_file_is_that_of_the_catalogue(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(yaml.safe_dump(shipped("tpu"), sort_keys=False))
    assert read_accelerator(str(file)) == read_accelerator("tpu")
