"""Kills at random, a disk that is full, a server that is restarted."""

from __future__ import annotations

import os
import signal
import threading
from contextlib import closing
from pathlib import Path

import pytest
from test_database_live import ended, running, submit

from support.control import postgres, rows, slots_add_up
from support.waiting import gone, until
from windtunnel.control.database import WorkerProcess, open_control, serve
from windtunnel.control.database.live import serve as module
from windtunnel.control.database.live.demo import demo
from windtunnel.linux import mounts
from windtunnel.store.transactions import DatabaseError

pytestmark = [pytest.mark.conformance]


@pytest.mark.parametrize("engine", ["sqlite", "postgres"])
def test_kills_lose_nothing(tmp_path: Path, engine: str) -> None:
    def hold(url: str) -> None:
        for seed in range(2):
            report = demo(url, tmp_path / "events.jsonl", tasks=150, kill=4, seed=seed)
            assert (report["done"], report["effects"], report["lost"], report["failed"]) == (150, 150, 0, 0)
            assert len(report["killed"]) == 4
        control = open_control(url)
        slots_add_up(control.engine)
        control.engine.dispose()

    if engine == "sqlite":
        hold(f"sqlite:///{tmp_path}/control.db")
    else:
        with postgres(tmp_path / "postgres") as server:
            hold(server.get_uri())


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="a file system is mounted by root")
def test_a_full_disk_is_said_and_loses_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "small"
    folder.mkdir()
    mounts.mount("tmpfs", folder, "tmpfs", options="size=8m")
    try:
        control = open_control(f"sqlite:///{folder}/control.db", create=True, durable=False)
        task, filler = submit(control, "true"), folder / "filler"
        filler.write_bytes(bytes(6 << 20))
        with pytest.raises(DatabaseError, match=r"control\.db: the database cannot be used \(.*full"):
            for number in range(10_000):
                control.run("write_file", path=f"{number}", data=bytes(200_000))
        assert rows(control.engine, "SELECT state FROM task") == [("pending",)]
        filler.unlink()
        control.run("write_file", path="x", data=b"there is room again")
        with running(lambda stop: serve(control, stop)), running(WorkerProcess(control, "w", 1).run):
            assert ended(control, task)[0] == "done"
        control.engine.dispose()
    finally:
        mounts.unmount(folder)


def test_a_server_that_is_restarted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The scheduler and the worker say so, and go on with what there is."""
    monkeypatch.setattr(module, "TURN", 0.1)
    with postgres(tmp_path / "postgres") as server:
        control = open_control(server.get_uri(), create=True)
        said: list[str] = []
        worker = WorkerProcess(control, "w", 2, lease=60.0, say=said.append)
        with running(lambda stop: serve(control, stop, say=said.append)), running(worker.run):
            assert ended(control, submit(control, "true"))[0] == "done"
            pid = server.get_pid()
            os.kill(pid, signal.SIGINT)  # at once: connections are cut
            until(lambda: said and gone(pid), "the sentence")
            server.ensure_postgres_running()

            def again() -> int:
                try:
                    return submit(control, "true", key="again")
                except DatabaseError:
                    return 0

            assert ended(control, until(again, "a new connection"))[0] == "done"
        assert any(
            "Postgres" in sentence or "cannot be used" in sentence or "wait for it" in sentence
            for sentence in said
        )
        control.engine.dispose()


def test_a_ring_of_postgres_wakes_its_channel(tmp_path: Path) -> None:
    with postgres(tmp_path / "postgres") as server:
        control, stop = open_control(server.get_uri(), create=True), threading.Event()
        with closing(control.listen("receiver", "r")) as listener:
            control.run("send", messages=[["r", "x"]])
            listener.wait(60.0, stop)
            assert control.run("receive", receiver="r") == [("", "x")]
        control.engine.dispose()
