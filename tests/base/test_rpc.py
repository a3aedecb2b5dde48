"""Calls over a connection: what travels, what fails, who is let in."""

from __future__ import annotations

import errno
import fcntl
import io
import os
import resource
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any, ClassVar, Protocol

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from support.certificates import Authority
from windtunnel.base import calls, rpc, wire
from windtunnel.base import remote as remotes
from windtunnel.base.errors import UserError, WindtunnelError
from windtunnel.base.keys import Keys
from windtunnel.base.tls import Certificates

KEYS = Keys(b"s" * 32)


@dataclass(frozen=True)
class Point:
    x: float
    names: tuple[str, ...] = ()


class Less(WindtunnelError):
    """One that both sides know."""

    travels: ClassVar[dict[str, Any]] = {"points": tuple[Point, ...]}

    def __init__(self, message: str, points: tuple[Point, ...] = ()) -> None:
        super().__init__(message)
        self.points = points


class Worker(Protocol):
    @property
    def size(self) -> int: ...
    def echo(self, point: Point | None, data: bytes) -> Point | None: ...
    def reverse(self, data: bytes) -> bytes: ...
    def fill(self, source: bytes | IO[bytes], *, mode: int = 7) -> int: ...
    def drain(self, out: IO[bytes]) -> None: ...
    def work(
        self, text: str | Sequence[str], *, cancel: threading.Event | None = None,
        on_output: Callable[[str, bytes], None] | None = None,
    ) -> Point: ...  # fmt: skip
    def fail(self, kind: str) -> None: ...
    def spawn(self, count: int) -> Sequence[Worker]: ...
    @calls.local
    def end(self) -> None: ...


def passed(on_output: Callable[[str, bytes], None], word: str) -> None:
    while True:  # the word before may not be under way yet
        with suppress(BlockingIOError):
            return on_output("word", word.encode())


class Working:
    def __init__(self, name: str = "first") -> None:
        self.name, self.data, self.begun, self.cancelled = name, b"", threading.Event(), threading.Event()

    @property
    def size(self) -> int:
        return len(self.data)

    def echo(self, point: Point | None, data: bytes) -> Point | None:
        self.data = data
        return point

    def reverse(self, data: bytes) -> bytes:
        return data[::-1]

    def fill(self, source: Any, *, mode: int = 7) -> int:
        self.data = source.read()
        return mode

    def drain(self, out: IO[bytes]) -> None:
        for at in range(0, len(self.data), 100_000):
            out.write(self.data[at : at + 100_000])

    def work(self, text: Any, *, cancel: Any = None, on_output: Any = None) -> Point:
        if text == "wait":
            self.begun.set()
            cancel.wait()
            self.cancelled.set()
        for word in text.split() if isinstance(text, str) else text:
            if on_output is not None:
                passed(on_output, word)
        return Point(float(cancel is not None), (str(text),))

    def fail(self, kind: str) -> None:
        if kind == "os":
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
        if kind == "less":
            raise Less("why", (Point(1.0),))
        raise {"user": UserError, "other": ZeroDivisionError}[kind]("why")

    def spawn(self, count: int) -> list[Working]:
        return [Working(f"{self.name}-{number}") for number in range(count)]

    def end(self) -> None:
        raise AssertionError("it is local")


class Elsewhere:
    """One of them at the other side."""

    def __init__(self, link: remotes.RemoteLink, name: str) -> None:
        self._link, self._on, self.name = link, name, name


@contextmanager
def running(service: rpc.RpcService, address: str, keys: Keys | None = None) -> Iterator[rpc.RpcServer]:
    server = rpc.RpcServer(service, address, keys)
    try:
        yield server
    finally:
        server.close()


@pytest.fixture(params=["unix", "tcp", "tls"])
def workers(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Any, Working, rpc.RpcServer]]:
    tls = (
        Certificates.load(Authority(tmp_path / "ca").issue("host").paths) if request.param == "tls" else None
    )
    keys = None if request.param == "unix" else replace(KEYS, tls=tls)
    first, known = Working(), {}
    known["first"] = first

    def refer(worker: Working) -> str:
        known[worker.name] = worker
        return worker.name

    service = rpc.RpcService((Worker,), lambda kind, name: known[name], refer, (Less,))
    with running(service, f"unix:{tmp_path}/w" if keys is None else "tcp:127.0.0.1:0", keys) as server:
        kind: Any = remotes.forwards(Worker)(type("Other", (Elsewhere,), {}))
        objects = {Worker: lambda name: kind(link, name)}
        link = remotes.RemoteLink(server.address, errors=(Less,), objects=objects, timeout=60, keys=keys)
        yield kind(link, "first"), first, server
        link.close()


