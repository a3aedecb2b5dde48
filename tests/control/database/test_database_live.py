"""A scheduler and workers with real commands, in threads of the test; who is fenced, what fails, who is
woken."""

from __future__ import annotations

import select
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from support.control import rows, slots_add_up
from support.waiting import gone, until
from windtunnel.base.errors import UserError
from windtunnel.cli.main import app
from windtunnel.control.database import Control, WorkerProcess, open_control, serve
from windtunnel.control.database import policy as policies
from windtunnel.control.database.live import serve as module
from windtunnel.control.database.live.serve import assign
from windtunnel.store.eventlog import EventLog, read


@pytest.fixture
def control(tmp_path: Path) -> Iterator[Control]:
    control = open_control(f"sqlite:///{tmp_path}/control.db", create=True, durable=False)
    yield control
    control.engine.dispose()


@contextmanager
def running(work: Callable[[threading.Event], None]) -> Iterator[threading.Event]:
    stop = threading.Event()
    thread = threading.Thread(target=work, args=(stop,))
    thread.start()
    try:
        yield stop
    finally:
        stop.set()
        thread.join(60)
        assert not thread.is_alive()


def submit(control: Control, *words: str, **more: Any) -> int:
    return int(control.run("submit", tasks=[{"command": list(words), **more}])[0])


def state(control: Control, task: int) -> tuple[Any, ...]:
    return rows(control.engine, f"SELECT state, attempt, status, error, output FROM task WHERE id = {task}")[
        0
    ]


def ended(control: Control, task: int) -> tuple[Any, ...]:
    until(lambda: state(control, task)[0] in ("done", "failed"), f"an end of task {task}")
    return state(control, task)


def test_commands_run_to_their_end(control: Control, tmp_path: Path) -> None:
    with closing(EventLog(tmp_path / "events.jsonl")) as log:
        worker = WorkerProcess(control, "w", 4)
        with running(lambda stop: serve(control, stop, log=log)), running(worker.run):
            good = submit(
                control, "sh", "-c", "printf %05000d 1; echo $WINDTUNNEL_KEY-$WINDTUNNEL_ATTEMPT", key="k"
            )
            bad = submit(control, "sh", "-c", "echo broken >&2; exit 3", attempts=2)
            none = submit(control, "/no/such/program", attempts=1)
            killed = submit(control, "sh", "-c", "kill -9 $$", attempts=1)
            done = ended(control, good)
            assert done[:4] == ("done", 1, 0, None)
            assert done[4].endswith("1k-1\n") and len(done[4]) == 4096
            assert ended(control, bad) == ("failed", 2, 3, "exit status 3", "broken\n")
            row = ended(control, none)
            assert row[:3] == ("failed", 1, 127) and "cannot begin: [Errno 2]" in row[3]
            assert ended(control, killed)[3] == "killed by signal 9"
    slots_add_up(control.engine)
    assert rows(control.engine, "SELECT free, lease_until < 2e9 FROM worker") == [(4, 1)]
    events = read(tmp_path / "events.jsonl")
    assigned = [pair for event in events if event["kind"] == "effect" for pair in event["assigned"]]
    assert [task for task, _ in assigned].count(bad) == 2


def test_a_worker_that_is_fenced_kills_its_commands(control: Control, tmp_path: Path) -> None:
    task = submit(control, "sh", "-c", f"sleep 1000 & echo $! >> {tmp_path}/pids; wait")
    said: list[str] = []
    worker = WorkerProcess(control, "w", 1, lease=1000.0, say=said.append)
    worker.turn()
    assert assign(control, "least") == 1
    worker.turn()
    until(
        lambda: (tmp_path / "pids").exists() and (tmp_path / "pids").read_text().endswith("\n"), "the command"
    )
    other = WorkerProcess(control, "w", 1, lease=1000.0)
    other.turn()
    assert state(control, task)[0] == "pending"
    assert assign(control, "least") == 1
    worker.renewed = -1e9  # time to renew
    worker.turn()
    assert said == ["w was fenced, 1 commands are killed"] and worker.commands == {}
    (child,) = (tmp_path / "pids").read_text().split()
    until(lambda: gone(int(child)), "its end")
    other.end()
    worker.end()


def test_a_worker_that_stops_gives_back_what_it_has(control: Control) -> None:
    task = submit(control, "sleep", "1000")
    with running(lambda stop: serve(control, stop)), running(WorkerProcess(control, "w", 1).run):
        until(lambda: state(control, task)[0] == "running", "its begin")
    control.run("expire")
    assert state(control, task)[0] == "pending" and state(control, task)[3] == "worker w was lost"


