"""Sweep files: what they mean, and one clear sentence for each thing that is wrong in them. The Pareto front
against brute force."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from windtunnel.base.errors import UserError
from windtunnel.calibration import profiles
from windtunnel.network.aggregation.twin.fabric import MOST_NEIGHBOURS
from windtunnel.training.emulate.graph import Operator
from windtunnel.training.emulate.sweep.execute import groups
from windtunnel.training.emulate.sweep.result import pareto_front
from windtunnel.training.emulate.sweep.spec import expand, holds, load_sweep
from windtunnel.training.emulate.twin.costs.profile import DeviceProfile, save_profile

GOOD = "script: train.py\nclusters: h100-sxm:1x4\n"


def write(folder: Path, text: str) -> Path:
    (folder / "train.py").write_text("print('a script')\n")
    path = folder / "sweep.yaml"
    path.write_text(text)
    return path


def test_points_are_the_combinations_that_hold(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        "script: train.py\n"
        "args: --size 8b\n"
        "clusters: ['h100-sxm:{1,2}x4']\n"
        "grid: {--pp: [1, 2], --tp: [1, 2, 4], --compile: [true, false]}\n"
        "where: ['tp * pp <= world_size / 2', 'not (compile and tp == 1)']\n"
        "options: {jitter: 0.1, reserve: 512, ranks: [0, 1], aggregation: esa, neighbours: 15}\n",
    )
    sweep = load_sweep(path)
    expected = [
        (hosts * 4, pp, tp, flag)
        for hosts in (1, 2)
        for pp in (1, 2)
        for tp in (1, 2, 4)
        for flag in (True, False)
        if tp * pp <= hosts * 4 / 2 and not (flag and tp == 1)
    ]
    points = [
        (p.cluster.world_size, p.chosen["--pp"], p.chosen["--tp"], p.chosen["--compile"])
        for p in sweep.points
    ]
    assert points == expected
    assert sweep.left_out == 24 - len(expected)
    assert [point.index for point in sweep.points] == list(range(len(expected)))
    first = sweep.points[0]
    assert first.script.arguments == ("--size", "8b", "--pp", "1", "--tp", "1")
    assert first.options.jitter == 0.1
    assert first.options.ranks == "0,1"
    assert (first.options.aggregation, first.options.neighbours) == ("esa", MOST_NEIGHBOURS)
    assert first.options.reserve == 512 * 2**20


def test_points_that_the_script_cannot_tell_apart_share_a_capture(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        "script: train.py\ngrid: {--tp: [1, 2]}\n"
        "clusters: ['h100-sxm:2x4,nic={ib-100,ib-400}', 'h100-sxm:1x8', 'h200:2x4', 'h100-sxm:2x4,price=3']\n"
        "price_per_device_hour: 2\n",
    )
    sweep = load_sweep(path)
    clusters = [sorted(point.cluster.name for point in group) for group in groups(sweep.points)]
    shared = ["h100-sxm:2x4,nic=ib-100", "h100-sxm:2x4,nic=ib-400", "h100-sxm:2x4,price=3"]
    assert sorted(clusters) == sorted([shared, ["h100-sxm:1x8"], ["h200:2x4"]] * 2)
    prices = {point.cluster.name: point.cluster.price_per_device_hour for point in sweep.points}
    assert prices["h100-sxm:1x8"] == 2
    assert prices["h100-sxm:2x4,price=3"] == 3


def test_the_id_is_that_of_what_decides_the_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WINDTUNNEL_HOME", str(tmp_path / "home"))
    path = write(tmp_path, GOOD)
    first = load_sweep(path).id
    path.write_text("# a remark\nclusters: [h100-sxm:1x4]\nscript: train.py\n")
    assert load_sweep(path).id == first
    (tmp_path / "train.py").write_text("print('another script')\n")
    assert load_sweep(path).id != first
    write(tmp_path, GOOD + "options: {seed: 1}\n")
    assert load_sweep(path).id != first
    # calibrated twice on one day, which gave other times
    ids, op = set(), Operator("aten.add.Tensor", (), ())
    for seconds in (1e-6, 2e-6):
        profile = DeviceProfile("h100-sxm", [(op, seconds)], provenance={"date": "2026-11-30"})
        save_profile(profile, profiles.own("h100-sxm"))
        ids.add(load_sweep(path).id)
    assert len(ids) == 2


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("[1]", "a sweep file holds [1], accepted is a mapping of fields"),
        ("clusters: h100-sxm:1x4", "field script is missing, accepted is the path"),
        (GOOD + "grid:\n  --tp: [1\n", "not valid YAML"),
        (GOOD + "script: other.py\n", "field script is given twice"),
        ("script: other.py\nclusters: h100-sxm:1x4\n", "other.py' does not exist"),
        (
            "script: train.py\nclusters: []\n",
            "field clusters is [], accepted is a list of at least one value",
        ),
        ("script: train.py\nclusters: h1000:1x4\n", "field clusters: "),
        ("script: train.py\nclusters: ['h100-sxm:{1,1}x4']\n", "field clusters has h100-sxm:1x4 twice"),
        (GOOD + "gird: {}\n", "field gird is unknown, did you mean grid?"),
        (GOOD + "options: {jitter: 2}\n", "field options.jitter is 2, accepted is a number from 0 to 1"),
        (GOOD + "options: {aggregation: espa}\n", "field options.aggregation is 'espa', accepted is"),
        (GOOD + "options: {ranks: 0-9}\n", "'0-9' lies outside the world of ranks 0 to 3"),
        (GOOD + "options: {slow: host=9:2}\n", "field options: `slow`: 'host=9:2' names host 9"),
        (GOOD + "options: {profile: nothing}\n", "there is no profile 'nothing'"),
        (GOOD + 'args: "--a \'open"\n', "accepted are words as in a shell"),
        (GOOD + "args: --tp 4\ngrid: {--tp: [1, 2]}\n", "option --tp is both fixed in args and varied"),
        (GOOD + "grid: {tp: [1]}\n", "field grid.tp is no option of a script, accepted is such as --tp"),
        (GOOD + "grid: {--tp: [[1]]}\n", "field grid.--tp is [1], accepted is a list of numbers, words"),
        (GOOD + "where: tq > 1\n", "field where has 'tq > 1': 'tq' is unknown, accepted are cluster"),
        (GOOD + "where: hosts\n", "it gives 1; accepted is what is true or false"),
        (
            "script: train.py\nclusters: [h100-sxm:1x4, 'h200:1x4,price=1']\n",
            "cluster h100-sxm:1x4 has no price and another has one",
        ),
        (GOOD + f"grid: {{--a: {list(range(101))}, --b: {list(range(100))}}}\n", "10,100 points"),
    ],
)
def test_what_is_wrong_is_one_sentence(tmp_path: Path, text: str, sentence: str) -> None:
    path = write(tmp_path, text)
    with pytest.raises(UserError) as error:
        load_sweep(path)
    message = str(error.value)
    assert message.startswith(str(path))
    assert sentence in message
    assert "\n" not in message


def test_the_shipped_examples_are_understood() -> None:
    shipped = sorted((Path(__file__).parents[3] / "examples" / "sweeps").glob("*.yaml"))
    sizes = {path.stem: load_sweep(path) for path in shipped}
    assert {name: len(sweep.points) for name, sweep in sizes.items()} == {
        "llama_8b_layouts": 16,
        "llama_8b_networks": 5,
        "llama_debug": 12,
    }
    assert len(groups(sizes["llama_8b_networks"].points)) == 1


def test_braces_expand_as_in_a_shell() -> None:
    assert expand("h100-sxm:{1,2}x8,nic={ib-200, ib-400}") == [
        "h100-sxm:1x8,nic=ib-200",
        "h100-sxm:1x8,nic=ib-400",
        "h100-sxm:2x8,nic=ib-200",
        "h100-sxm:2x8,nic=ib-400",
    ]
    assert expand("{alone}") == ["{alone}"]


def test_conditions_mean_what_they_mean_in_python() -> None:
    values = {"tp": 2, "pp": 3, "ac": "full"}
    for text in (
        "tp * pp == 6",
        "pp // tp + pp % tp == 2",
        "not (tp > pp or ac != 'full')",
        "ac in ['full']",
    ):
        assert holds(text, values)  # type: ignore[arg-type]
        assert not holds(f"not ({text})", values)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "text",
    [
        "__import__('os')", "tp.__class__ == 1", "tp ** 9 > 1", "1 << tp > 1", "lambda: 1", "tp >",
        "(tp := 1) > 0", "tp = pp > 2", "tp += pp > 2", "tp == 2; pp == 3",
        "", "(" * 600, "ac > 1", "tp * pp", "tp / 0 > 1", "tp in 5", "'x' * 999999 * 999999 == ac",
    ],
)  # fmt: skip
def test_what_cannot_be_said_is_an_error(text: str) -> None:
    with pytest.raises(ValueError):
        holds(text, {"ac": "x", "tp": 2, "pp": 3})


@given(
    st.integers(1, 3).flatmap(
        lambda width: st.lists(st.tuples(*[st.integers(0, 4)] * width), min_size=0, max_size=14).map(
            lambda rows: np.array(rows, np.float64).reshape(len(rows), width)
        )
    )
)
def test_pareto_front_is_that_of_brute_force(table: np.ndarray) -> None:
    def beats(first: np.ndarray, second: np.ndarray) -> bool:
        return all(a <= b for a, b in zip(first, second, strict=True)) and any(
            a < b for a, b in zip(first, second, strict=True)
        )

    expected = [not any(beats(other, row) for other in table) for row in table]
    assert pareto_front(table).tolist() == expected