def test_values_and_bytes_arrive_as_they_were(workers: tuple[Any, Working, rpc.RpcServer]) -> None:
    remote, target, _ = workers
    point = Point(1.5, ("a", "b"))
    assert remote.echo(point, data=b"\0\xff" * 100_000) == point
    assert target.data == b"\0\xff" * 100_000
    assert remote.echo(None, b"") is None
    assert remote.reverse(b"abc") == b"cba"


def test_exceptions_arrive_as_what_they_were(workers: tuple[Any, Working, rpc.RpcServer]) -> None:
    remote, _, _ = workers
    kinds = {"os": FileNotFoundError, "user": UserError, "less": Less, "other": calls.RemoteError}
    for kind, expected in kinds.items():
        with pytest.raises(expected) as error:
            remote.fail(kind)
        assert type(error.value) is expected
    assert remote.reverse(b"ab") == b"ba"


def test_a_server_that_goes_fails_the_calls_and_cancels(workers: tuple[Any, Working, rpc.RpcServer]) -> None:
    remote, target, server = workers
    failed: list[Exception] = []

    def wait() -> None:
        try:
            remote.work("wait", cancel=threading.Event())
        except ConnectionError as error:
            failed.append(error)

    waiting = threading.Thread(target=wait)
    waiting.start()
    assert target.begun.wait(60)
    server.close()
    waiting.join(60)
    assert failed and target.cancelled.wait(60)
    with pytest.raises(ConnectionError):
        remote.reverse(b"")


def test_who_does_not_know_the_secret_calls_nothing() -> None:
    with running(rpc.RpcService.of(Worker, Working()), "tcp:127.0.0.1:0", KEYS) as server:
        with pytest.raises(PermissionError):
            remotes.Blocking(Worker, server.address, keys=Keys(b"x" * 32))
        with socket.create_connection(("127.0.0.1", int(server.address.rpartition(":")[2]))) as stranger:
            stranger.sendall(b"\0\0\0\2\0\0\0\0{}" * 64)
            with suppress(ConnectionResetError):
                assert stranger.recv(100) == b""
        assert remotes.Blocking(Worker, server.address, keys=KEYS).reverse(b"ab") == b"ba"


@pytest.mark.parametrize("address", ["nowhere", "unix:", "tcp:host", "tcp:127.0.0.1:0", "tcp:127.0.0.1:x"])
def test_addresses_that_are_none(address: str) -> None:
    with pytest.raises(UserError, match="accepted"):
        rpc.RpcServer(rpc.RpcService.of(Worker, Working()), address)


def test_a_socket_in_use_is_refused_and_a_stale_one_replaced(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(str(path))
    service = rpc.RpcService.of(Worker, Working())
    with running(service, f"unix:{path}"):
        assert path.stat().st_mode & 0o777 == 0o600
        with pytest.raises(UserError, match="another server answers"):
            rpc.RpcServer(service, f"unix:{path}")
        assert remotes.Blocking(Worker, f"unix:{path}").reverse(b"ab") == b"ba"


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary(max_size=200))
def test_bytes_that_are_no_message_end_only_their_connection(tmp_path: Path, data: bytes) -> None:
    with running(rpc.RpcService.of(Worker, Working()), f"unix:{tmp_path}/socket") as server:
        with socket.socket(socket.AF_UNIX) as stranger:
            stranger.connect(f"{tmp_path}/socket")
            stranger.sendall(data)
            stranger.shutdown(socket.SHUT_WR)
            with suppress(ConnectionResetError):
                stranger.recv(100)
        assert remotes.Blocking(Worker, server.address).reverse(b"ab") == b"ba"


def test_files_travel_in_pieces_both_ways(workers: tuple[Any, Working, rpc.RpcServer]) -> None:
    remote, target, _ = workers
    data = os.urandom(3_000_001)
    assert remote.fill(io.BytesIO(data), mode=4) == 4 and target.data == data and remote.size == len(data)
    out = io.BytesIO()
    remote.drain(out)
    assert out.getvalue() == data
    assert remote.fill(b"") == 7 and target.data == b""

    class Broken(io.BytesIO):
        def read(self, size: int | None = -1) -> bytes:
            raise OSError(errno.EIO, "the caller's disk")

    with pytest.raises(OSError, match="caller's disk"):
        remote.fill(Broken())
    assert remote.size == 0


