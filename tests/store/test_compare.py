"""Runs side by side, as data and on the command line."""

import json

import pytest
import typer
from typer.testing import CliRunner

from windtunnel.base.errors import UserError
from windtunnel.cli import runs as cli
from windtunnel.store.compare import compare
from windtunnel.store.runs import Store

GIB = 1 << 30


@pytest.fixture(autouse=True)
def own_home(tmp_path, monkeypatch):
    monkeypatch.setenv("WINDTUNNEL_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("WINDTUNNEL_STORE", raising=False)
    monkeypatch.setenv("COLUMNS", "160")


@pytest.fixture
def invoke():
    app = typer.Typer()
    app.callback()(lambda: None)
    app.add_typer(cli.group, name="runs")
    runner = CliRunner()

    def call(*words, **more):
        return runner.invoke(app, ["runs", *words], **more)

    return call


def summary(time, reserved):
    return {
        "iteration_time_s": time,
        "tokens_per_second_per_device": 16384 / time,
        "mfu": 0.4,
        "critical_path": {"compute": time * 0.75, "idle": time * 0.25},
        "ranks": [{"peak_reserved_bytes": reserved, "peak_allocated_bytes": 1}, {"peak_reserved_bytes": 5}],
        "command": {"script": "train.py", "args": []},
        "cluster": {"name": "h100-sxm:16x8"},
        "warnings": ["loss.item() was given a stand-in"],
    }


def two_runs():
    store = Store.open()
    first = store.begin("training.emulate", {"script": "train.py", "options": {"tp": 1, "pp": 1}}, seed=1)
    first.finish(summary(2.0, 60 * GIB))
    second = store.begin("training.emulate", {"script": "train.py", "options": {"tp": 8, "pp": 1}, "x": 1}, 1)
    second.finish(summary(1.5, 30 * GIB))
    return store, first.id, second.id


def test_only_what_differs_and_all_figures():
    store, first, second = two_runs()
    result = compare([store.get(first), store.get(second)])
    assert result.inputs == {"options.tp": (1, 8), "x": (None, 1)}
    values = {figure.name: figure.values for figure in result.figures}
    assert values["iteration_time_s"] == (2.0, 1.5)
    assert values["critical_path.idle"] == (0.5, 0.375)
    assert values["peak_reserved_bytes"] == (60 * GIB, 30 * GIB)
    ratios = {figure.name: figure.ratios for figure in result.figures}
    assert ratios["iteration_time_s"] == (1.0, 0.75)
    assert ratios["peak_reserved_bytes"] == (1.0, 0.5)


@pytest.mark.parametrize(
    "strange",
    [
        None,
        {},
        {"ranks": None, "critical_path": []},
        {"ranks": [3], "mfu": "high", "critical_path": {"a": None}},
    ],
)
def test_summaries_may_lack_anything(strange):
    store, first, _ = two_runs()
    run = store.begin("training.emulate", {})
    if strange is not None:
        run.finish(strange)
    result = compare([store.get(run.id), store.get(first)])
    for figure in result.figures:
        assert figure.values[0] is None and figure.values[1] is not None
        assert figure.ratios == (None, None)
    assert len(result.figures) >= 6


def test_compare_on_the_command_line(invoke):
    _, first, second = two_runs()
    shown = invoke("compare", first, second, "--json")
    data = json.loads(shown.stdout)
    assert data["runs"] == [first, second]
    assert data["inputs"]["options.tp"] == [1, 8]
    assert {"name": "iteration_time_s", "unit": "s", "values": [2.0, 1.5], "ratios": [1.0, 0.75]} in data[
        "figures"
    ]
    text = invoke("compare", first, second).stdout
    assert "1.50 s  ×0.75" in text and "30.00 GiB  ×0.5" in text and "options.tp" in text
    assert "emulated" in text
    alone = invoke("compare", first)
    assert isinstance(alone.exception, UserError)


def test_list_and_show_on_the_command_line(invoke):
    assert "No runs yet" in invoke("list").stdout
    _, first, second = two_runs()
    assert [run["id"] for run in json.loads(invoke("list", "--json").stdout)] == [second, first]
    assert [run["id"] for run in json.loads(invoke("list", "--json", "--limit", "1").stdout)] == [second]
    assert json.loads(invoke("list", "--json", "--capability", "other").stdout) == []
    text = invoke("list").stdout
    assert first in text and "train.py on h100-sxm:16x8" in text and "60.00 GiB" in text
    assert "Runs of training.emulate" in text
    Store.open().begin("other", {"script": "dir/other.py"})
    text = invoke("list").stdout
    assert (
        "Runs of" not in text and "other.py" in text and text.count("training.emulate") == 3
    )  # and the caption
    Store.open().get("last").fail("x")
    Store.open().remove("last")
    shown = json.loads(invoke("show", first, "--json").stdout)
    assert shown["summary"]["iteration_time_s"] == 2.0 and shown["seed"] == 1
    text = invoke("show", "last").stdout
    assert second in text and "1.50 s" in text and "stand-in" in text and "40.0%" in text


def test_rm_on_the_command_line(invoke):
    store, first, second = two_runs()
    # One wrong id, and nothing is deleted.
    assert isinstance(invoke("rm", first, "nonsense", "--yes").exception, UserError)
    refused = invoke("rm", first, input="n\n")
    assert refused.exit_code == 1 and first in refused.stdout
    assert len(store.list()) == 2
    assert invoke("rm", first, first, "--yes").exit_code == 0
    assert invoke("rm", second, input="y\n").exit_code == 0
    assert store.list() == []
