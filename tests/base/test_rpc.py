"""One connection, many calls: what travels, what fails, who is let in."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import threading
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from windtunnel.base import rpc
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
        server = await rpc.serve(Calls, target, address, errors=(Full,), **options)
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
        kinds = {"os": FileNotFoundError, "user": UserError, "full": Full, "other": rpc.RemoteError}
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
        asyncio.run(rpc.serve(Calls, Target, address))


def test_a_socket_in_use_is_refused_and_a_stale_one_replaced(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(str(path))

    async def body(target: Target, remote: Calls, server: rpc.Server) -> None:
        assert path.stat().st_mode & 0o777 == 0o600
        with pytest.raises(UserError, match="another server answers"):
            await rpc.serve(Calls, target, server.address)
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


def test_threads_share_one_connection(tmp_path: Path) -> None:
    ready, stop = threading.Event(), threading.Event()
    loop = asyncio.new_event_loop()

    def serve() -> None:
        async def main() -> None:
            server = await rpc.serve(Calls, Target(), f"unix:{tmp_path}/socket")
            ready.set()
            await asyncio.to_thread(stop.wait)
            await server.close()

        loop.run_until_complete(main())

    thread = threading.Thread(target=serve)
    thread.start()
    assert ready.wait(30)
    remote = rpc.Blocking(Calls, f"unix:{tmp_path}/socket", timeout=30)
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
