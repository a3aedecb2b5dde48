"""A capture that is killed or interrupted, at any end of it, leaves no process and no file behind. What
stands still is a hang, and ends with all that it started; what is only slow is none."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.waiting import gone, until
from training.emulate.capturing import SCRIPTS, session
from windtunnel.base.errors import HangError, ScriptError
from windtunnel.store.runs import Store
from windtunnel.training.emulate.live import session as captures
from windtunnel.training.emulate.live.session import Session

STUCK = Path(__file__).parent / "programs" / "stuck.py"
NAMES = re.findall(r"^def case_(\w+)", STUCK.read_text(), re.MULTILINE)


def test_nothing_is_left_when_the_worker_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pid_file = tmp_path / "pid"
    monkeypatch.setattr(captures, "subprocess", subprocess)  # the worker as it starts for users
    monkeypatch.setenv("PID_FILE", str(pid_file))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with (
        pytest.raises(ScriptError, match="killed by signal 9"),
        session("faulty.py", "case_endless") as capture_session,
    ):

        def kill() -> None:
            until(lambda: _written(pid_file))
            os.kill(capture_session._worker.pid, signal.SIGKILL)

        threading.Thread(target=kill).start()
        capture_session.capture([0])
    until(lambda: gone(int(pid_file.read_text())))
    assert not list(tmp_path.glob("windtunnel-*"))


def command(tmp_path: Path, *arguments: str, pid_file: Path | None = None) -> subprocess.Popen[str]:
    environment = {**os.environ, "WINDTUNNEL_HOME": str(tmp_path / "home"), "TMPDIR": str(tmp_path)}
    if pid_file is not None:
        environment["PID_FILE"] = str(pid_file)
    return subprocess.Popen(
        [sys.executable, "-c", "from windtunnel.cli.main import main; main()", "emulate", "-c",
        "h100-sxm:1x8", *arguments],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment,
    )  # fmt: skip


@pytest.mark.slow
def test_an_interrupt_ends_all_of_it(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    process = command(tmp_path, str(SCRIPTS / "faulty.py"), "case_endless", pid_file=pid_file)
    until(lambda: _written(pid_file))
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130 and "Traceback" not in err
    until(lambda: gone(int(pid_file.read_text())))
    assert not list(tmp_path.glob("windtunnel-*"))


@pytest.mark.slow
def test_a_command_that_is_killed_leaves_nothing_but_its_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STUCK_FOLDER", str(tmp_path))
    process = command(tmp_path, str(STUCK), "case_child")
    until(lambda: _written(tmp_path / "child"))
    store = Store.open(f"sqlite:///{tmp_path}/home/runs.db")
    assert [run.status for run in store.list()] == ["running"]
    assert list(tmp_path.glob("windtunnel-*"))
    process.kill()
    process.communicate(timeout=60)
    assert [run.status for run in store.list()] == ["killed"]
    # Also what the script had started in a session of its own.
    until(lambda: gone(int((tmp_path / "child").read_text())))
    until(lambda: not list(tmp_path.glob("windtunnel-*")))


def _written(path: Path) -> bool:
    return path.exists() and path.read_text().endswith("\n")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("stuck")


@pytest.fixture(scope="module")
def stuck(folder: Path) -> Iterator[Session]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("STUCK_FOLDER", str(folder))
        with session(str(STUCK), cluster="h100-sxm:2x8", timeout=1.0) as capture_session:
            yield capture_session


@pytest.mark.parametrize("name", ["sleeps", "spins", "stopped"])
def test_what_stands_still_hangs_where_it_stands(stuck: Session, name: str) -> None:
    with pytest.raises(HangError) as caught:
        stuck.capture([NAMES.index(name)])
    said = rf"the script hung as rank \d+: for \d+ s it stood at stuck\.py:\d+ in case_{name}"
    assert re.fullmatch(said, str(caught.value))
    assert f"in case_{name}" in caught.value.details


def test_a_loop_that_reads_what_never_changes_hangs_whatever_else_it_does(stuck: Session) -> None:
    with pytest.raises(HangError) as caught:
        stuck.capture([NAMES.index("reads")])
    line = 1 + STUCK.read_text().splitlines().index("    while x.sum().item() < 100:")
    said = (
        rf"the script hung as rank \d+: for \d+ s the loop at stuck\.py:{line} in case_reads "
        "read the same of the device, and did nothing new"
    )
    assert re.fullmatch(said, str(caught.value))


def test_all_that_a_hanging_rank_started_is_ended(stuck: Session, folder: Path) -> None:
    with pytest.raises(HangError, match="in case_child"):
        stuck.capture([NAMES.index("child")])
    until(lambda: gone(int((folder / "child").read_text())))


@pytest.mark.parametrize("name", ["records", "grows"])
def test_what_is_only_slow_comes_to_its_end(stuck: Session, name: str) -> None:
    (slice_,) = stuck.capture([NAMES.index(name)])
    assert len(slice_.steps) > 1
