"""The fork server: what a forked script sees, how its end is told, and what survives whose death."""

from __future__ import annotations

import itertools
import json
import os
import queue
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.waiting import PATIENCE, until
from windtunnel.linux import forkserver_client, processes
from windtunnel.linux.forkserver_client import GONE, ForkServerClient, ForkServerKeeper


def alive(pid: int) -> bool:
    return processes.state(pid) not in ("", "Z")


def environment(*more: Path) -> dict[str, str]:
    """``more``: folders with modules."""
    path = os.pathsep.join([*map(str, more), os.environ.get("PYTHONPATH", "")])
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}


class Starter:
    """A client of a fork server that waits for its answers."""

    def __init__(self, path: Path, folder: Path) -> None:
        self.folder = folder
        self.numbers = itertools.count()
        self.exits: queue.Queue[dict[str, Any]] = queue.Queue()
        self.before: list[str] = []
        self.forks = ForkServerClient(path, self.exits.put)

    def start(self, text: str, *arguments: str, **env: str) -> int:
        answers: queue.Queue[dict[str, Any]] = queue.Queue()
        script = self.folder / f"script{next(self.numbers)}.py"
        script.write_text(text)
        wanted = {
            "script": str(script),
            "arguments": arguments,
            "cwd": str(self.folder),
            "env": environment() | env,
            "before": self.before,
        }
        out = os.open(self.folder / "out", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        err = os.open(self.folder / "err", os.O_WRONLY | os.O_CREAT | os.O_APPEND)

        def ask() -> bool:
            try:
                self.forks.start(wanted, answers.put, (out, err))
            except OSError:
                return False
            return True

        answer: dict[str, Any] = {"error": GONE}
        # A child of one that was killed may hold the connection for a moment more, and take the question.
        while answer.get("error") == GONE:
            until(ask)
            answer = answers.get(timeout=PATIENCE)
        os.close(out)
        os.close(err)
        assert answer["op"] == "started", answer
        return int(answer["pid"])

    def run(self, text: str, *arguments: str, **env: str) -> tuple[dict[str, Any], str, str]:
        pid = self.start(text, *arguments, **env)
        end = self.exits.get(timeout=PATIENCE)
        assert end["pid"] == pid
        return end, (self.folder / "out").read_text(), (self.folder / "err").read_text()


@pytest.fixture
def keeper(tmp_path: Path) -> Iterator[ForkServerKeeper]:
    kept = ForkServerKeeper(tmp_path / "z", (), environment())
    yield kept
    kept.close()


@pytest.fixture
def starter(keeper: ForkServerKeeper, tmp_path: Path) -> Iterator[Starter]:
    script_starter = Starter(keeper.path, tmp_path)
    yield script_starter
    script_starter.forks.close()


def test_a_script_sees_what_it_would_see_alone(starter: Starter, tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text("value = 7\n")
    text = """
import beside, json, os, signal, sys
print(json.dumps([__name__, sys.argv[1:], beside.value, os.environ["WHO"], os.getcwd(), sys.stdin.read(),
  os.getsid(0) == os.getpid(), signal.getsignal(signal.SIGINT) is signal.default_int_handler,
  sys.modules["__main__"].__file__ == sys.argv[0], "HOME_ALONE" in os.environ]))
"""
    end, out, _ = starter.run(text, "--lr", "1", WHO="me")
    assert json.loads(out) == ["__main__", ["--lr", "1"], 7, "me", str(tmp_path), "", True, True, True, False]
    assert (end["status"], end["signal"]) == (0, None)


def test_what_is_printed_at_an_import_is_not_the_launchers_output(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "noisy.py").write_text("print('a warning')\n")
    kept = ForkServerKeeper(tmp_path / "z", ("noisy",), environment(tmp_path))
    starter = Starter(kept.path, tmp_path)
    _, out, _ = starter.run("import sys; print('noisy' in sys.modules)")
    starter.forks.close()
    kept.close()
    assert out == "True\n"
    assert capfd.readouterr() == ("", "a warning\n")


def test_a_script_holds_nothing_of_the_server(starter: Starter) -> None:
    held = starter.start("import time; time.sleep(60)")
    _, out, _ = starter.run("import os; print(sorted(os.listdir('/proc/self/fd'), key=int))")
    numbers = [int(number) for number in eval(out)]
    assert numbers[:3] == [0, 1, 2]
    assert len(numbers) == 4  # and the listing itself
    os.kill(held, signal.SIGKILL)


@pytest.mark.parametrize(
    ("text", "status", "number", "said"),
    [
        ("raise SystemExit(3)", 3, None, ""),
        ("import sys; sys.exit('enough')", 1, None, "enough\n"),
        ("import sys; sys.exit()", 0, None, ""),
        ("import os; os._exit(4)", 4, None, ""),
        ("import os; os.kill(os.getpid(), 9)", None, 9, ""),
        ("import atexit, sys; atexit.register(lambda: print('bye', file=sys.stderr))", 0, None, "bye\n"),
    ],
)
def test_how_it_ended_is_told(
    starter: Starter, text: str, status: int | None, number: int | None, said: str
) -> None:
    end, _, err = starter.run(text)
    assert (end["status"], end["signal"], err) == (status, number, said)


def test_an_exception_shows_the_frames_of_the_script_alone(starter: Starter, tmp_path: Path) -> None:
    end, _, err = starter.run("def f():\n    raise ValueError('boom')\nf()\n")
    assert end["status"] == 1
    assert err.startswith("Traceback (most recent call last):\n")
    assert "ValueError: boom" in err
    assert "forkserver" not in err and "runpy" not in err
    assert err.count("  File") == 2


def test_a_syntax_error_is_one_too(starter: Starter) -> None:
    end, _, err = starter.run("def f(:\n")
    assert end["status"] == 1
    assert "SyntaxError" in err


def test_a_script_that_is_not_there(starter: Starter, tmp_path: Path) -> None:
    end, _, err = starter.run("import os; os.execv('/nowhere', ['x'])")
    assert end["status"] == 1
    assert "FileNotFoundError" in err


def test_threads_that_are_not_daemons_are_waited_for(starter: Starter) -> None:
    text = "import threading, time\nthreading.Thread(target=lambda: (time.sleep(0.1), print('late'))).start()"
    _, out, _ = starter.run(text)
    assert out == "late\n"


def test_what_a_script_started_ends_with_it(starter: Starter, tmp_path: Path) -> None:
    text = "import subprocess; print(subprocess.Popen(['sleep', '600']).pid, flush=True)"
    _, out, _ = starter.run(text)
    until(lambda: not alive(int(out)))


def test_a_large_environment_fits(starter: Starter) -> None:
    _, out, _ = starter.run("import os; print(len(os.environ['LONG']))", LONG="x" * 120_000)
    assert out == "120000\n"


def test_a_client_that_is_gone_takes_its_scripts_along(starter: Starter) -> None:
    pid = starter.start("import time; time.sleep(600)")
    starter.forks.close()
    until(lambda: not alive(pid))


def test_scripts_survive_the_server_and_a_new_one_serves(keeper: ForkServerKeeper, starter: Starter) -> None:
    pid = starter.start("import time; time.sleep(600)")
    keeper.process.kill()
    keeper.process.wait(PATIENCE)
    assert alive(pid)
    until(keeper.tend)
    end, out, _ = starter.run("print('again')")
    assert (end["status"], out) == (0, "again\n")
    os.kill(pid, signal.SIGKILL)


def test_a_server_that_is_stopped_is_replaced(
    keeper: ForkServerKeeper, starter: Starter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever asked it is told, and does not wait for ever."""
    monkeypatch.setattr(forkserver_client, "STANDS", 0.05)
    starter.run("pass")
    os.kill(keeper.process.pid, signal.SIGSTOP)
    answers: queue.Queue[dict[str, Any]] = queue.Queue()
    starter.forks.start({"script": "x.py", "args": [], "env": {}, "cwd": "/"}, answers.put, (1, 2))
    until(keeper.tend)
    assert answers.get(timeout=60)["error"] == GONE
    assert starter.run("print('again')")[1] == "again\n"
    assert not keeper.tend()


def test_an_owner_that_is_gone_ends_it_with_all_children(keeper: ForkServerKeeper, starter: Starter) -> None:
    pid = starter.start("import time; time.sleep(600)")
    keeper.close()
    assert keeper.process.returncode == 0
    until(lambda: not alive(pid))


def test_nonsense_on_its_socket_harms_nobody(keeper: ForkServerKeeper, starter: Starter) -> None:
    starter.run("pass")
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
        sock.connect(str(keeper.path))
        for packet in (b"not json", b"{}", b'{"op": "start", "id": 1}', b"[]"):
            sock.send(packet)
        until(lambda: b"failed" in sock.recv(1 << 16))
    end, _, _ = starter.run("pass")
    assert end["status"] == 0


def test_functions_are_called_before_a_script_and_in_its_place(tmp_path: Path) -> None:
    (tmp_path / "called.py").write_text(
        "import os\n"
        "def first(): os.environ['SEEN'] = 'first'\n"
        "def work(arguments):\n"
        "    with open(arguments['file'], 'w') as file:\n"
        "        file.write(f\"{os.environ['SEEN']} {os.getcwd()}\")\n"
    )
    kept = ForkServerKeeper(tmp_path / "second", ("called",), environment(tmp_path))
    try:
        starter = Starter(kept.path, tmp_path)
        starter.before = ["called:first"]
        _, out, _ = starter.run("import os; print(os.environ['SEEN'])")
        assert out == "first\n"
        file, before = tmp_path / "said", {"before": ["called:first"], "cwd": str(tmp_path)}
        pid = starter.forks.started({"call": "called:work", "arguments": {"file": str(file)}, **before})
        assert starter.exits.get(timeout=PATIENCE) == {"op": "exit", "pid": pid, "status": 0, "signal": None}
        assert file.read_text() == f"first {tmp_path}"
    finally:
        kept.close()


def test_nobody_listening_is_told_in_time(tmp_path: Path) -> None:
    with pytest.raises(OSError):
        ForkServerClient(tmp_path / "none", lambda _: None).started({}, timeout=0.1)
