"""How the daemon begins and ends: crashes, sockets that are left over, two at once, HTTP with a token."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from agents.sandbox.daemon import fakehost
from agents.sandbox.daemon.daemons import ended, pid_of
from support.preloaded import SANDBOX, run
from support.waiting import gone, until
from windtunnel.agents.sandbox import daemon as launch
from windtunnel.agents.sandbox.client import connect
from windtunnel.agents.sandbox.errors import SandboxError
from windtunnel.agents.sandbox.model import SandboxSpec
from windtunnel.base.errors import UserError

FAKE = (sys.executable, fakehost.__file__)


def test_a_killed_daemon_is_followed_by_one_that_has_its_sandboxes(daemon_home: Path) -> None:
    with fakehost.daemon(daemon_home) as first, connect(daemon_home, start=False) as client:
        client.create(SandboxSpec("a")).run("echo kept > file")
        begun = threading.Event()
        with ThreadPoolExecutor(1) as pool:
            cut = pool.submit(client.get("a").run, "echo x; exec sleep 600", on_output=lambda *_: begun.set())
            assert begun.wait(60)
            first.kill()
            first.wait()
            with pytest.raises(SandboxError):
                cut.result(60)
    assert (daemon_home / "daemon.sock").exists()  # nobody could tidy up
    with fakehost.daemon(daemon_home), connect(daemon_home, start=False) as client:
        assert [box.name for box in client.boxes()] == ["a"]
        assert client.get("a").get("/file") == b"kept\n"


def test_a_client_outlives_its_daemon(daemon_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "COMMAND", FAKE)
    with ended(daemon_home), connect(daemon_home) as client:
        client.create(SandboxSpec("a"))
        pid = pid_of(daemon_home)
        os.kill(pid, signal.SIGKILL)
        until(lambda: gone(pid))
        box = client.get("a")
        assert pid_of(daemon_home) != pid
        assert box.run("echo hi").stdout == b"hi\n"


def test_only_one_daemon_for_a_home(daemon_home: Path) -> None:
    with fakehost.daemon(daemon_home) as first:
        second = run([FAKE[1], "--home", daemon_home], modules=SANDBOX)
        assert second.returncode == 2
        assert f"process {first.pid}".encode() in second.stderr
        assert second.stderr.count(b"\n") == 1
        with connect(daemon_home, start=False) as client:
            assert client.boxes() == [] and pid_of(daemon_home) == first.pid


def test_what_is_left_of_a_socket_is_replaced_and_a_live_one_is_not(daemon_home: Path) -> None:
    path = daemon_home / "daemon.sock"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    with fakehost.daemon(daemon_home) as process:
        assert path.stat().st_mode & 0o777 == 0o600
        with connect(daemon_home, start=False) as client:
            assert client.boxes() == [] and pid_of(daemon_home) == process.pid


def test_a_daemon_that_is_told_to_end_finishes_commands_and_leaves_no_socket(daemon_home: Path) -> None:
    with fakehost.daemon(daemon_home) as process:
        with connect(daemon_home, start=False) as client, ThreadPoolExecutor(1) as pool:
            box = client.create(SandboxSpec("a"))
            begun = threading.Event()
            running = pool.submit(
                box.run, "echo begun; sleep 0.5; echo done", on_output=lambda *_: begun.set()
            )
            assert begun.wait(60)
            process.send_signal(signal.SIGTERM)
            assert running.result(60).stdout == b"begun\ndone\n"
        assert process.wait(60) == 0
    assert not (daemon_home / "daemon.sock").exists()


def test_an_unused_daemon_ends_and_one_with_a_sandbox_stays(daemon_home: Path) -> None:
    fakehost.FakeHost(daemon_home).create(SandboxSpec("a"))
    with fakehost.daemon(daemon_home, "--idle", "0.2") as process:
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.7)
        with connect(daemon_home, start=False) as client:
            client.remove("a")
            assert process.wait(60) == 0


def test_a_daemon_that_cannot_start_says_why(daemon_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for code, kind, words in (
        ("print('no luck'); raise SystemExit(3)", SandboxError, r"status 3: no luck; see .*daemon\.log"),
        ("print('windtunnel: sandbox: needs root'); raise SystemExit(2)", UserError, "^sandbox: needs root$"),
        ("import time; time.sleep(600)", SandboxError, "did not answer within"),
    ):
        monkeypatch.setattr(launch, "COMMAND", (sys.executable, "-c", code))
        monkeypatch.setattr(launch, "READY_SECONDS", 0.3 if "sleep" in code else 60.0)
        with pytest.raises(kind, match=words):
            launch.ensure(daemon_home)
    (daemon_home / "file").touch()
    with pytest.raises(UserError, match="cannot be used"):
        launch.ensure(daemon_home / "file" / "home")


def test_a_daemon_that_is_not_there_is_told(daemon_home: Path) -> None:
    with connect(daemon_home, start=False) as client, pytest.raises(UserError, match="no daemon of home"):
        client.boxes()
