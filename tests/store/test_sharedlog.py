"""A log in a database: one leader appends, others are fenced off, and copies are made of it."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import sqlalchemy

from windtunnel.base.errors import UserError
from windtunnel.store import eventlog, sharedlog
from windtunnel.store.sharedlog import SharedLog

PROGRAMS = Path("/usr/lib/postgresql")


@pytest.fixture(scope="module")
def postgres() -> Iterator[str]:
    """The URL of a server of our own, on a Unix socket."""
    if importlib.util.find_spec("psycopg") is None:
        pytest.skip("psycopg is not installed (pip install 'windtunnel[data]')")
    if shutil.which("setpriv") is None or not (found := sorted(PROGRAMS.glob("*/bin"))):
        pytest.skip(f"no Postgres in {PROGRAMS}, or no setpriv to start it without root")
    folder = Path(tempfile.mkdtemp(prefix="pg-"))
    folder.chmod(0o777)
    drop = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]
    run = [*drop, str(found[-1] / "pg_ctl"), "-D", str(folder / "data"), "-w", "-l", str(folder / "log")]
    try:
        make = [*drop, str(found[-1] / "initdb"), "-D", str(folder / "data"), "-U", "me", "-A", "trust"]
        subprocess.run(make, check=True, capture_output=True)
        only = f"-c listen_addresses= -c unix_socket_directories={folder} -c fsync=off"
        subprocess.run([*run, "-o", only, "start"], check=True, capture_output=True)
        yield f"postgresql://me@/postgres?host={folder}"
        subprocess.run([*run, "-m", "immediate", "stop"], check=True, capture_output=True)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(params=["sqlite", "postgres"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'log.db'}"
    return str(request.getfixturevalue("postgres"))


def test_who_does_not_lead_appends_nothing(url: str, tmp_path: Path) -> None:
    first, second, other = (SharedLog(url, run) for run in ("run", "run", "other"))
    assert first.leader() == (0, {})
    with pytest.raises(eventlog.Fenced):
        first.append(1, "{}")
    assert first.swap(0, 1, {"who": "a"}) and not second.swap(0, 1, {"who": "b"})
    mine = eventlog.EventLog(tmp_path / "mine", first=lambda line: first.append(1, line), epoch=1)
    mine.append("step", step=0)
    mine.append("step", step=1)
    assert second.leader() == (1, {"who": "a"})
    assert second.swap(1, 1, {"who": "a", "beat": 1}) and not second.swap(2, 3, {})
    assert second.swap(1, 2, {"who": "b"})
    second.copy(tmp_path / "copy")
    with pytest.raises(eventlog.Fenced, match="epoch 1 does not lead this run any more"):
        mine.append("step", step=2)
    second.append(2, '{"kind":"step","t":1,"step":7}')
    second.copy(tmp_path / "copy")
    second.copy(tmp_path / "mine")
    for copy in ("mine", "copy"):
        assert [event["step"] for event in eventlog.read(tmp_path / copy)] == [0, 1, 7]
    assert other.leader() == (0, {}) and other.lines() == []


def test_a_leader_that_froze_within_a_transaction_holds_nobody_up(postgres: str) -> None:
    """Its row is locked until the transaction ends, and the server cannot see that nobody comes to end it."""
    frozen, other = SharedLog(postgres, "frozen"), SharedLog(postgres, "frozen")
    assert frozen.swap(0, 1, {})
    frozen.append(1, "first")
    stopped, moves = threading.Event(), threading.Event()

    def stop(_: object) -> None:
        stopped.set()
        moves.wait(60)

    sqlalchemy.event.listen(frozen._engine, "commit", stop)
    with ThreadPoolExecutor(1) as pool:
        line = pool.submit(frozen.append, 1, "second")
        try:
            assert stopped.wait(60)
            assert other.swap(1, 2, {"who": "b"})
        finally:
            moves.set()
        with pytest.raises(eventlog.Fenced, match="epoch 1 does not lead this run any more"):
            line.result(60)
    assert other.lines() == ["first"]


def test_what_is_no_database_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sharedlog, "PATIENCE", 0.0)
    with pytest.raises(UserError, match="--log: 'nothing' is not a database"):
        SharedLog("nothing", "run")
    with pytest.raises(eventlog.LogFailed, match="the log cannot be used"):
        SharedLog("sqlite:////proc/none/log.db", "run")
