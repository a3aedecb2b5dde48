"""How the daemon begins and ends: crashes, sockets that are left over, two at once, HTTP with a token."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

import fakehost
import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.preloaded import SANDBOX, Process, run
from support.waiting import gone, until
from windtunnel.agents.sandbox.client import connect, launch
from windtunnel.agents.sandbox.daemon.server import held, is_loopback, listening, named_here
from windtunnel.agents.sandbox.daemon.server import run as serve_home
from windtunnel.agents.sandbox.errors import SandboxError
from windtunnel.agents.sandbox.model import SandboxSpec
from windtunnel.base.errors import UserError
from windtunnel.linux.processes import command_line

FAKE = (sys.executable, fakehost.__file__)
TOKEN = "t0ken-of-the-test"


@contextmanager
def ended(home: Path) -> Iterator[None]:
    """End the daemons that are started for ``home`` in the background."""
    (home / "starts").touch()
    try:
        yield
    finally:
        for pid in (home / "starts").read_text().split():
            if FAKE[1] in command_line(int(pid)):
                with suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGTERM)


def started(process: Process, lines: int = 1) -> list[str]:
    assert process.stdout is not None
    return [process.stdout.readline().strip() for _ in range(lines)]


def test_a_killed_daemon_is_followed_by_one_that_has_its_sandboxes(daemon_home: Path) -> None:
    with fakehost.daemon(daemon_home) as first:
        started(first)
        with connect(daemon_home, start=False) as client:
            client.create(SandboxSpec("a")).run("echo kept > file")
            begun = threading.Event()
            with ThreadPoolExecutor(1) as pool:
                cut = pool.submit(
                    client.get("a").run, "echo x; exec sleep 600", on_output=lambda *_: begun.set()
                )
                assert begun.wait(60)
                first.kill()
                first.wait()
                with pytest.raises(SandboxError):
                    cut.result(60)
    assert (daemon_home / "daemon.sock").exists()  # nobody could tidy up
    with fakehost.daemon(daemon_home) as second:
        started(second)
        with connect(daemon_home, start=False) as client:
            assert [one.name for one in client.boxes()] == ["a"]
            assert client.get("a").get("/file") == b"kept\n"


def test_a_client_outlives_its_daemon(daemon_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "COMMAND", FAKE)
    with ended(daemon_home), connect(daemon_home) as client:
        client.create(SandboxSpec("a"))
        pid = client.health().pid
        os.kill(pid, signal.SIGKILL)
        until(lambda: gone(pid))
        box = client.get("a")
        assert client.health().pid != pid
        assert box.run("echo hi").stdout == b"hi\n"


def test_only_one_daemon_for_a_home(daemon_home: Path) -> None:
    with fakehost.daemon(daemon_home) as first:
        started(first)
        second = run([FAKE[1], "--home", daemon_home], modules=SANDBOX)
        assert second.returncode == 2
        assert f"process {first.pid}".encode() in second.stderr
        assert second.stderr.count(b"\n") == 1
        with connect(daemon_home, start=False) as client:
            assert client.health().pid == first.pid


def test_what_is_left_of_a_socket_is_replaced_and_a_live_one_is_not(daemon_home: Path) -> None:
    path = daemon_home / "daemon.sock"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    with fakehost.daemon(daemon_home) as process:
        started(process)
        assert path.stat().st_mode & 0o777 == 0o600
        with pytest.raises(UserError, match="answers on"), listening(daemon_home):
            pass
        with connect(daemon_home, start=False) as client:
            assert client.health().pid == process.pid


def test_a_daemon_that_is_told_to_end_finishes_commands_and_leaves_no_socket(daemon_home: Path) -> None:
    with fakehost.daemon(daemon_home) as process:
        started(process)
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
        started(process)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.7)
        with connect(daemon_home, start=False) as client:
            client.remove("a")
            assert process.wait(60) == 0


def test_many_that_start_a_daemon_at_once_start_one(daemon_home: Path) -> None:
    code = (
        "import sys\n"
        "from pathlib import Path\n"
        "from windtunnel.agents.sandbox.client import connect, launch\n"
        f"launch.COMMAND = {FAKE!r}\n"
        "print(connect(sys.argv[1]).health().pid)\n"
    )
    asks = {"modules": SANDBOX, "stdout": subprocess.PIPE, "text": True}
    with ended(daemon_home):
        asking = [Process(["-c", code, daemon_home], **asks) for _ in range(4)]
        pids = {line for one in asking for line in started(one)}
        assert [one.wait(60) for one in asking] == [0] * 4
        assert len(pids) == 1
        assert (daemon_home / "starts").read_text().split() == sorted(pids)


def test_a_daemon_that_cannot_start_says_why(daemon_home: Path) -> None:
    def command(code: str) -> tuple[str, ...]:
        return sys.executable, "-c", code

    with pytest.raises(SandboxError, match=r"status 3: no luck; see .*daemon\.log"):
        launch.ensure(daemon_home, command=command("print('no luck'); raise SystemExit(3)"))
    with pytest.raises(UserError, match=r"^sandbox: needs root$"):
        launch.ensure(
            daemon_home, command=command("print('windtunnel: sandbox: needs root'); raise SystemExit(2)")
        )
    with pytest.raises(SandboxError, match="did not answer within"):
        launch.ensure(daemon_home, command=command("import time; time.sleep(600)"), seconds=0.3)
    (daemon_home / "file").touch()
    with pytest.raises(UserError, match="cannot be used"):
        launch.ensure(daemon_home / "file" / "home")


def test_the_home_is_free_when_its_daemon_has_gone(daemon_home: Path) -> None:
    with held(daemon_home):
        assert (daemon_home / "daemon.lock").read_text() == str(os.getpid())
    with held(daemon_home):
        pass


def test_a_home_whose_socket_path_is_too_long_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="too long"):
        connect(tmp_path / ("x" * 120))


@pytest.fixture
def served(daemon_home: Path) -> Iterator[str]:
    """The URL of a daemon that serves HTTP too."""
    with fakehost.daemon(daemon_home, "--http", "0", "--token", TOKEN) as process:
        yield started(process, 2)[1]


def test_http_needs_the_token(served: str) -> None:
    with connect(served, TOKEN) as client:
        assert client.create(SandboxSpec("a")).run("echo hi").stdout == b"hi\n"
    for wrong in ("nope", TOKEN + "x", TOKEN[:-1]):
        with pytest.raises(UserError, match="token is missing or wrong"), connect(served, wrong) as client:
            client.boxes()
    for headers in ({}, {"Authorization": TOKEN}, {"Authorization": f"Basic {TOKEN}"}):
        answer = httpx.get(f"{served}/v1/boxes", headers=headers, trust_env=False)
        assert answer.status_code == 401
        assert answer.json()["kind"] == "denied"
    assert httpx.get(f"{served}/openapi.json", trust_env=False).status_code == 200


def test_http_under_a_foreign_name_is_refused(served: str) -> None:
    headers = {"Authorization": f"Bearer {TOKEN}", "Host": "evil.example"}
    for path in ("/v1/boxes", "/openapi.json"):
        answer = httpx.get(served + path, headers=headers, trust_env=False)
        assert answer.status_code == 403
        assert "evil.example" in answer.json()["error"]
    headers["Host"] = "localhost:1"
    assert httpx.get(f"{served}/v1/boxes", headers=headers, trust_env=False).status_code == 200


def test_http_without_a_token_or_beyond_this_machine_is_refused(daemon_home: Path) -> None:
    path = daemon_home / "daemon.sock"
    serve = partial(serve_home, daemon_home, open_host=fakehost.opened)
    with pytest.raises(UserError, match="needs a token"):
        serve(http=("127.0.0.1", 0))
    with pytest.raises(UserError, match="other machines"):
        serve(http=("0.0.0.0", 0), token=TOKEN)
    with pytest.raises(UserError, match="cannot listen"):
        serve(http=("203.0.113.7", 1), token=TOKEN, allow_remote=True)
    with pytest.raises(UserError, match="scheme"):
        connect("ftp://x", TOKEN)
    assert not path.exists()


def test_a_daemon_that_is_not_there_is_told(daemon_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with connect(daemon_home, start=False) as client, pytest.raises(UserError, match="no daemon of home"):
        client.boxes()
    monkeypatch.delenv("WINDTUNNEL_SANDBOX_TOKEN", raising=False)
    with pytest.raises(UserError, match="needs a token"):
        connect("http://127.0.0.1:1")


@given(st.text("abcdefghijklmnopqrstuvwxyz0123456789-.", min_size=1, max_size=30), st.integers(1, 65535))
def test_names_that_are_not_this_machine_are_known(name: str, port: int) -> None:
    numeric = all(part.isdecimal() for part in name.strip(".").split("."))
    if name.rstrip(".") != "localhost" and not numeric:
        assert not named_here(f"{name}:{port}", "127.0.0.1")
        assert not is_loopback(name)
    assert named_here(f"localhost:{port}", "127.0.0.1")
    assert named_here(f"127.0.0.1:{port}", "127.0.0.1")
    assert named_here(f"[::1]:{port}", "::1")
