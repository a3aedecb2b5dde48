"""What the services promise: once for each key, fenced by epochs, bounded attempts, and why somebody
waits."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import event

from support.control import rows, slots_add_up
from windtunnel.base.errors import UserError
from windtunnel.control.database import Control, PolicyError, open_control
from windtunnel.control.database import policy as policies
from windtunnel.control.database.handlers import BLOCK
from windtunnel.control.database.tables import open_tables

LONG = 1000.0


@pytest.fixture
def control(tmp_path: Path) -> Iterator[Control]:
    control = open_control(f"sqlite:///{tmp_path}/control.db", create=True, durable=False)
    yield control
    control.engine.dispose()


def submit(control: Control, count: int = 1, **more: Any) -> list[int]:
    tasks: list[int] = control.run("submit", tasks=[{"command": ["true"], **more} for _ in range(count)])
    return tasks


def why(control: Control) -> dict[int, str]:
    return dict(control.query("SELECT id, why FROM waiting")[1])


def test_a_key_is_one_task_and_one_command(control: Control) -> None:
    first = submit(control, key="a")
    assert submit(control, 2, key="a") == first * 2
    with pytest.raises(UserError, match="key 'a' is of task 1, which runs"):
        control.run("submit", tasks=[{"command": ["false"], "key": "a"}])
    with pytest.raises(UserError, match="key 'b' is of task"):
        control.run("submit", tasks=[{"command": ["true"], "key": "b"}, {"command": ["false"], "key": "b"}])
    assert rows(control.engine, "SELECT count(*) FROM task") == [(1,)]


@pytest.mark.parametrize(
    "spec",
    [
        {"command": []}, {"command": "true"}, {"command": [""]}, {"slots": 0}, {"slots": "2"}, {"speed": 1},
        {"members": 2}, {"gang": "g"}, {"gang": "g", "members": 101}, {"attempts": 0},
    ],
)  # fmt: skip
def test_what_cannot_be_a_task_is_one_sentence(control: Control, spec: dict[str, Any]) -> None:
    with pytest.raises(
        UserError, match=r"submit: \w+ is .*, accepted are command \(a list of words\), key, "
    ) as caught:
        control.run("submit", tasks=[{"command": ["true"], **spec}])
    assert "\n" not in str(caught.value)


def test_a_worker_with_an_old_epoch_writes_nothing(control: Control) -> None:
    (task,) = submit(control)
    epoch = control.run("join", workers=[["w", 1, ""]], lease=LONG)["w"]
    assert control.run("schedule").assigned == ((task, "w"),)
    assert [row["task"] for row in control.run("claim", workers=[("w", epoch)])] == [task]
    later = control.run("join", workers=[["w", 2, ""]], lease=LONG)["w"]
    assert later == epoch + 1
    assert control.run("finish", results=[[task, "w", epoch, 0, "", ""]]) == []
    assert control.run("claim", workers=[("w", epoch)]) == []
    assert not control.run("renew", worker="w", epoch=epoch, lease=LONG)
    assert rows(control.engine, "SELECT state, error FROM task") == [("pending", "worker w was lost")]
    control.run("schedule")
    assert [row["attempt"] for row in control.run("claim", workers=[("w", later)])] == [2]
    assert control.run("finish", results=[[task, "w", later, 0, "", "out"]]) == [task]
    assert control.run("finish", results=[[task, "w", later, 0, "", "out"]]) == []
    slots_add_up(control.engine)


def test_a_poisoned_task_fails_and_others_go_on(control: Control) -> None:
    poisoned, other = submit(control, 2, attempts=2)
    for attempt in (1, 2):
        epoch = control.run("join", workers=[["w", 4, ""]], lease=LONG)["w"]
        control.run("schedule")
        assert poisoned in [row["task"] for row in control.run("claim", workers=[("w", epoch)])]
        if attempt == 1:
            assert control.run("finish", results=[[other, "w", epoch, 0, "", ""]]) == [other]
            assert control.run("finish", results=[[poisoned, "w", epoch, 3, "exit status 3", "why"]])
    control.run("renew", worker="w", epoch=epoch, lease=-1.0)  # the worker is lost at the second attempt
    assert control.run("expire") == ["w"]
    assert control.run("expire") == []
    states = rows(control.engine, "SELECT id, state, attempt, error FROM task ORDER BY id")
    assert states == [(poisoned, "failed", 2, "worker w was lost"), (other, "done", 1, None)]
    assert control.run("schedule") is None


def test_who_waits_and_why(control: Control) -> None:
    (task,) = submit(control)
    assert why(control) == {task: "no worker"}
    epoch = control.run("join", workers=[["w", 2, ""]], lease=LONG)["w"]
    (large,) = submit(control, slots=3)
    (gang,) = submit(control, gang="g", members=2)
    (due,) = submit(control, not_before=time.time() + LONG)
    assert why(control) == {
        task: "to be scheduled", large: "too large: no worker has 3 slots",
        gang: "gang incomplete: 1 of 2 members", due: "not before a time that is to come",
    }  # fmt: skip
    control.run("schedule")
    submit(control, gang="g", members=2)
    (second,) = submit(control, slots=2)
    reasons = why(control)
    assert reasons[task] == "assigned to w, which has not begun it"
    assert reasons[gang] == "no free slots for the whole gang"
    assert reasons[second] == "no free slots: no worker has 2 of them"
    assert control.query("SELECT free, tasks, state FROM load")[1] == [(1, 1, "live")]
    control.run("claim", workers=[("w", epoch)])
    assert task not in why(control)
    history = control.query("SELECT task, worker, policy, attempt, reason, state FROM history")[1]
    assert history == [(task, "w", "least", 1, "most free slots", "running")]


def test_a_gang_begins_whole_also_where_the_window_cuts_it(control: Control) -> None:
    members = submit(control, 3, gang="g", members=3)
    control.run("join", workers=[["u", 2, ""], ["v", 1, ""]], lease=LONG)
    placement = control.run("schedule", policy="gang", most=2)
    assert sorted(number for number, _ in placement.assigned) == members
    slots_add_up(control.engine)


@pytest.mark.parametrize("fault", ["raises", "unknown worker", "twice", "too much"])
def test_a_policy_that_fails_places_nothing(
    control: Control, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    submit(control, 2)
    control.run("join", workers=[["w", 1, ""]], lease=LONG)

    def wrong(observation: policies.Observation) -> policies.Decision:
        if fault == "raises":
            raise ZeroDivisionError("by nothing")
        first, second = (task.id for task in observation.tasks)
        pairs = {
            "unknown worker": [(first, "x")],
            "twice": [(99, "w")],
            "too much": [(first, "w"), (second, "w")],
        }
        return policies.Decision(tuple(policies.Assignment(*pair) for pair in pairs[fault]))

    monkeypatch.setitem(policies.POLICIES, "wrong", wrong)  # type: ignore[arg-type]
    with pytest.raises(PolicyError, match=r"policy wrong .*its tasks stay pending"):
        control.run("schedule", policy="wrong")
    assert rows(control.engine, "SELECT DISTINCT state FROM task") == [("pending",)]
    assert rows(control.engine, "SELECT count(*) FROM decision") == [(0,)]
    assert len(control.run("schedule", policy="fifo").assigned) == 1


def test_messages_come_once_and_in_order(control: Control) -> None:
    control.run("send", messages=[["r", str(number)] for number in range(5)], sender="s")
    control.run("send", messages=[["other", "x"]])
    assert control.run("receive", receiver="r", most=3) == [("s", "0"), ("s", "1"), ("s", "2")]
    assert control.run("receive", receiver="r") == [("s", "3"), ("s", "4")]
    assert control.run("receive", receiver="r") == []
    assert control.run("receive", receiver="other") == [("", "x")]


def test_files_are_replaced_whole(control: Control) -> None:
    data = os.urandom(2 * BLOCK + 5)
    control.run("write_file", path="a", data=data)
    assert control.run("read_file", path="a") == data
    control.run("write_file", path="a", data=b"")
    assert control.run("read_file", path="a") == b""
    assert rows(control.engine, "SELECT count(*) FROM file_block") == [(0,)]
    assert control.run("read_file", path="b") is None
    assert control.run("remove_files", paths=["a", "b"]) == 1


def test_sql_only_reads(control: Control) -> None:
    for statement in (
        "DELETE FROM task",
        "nonsense",
        "SELECT 1; SELECT 2",
        "PRAGMA user_version=3; SELECT 1",
    ):
        with pytest.raises(UserError, match=r"sql: .* cannot be read"):
            control.query(statement)
    submit(control)  # who asked can still write
    assert control.query("SELECT count(*) AS n FROM task") == (["n"], [(1,)])


def test_a_database_without_tables_is_refused_and_not_made(tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match=r"--db: sqlite:.* has no control plane; windtunnel control init makes one"
    ):
        open_tables(f"sqlite:///{tmp_path}/none.db", "--db")
    assert not list(tmp_path.iterdir())
    open_tables(f"sqlite:///{tmp_path}/made/x.db", "--db", create=True).dispose()
    open_tables(f"sqlite:///{tmp_path}/made/x.db", "--db", create=True).dispose()


# --- a crash at each statement


def cycle(control: Control) -> None:
    """All that befalls a task, twice."""
    submit(control, key="a", attempts=9)
    epoch = control.run("join", workers=[["w", 1, ""]], lease=LONG)["w"]
    for status, error in ((1, "broken"), (0, "")):
        control.run("expire")
        control.run("schedule")
        for task in control.run("claim", workers=[("w", epoch)]):
            control.run("finish", results=[[task["task"], "w", epoch, status, error, ""]])
    control.run("send", messages=[["r", "done"]])
    control.run("receive", receiver="r")


def dies_at(url: str, number: int) -> int:
    """The exit status of a process that ends, as by kill -9, before its statement of that number."""
    child = os.fork()
    if child == 0:
        try:
            control, count = open_control(url), iter(range(1, 10**9))

            @event.listens_for(control.engine, "before_cursor_execute")
            @event.listens_for(control.engine, "commit")
            def end(*_: Any) -> None:
                if next(count) == number:
                    os._exit(9)

            cycle(control)
            os._exit(0)
        except BaseException:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_a_crash_at_any_statement_loses_and_doubles_nothing(tmp_path: Path) -> None:
    crashes = 0
    for number in range(1, 100):
        url = f"sqlite:///{tmp_path}/{number}.db"
        open_tables(url, "url", create=True, durable=False).dispose()
        status = dies_at(url, number)
        assert status in (0, 9)
        control = open_control(url, durable=False)
        slots_add_up(control.engine)
        cycle(control)
        cycle(control)
        states = rows(control.engine, "SELECT key, state FROM task")
        assert states == [("a", "done")], number
        assert rows(control.engine, "SELECT count(*) FROM message") == [(0,)]
        slots_add_up(control.engine)
        control.engine.dispose()
        if status == 0:
            break
        crashes += 1
    assert crashes > 20
