"""Sweeps whose points are tasks of a control plane: with two workers, started again, with a worker killed.

Points are stood in for by a program that makes up its figures; the last test has real ones.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import windtunnel as wt
from support.postgres import server
from support.waiting import until
from windtunnel import tasks
from windtunnel.base.errors import UserError
from windtunnel.cli.main import app
from windtunnel.control.database import Control, WorkerProcess, open_control, serve
from windtunnel.control.database.live.worker import TAIL
from windtunnel.training.emulate.sweep import Point, load_sweep
from windtunnel.training.emulate.sweep.execute import head

POINT = """
import json, os, signal, sys
folder, (spec, sweep, index, report) = sys.argv[1], sys.argv[2:]
tp, name = (1, 3, 2, 4, 8)[int(index)], os.environ["WINDTUNNEL_WORKER"].partition("@")[0]
with open(f"{folder}/points", "a") as file:
    file.write(f"{tp}.{os.environ['WINDTUNNEL_ATTEMPT']} {report} {name}\\n")
if tp == 2 and os.environ["WINDTUNNEL_ATTEMPT"] == "1":
    signal.pause()
if tp == 8:
    os.kill(os.getpid(), signal.SIGKILL)
figures = {
    "run_id": "r", "directory": "/nowhere", "iteration_time_s": 1 / tp, "tokens_per_iteration": 4000,
    "tokens_per_second_per_device": 1.0, "mfu": 0.5, "peak_reserved_bytes": tp, "memory_bytes": 80,
    "headroom_bytes": 80 - tp, "fits": True, "cost_per_iteration": 1.0, "cost_per_million_tokens": 1.0,
    "cost_unit": "price", "wall_time_s": 1.0,
}
print("some words", flush=True)
print(json.dumps({"status": "failed", "error": "odd"} if tp == 4 else {"status": "done", **figures}))
"""
SCRIPT = Path(__file__).parent / "training" / "emulate" / "scripts" / "sweep_me.py"


@pytest.fixture
def control(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Control]:
    monkeypatch.setenv("WINDTUNNEL_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(tasks, "COMMAND", (sys.executable, "-c", POINT, str(tmp_path)))
    control = open_control(url(tmp_path), create=True, durable=False)
    yield control
    control.engine.dispose()


def url(folder: Path) -> str:
    return f"sqlite:///{folder}/control.db"


@pytest.mark.conformance
def test_on_postgres(control: Control, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with server() as place:
        monkeypatch.setattr(f"{__name__}.url", lambda folder: place)
        other = open_control(place, create=True)
        test_two_workers_do_the_points_of_a_sweep_once(other, tmp_path, monkeypatch)
        other.engine.dispose()


def spec(folder: Path, tp: str = "1, 3", more: str = "") -> Path:
    (folder / "train.py").write_text("")
    path = folder / "sweep.yaml"
    path.write_text(f"script: train.py\ngrid: {{--tp: [{tp}]}}\nclusters: ['h100-sxm:2x4']\n{more}")
    return path


@contextmanager
def running(*works: Callable[[threading.Event], object]) -> Iterator[None]:
    stop = threading.Event()
    threads = [threading.Thread(target=work, args=(stop,)) for work in works]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join(60)


@contextmanager
def working(control: Control, *names: str) -> Iterator[None]:
    workers = [WorkerProcess(control, name, 1) for name in names]
    with running(lambda stop: serve(control, stop), *(worker.run for worker in workers)):
        yield


def started(folder: Path) -> list[str]:
    path = folder / "points"
    return sorted(path.read_text().splitlines()) if path.exists() else []


def test_two_workers_do_the_points_of_a_sweep_once(
    control: Control, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = spec(tmp_path, "1, 3, 2, 4")
    monkeypatch.setattr(tasks, "COMMAND", (*tasks.COMMAND[:2], POINT.replace("== 2", "== -1"), str(tmp_path)))
    with working(control, "w1", "w2"):
        done = wt.sweep(path, on=url(tmp_path))
        assert [row["chosen"]["--tp"] for row in done.points] == [1, 3, 2, 4]
        assert [row.get("iteration_time_s") for row in done.points] == [1, 1 / 3, 1 / 2, None]
        assert done.points[0]["world_size"] == 8 and done.points[3]["error"] == "odd"
        first = started(tmp_path)
        assert [line.rpartition(" ")[0] for line in first] == ["1.1 1", "2.1 1", "3.1 1", "4.1 1"]
        assert {line.rpartition(" ")[2] for line in first} == {"w1", "w2"}
        # again: what was done stays, what failed is tried once more
        again = wt.sweep(path, on=url(tmp_path))
        assert again.points == done.points and len(started(tmp_path)) == 5
        # from another home, which has no outcomes: they are those of the tasks
        monkeypatch.setenv("WINDTUNNEL_HOME", str(tmp_path / "other"))
        assert wt.sweep(path, on=url(tmp_path)).points == done.points and len(started(tmp_path)) == 6
        # all of them anew
        wt.sweep(path, on=url(tmp_path), resume=False, report=False)
        assert len([line for line in started(tmp_path) if line.split()[1] == "0"]) == 4


def test_a_sweep_that_was_killed_finds_its_tasks(control: Control, tmp_path: Path) -> None:
    """Those that wait, too; a task of somebody else is none of them."""
    path = spec(tmp_path)
    what = load_sweep(path)
    tasks._submitted(control, path, what, what.points, True, True)
    control.run("submit", tasks=[{"command": ["true"], "key": "of somebody else"}])
    with working(control, "w1"):
        assert [row["status"] for row in wt.sweep(path, on=url(tmp_path)).points] == ["done"] * 2
    assert [line.partition(" ")[0] for line in started(tmp_path)] == ["1.1", "3.1"]
    assert control.query("SELECT count(*) FROM task")[1] == [(3,)]


def test_a_worker_that_is_killed_loses_no_point(control: Control, tmp_path: Path) -> None:
    """Its point begins again at the other; a point that kills its process is a failed one."""
    path, sweeps = spec(tmp_path, "1, 3, 2, 4, 8"), list[Any]()
    words = ["control", "worker", "--db", url(tmp_path), "--name", "w1", "--slots", "5", "--lease", "1"]
    main = "import sys; from windtunnel.cli.main import main; main()"
    with (
        running(lambda stop: serve(control, stop)),
        subprocess.Popen([sys.executable, "-c", main, *words], stdout=subprocess.DEVNULL) as worker,
        running(lambda stop: sweeps.append(wt.sweep(path, on=url(tmp_path)))),
    ):
        until(lambda: "2.1 1 w1" in started(tmp_path), "the point that stands still")
        os.kill(worker.pid, signal.SIGKILL)
        with running(WorkerProcess(control, "w2", 5).run):
            until(lambda: sweeps, "the end of the sweep")
    rows = sweeps[0].points
    assert [row["status"] for row in rows] == ["done", "done", "done", "failed", "failed"]
    assert rows[4]["error"].startswith("the task failed (killed by signal 9)")
    assert "2.2 1 w2" in started(tmp_path)


def test_a_point_is_what_the_sweep_here_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """And a host that has another script refuses it."""

    def emulate_group(points: list[Point], jobs: int, pictures: bool, **_: Any) -> list[dict[str, Any]]:
        (point,) = points
        return [{**head(point), "status": "failed", "error": f"{point.index} {pictures} " + "\u00fc" * 9000}]

    monkeypatch.setattr(tasks, "emulate_group", emulate_group)
    path = spec(tmp_path)
    sweep = load_sweep(path)
    tasks.main([str(path), sweep.id, "1", "0"])
    output = capsys.readouterr().out
    assert len(output) < TAIL
    outcome = tasks._outcome("done", None, output + "what Python says as it ends\n")
    assert outcome["status"] == "failed" and outcome["error"].startswith("1 False \u00fc")
    assert not outcome.keys() & head(sweep.points[1]).keys()
    assert tasks._outcome("done", None, "")["error"] == "the task failed (no outcome): it wrote nothing"
    (tmp_path / "train.py").write_text("print()")
    with pytest.raises(UserError, match=f"submitted is {sweep.id}; accepted are the same"):
        tasks.main([str(path), sweep.id, "1", "0"])


def test_what_is_wrong_is_said(control: Control, tmp_path: Path) -> None:
    path = spec(tmp_path)
    with pytest.raises(UserError, match=r"--on: sqlite:.*none\.db has no control plane"):
        wt.sweep(path, on=f"sqlite:///{tmp_path}/none.db")


@pytest.mark.conformance
def test_real_points_are_as_here(control: Control, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.setenv("WINDTUNNEL_HOME", str(tmp_path / "home"))
    path = tmp_path / "real.yaml"
    path.write_text(
        f"script: {SCRIPT}\ngrid: {{--width: [256, 3]}}\nclusters: ['h100-sxm:1x4']\n"
        "options: {ranks: 0, tokens: 64}\n"
    )
    with working(control, "w1", "w2"):
        words = ["sweep", str(path), "--on", url(tmp_path), "--no-report", "--json"]
        rows = json.loads(CliRunner().invoke(app, words).stdout)["rows"]
    varying = {"run_id", "directory", "wall_time_s"}
    here = wt.sweep(path, resume=False, report=False).points
    for there, row in zip(rows, here, strict=True):
        assert {k: v for k, v in there.items() if k not in varying} == {
            k: v for k, v in row.items() if k not in varying
        }
    assert [row["status"] for row in rows] == ["done", "failed"]