def test_output_comes_while_a_function_runs_and_it_can_be_cancelled(
    workers: tuple[Any, Working, rpc.RpcServer],
) -> None:
    remote, target, _ = workers
    pieces: list[tuple[str, bytes]] = []
    done = remote.work("a b", on_output=lambda *piece: pieces.append(piece))
    assert (done, pieces) == (Point(0.0, ("a b",)), [("word", b"a"), ("word", b"b")])
    assert remote.work(["c", "d"]).names == ("['c', 'd']",)
    cancel = threading.Event()
    threading.Thread(target=lambda: target.begun.wait(60) and cancel.set()).start()
    assert remote.work("wait", cancel=cancel) == Point(1.0, ("wait",))
    with pytest.raises(ZeroDivisionError):
        remote.work("a b", on_output=lambda *piece: 1 // 0)
    assert remote.size == 0


def test_what_an_exception_carries_and_what_stays_there(workers: tuple[Any, Working, rpc.RpcServer]) -> None:
    remote, _, _ = workers
    with pytest.raises(Less) as error:
        remote.fail("less")
    assert error.value.points == (Point(1.0),)
    assert [worker.name for worker in remote.spawn(2)] == ["first-0", "first-1"]
    assert remote.spawn(1)[0].fill(b"x") == 7
    assert not hasattr(type(remote), "end")


@pytest.mark.parametrize(
    ("do", "given", "words"),
    [
        ("Worker.end", {}, "unknown"),
        ("Worker.__init__", {}, "unknown"),
        ("Working.fail", {}, "protocol"),
        ("Worker.spawn", {"count": "2"}, "not accepted"),
        ("Worker.spawn", {"counts": 2}, "unknown"),
        ("Worker.spawn", {}, "count"),
    ],
)
def test_only_what_is_declared_is_called(do: str, given: dict[str, Any], words: str) -> None:
    service = rpc.RpcService((Worker,), lambda kind, name: Working())
    answer, _ = service.perform({"do": do, "with": given})
    assert answer["error"] == "UserError" and words in answer["text"]


def test_who_is_started_on_demand(tmp_path: Path) -> None:
    with ExitStack() as stack:
        service = rpc.RpcService((Worker,), lambda kind, name: Working())
        link = remotes.RemoteLink(
            f"unix:{tmp_path}/w",
            start=lambda: stack.enter_context(running(service, f"unix:{tmp_path}/w")) and None,
        )
        assert link.call(Worker, "size", "") == 0
        link.close()
    with pytest.raises(ConnectionError):
        remotes.RemoteLink(f"unix:{tmp_path}/w").call(Worker, "size", "")


def test_threads_share_a_client(workers: tuple[Any, Working, rpc.RpcServer]) -> None:
    remote, _, _ = workers
    results: list[bytes] = []
    threads = [
        threading.Thread(target=lambda n=n: results.append(remote.reverse(bytes([n, 0])))) for n in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(results) == [bytes([0, n]) for n in range(8)]


def test_a_call_that_nobody_read_is_made_again(tmp_path: Path) -> None:
    dying = socket.socket(socket.AF_UNIX)
    dying.bind(f"{tmp_path}/w")
    dying.listen()
    link = remotes.RemoteLink(f"unix:{tmp_path}/w", start=lambda: None)
    results: list[int] = []
    asking = threading.Thread(target=lambda: results.append(link.call(Worker, "size", "")))
    asking.start()
    connection, _ = dying.accept()
    connection.recv(1, socket.MSG_PEEK)  # it has come, and is not read
    Path(f"{tmp_path}/w").unlink()
    with running(rpc.RpcService((Worker,), lambda kind, name: Working()), f"unix:{tmp_path}/w"):
        dying.close()
        connection.close()
        asking.join(60)
        assert results == [0]
        link.close()


def test_a_peer_is_waited_for_whatever_the_number_of_its_descriptor() -> None:
    """As in a trainer that has opened a thousand files of samples."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard <= 1500:
        pytest.skip(f"this process may open {hard} files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 1501), hard))
    here, there = socket.socketpair()
    with here, there, socket.socket(fileno=fcntl.fcntl(here.fileno(), fcntl.F_DUPFD_CLOEXEC, 1500)) as high:
        assert not wire.wait(high, 0.0)
        there.send(b"!")
        assert wire.wait(high, 0.0)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
