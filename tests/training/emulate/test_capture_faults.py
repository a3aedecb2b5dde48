"""Scripts that fail end with one sentence and their own traceback, and leave nothing behind."""

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
from capturing import SCRIPTS, session

from support.waiting import gone, until
from windtunnel.base.errors import ScriptError, UserError
from windtunnel.cli.main import main
from windtunnel.cluster.load import load_cluster
from windtunnel.store.runs import Store
from windtunnel.training.emulate.live.session import Session
from windtunnel.training.emulate.program import Script

NAMES = re.findall(r"^def case_(\w+)", (SCRIPTS / "faulty.py").read_text(), re.MULTILINE)
SAID = {
    "raises": (r"case_raises: ValueError: no such luck \(", "with a second line"),
    "exit_3": (r"case_exit_3: the script called exit\(3\)", ""),
    "exit_0": (r"the script ended without any work on a device", ""),
    "os_exit_0": (r"the script ended by itself as rank \d+ \(os._exit\?\)", ""),
    "endless": (r"the script hung as rank \d+: for \d+ s it stood at faulty.py:\d+ in case_endless$",
    "in case_endless"),
    "wrong_device_of_a_tensor": (r"invalid device ordinal 9: the emulated host has 8 devices", "cuda:9"),
    "wrong_world_size": (r"init_process_group\(world_size=3\): the emulated world gives world_size 16", ""),
    "killed": (r"rank \d+ was killed \(SIGKILL", ""),
    "crash": (r"the script died of signal 11", "in case_crash"),
    "syntax": (r"broken.py:1: SyntaxError: invalid syntax \(as", "x = = 1"),
}  # fmt: skip


@pytest.fixture(scope="module")
def failing() -> Iterator[Session]:
    with session("faulty.py", cluster="h100-sxm:2x8", timeout=2.0) as one:
        yield one


@pytest.mark.parametrize("name", NAMES)
def test_a_failure_is_told_in_one_sentence(failing: Session, name: str) -> None:
    with pytest.raises(ScriptError) as caught:
        failing.capture([NAMES.index(name)])
    sentence, shown = SAID[name]
    assert re.search(sentence, str(caught.value)), str(caught.value)
    assert "\n" not in str(caught.value)
    assert shown in caught.value.details
    assert "windtunnel/training" not in caught.value.details, "frames of ours are no help to the user"


def test_the_script_is_looked_at_before_anything_starts(tmp_path: Path) -> None:
    for path, said in ((tmp_path / "none.py", "does not exist"), (tmp_path, "is not a file")):
        with pytest.raises(UserError, match=said):
            Session(Script(path, ()), load_cluster("h100-sxm:1x8"))


@pytest.mark.usefixtures("real_worker")
def test_nothing_is_left_when_the_worker_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pid_file = tmp_path / "pid"
    monkeypatch.setenv("PID_FILE", str(pid_file))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with pytest.raises(ScriptError, match="killed by signal 9"), session("faulty.py", "case_endless") as one:

        def kill() -> None:
            until(lambda: _written(pid_file))
            assert one._worker is not None
            os.kill(one._worker.pid, signal.SIGKILL)

        threading.Thread(target=kill).start()
        one.capture([0])
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
@pytest.mark.parametrize(
    ("script", "said"),
    [
        (["faulty.py", "case_raises"], r"^windtunnel: faulty.py:\d+ in case_raises: ValueError: no"),
        (["lonely.py"], r"the job would hang: .* at lonely\.py:12 in <module>"),
    ],
)
def test_the_command_ends_with_a_status_and_a_sentence(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    script: list[str],
    said: str,
) -> None:
    monkeypatch.setenv("WINDTUNNEL_HOME", str(tmp_path / "home"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    words = ["windtunnel", "emulate", "-c", "h100-sxm:1x8", str(SCRIPTS / script[0]), *script[1:]]
    monkeypatch.setattr("sys.argv", words)
    with pytest.raises(SystemExit) as end:
        main()
    out, err = capfd.readouterr()
    assert end.value.code == 1
    assert re.search(said, err, re.MULTILINE), err
    assert out == "" and "windtunnel/" not in err.replace(str(SCRIPTS), "")
    assert not list(tmp_path.glob("windtunnel-*"))


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
    process = command(tmp_path, str(SCRIPTS / "stuck.py"), "case_child")
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
