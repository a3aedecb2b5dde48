"""``windtunnel embeddings plan``: a plan that is shown, kept, written, replayed, or refused."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from windtunnel.base.errors import UserError
from windtunnel.cli.main import app
from windtunnel.data.embeddings import synthetic
from windtunnel.data.embeddings.files import read_plan, write_statistics
from windtunnel.data.embeddings.model import EmbeddingTable
from windtunnel.replay import replay
from windtunnel.store.eventlog import NAME

WORDS = ["embeddings", "plan", "--cluster", "a100-80:1x2", "--memory", "64MB", "--host-memory", "1GB"]


def plan(*words: str | Path) -> str:
    done = CliRunner().invoke(app, [*WORDS, *map(str, words)])
    if done.exception:
        raise done.exception
    return done.stdout


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("WINDTUNNEL_HOME", str(tmp_path / "home"))
    return tmp_path


def test_a_plan_is_kept_written_and_decided_anew(home: Path) -> None:
    out = home / "plan.json"
    report = json.loads(plan("--synthetic", "small", "--policy", "lookup", "--out", out, "--json"))
    tables = synthetic.tables("small")
    placement = read_plan(out, tables)
    assert report["tables"] == len(tables) and len(report["plan"]["shards"]) == len(placement.shards) == 16
    assert report["summary"]["slow_accesses"] == report["emulated"]["raw"][1]
    directory = Path(report["directory"])
    assert read_plan(directory / "plan.json", tables) == placement
    [same] = replay(directory / NAME).parts
    [other] = replay(directory / NAME, "recshard").parts
    assert same.same == 1 and other.same == 0
    assert other.recorded_cost and other.replayed_cost
    assert other.replayed_cost["seconds"] < other.recorded_cost["seconds"]


def test_a_plan_for_statistics_is_shown(home: Path) -> None:
    write_statistics(home / "stats", synthetic.tables("small"), {})
    text = " ".join(plan("--statistics", home / "stats", "--state-bytes", "4").split())
    assert "16 tables, 248 MiB, on 2 devices of a100-80:1x2" in text
    assert "recshard (milp): slowest device" in text and "largest shard alone" in text


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ((), "--synthetic NAME or --statistics FOLDER is needed, and not both"),
        (("--synthetic", "rm4"), "synthetic tables 'rm4' are unknown, did you mean rm"),
        (("--synthetic", "rm1"), r"the tables take 317 GiB, 2 devices have 1\.98 GiB"),
        (("--synthetic", "small", "--policy", "fair"), "policy 'fair' is unknown; accepted are recshard"),
        (
            ("--synthetic", "small", "--memory", "much"),
            r"--memory 'much' is not accepted; accepted is a number",
        ),
        (("--synthetic", "small", "--out", "none/x"), "--out none/x: a file in a folder that is there"),
    ],
)
def test_bad_input_is_a_sentence(words: tuple[str, ...], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence) as raised:
        plan(*words)
    assert raised.value.status == 2 and "\n" not in str(raised.value)


def test_tables_that_nobody_asks_have_no_plan(home: Path) -> None:
    table = EmbeddingTable("unused", 10, 4, coverage=0.0)
    write_statistics(home / "statistics", (table,), {"unused": np.arange(10, dtype=np.uint32)})
    with pytest.raises(UserError, match="statistics: no table is looked up, accepted are statistics of logs"):
        plan("--statistics", home / "statistics")
