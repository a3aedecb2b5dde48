"""One connection, many calls: what travels, what fails, who is let in."""

from __future__ import annotations

import asyncio
import errno
import io
import os
import socket
import threading
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, ClassVar, Protocol

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from windtunnel.base import calls, rpc
from windtunnel.base.errors import UserError, WindtunnelError

SECRET = b"s" * 32


@dataclass(frozen=True)
class Point:
    x: float
    names: tuple[str, ...] = ()


class Full(WindtunnelError):
    """One that both sides know."""


class Calls(Protocol):
    async def echo(self, point: Point | None, data: bytes) -> Point | None: ...
    async def reverse(self, data: bytes) -> bytes: ...
    async def fail(self, kind: str) -> None: ...
    async def wait(self) -> int: ...
    async def release(self) -> None: ...


class Target:
    def __init__(self) -> None:
        self.gate = asyncio.Event()
        self.waiting = asyncio.Event()
        self.cancelled = asyncio.Event()
        self.received = b""

    async def echo(self, point: Point | None, data: bytes) -> Point | None:
        self.received = data
        return point

    async def reverse(self, data: bytes) -> bytes:
        return data[::-1]

    async def fail(self, kind: str) -> None:
        if kind == "os":
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
        raise {"user": UserError, "full": Full, "other": ZeroDivisionError}[kind]("why")

    async def wait(self) -> int:
        self.waiting.set()
        try:
            await self.gate.wait()
        except asyncio.CancelledError:
            self.cancelled.set()
            raise
        return 7

    async def release(self) -> None:
        self.gate.set()

    async def hidden(self) -> None:
        raise AssertionError("it is no method of the protocol")


def run(
    body: Callable[[Target, Calls, rpc.Server], Coroutine[Any, Any, None]], address: str, **options: Any
) -> None:
    async def main() -> None:
        target = Target()
        server = await rpc.serve(rpc.Service.of(Calls, target, (Full,)), address, **options)
        remote = await rpc.connect(Calls, server.address, errors=(Full,), **options)
        try:
            await body(target, remote, server)
        finally:
            await rpc.close(remote)
            await server.close()

    asyncio.run(asyncio.wait_for(main(), 60))


@pytest.fixture(params=["unix", "tcp"])
def options(request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, Any]:
    if request.param == "unix":
        return {"address": f"unix:{tmp_path}/socket"}
    return {"address": "tcp:127.0.0.1:0", "secret": SECRET}


def test_values_and_bytes_arrive_as_they_were(options: dict[str, Any]) -> None:
    async def body(target: Target, remote: Calls, server: rpc.Server) -> None:
        point = Point(1.5, ("a", "b"))
        assert await remote.echo(point, data=b"\0\xff" * 100_000) == point
        assert target.received == b"\0\xff" * 100_000
        assert await remote.echo(None, b"") is None
        assert await remote.reverse(b"abc") == b"cba"

    run(body, **options)


def test_a_call_that_waits_does_not_stop_the_others(options: dict[str, Any]) -> None:
    async def body(target: Target, remote: Calls, server: rpc.Server) -> None:
        waiting = asyncio.create_task(remote.wait())
        await target.waiting.wait()
        assert await remote.reverse(b"ab") == b"ba" and not waiting.done()
        await remote.release()
        assert await waiting == 7

    run(body, **options)


def test_who_gives_up_or_goes_ends_the_call_there(options: dict[str, Any]) -> None:
    async def body(target: Target, remote: Calls, server: rpc.Server) -> None:
        waiting = asyncio.create_task(remote.wait())
        await target.waiting.wait()
        waiting.cancel()
        await target.cancelled.wait()
        target.cancelled.clear()
        target.waiting.clear()
        given = {name: value for name, value in options.items() if name != "address"}
        other = await rpc.connect(Calls, server.address, **given)
        waiting = asyncio.create_task(other.wait())
        await target.waiting.wait()
        await rpc.close(other)
        await target.cancelled.wait()
        with pytest.raises(ConnectionError):
            await waiting

    run(body, **options)


def test_exceptions_arrive_as_what_they_were(options: dict[str, Any]) -> None:
    async def body(target: Target, remote: Calls, server: rpc.Server) -> None:
        kinds = {"os": FileNotFoundError, "user": UserError, "full": Full, "other": calls.RemoteError}
        for kind, expected in kinds.items():
            with pytest.raises(expected) as error:
                await remote.fail(kind)
            assert type(error.value) is expected
        with pytest.raises(AttributeError):
            await remote.hidden()  # type: ignore[attr-defined]
        assert await remote.reverse(b"ab") == b"ba"

    run(body, **options)


