"""``windtunnel graph show``: by file, folder and run, as tables and as JSON."""

import json
from pathlib import Path

import pytest
import typer
from graph_examples import graph
from typer.testing import CliRunner

from windtunnel.base.errors import UserError
from windtunnel.cli.graph import group
from windtunnel.report.chakra import COMM_COLL, COMP, write_graph
from windtunnel.store.runs import Store

app = typer.Typer()
app.add_typer(group, name="graph")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("WINDTUNNEL_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("WINDTUNNEL_STORE", raising=False)
    run = Store.open().begin("training.emulate", {})
    reduce = {"comm_type": 0, "comm_size": 2**20, "pg_name": "dp [x]"}
    nodes = graph([COMP, COMM_COLL, COMP], [1e-3, 2e-3, 4e-3], [[], [0], [0]], [{}, reduce, {}])
    for name in ("pp=0", "pp=1"):
        write_graph(run.directory / "graph" / f"{name}.et", nodes)
    return run.directory


def _show(*words: str) -> str:
    result = CliRunner().invoke(app, ["graph", "show", *words])
    if result.exception:
        raise result.exception
    return result.stdout


def test_a_run_is_shown_class_by_class(folder: Path) -> None:
    for what in (folder.name, "last", str(folder), str(folder / "graph")):
        shown = _show(what)
        assert "pp=0" in shown and "pp=1" in shown
        assert "3 nodes (2 COMP, 1 COMM_COLL), 2 dependencies" in shown
        assert "longest chain 2 nodes" in shown and "5.00 ms" in shown and "7.00 ms" in shown
        assert "dp [x]" in shown and "1.00 MiB" in shown


def test_limit_and_json(folder: Path) -> None:
    shown = _show(str(folder / "graph" / "pp=1.et"), "--limit", "1")
    assert "node 0" in shown and "node 2" not in shown and "2 more" in shown
    (report,) = json.loads(_show(str(folder / "graph" / "pp=1.et"), "--json", "--limit", "2"))["graphs"]
    assert report["types"] == {"COMP_NODE": 2, "COMM_COLL_NODE": 1}
    assert report["metadata"] == {"rank": 3, "world_size": 8} and report["chain"] == [0, 20]
    assert report["first"][1] == {
        "id": 10,
        "name": "node 1",
        "type": "COMM_COLL_NODE",
        "duration_s": 2e-3,
        "dependencies": [0],
        "attributes": {"comm_type": "all_reduce", "comm_size": 2**20, "pg_name": "dp [x]"},
    }


def test_what_is_not_there_is_said_in_a_sentence(folder: Path, tmp_path: Path) -> None:
    for what, words in (
        ("nothing.et", "no such file"),
        ("20200101-000000-abcd", "is not a run"),
        (str(tmp_path), "no graph there"),
    ):
        with pytest.raises(UserError, match=words):
            _show(what)
    (folder / "graph" / "pp=1.et").write_bytes(b"nonsense")
    with pytest.raises(UserError, match=r"pp=1\.et"):
        _show(folder.name)
