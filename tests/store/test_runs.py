"""The run store: what is written stays, whatever happens around it."""

import json
import re
import signal
import sqlite3
import subprocess
import sys
from contextlib import contextmanager
from datetime import UTC, datetime

import numpy as np
import pytest

from windtunnel.base.errors import UserError
from windtunnel.base.paths import home
from windtunnel.store import database, runs
from windtunnel.store.alive import is_gone
from windtunnel.store.database import plain, this_process
from windtunnel.store.runs import Store


@pytest.fixture(autouse=True)
def own_home(tmp_path, monkeypatch):
    monkeypatch.setenv("WINDTUNNEL_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("WINDTUNNEL_STORE", raising=False)
    return tmp_path / "home"


def test_a_run_from_begin_to_end(own_home):
    store = Store.open()
    run = store.begin("training.emulate", {"cluster": "h100-sxm:16x8", "ranks": (0, 17)}, seed=7)
    assert re.fullmatch(r"\d{8}-\d{6}-[0-9a-f]{4}", run.id)
    assert run.directory == own_home / "runs" / run.id and run.directory.is_dir()
    begun = Store.open().get(run.id)
    assert (begun.status, begun.summary, begun.wall_time_s, begun.seed) == ("running", None, None, 7)
    assert begun.inputs == {"cluster": "h100-sxm:16x8", "ranks": [0, 17]}
    assert begun.versions["numpy"] == np.__version__
    assert abs((datetime.now(UTC) - begun.created_at).total_seconds()) < 60
    run.finish({"iteration_time_s": np.float64(2.5), "world_size": np.int64(128), "mfu": float("nan")})
    done = store.get("last")
    assert done.status == "done" and done.error is None
    assert done.summary == {"iteration_time_s": 2.5, "world_size": 128, "mfu": None}
    assert done.wall_time_s is not None and 0 <= done.wall_time_s < 60
    assert json.loads(json.dumps(done.as_dict()))["id"] == run.id


def test_the_summary_says_how_long_it_took():
    run = Store.open().begin("a", {})
    run.finish({"wall_time_s": 12.5})
    assert Store.open().get(run.id).wall_time_s == 12.5


def test_a_failed_run_keeps_its_error_and_is_final():
    store = Store.open()
    run = store.begin("training.emulate", {})
    run.fail("train.py: line 3: no such size")
    run.finish({"late": True})
    stored = store.get(run.id)
    assert (stored.status, stored.error, stored.summary) == ("failed", "train.py: line 3: no such size", None)


def test_list_is_newest_first_and_filtered():
    store = Store.open()
    names = [store.begin("ab"[index % 2], {"index": index}).id for index in range(5)]
    assert [run.id for run in store.list()] == names[::-1]
    assert [run.id for run in store.list(2)] == names[:2:-1]
    assert [run.id for run in store.list(capability="b")] == [names[3], names[1]]
    assert store.get("last").id == names[-1]


def test_get_by_prefix(monkeypatch):
    store = Store.open()
    tails = iter(["aa00", "aa00", "ab00", "b%_0"])  # the second is taken: another one is drawn
    monkeypatch.setattr(runs.secrets, "token_hex", lambda _: next(tails))

    class Clock(datetime):
        @classmethod
        def now(cls, tz=None):
            return datetime(2026, 11, 21, 14, 35, 1, tzinfo=tz)

    monkeypatch.setattr(runs, "datetime", Clock)
    names = [store.begin("a", {}).id for _ in range(3)]
    assert names == [f"20261121-143501-{tail}" for tail in ("aa00", "ab00", "b%_0")]
    assert store.get("20261121-143501-ab").id == names[1]
    with pytest.raises(UserError, match=r"more than one run .*aa00"):
        store.get("20261121")
    for wrong in ("20251121", "", "%", "20261121-143501-a_"):
        with pytest.raises(UserError, match="runs list"):
            store.get(wrong)


def test_an_empty_store():
    store = Store.open()
    assert store.list() == []
    with pytest.raises(UserError, match="the store is empty"):
        store.get("last")


def test_remove_deletes_the_files_of_that_run_alone(own_home):
    store = Store.open()
    keep, drop = store.begin("a", {}), store.begin("a", {})
    (drop.directory / "summary.json").write_text("{}")
    with pytest.raises(UserError, match="still running"):
        store.remove(drop.id)
    assert drop.directory.is_dir()
    drop.finish({})
    store.remove(drop.id)
    assert [run.id for run in store.list()] == [keep.id]
    assert sorted(path.name for path in (own_home / "runs").iterdir()) == [keep.id]


def test_remove_never_deletes_a_folder_that_is_not_the_runs(tmp_path):
    store = Store.open()
    run = store.begin("a", {})
    run.fail("x")
    precious = tmp_path / "precious"
    precious.mkdir()
    with sqlite3.connect(home() / "runs.db") as database:
        database.execute("UPDATE runs SET directory = ?", (str(precious),))
    store.remove(run.id)
    assert precious.is_dir() and store.list() == []


@contextmanager
def another_process():
    """One that has begun a run, and its id; killed at the end."""
    program = (
        "from windtunnel.store.runs import Store; print(Store.open().begin('a', {}).id, flush=True); input()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        try:
            yield child, child.stdout.readline().strip()
        finally:
            child.kill()


@pytest.mark.parametrize("host", ["this one", "a container that bore another name"])
def test_a_killed_process_is_shown_as_killed_and_stays_so(own_home, monkeypatch, host):
    with another_process() as (child, name):
        if host != "this one":
            monkeypatch.setattr("platform.node", lambda: "renamed")
        store = Store.open()
        assert store.get(name).status == "running"
        child.send_signal(signal.SIGKILL)
        child.wait()
        (stored,) = store.list()
    assert (stored.status, stored.error) == ("killed", "its process ended without a word")
    monkeypatch.undo()
    with sqlite3.connect(own_home / "runs.db") as database:
        assert database.execute("SELECT status FROM runs").fetchall() == [("killed",)]
    store.remove(name)


def test_a_run_is_alive_while_its_lock_is_held(monkeypatch):
    with another_process() as (_, name):
        # As seen from a container, where the process has another number, or none.
        monkeypatch.setattr("windtunnel.base.processes.Identity.lives", lambda _: False)
        assert Store.open().get(name).status == "running"
    assert Store.open().get(name).status == "killed"


def test_a_run_that_ended_leaves_no_lock():
    store = Store.open()
    run = store.begin("a", {})
    assert [path.name for path in run.directory.iterdir()] == [".running"]
    run.finish({})
    assert list(run.directory.iterdir()) == []


def test_who_is_gone(tmp_path):
    mine = this_process()
    assert not is_gone(mine, tmp_path)
    assert is_gone(mine | {"boot": "an earlier one"}, tmp_path)
    assert is_gone(mine | {"started": mine["started"] - 3600}, tmp_path)  # the id is another process's now
    assert is_gone(mine | {"pid": 2**22 + 1}, tmp_path)
    assert not is_gone(mine | {"host": "elsewhere", "pid": 2**22 + 1}, tmp_path)


WRITER = """
from windtunnel.store.runs import Store
store = Store.open()
for index in range(15):
    run = store.begin("training.emulate", {"index": index})
    run.finish({"iteration_time_s": float(index)})
    print(run.id)
"""


def test_parallel_writers_lose_nothing():
    """Four processes open a store that is not there yet and write at once."""
    writers = [
        subprocess.Popen([sys.executable, "-c", WRITER], stdout=subprocess.PIPE, text=True) for _ in range(4)
    ]
    names = [name for writer in writers for name in writer.communicate(timeout=100)[0].split()]
    assert [writer.returncode for writer in writers] == [0] * 4
    listed = Store.open().list()
    assert len(set(names)) == 60
    assert sorted(run.id for run in listed) == sorted(names)
    assert {run.status for run in listed} == {"done"}
    with sqlite3.connect(home() / "runs.db") as database:
        assert database.execute("PRAGMA journal_mode").fetchone() == ("wal",)


def test_a_corrupted_store_is_said_in_one_sentence_and_the_files_stay(own_home):
    run = Store.open().begin("a", {})
    (run.directory / "summary.json").write_text("{}")
    for name in ("runs.db-wal", "runs.db-shm"):
        (own_home / name).unlink(missing_ok=True)
    (own_home / "runs.db").write_bytes(b"this is not a database, however long it may be" * 100)
    with pytest.raises(UserError, match=r"runs\.db: the run store cannot be used \(file is not a database\)"):
        Store.open()
    assert (run.directory / "summary.json").read_text() == "{}"


def test_a_home_that_cannot_be_written(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("WINDTUNNEL_HOME", str(tmp_path / "file"))
    with pytest.raises(UserError, match="WINDTUNNEL_HOME"):
        Store.open()


def test_a_name_that_another_host_took_is_drawn_again(tmp_path, monkeypatch):
    url = f"sqlite:///{tmp_path / 'shared.db'}"
    first = Store.open(url).begin("a", {})
    monkeypatch.setenv("WINDTUNNEL_HOME", str(tmp_path / "elsewhere"))
    tails = iter([first.id[-4:], "ffff" if first.id[-4:] != "ffff" else "eeee"])
    monkeypatch.setattr(runs.secrets, "token_hex", lambda _: next(tails))

    class Clock(datetime):
        @classmethod
        def now(cls, tz=None):
            return first.created_at

    monkeypatch.setattr(runs, "datetime", Clock)
    second = Store.open(url).begin("a", {})
    assert second.id != first.id and next(tails, None) is None
    assert [path.name for path in (tmp_path / "elsewhere" / "runs").iterdir()] == [second.id]


def test_a_run_that_cannot_be_written_leaves_no_folder(own_home):
    store = Store.open()
    with sqlite3.connect(own_home / "runs.db") as database:
        database.execute(
            "CREATE TRIGGER full BEFORE INSERT ON runs BEGIN SELECT RAISE(FAIL, 'disk is full'); END"
        )
    for _ in range(2):
        with pytest.raises(UserError, match="disk is full"):
            store.begin("a", {})
    assert list((own_home / "runs").iterdir()) == []


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("not a url", "is not a database that can be used"),
        ("nodb://me@host/runs", "is not a database that can be used"),
        ("postgresql+pg8000://me:secret@host/runs", r"needs the package pg8000, .*windtunnel\[data\]"),
    ],
)
def test_wrong_urls(url, message, monkeypatch):
    monkeypatch.setenv("WINDTUNNEL_STORE", url)
    with pytest.raises(UserError, match=message) as refused:
        Store.open()
    assert "secret" not in str(refused.value)


def test_another_sqlite_file_by_url(tmp_path, own_home):
    store = Store.open(f"sqlite:///{tmp_path / 'deep' / 'other.db'}")
    run = store.begin("a", {})
    assert (tmp_path / "deep" / "other.db").exists()
    assert run.directory.parent == own_home / "runs"
    assert Store.open().list() == []


@pytest.mark.parametrize(
    ("own", "data", "expected"),
    [
        ("{t}/x", "{t}/y", "{t}/x"),
        ("", "{t}/y", "{t}/y/windtunnel"),
        (None, None, "{t}/.local/share/windtunnel"),
    ],
)
def test_where_home_is(own, data, expected, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    for name, value in (("WINDTUNNEL_HOME", own), ("XDG_DATA_HOME", data)):
        if value is None:
            monkeypatch.delenv(name, raising=False)
        else:
            monkeypatch.setenv(name, value.format(t=tmp_path))
    assert str(home()) == expected.format(t=tmp_path)


def test_plain_values():
    assert plain({1: np.arange(3), "p": home(), "b": np.bool_(True), "i": float("-inf"), "s": {4}}) == {
        "1": [0, 1, 2], "p": str(home()), "b": True, "i": None, "s": [4],
    }  # fmt: skip
    assert type(plain(database.Row)) is str
