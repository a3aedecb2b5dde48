"""The control plane records itself: a double start, from a claim without its fence, is found, replayed, and
gone with the fence."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from windtunnel.cli.main import app
from windtunnel.control.database.tables import open_tables
from windtunnel.control.debug import Recorder, read, replay, retro, sql
from windtunnel.control.debug.live.world import load
from windtunnel.store.transactions import Transactions

UNFENCED = '''
from windtunnel.control.database import handlers

def claim(call, workers):
    """Whoever has the name of a worker gets its tasks, whichever epoch he joined with."""
    epochs = dict(call.connection.exec_driver_sql("SELECT name, epoch FROM worker").fetchall())
    return handlers.claim(call, [(name, epochs[name]) for name, _ in workers])

HANDLERS = {**handlers.HANDLERS, "claim": claim}
'''
FENCED = """
from windtunnel.control.database import handlers

HANDLERS = {"claim": handlers.claim}
"""
CLAIMS = (
    "SELECT task, count(*) FROM (SELECT CAST(after->>'id' AS INT) AS task, request FROM writes"
    " WHERE table_name = 'task' AND after->>'state' = 'running' AND before->>'state' = 'assigned')"
    " GROUP BY task"
)


def test_a_double_start_is_found_and_replayed_and_gone_with_the_fence(tmp_path: Path) -> None:
    (tmp_path / "unfenced.py").write_text(UNFENCED)
    (tmp_path / "fenced.py").write_text(FENCED)
    place = f"{tmp_path / 'unfenced.py'}:HANDLERS"
    engine = open_tables(f"sqlite:///{tmp_path / 'control.db'}", "db", create=True)
    with Recorder(Transactions(engine, load(place)), tmp_path / "trace", handlers=place) as recorder:
        recorder.run("submit", tasks=[{"command": ["train"]}])
        old = recorder.run("join", workers=[["w", 1, ""]], lease=600.0)["w"]
        recorder.run("schedule", policy="fifo")
        first = recorder.run("claim", workers=[["w", old]])
        new = recorder.run("join", workers=[["w", 1, ""]], lease=600.0)["w"]  # the old process is cut off
        recorder.run("schedule", policy="fifo")
        late = recorder.run("claim", workers=[["w", old]])
        right = recorder.run("claim", workers=[["w", new]])
    assert [len(first), len(late), len(right)] == [1, 1, 0]  # the cut-off process has the task again
    trace = read(tmp_path / "trace")
    assert sql(trace, CLAIMS)[1] == [(1, 2)]
    again = replay(trace)
    assert not again["divergences"] and again["reads"], again
    mended = retro(trace, tmp_path / "fenced.py")
    (outcome,) = (outcome for outcome in mended["outcomes"] if 0 in outcome["orders"])
    claimed = [
        (before != "[]", after != "[]") for _, name, before, after in outcome["answers"] if name == "claim"
    ]
    assert claimed == [(True, False), (False, True)]  # with the fence the process that joined last has it


def test_a_recorded_demo_is_replayed_and_asked_about(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WINDTUNNEL_HOME", str(tmp_path))
    for name in ("WINDTUNNEL_STORE", "WINDTUNNEL_CONTROL"):
        monkeypatch.delenv(name, raising=False)

    def said(*words: str) -> object:
        shown = CliRunner().invoke(app, [*words, "--json"])
        assert shown.exit_code == 0, (shown.output, shown.exception)
        return json.loads(shown.stdout)

    demo = said("control", "demo", "--record", "--tasks", "12")
    assert isinstance(demo, dict) and (demo["done"], demo["effects"], demo["killed"]) == (12, 12, [])
    again = said("debug", "replay", "last")
    assert isinstance(again, dict) and not again["divergences"] and again["reads"] > 12
    claimed = (
        "SELECT count(DISTINCT key) AS tasks FROM writes WHERE table_name = 'task' AND handler = 'claim'"
    )
    assert said("debug", "sql", "last", claimed) == [{"tasks": 12}]
    refused = CliRunner().invoke(app, ["control", "demo", "--record", "--kill", "1"])
    assert "accepted is 0 where all is one process" in str(refused.exception)