def test_a_server_that_goes_fails_the_calls(options: dict[str, Any]) -> None:
    async def body(target: Target, remote: Calls, server: rpc.Server) -> None:
        waiting = asyncio.create_task(remote.wait())
        await target.waiting.wait()
        await server.close()
        with pytest.raises(ConnectionError):
            await waiting
        with pytest.raises(ConnectionError):
            await remote.reverse(b"")

    run(body, **options)


def test_who_does_not_know_the_secret_calls_nothing() -> None:
    async def body(target: Target, remote: Calls, server: rpc.Server) -> None:
        with pytest.raises(PermissionError):
            await rpc.connect(Calls, server.address, secret=b"x" * 32)
        reader, writer = await asyncio.open_connection("127.0.0.1", int(server.address.rpartition(":")[2]))
        writer.write(b"\0\0\0\2\0\0\0\0{}" * 64)  # one that proves nothing
        assert len(await reader.read()) == 32  # the nonce, and the end
        writer.close()
        assert await remote.reverse(b"ab") == b"ba"

    run(body, "tcp:127.0.0.1:0", secret=SECRET)


def test_a_server_of_another_secret_is_not_believed() -> None:
    async def body(target: Target, remote: Calls, server: rpc.Server) -> None:
        async def reflect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            while data := await reader.read(1 << 16):
                writer.write(data)  # the client's own nonce and proof back
            writer.close()

        liar = await asyncio.start_server(reflect, "127.0.0.1", 0)
        with pytest.raises(PermissionError):
            await rpc.connect(Calls, f"tcp:127.0.0.1:{liar.sockets[0].getsockname()[1]}", secret=SECRET)
        liar.close()

    run(body, "tcp:127.0.0.1:0", secret=SECRET)


@pytest.mark.parametrize("address", ["nowhere", "unix:", "tcp:host", "tcp:127.0.0.1:0", "tcp:127.0.0.1:x"])
def test_addresses_that_are_none(address: str) -> None:
    with pytest.raises(UserError, match="accepted"):
        asyncio.run(rpc.serve(rpc.Service.of(Calls, Target), address))


def test_a_socket_in_use_is_refused_and_a_stale_one_replaced(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(str(path))

    async def body(target: Target, remote: Calls, server: rpc.Server) -> None:
        assert path.stat().st_mode & 0o777 == 0o600
        with pytest.raises(UserError, match="another server answers"):
            await rpc.serve(rpc.Service.of(Calls, target), server.address)
        assert await remote.reverse(b"ab") == b"ba"

    run(body, f"unix:{path}")


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary(max_size=200))
def test_bytes_that_are_no_message_end_only_their_connection(tmp_path: Path, data: bytes) -> None:
    async def body(target: Target, remote: Calls, server: rpc.Server) -> None:
        reader, writer = await asyncio.open_unix_connection(server.address.partition(":")[2])
        writer.write(data)
        writer.write_eof()
        await reader.read()
        writer.close()
        assert await remote.reverse(b"ab") == b"ba"

    run(body, f"unix:{tmp_path}/socket")


class Worker(Protocol):
    """Plain functions, which the server calls in threads."""

    @property
    def size(self) -> int: ...
    def fill(self, source: bytes | IO[bytes], *, mode: int = 7) -> int: ...
    def drain(self, out: IO[bytes]) -> None: ...
    def work(
        self, text: str | Sequence[str], *, cancel: threading.Event | None = None,
        on_output: Callable[[str, bytes], None] | None = None,
    ) -> Point: ...  # fmt: skip
    def fail(self) -> None: ...
    def spawn(self, count: int) -> Sequence[Worker]: ...
    @calls.local
    def end(self) -> None: ...


class Less(WindtunnelError):
    travels: ClassVar[dict[str, Any]] = {"points": tuple[Point, ...]}

    def __init__(self, message: str, points: tuple[Point, ...] = ()) -> None:
        super().__init__(message)
        self.points = points


class Working:
    def __init__(self, name: str = "first") -> None:
        self.name, self.data, self.begun, self.cancelled = name, b"", threading.Event(), threading.Event()

    @property
    def size(self) -> int:
        return len(self.data)

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
                on_output("word", word.encode())
        return Point(float(cancel is not None), (str(text),))

    def fail(self) -> None:
        raise Less("why", (Point(1.0),))

    def spawn(self, count: int) -> list[Working]:
        return [Working(f"{self.name}-{number}") for number in range(count)]

    def end(self) -> None:
        raise AssertionError("it is local")


class Elsewhere:
    """One of them at the other side."""

    def __init__(self, link: calls.Link, name: str) -> None:
        self._link, self._on, self.name = link, name, name


