"""A daemon that is killed is started again, with the sockets that it had; who waits there is answered."""

from __future__ import annotations

import fcntl
import os
import signal
import socket
import subprocess
import sys
import termios
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import fakehost
import pytest
from hurt import traces

from support.ports import free_port
from support.waiting import gone, until
from windtunnel.agents.sandbox.client import connect, launch
from windtunnel.agents.sandbox.errors import SandboxError
from windtunnel.agents.sandbox.kept import Kept
from windtunnel.agents.sandbox.model import SandboxSpec
from windtunnel.base.errors import UserError

FAKE = (sys.executable, fakehost.__file__)
SERVICE = Path(__file__).with_name("kept_service.py")
"""A daemon that keeps one listening socket and answers there; see there for what it does on words."""


def killed(pid: int) -> None:
    """Kill a process and wait until it is gone: a daemon that is just dying still takes what it is told."""
    os.kill(pid, signal.SIGKILL)
    until(lambda: gone(pid))


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()[1])


@pytest.fixture
def fake(daemon_home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A home whose daemon is the fake one; in the end nothing of it runs."""
    monkeypatch.setattr(launch, "COMMAND", FAKE)
    (daemon_home / "starts").touch()
    yield daemon_home
    if launch.answers(daemon_home):
        with connect(daemon_home, start=False) as client:
            client.down()
    until(lambda: not traces(daemon_home))


def test_a_killed_daemon_is_back_and_who_waited_is_answered(fake: Path) -> None:
    with connect(fake) as client, ThreadPoolExecutor(4) as pool:
        client.create(SandboxSpec("a")).run("echo kept > file")
        first = client.health().pid
        os.kill(first, signal.SIGSTOP)
        others = [connect(fake, start=False) for _ in range(4)]
        waiting = [pool.submit(lambda other=other: other.get("a").get("/file")) for other in others]
        killed(first)
        results = []
        for one in waiting:
            try:
                results.append(one.result(60))
            except SandboxError as error:  # it was sent to the old one already
                assert "the connection to the daemon" in str(error)
        assert set(results) <= {b"kept\n"}
        assert client.get("a").get("/file") == b"kept\n"
        second = client.health().pid
        assert second != first
        assert parent(second) != 1
        for other in others:
            other.close()
    assert f"the daemon (process {first}) was killed by signal 9" in (fake / "daemon.log").read_text()


def test_kill_both_and_the_next_command_starts_both(fake: Path) -> None:
    with connect(fake) as client:
        client.create(SandboxSpec("a"))
        daemon = client.health().pid
        for pid in (parent(daemon), daemon):
            os.kill(pid, signal.SIGKILL)
        until(lambda: not launch.answers(fake))
        assert [one.name for one in client.boxes()] == ["a"]
        assert client.health().pid != daemon


def test_what_no_daemon_has_read_is_asked_of_the_next(fake: Path) -> None:
    with connect(fake) as client, ThreadPoolExecutor(1) as pool:
        client.create(SandboxSpec("a"))
        daemon = client.health().pid
        os.kill(daemon, signal.SIGSTOP)
        (idle,) = client._link._http._idle
        waiting = pool.submit(client.boxes)
        until(lambda: fcntl.ioctl(idle.sock, termios.TIOCOUTQ, bytes(4)) != bytes(4))
        for pid in (parent(daemon), daemon):
            os.kill(pid, signal.SIGKILL)
        assert [one.name for one in waiting.result(60)] == ["a"]
        assert client.health().pid != daemon


def test_down_ends_both(fake: Path) -> None:
    with connect(fake) as client:
        watchdog = parent(client.health().pid)
        client.down()
    until(lambda: not Path(f"/proc/{watchdog}/cmdline").exists() or not traces(fake))
    assert not (fake / "daemon.sock").exists()


class Service:
    """`kept_service.py` under a watchdog, with a port that both share."""

    def __init__(self, home: Path, *words: str, patience: float = 60.0) -> None:
        self.home = home
        self.port = free_port()
        env = os.environ | {"WINDTUNNEL_SANDBOX_PATIENCE": str(patience)}
        command = [sys.executable, str(SERVICE), str(self.port), str(home), *words]
        self.process = subprocess.Popen(
            [*launch.WATCHDOG, str(home), *command], stderr=subprocess.PIPE, text=True, env=env
        )

    def ask(self, words: str) -> str:
        with socket.create_connection(("127.0.0.1", self.port), timeout=60) as plug:
            plug.sendall(words.encode() + b"\n")
            answer = b""
            while part := plug.recv(4096):
                answer += part
            return answer.decode()

    def pid(self) -> int:
        return int(self.ask("pid"))

    def said(self) -> str:
        assert self.process.stderr is not None
        return self.process.stderr.read()


@pytest.fixture
def service(daemon_home: Path) -> Iterator[Callable[..., Service]]:
    made: list[Service] = []

    def start(*words: str, **options: float) -> Service:
        made.append(Service(daemon_home, *words, **options))
        until(lambda: (daemon_home / "ready").exists() or made[-1].process.poll() is not None)
        return made[-1]

    yield start
    for one in made:
        one.process.terminate()
        one.process.wait(60)
        assert one.process.stderr is not None
        one.process.stderr.close()
    for pid in (daemon_home / "began").read_text().split():
        until(lambda pid=pid: gone(pid))  # type: ignore[misc]


def test_a_connection_in_the_gap_waits(service: Callable[..., Service], daemon_home: Path) -> None:
    running = service()
    first = running.pid()
    # the second one does not begin before it is told to: the gap is as long as the test wants
    (daemon_home / "hold").touch()
    killed(first)
    with ThreadPoolExecutor(2) as pool:
        asked = [pool.submit(running.pid) for _ in range(2)]
        until(lambda: len((daemon_home / "began").read_text().split()) == 2)
        assert not any(one.done() for one in asked)
        (daemon_home / "hold").unlink()
        second = {one.result(60) for one in asked}
    assert len(second) == 1 and first not in second


def test_who_has_waited_long_enough_is_told_503(service: Callable[..., Service], daemon_home: Path) -> None:
    running = service(patience=0.5)
    first = running.pid()
    (daemon_home / "hold").touch()
    killed(first)
    assert running.ask("pid").startswith("HTTP/1.1 503 ")
    (daemon_home / "hold").unlink()
    until(lambda: running.ask("pid").isdigit())


def test_a_daemon_that_dies_at_once_is_given_up(service: Callable[..., Service]) -> None:
    running = service("die", patience=0.2)
    assert running.process.wait(60) == 1
    said = running.said()
    assert said.count("was killed by signal 9; it is started again") == 4
    assert said.endswith("as 5 in a row did; it is given up\n")


def test_a_daemon_that_never_gets_ready_is_not_started_again(service: Callable[..., Service]) -> None:
    running = service("fail")
    assert running.process.wait(60) == 7
    assert running.said() == ""


def test_a_successor_fetches_what_an_ended_daemon_listened_on(
    service: Callable[..., Service], daemon_home: Path
) -> None:
    running = service()
    os.kill(running.pid(), signal.SIGTERM)
    until(lambda: (daemon_home / "held.sock").exists())
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(running.ask, "hello")
        kept = Kept(daemon_home)
        assert kept.names() == ["listen.1.a"]
        assert not kept.lasts
        with socket.socket(fileno=kept.take("listen.1.a")[0]) as listener:
            listener.settimeout(60)
            plug, _ = listener.accept()
            with plug:
                assert plug.recv(100) == b"hello\n"
                plug.sendall(b"from the successor")
        assert asked.result(60) == "from the successor"
    assert running.process.wait(60) == 0
    assert not (daemon_home / "held.sock").exists()


def test_nobody_else_is_believed(service: Callable[..., Service], daemon_home: Path) -> None:
    running = service()
    address = running.ask("address")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as stranger:
        stranger.connect("\0" + address)
        stranger.send(b"FDSTOREREMOVE=1\nFDNAME=listen.1.a")
    killed(running.pid())
    assert running.pid() > 0


def test_a_home_without_a_watchdog_keeps_nothing(daemon_home: Path) -> None:
    kept = Kept(daemon_home, supervised=True)
    assert not kept.lasts
    assert not kept.keep("a", 0)
    kept.drop("a")
    kept.settle()
    assert kept.names() == []


def test_wrong_input_is_told_once(daemon_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = "print('windtunnel: sandbox: needs root'); raise SystemExit(2)"
    with pytest.raises(UserError, match=r"^sandbox: needs root$"):
        launch.ensure(daemon_home, command=(sys.executable, "-c", code))
    assert (daemon_home / "daemon.log").read_text().count("needs root") == 1
