"""The zygote: what a forked script sees, how its end is told, and what survives whose death."""

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
from node_helpers import alive, environment, script, until

from windtunnel.training.elastic.live.agent.forkserver_client import Forks, ZygoteKeeper


class Starter:
    """A client of a zygote that waits for its answers."""

    def __init__(self, path: Path, folder: Path) -> None:
        self.folder = folder
        self.numbers = itertools.count()
        self.exits: queue.Queue[dict[str, Any]] = queue.Queue()
        self.forks = Forks(path, self.exits.put)

    def start(self, text: str, *arguments: str, **env: str) -> int:
        answers: queue.Queue[dict[str, Any]] = queue.Queue()
        wanted = {
            "script": str(script(self.folder, text, f"script{next(self.numbers)}.py")),
            "arguments": arguments,
            "cwd": str(self.folder),
            "env": environment() | env,
        }
        out = os.open(self.folder / "out", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        err = os.open(self.folder / "err", os.O_WRONLY | os.O_CREAT | os.O_APPEND)

        def ask() -> bool:
            try:
                self.forks.start(wanted, out, err, answers.put)
            except OSError:
                return False
            return True

        answer: dict[str, Any] = {"error": "the zygote is gone"}
        # A child of one that was killed may hold the connection for a moment more, and take the question.
        while answer.get("error") == "the zygote is gone":
            until(ask)
            answer = answers.get(timeout=30)
        os.close(out)
        os.close(err)
        assert answer["op"] == "started", answer
        return int(answer["pid"])

    def run(self, text: str, *arguments: str, **env: str) -> tuple[dict[str, Any], str, str]:
        pid = self.start(text, *arguments, **env)
        end = self.exits.get(timeout=30)
        assert end["pid"] == pid
        return end, (self.folder / "out").read_text(), (self.folder / "err").read_text()


@pytest.fixture
def keeper(tmp_path: Path) -> Iterator[ZygoteKeeper]:
    kept = ZygoteKeeper(tmp_path / "z", (), environment())
    yield kept
    kept.close()


@pytest.fixture
def starter(keeper: ZygoteKeeper, tmp_path: Path) -> Iterator[Starter]:
    made = Starter(keeper.path, tmp_path)
    yield made
    made.forks.close()


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


def test_a_script_holds_nothing_of_the_zygote(starter: Starter) -> None:
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
    assert "zygote" not in err and "runpy" not in err
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


def test_scripts_survive_the_zygote_and_a_new_one_serves(keeper: ZygoteKeeper, starter: Starter) -> None:
    pid = starter.start("import time; time.sleep(600)")
    keeper.process.kill()
    keeper.process.wait(10)
    assert alive(pid)
    until(keeper.tend)
    end, out, _ = starter.run("print('again')")
    assert (end["status"], out) == (0, "again\n")
    os.kill(pid, signal.SIGKILL)


def test_an_owner_that_is_gone_ends_it_with_all_children(keeper: ZygoteKeeper, starter: Starter) -> None:
    pid = starter.start("import time; time.sleep(600)")
    keeper.close()
    assert keeper.process.returncode == 0
    until(lambda: not alive(pid))


def test_nonsense_on_its_socket_harms_nobody(keeper: ZygoteKeeper, starter: Starter) -> None:
    starter.run("pass")
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
        sock.connect(str(keeper.path))
        for packet in (b"not json", b"{}", b'{"op": "start", "id": 1}', b"[]"):
            sock.send(packet)
        until(lambda: b"failed" in sock.recv(1 << 16))
    end, _, _ = starter.run("pass")
    assert end["status"] == 0


@pytest.mark.slow
def test_a_store_serves_and_outlives_who_asked(keeper: ZygoteKeeper, tmp_path: Path) -> None:
    from datetime import timedelta

    from torch.distributed import TCPStore

    asker = Starter(keeper.path, tmp_path)
    until(keeper.path.exists)
    address, pid = asker.forks.store("127.0.0.1")
    asker.forks.close()
    host, _, port = address.rpartition(":")
    store = TCPStore(host, int(port), is_master=False, wait_for_workers=False, timeout=timedelta(seconds=30))
    store.set("a", "1")
    assert store.get("a") == b"1"
    assert alive(pid)