@pytest.fixture(params=["unix", "tcp"])
def workers(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Any, Working, calls.Link]]:
    options: dict[str, Any] = {} if request.param == "unix" else {"secret": SECRET}
    first, known = Working(), {}
    known["first"] = first

    def refer(worker: Working) -> str:
        known[worker.name] = worker
        return worker.name

    service = rpc.Service((Worker,), lambda kind, name: known[name], refer, (Less,))
    with running(service, f"unix:{tmp_path}/w" if not options else "tcp:127.0.0.1:0", **options) as address:
        kind: Any = calls.forwards(Worker)(type("Other", (Elsewhere,), {}))
        objects = {Worker: lambda name: kind(link, name)}
        link = calls.Link(address, errors=(Less,), objects=objects, timeout=60, **options)
        yield kind(link, "first"), first, link
        link.close()


@contextmanager
def running(service: rpc.Service, address: str, **options: Any) -> Iterator[str]:
    """A server in a thread of its own."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    server = asyncio.run_coroutine_threadsafe(rpc.serve(service, address, **options), loop).result(30)
    try:
        yield server.address
    finally:
        asyncio.run_coroutine_threadsafe(server.close(), loop).result(30)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def test_files_travel_in_pieces_both_ways(workers: tuple[Any, Working, calls.Link]) -> None:
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
    workers: tuple[Any, Working, calls.Link],
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


def test_a_caller_who_goes_away_cancels(workers: tuple[Any, Working, calls.Link]) -> None:
    remote, target, link = workers
    waiting = threading.Thread(
        target=lambda: suppress_all(lambda: remote.work("wait", cancel=threading.Event()))
    )
    waiting.start()
    assert target.begun.wait(60)
    link.hang_up()
    assert target.cancelled.wait(60)
    waiting.join(60)
    assert not waiting.is_alive()


def suppress_all(work: Callable[[], Any]) -> None:
    with suppress(ConnectionError):
        work()


def test_what_an_exception_carries_and_what_stays_there(workers: tuple[Any, Working, calls.Link]) -> None:
    remote, _, _ = workers
    with pytest.raises(Less) as error:
        remote.fail()
    assert error.value.points == (Point(1.0),)
    assert [one.name for one in remote.spawn(2)] == ["first-0", "first-1"]
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
    service = rpc.Service((Worker,), lambda kind, name: Working())
    answer, _ = asyncio.run(service.perform({"do": do, "with": given}))
    assert answer["error"] == "UserError" and words in answer["text"]


def test_who_is_started_on_demand(tmp_path: Path) -> None:
    with ExitStack() as stack:
        service = rpc.Service((Worker,), lambda kind, name: Working())
        link = calls.Link(
            f"unix:{tmp_path}/w",
            start=lambda: stack.enter_context(running(service, f"unix:{tmp_path}/w")) and None,
        )
        assert link.call(Worker, "size", "") == 0
        link.close()
    with pytest.raises(ConnectionError):
        calls.Link(f"unix:{tmp_path}/w").call(Worker, "size", "")


def test_threads_share_a_client(tmp_path: Path) -> None:
    ready, stop = threading.Event(), threading.Event()
    loop = asyncio.new_event_loop()

    def serve() -> None:
        async def main() -> None:
            server = await rpc.serve(rpc.Service.of(Calls, Target()), f"unix:{tmp_path}/socket")
            ready.set()
            await asyncio.to_thread(stop.wait)
            await server.close()

        loop.run_until_complete(main())

    thread = threading.Thread(target=serve)
    thread.start()
    assert ready.wait(30)
    remote = calls.Blocking(Calls, f"unix:{tmp_path}/socket", timeout=30)
    results: list[bytes] = []
    threads = [
        threading.Thread(target=lambda n=n: results.append(remote.reverse(bytes([n, 0])))) for n in range(8)
    ]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert sorted(results) == [bytes([0, n]) for n in range(8)]
    stop.set()
    thread.join()
    with pytest.raises(ConnectionError):
        remote.reverse(b"")
    remote.close()


def test_a_call_that_nobody_read_is_made_again(tmp_path: Path) -> None:
    dying = socket.socket(socket.AF_UNIX)
    dying.bind(f"{tmp_path}/w")
    dying.listen()
    link = calls.Link(f"unix:{tmp_path}/w", start=lambda: None)
    results: list[int] = []
    asking = threading.Thread(target=lambda: results.append(link.call(Worker, "size", "")))
    asking.start()
    connection, _ = dying.accept()
    connection.recv(1, socket.MSG_PEEK)  # it has come, and is not read
    Path(f"{tmp_path}/w").unlink()
    with running(rpc.Service((Worker,), lambda kind, name: Working()), f"unix:{tmp_path}/w"):
        dying.close()
        connection.close()
        asking.join(60)
        assert results == [0]
        link.close()
