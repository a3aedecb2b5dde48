"""``import windtunnel as wt``: light, typed, and good in a notebook."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

import windtunnel as wt
from support import quick
from support.programs import train
from windtunnel.base import units
from windtunnel.store.runs import Store

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> wt.Run:
    with pytest.MonkeyPatch.context() as patch, quick.captures():
        patch.setenv("WINDTUNNEL_HOME", str(tmp_path_factory.mktemp("home")))
        return wt.emulate(train, 256, cluster="h100-sxm:2x2")


@pytest.fixture
def kept(run: wt.Run, monkeypatch: pytest.MonkeyPatch) -> wt.Run:
    """The same run, from the store."""
    monkeypatch.setenv("WINDTUNNEL_HOME", str(run.directory.parent.parent))
    monkeypatch.delenv("WINDTUNNEL_STORE", raising=False)
    return wt.load_run(run.id)


def test_all_names_are_there_and_nothing_is_loaded_before_it_is_used() -> None:
    assert set(wt.__all__) <= set(dir(wt))
    for name in wt.__all__:
        assert getattr(wt, name).__doc__, name
    with pytest.raises(AttributeError, match="emulat"):
        wt.emulat  # noqa: B018
    code = "import sys, windtunnel; raise SystemExit('numpy' in sys.modules or 'typer' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_a_run_has_its_figures_in_the_summary(run: wt.Run) -> None:
    summary = run.summary
    assert 0 < summary.iteration_time_s <= summary.first_iteration_time_s
    (rank,) = summary.ranks
    assert summary.peak_reserved_bytes >= rank.peak_allocated_bytes > 3 * 4 * 256 * 256  # with a bucket
    assert summary.fits
    assert 0 < summary.mfu <= summary.hfu < 1
    assert rank.count == 4
    assert sum(summary.critical_path.values()) == pytest.approx(summary.iteration_time_s)
    assert {collective.kind for collective in summary.collectives} == {"all_reduce"}
    assert any(operator.flops for operator in summary.operators)
    assert (run.directory / "report.html").exists()
    assert (run.directory / "events.jsonl").exists()


def test_a_run_is_shown_in_one_line(run: wt.Run) -> None:
    time, memory = units.seconds(run.summary.iteration_time_s), units.size(run.summary.peak_reserved_bytes)
    assert repr(run) == f"Run({run.id}: h100-sxm:2x2, {time} an iteration, {memory} reserved)"


def test_all_that_is_raised_can_be_caught_by_name() -> None:
    kinds = (wt.UserError, wt.ScriptError, wt.HangError, wt.VerdictError, wt.LessError, wt.HostError)
    assert all(issubclass(kind, wt.WindtunnelError) for kind in kinds)


def test_the_store_gives_the_same_run_back(run: wt.Run, kept: wt.Run) -> None:
    assert kept == run
    assert kept.result is None
    assert wt.load_run() == run
    assert wt.runs() == [run]
    Store.open().begin("training.elastic", {}).finish({})
    assert wt.load_run() == run
    with pytest.raises(wt.UserError, match=r"training\.elastic is done: it has no figures of an emulation"):
        wt.load_run(Store.open().get("last").id)


def test_runs_are_compared(run: wt.Run, kept: wt.Run) -> None:
    with quick.captures():
        other = wt.emulate(train, 512, cluster=wt.load_cluster("h100-sxm:2x2"), report=False)
    comparison = run.compare(other)
    assert comparison.inputs["args"] == (["256"], ["512"])
    ratios = {figure.name: figure.ratios[1] for figure in comparison.figures}
    assert ratios["peak_allocated_bytes"] == pytest.approx(
        other.summary.ranks[0].peak_allocated_bytes / run.summary.ranks[0].peak_allocated_bytes
    )
    assert other._repr_html_() is None  # a notebook shows the line that it is in text


def test_a_notebook_shows_the_report(run: wt.Run) -> None:
    page = run._repr_html_()
    assert page and "h100-sxm:2x2" in page and units.seconds(run.summary.iteration_time_s) in page
    assert "srcdoc=" in page
    assert "<script" not in page  # all of the report is in the frame


def test_what_is_wrong_is_one_sentence(tmp_path: Path) -> None:
    for given, words in (
        ({"program": "none.py"}, "script 'none.py' does not exist"),
        ({"program": train, "cluster": "h100:2x"}, "h100"),
        ({"program": train, "ranks": "9", "cluster": "h100-sxm:1x2"}, "9"),
        ({"program": train, "ranks": 9, "cluster": "h100-sxm:1x2"}, "`ranks`: '9' lies outside"),
        ({"program": train, "ranks": (0, 9), "cluster": "h100-sxm:1x2"}, "`ranks`: '9' lies outside"),
        ({"program": train, "live": 9, "cluster": "cpu:2x1"}, "`live`: '9' lies outside"),
        ({"program": train, "timeline": "9", "cluster": "h100-sxm:1x2"}, "`timeline`: '9' lies outside"),
        ({"program": train, "fail_on": "oo"}, "`fail_on`: 'oo' is not known"),
        ({"program": train, "baseline": "x"}, "ask for it by `fail_on` slower"),
    ):
        with pytest.raises(wt.UserError, match=words) as caught:
            wt.emulate(**given)
        assert "\n" not in str(caught.value)
        assert "--" not in str(caught.value)


def test_what_is_slow_is_an_object_or_text(
    run: wt.Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WINDTUNNEL_HOME", str(tmp_path))
    given = {"cluster": "h100-sxm:2x2", "report": False}
    options = wt.Options(slow=[wt.Slow(host=1, factor=100.0)], ranks="0")
    with quick.captures():
        by_options = wt.emulate(train, 256, options=options, **given)
        other = wt.emulate(train, 256, slow="host=1:100.0", ranks="0", **given)
        both = wt.emulate(train, 256, options=options, slow=wt.Slow(rank=0, factor=1.5), **given)
    assert (
        by_options.summary.iteration_time_s
        == other.summary.iteration_time_s
        > 5 * run.summary.iteration_time_s
    )
    assert by_options.summary.first_iteration_time_s >= by_options.summary.iteration_time_s
    assert by_options.summary.command.options["slow"] == ["host=1:100.0"]
    assert both.summary.command.options["slow"] == ["rank=0:1.5"]
    assert both.summary.captured_ranks == (0,)
    for wrong in ({"factor": 2.0}, {"host": 1, "rank": 2, "factor": 2.0}):
        with pytest.raises(wt.UserError, match="accepted is one of host, rank and link"):
            wt.Slow(**wrong)
    with pytest.raises(wt.UserError, match=r"`slow`: 'host=9:2\.0' names host 9, .* has 0 to 1"):
        wt.emulate(train, slow=wt.Slow(host=9, factor=2.0), **given)


@pytest.mark.conformance
@pytest.mark.slow
def test_in_a_real_notebook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nbclient = pytest.importorskip("nbclient")
    nbformat = pytest.importorskip("nbformat")
    pytest.importorskip("ipykernel")
    for name in ("WINDTUNNEL_HOME", "IPYTHONDIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR"):
        monkeypatch.setenv(name, str(tmp_path / name.lower()))
    notebook = nbformat.read(ROOT / "examples" / "emulate.ipynb", as_version=4)
    assert all(not cell.get("outputs") for cell in notebook.cells), "commit it without outputs"
    nbformat.validate(notebook)
    # the kernel of this interpreter, whatever kernels this machine has
    manager = importlib.import_module("jupyter_client.manager").AsyncKernelManager(kernel_name="python3")
    manager.kernel_spec.argv = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    nbclient.NotebookClient(
        notebook, timeout=300, km=manager, resources={"metadata": {"path": tmp_path}}
    ).execute()
    shown, figures, ratios = (cell.outputs[0]["data"] for cell in notebook.cells if cell.get("outputs"))
    assert "srcdoc=" in shown["text/html"]
    assert figures["text/plain"].startswith("(")
    assert "iteration_time_s" in ratios["text/plain"]