def test_who_holds_no_lease_any_more_kills_its_commands(
    control: Control, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The database cannot be reached for longer than the lease, by the scheduler neither."""
    task = submit(control, "sleep", "1000")
    worker = WorkerProcess(control, "w", 1, lease=0.6)
    with running(worker.run):
        until(lambda: worker.epoch, "its epoch")
        assign(control, "least")
        process = until(lambda: worker.commands.get(task), "its command").process

        def broken(*_: Any) -> None:
            raise module.UserError("the database is away")

        with monkeypatch.context() as patched:
            patched.setattr(WorkerProcess, "turn", broken)
            assert until(lambda: process.poll() is not None, "its end")
        until(lambda: state(control, task)[0] == "pending", "a worker that knows what it lost")


def test_commands_that_take_long_to_begin_do_not_cost_the_lease(control: Control) -> None:
    """Each takes longer than a third of the lease: it is renewed between them, and none begins twice."""
    tasks = [submit(control, "sleep", "1000") for _ in range(3)]
    said: list[str] = []
    worker = WorkerProcess(control, "w", 3, lease=1000.0, say=said.append)
    worker.turn()
    assert assign(control, "least") == 3
    start = worker._start

    def slow(task: dict[str, Any]) -> None:
        start(task)
        worker.renewed = -1e9

    worker._start = slow  # type: ignore[method-assign]
    for number in (1, 2, 3):
        worker.turn(rung=number == 1)
        assert len(worker.commands) == number
    assert [state(control, task)[:2] for task in tasks] == [("running", 1)] * 3 and said == []
    worker.end()


def test_a_policy_that_raises_is_named_and_serving_goes_on(
    control: Control, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = threading.Event()
    broken.set()

    def sometimes(observation: policies.Observation) -> policies.Decision:
        if broken.is_set():
            raise ZeroDivisionError("by nothing")
        return policies.decide(observation)

    monkeypatch.setitem(policies.POLICIES, "sometimes", sometimes)  # type: ignore[arg-type]
    monkeypatch.setattr(module, "TURN", 0.01)
    control.run("join", workers=[["w", 1, ""]], lease=1000.0)
    task, said = submit(control, "true"), list[str]()
    with running(lambda stop: serve(control, stop, policy="sometimes", say=said.append)):
        until(lambda: said, "the sentence")
        assert state(control, task)[0] == "pending"
        broken.clear()
        until(lambda: state(control, task)[0] == "assigned", "its place")
    assert said == ["policy sometimes failed, its tasks stay pending: ZeroDivisionError: by nothing"]
    with pytest.raises(UserError, match="`policy` is 'x', accepted are least, fifo"):
        serve(control, threading.Event(), policy="x")


def test_two_schedulers_place_each_task_once(control: Control) -> None:
    control.run("join", workers=[["w", 1000, ""]], lease=1000.0)
    with running(lambda stop: serve(control, stop)), running(lambda stop: serve(control, stop)):
        for _ in range(20):
            submit(control, "true")
        until(lambda: rows(control.engine, "SELECT count(*) FROM decision")[0][0] >= 20, "all places")
    assert rows(control.engine, "SELECT task, count(*) FROM decision GROUP BY task HAVING count(*) > 1") == []


def test_a_ring_wakes_who_listens_and_nobody_else(control: Control) -> None:
    with (
        closing(control.listen("receiver", "r")) as listener,
        closing(control.listen("receiver", "s")) as other,
    ):
        control.run("send", messages=[["r", "x"]])
        assert is_rung(listener) and not is_rung(other)
        listener.wait(0, threading.Event())
        assert not is_rung(listener)
        control.run("send", messages=[["s", "x"], ["r", "y"]])
        assert is_rung(other) and is_rung(listener)
    control.run("send", messages=[["r", "nobody listens"]])


def is_rung(listener: Any) -> bool:
    return bool(select.select([listener._source], [], [], 0)[0])


# --- the command line


@pytest.fixture
def invoke(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    monkeypatch.setenv("WINDTUNNEL_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("WINDTUNNEL_CONTROL", raising=False)
    return lambda *words: CliRunner().invoke(app, ["control", *words])


def test_the_verbs(invoke: Callable[..., Any], tmp_path: Path) -> None:
    assert invoke("init").output == f"Ready  sqlite:///{tmp_path}/home/control.db\n"
    assert invoke("submit", "--key", "a", "--", "true").output == "1\n"
    assert invoke("submit", "--key", "a", "--", "true").output == "1\n"
    assert len(invoke("submit", "--gang", "3", "--slots", "2", "--", "true").output.split()) == 3
    table = invoke("sql", "select state, count(*) as n from task group by state").output
    assert table == "state    n\npending  4\n"
    assert invoke("sql", "select 1 as x", "--json").output == '[{"x": 1}]\n'
    shown = invoke("ps").output
    assert "pending  4" in shown and "no worker" in shown
    assert '"waiting": [{"why": "no worker", "tasks": 4' in invoke("ps", "--json").output
