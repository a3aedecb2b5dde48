"""The asyncio side of `calls`: a server of several protocols, and a client of one.

    class Counter(Protocol):
        async def add(self, amount: int) -> int: ...

    server = await serve(Service.of(Counter, counter), "unix:/run/counter")  # "tcp:HOST:PORT"; 0: any port
    remote = await connect(Counter, server.address)
    await remote.add(2)

A connection carries many calls at once. A coroutine is a task of the server, which is cancelled when its
caller gives up or goes away; a plain function runs in a thread to its end, and what it writes for a caller
who has gone is dropped. A caller who is slow makes that thread wait: what waits for him is one piece.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hmac
import inspect
import io
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from windtunnel.base.calls import (
    LENGTHS,
    NONCE,
    PATIENCE,
    PROOF,
    Errors,
    Message,
    Method,
    error_message,
    error_of,
    lengths,
    method,
    methods,
    packed,
    parsed,
    proof,
    referred,
    result,
    unpacked,
)
from windtunnel.base.errors import UserError
from windtunnel.base.plain import to_plain

if TYPE_CHECKING:
    from windtunnel.base.tls import Certificates

_BUFFER = 1 << 20  # bytes that are read ahead
_SLOW = 0.05  # seconds that a function waits for a slow caller before BlockingIOError
_readers: set[asyncio.Task[None]] = set()  # a loop holds its tasks weakly


@dataclass
class Service:
    """What is served. ``find``: the object of a protocol by its name; ``refer``: the name of one that a
    method returned. ``explain``: makes an exception into the one that the caller gets."""

    protocols: tuple[type, ...]
    find: Callable[[type, str], object]
    refer: Callable[[Any], str] = str
    errors: Errors = ()
    explain: Callable[[Exception], Exception] = lambda error: error
    threads: Executor | None = None
    busy: int = field(default=0, init=False)
    """Plain functions at work."""
    last: float = field(default_factory=time.monotonic, init=False)
    """When the last one ended."""

    @staticmethod
    def of(protocol: type, target: object, errors: Errors = ()) -> Service:
        return Service((protocol,), lambda kind, name: target, errors=errors)

    async def perform(
        self, message: Message, data: bytes = b"", streams: Streams | None = None
    ) -> tuple[Message, bytes]:
        """The answer to one call, and what of it travels raw."""
        try:
            value, declared = await self._value(message, data, streams)
            if declared.returns is bytes:
                return {"value": None}, value
            kind, several = referred(declared.returns, self.protocols)
            if kind is not None:
                value = [self.refer(one) for one in value] if several else self.refer(value)
            return {"value": to_plain(value)}, b""
        except Exception as error:
            return error_message(self.explain(error), self.errors), b""

    async def _value(self, message: Message, data: bytes, streams: Streams | None) -> tuple[Any, Method]:
        kind, _, name = message["do"].rpartition(".")
        protocol = next((one for one in self.protocols if one.__name__ == kind), None)
        if protocol is None:
            accepted = ", ".join(one.__name__ for one in self.protocols)
            raise UserError(f"protocol {kind!r} is unknown; accepted are {accepted}")
        declared = method(protocol, name)
        given = _arguments(declared, message["with"])
        if raw := declared.role("raw"):
            given.setdefault(raw, data)
        if streams is not None:
            given |= {key: streams.of(key, declared.roles[key]) for key in message.get("streams", ())}

        def work() -> Any:
            target = self.find(protocol, message.get("on", ""))
            member = getattr(target, name)
            return member if declared.is_property else member(**given)

        if inspect.iscoroutinefunction(declared.function):
            return await work(), declared
        running = asyncio.get_running_loop().run_in_executor(self.threads, work)
        self.busy += 1
        running.add_done_callback(self._ended)
        return await asyncio.shield(running), declared

    def _ended(self, running: asyncio.Future[Any]) -> None:
        running.cancelled() or running.exception()  # it is told to the caller, where there still is one
        self.busy -= 1
        self.last = time.monotonic()


def _arguments(declared: Method, given: dict[str, Any]) -> dict[str, Any]:
    """Raises UserError: one is unknown, missing, or of another type."""
    try:
        files = ("raw", "read")
        kinds = {
            key: bytes if declared.roles.get(key) in files else kind for key, kind in declared.kinds.items()
        }
        made = {key: result(kinds[key], value) for key, value in given.items()}
        needed = {key: None for key, role in declared.roles.items() if role}
        inspect.signature(declared.function).bind(None, **(needed | made))
        return made
    except KeyError as error:
        accepted = ", ".join(declared.kinds) or "none"
        raise UserError(f"{declared.name}: {error.args[0]!r} is unknown; accepted are {accepted}") from error
    except (TypeError, ValueError) as error:
        raise UserError(f"{declared.name}: {error}") from error


class Streams:
    """What the thread of one call exchanges with the caller meanwhile. ``send``: to him."""

    def __init__(self, send: Callable[[Message, bytes], Coroutine[Any, Any, None]]) -> None:
        self._send, self._loop = send, asyncio.get_running_loop()
        self._piece: Future[bytes] = Future()
        self._sent: Future[None] | None = None
        self.cancel = threading.Event()
        self.gone = False

    def of(self, name: str, role: str) -> Any:
        """What the function gets for a parameter."""
        if role == "cancel":
            return self.cancel
        if role == "call":
            return functools.partial(self._call, name)
        file = _Incoming(self, name) if role == "read" else _Outgoing(self, name)
        return io.BufferedReader(file, _BUFFER) if role == "read" else file

    def leave(self) -> None:
        """The caller has gone."""
        self.gone = True
        self.cancel.set()
        self.receive(None)

    def receive(self, piece: bytes | None) -> None:
        """A piece that was asked for; None: there is none, and the file is not whole."""
        if not self._piece.done():
            if piece is None:
                self._piece.set_exception(OSError("the caller went away before the whole file was sent"))
            else:
                self._piece.set_result(piece)

    def read(self, name: str, size: int) -> bytes:
        self._piece = Future()
        if self.gone:
            self.receive(None)
        self._start({"read": name, "size": size})
        return self._piece.result()

    def write(self, name: str, data: bytes) -> None:
        """Raises BrokenPipeError: the caller has gone."""
        if self.gone:
            raise BrokenPipeError("the caller went away")
        self._start({"to": name, "with": []}, data).result()

    def _call(self, name: str, *arguments: Any) -> None:
        """Raises BlockingIOError: the caller has not taken yet what came before."""
        if self._sent is not None and not self.gone:
            try:
                self._sent.result(_SLOW)
            except ConnectionError:
                self.leave()
            except TimeoutError as error:
                raise BlockingIOError("the caller is slow") from error
        if not self.gone:
            *plain, data = arguments
            self._sent = self._start({"to": name, "with": plain}, bytes(data))

    def _start(self, message: Message, data: bytes = b"") -> Future[None]:
        return asyncio.run_coroutine_threadsafe(self._send(message, data), self._loop)


class _Incoming(io.RawIOBase):
    def __init__(self, streams: Streams, name: str) -> None:
        self._streams, self._name = streams, name

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        piece = self._streams.read(self._name, len(buffer))
        buffer[: len(piece)] = piece
        return len(piece)


class _Outgoing(io.RawIOBase):
    def __init__(self, streams: Streams, name: str) -> None:
        self._streams, self._name = streams, name

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self._streams.write(self._name, bytes(data))
        return len(data)


@dataclass
class Server:
    """Answers at ``address`` until it is closed."""

    address: str
    _server: asyncio.Server
    _connections: set[asyncio.Task[None]] = field(default_factory=set)

    def refuse(self) -> None:
        """Take no further connection."""
        self._server.close()

    async def close(self) -> None:
        """No further call is taken; those at work are cancelled."""
        self._server.close()
        for task in self._connections:
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)


async def serve(
    service: Service, address: str, *, secret: bytes | None = None, tls: Certificates | None = None
) -> Server:
    """Answer calls of the service's protocols.

    Raises:
        UserError: ``address`` is none, is in use, or is TCP without a secret.
    """
    kind, host, port = parsed(address, secret)
    connections: set[asyncio.Task[None]] = set()

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        connections.add(task)
        try:
            if secret is not None:
                await asyncio.wait_for(_prove(reader, writer, secret, server=True), PATIENCE)
            await _answer_calls(reader, writer, service)
        except (OSError, EOFError, ValueError, asyncio.CancelledError):
            pass  # the peer went, or speaks something else, or the server is closed
        finally:
            connections.discard(task)
            writer.close()

    try:
        if kind == "unix":
            await _remove_stale(host)
            before = os.umask(0o177)
            try:
                server = await asyncio.start_unix_server(accept, host, limit=_BUFFER)
            finally:
                os.umask(before)
            return Server(address, server, connections)
        context = None if tls is None else tls.server
        server = await asyncio.start_server(accept, host, port, ssl=context, limit=_BUFFER)
    except OSError as error:
        raise UserError(f"address {address!r} cannot be listened on: {error.strerror or error}") from error
    return Server(f"tcp:{host}:{server.sockets[0].getsockname()[1]}", server, connections)


async def _answer_calls(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, service: Service) -> None:
    calls: dict[int, tuple[asyncio.Task[None], Streams, bool]] = {}

    async def answer(number: int, message: Message, data: bytes, streams: Streams) -> None:
        try:
            reply, raw = await service.perform(message, data, streams)
        finally:
            calls.pop(number, None)
            gone = streams.gone
            streams.leave()  # what still reads for a call that has ended reads no more
        if not gone:
            with contextlib.suppress(ConnectionError):
                await _send(writer, {"id": number, **reply}, raw)

    try:
        while True:
            message, data = await _receive(reader)
            number = message["id"]
            if "do" in message:
                streams = Streams(functools.partial(_send_part, writer, number))
                work = answer(number, message, data, streams)
                task = asyncio.get_running_loop().create_task(work)
                calls[number] = task, streams, "streams" in message
            elif number in calls:
                task, streams, answered = calls[number]
                if "piece" in message:
                    streams.receive(data if message["piece"] else None)
                elif answered:  # the function is told, and its result is waited for
                    streams.cancel.set()
                else:
                    task.cancel()
    finally:
        for task, streams, _ in list(calls.values()):
            streams.leave()
            task.cancel()


async def _send_part(writer: asyncio.StreamWriter, number: int, part: Message, data: bytes) -> None:
    await _send(writer, {"id": number, **part}, data)


# -- the client ----------------------------------------------------------------------------------------------


async def connect(
    protocol: type, address: str, *, secret: bytes | None = None, tls: Certificates | None = None,
    errors: Errors = (),
) -> Any:  # fmt: skip
    """The object at ``address``: its methods are those of ``protocol``; ``await close(remote)`` ends it.

    Raises:
        ConnectionError: nobody answers there, or not in time.
        PermissionError: the peer does not know the secret, or does not take ours.
    """
    kind, host, port = parsed(address, secret)
    try:
        async with asyncio.timeout(PATIENCE):
            if kind == "unix":
                reader, writer = await asyncio.open_unix_connection(host, limit=_BUFFER)
            else:
                context = None if tls is None else tls.client
                reader, writer = await asyncio.open_connection(host, port, ssl=context, limit=_BUFFER)
                writer.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if secret is not None:
                await _prove(reader, writer, secret, server=False)
    except PermissionError:
        raise
    except (OSError, EOFError) as error:
        raise ConnectionError(f"{address}: {error or 'no answer in time'}") from error
    return Remote(protocol, reader, writer, errors)


async def close(remote: Any) -> None:
    """End the connection of what `connect` returned; its calls on their way raise ConnectionError."""
    remote._writer.close()
    remote._reading.cancel()
    await asyncio.gather(remote._reading, return_exceptions=True)


class Remote:
    """The client's side of one connection, until it has ``ended``: attributes are the Protocol's methods."""

    def __init__(
        self, protocol: type, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, errors: Errors
    ) -> None:
        self._protocol, self._writer, self._errors = protocol, writer, errors
        self._calls: dict[int, asyncio.Future[tuple[Message, bytes]]] = {}
        self._number = 0
        self.ended = False
        self._reading = asyncio.get_running_loop().create_task(self._read(reader))
        _readers.add(self._reading)
        self._reading.add_done_callback(_readers.discard)

    def __getattr__(self, name: str) -> Callable[..., Coroutine[Any, Any, Any]]:
        if name.startswith("_") or name not in methods(self._protocol):
            raise AttributeError(name)
        return functools.partial(self._call, method(self._protocol, name))

    async def _call(self, declared: Method, *args: Any, **kwargs: Any) -> Any:
        given = declared.named(*args, **kwargs)
        raw = given.pop(declared.role("raw"), b"")
        if self.ended:
            raise ConnectionError("the connection has ended")
        self._number += 1
        number = self._number
        answer = self._calls[number] = asyncio.get_running_loop().create_future()
        call = {"id": number, "do": f"{self._protocol.__name__}.{declared.name}", "with": to_plain(given)}
        try:
            await _send(self._writer, call, raw)
            message, data = await answer
        except asyncio.CancelledError:
            with contextlib.suppress(OSError):
                await _send(self._writer, {"id": number, "cancel": True})
            raise
        finally:
            self._calls.pop(number, None)
            answer.cancel()
        if "error" in message:
            raise error_of(message, self._errors)
        return data if declared.returns is bytes else result(declared.returns, message.get("value"))

    async def _read(self, reader: asyncio.StreamReader) -> None:
        try:
            while True:
                message, data = await _receive(reader)
                answer = self._calls.get(message["id"])
                if answer is not None and not answer.done():
                    answer.set_result((message, data))
        except (OSError, EOFError, ValueError):
            pass
        finally:
            self.ended = True
            for answer in self._calls.values():
                if not answer.done():
                    answer.set_exception(ConnectionError("the connection ended before the answer"))
            self._writer.close()


# -- the connection ------------------------------------------------------------------------------------------


async def _send(writer: asyncio.StreamWriter, message: Message, data: bytes = b"") -> None:
    writer.write(packed(message, data))
    if writer.transport.get_write_buffer_size():
        await writer.drain()


async def _receive(reader: asyncio.StreamReader) -> tuple[Message, bytes]:
    head, raw = lengths(await reader.readexactly(LENGTHS.size))
    both = await reader.readexactly(head + raw)
    return unpacked(both[:head]), both[head:]


async def _prove(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, secret: bytes, *, server: bool
) -> None:
    """Each side sends a nonce, then its proof. Raises PermissionError: the peer does not know the secret."""
    own = secrets.token_bytes(NONCE)
    writer.write(own)
    await writer.drain()
    theirs = await reader.readexactly(NONCE)
    mine, peer = (b"server", b"client") if server else (b"client", b"server")
    if not server:
        writer.write(proof(secret, mine, own, theirs))
        await writer.drain()
    try:
        answer = await reader.readexactly(PROOF)
    except EOFError:
        answer = b""  # who does not take our proof hangs up
    if not hmac.compare_digest(answer, proof(secret, peer, theirs, own)):
        raise PermissionError("the peer does not know the secret")
    if server:
        writer.write(proof(secret, mine, own, theirs))
        await writer.drain()


async def _remove_stale(path: str) -> None:
    """Take away the socket of a server that is gone. Raises OSError: one that lives has it."""
    if not Path(path).is_socket():
        return
    with contextlib.suppress(ConnectionRefusedError):
        _, writer = await asyncio.open_unix_connection(path)
        writer.close()
        raise OSError(None, "another server answers there")
    Path(path).unlink(missing_ok=True)
