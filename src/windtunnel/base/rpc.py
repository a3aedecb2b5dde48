"""Calls between processes: the methods of a Protocol, declared once, over a Unix socket or TCP.

    class Counter(Protocol):
        async def add(self, amount: int) -> int: ...
        async def store(self, name: str, data: bytes) -> None: ...

    server = await serve(Counter, counter, "unix:/run/counter")  # "tcp:HOST:PORT"; port 0: any that is free
    remote = await connect(Counter, server.address)
    await remote.add(2)
    Blocking(Counter, server.address).add(2)  # the same, for threads

A message is two lengths, a JSON object and raw bytes. Arguments and results become JSON by the Protocol's own
type hints (`plain`); one parameter that is ``bytes``, or a result that is, travels raw. A connection carries
many calls at once: each is a task of the server, which is cancelled when its caller gives up or goes away.

An exception of a method arrives as what it was where it is an `OSError` (by its number), a `UserError`, or of
the classes that both sides name in ``errors``; any other as a `RemoteError`. When the connection ends, calls
on their way raise ConnectionError, and nobody knows whether they were performed.

With a ``secret`` both sides prove that they know it (HMAC-SHA256 over a nonce of each) before the first call;
with ``tls`` all of it is encrypted. TCP without a secret is refused: a Unix socket is guarded by its mode.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hashlib
import hmac
import inspect
import json
import os
import secrets
import socket
import struct
import threading
import typing
import weakref
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from windtunnel.base.errors import HostError, UserError
from windtunnel.base.plain import from_plain, to_plain

if typing.TYPE_CHECKING:
    import ssl

T = TypeVar("T")
_LENGTHS = struct.Struct("!II")
_LARGEST = 1 << 28  # bytes of either part of a message
_BUFFER = 1 << 20  # bytes that are read ahead
_NONCE = 32
_PATIENCE = 10.0  # seconds for connecting and the proofs
Errors = Sequence[type[Exception]]
_readers: set[asyncio.Task[None]] = set()  # a loop holds its tasks weakly


class RemoteError(HostError):
    """A method failed at the other side, with an exception that is none of those that travel."""


@dataclass
class Server:
    """Answers at ``address`` until it is closed."""

    address: str
    _server: asyncio.Server
    _connections: set[asyncio.Task[None]] = field(default_factory=set)

    async def close(self) -> None:
        """No further call is taken; those at work are cancelled."""
        self._server.close()
        for task in self._connections:
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)


async def serve(
    protocol: type, target: object, address: str, *, secret: bytes | None = None,
    tls: ssl.SSLContext | None = None, errors: Errors = (),
) -> Server:  # fmt: skip
    """Answer calls of ``protocol``'s methods with those of ``target``.

    Raises:
        UserError: ``address`` is none, is in use, or is TCP without a secret.
    """
    kind, host, port = _parse(address, secret)
    methods = _methods(protocol)
    connections: set[asyncio.Task[None]] = set()

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        connections.add(task)
        try:
            if secret is not None:
                await asyncio.wait_for(_prove(reader, writer, secret, server=True), _PATIENCE)
            await _answer_calls(reader, writer, methods, target, errors)
        except (OSError, EOFError, ValueError, asyncio.CancelledError):
            pass  # the peer went, or speaks something else, or the server is closed
        finally:
            connections.discard(task)
            writer.close()

    try:
        if kind == "unix":
            await _remove_stale(host)
            server = await asyncio.start_unix_server(accept, host, limit=_BUFFER)
            os.chmod(host, 0o600)
            return Server(address, server, connections)
        server = await asyncio.start_server(accept, host, port, ssl=tls, limit=_BUFFER)
    except OSError as error:
        raise UserError(f"address {address!r} cannot be listened on: {error.strerror or error}") from error
    return Server(f"tcp:{host}:{server.sockets[0].getsockname()[1]}", server, connections)


async def connect(
    protocol: type, address: str, *, secret: bytes | None = None, tls: ssl.SSLContext | None = None,
    errors: Errors = (),
) -> Any:  # fmt: skip
    """The object at ``address``: its methods are those of ``protocol``; ``await close(remote)`` ends it.

    Raises:
        ConnectionError: nobody answers there, or not in time.
        PermissionError: the peer does not know the secret, or does not take ours.
    """
    kind, host, port = _parse(address, secret)
    try:
        async with asyncio.timeout(_PATIENCE):
            if kind == "unix":
                reader, writer = await asyncio.open_unix_connection(host, limit=_BUFFER)
            else:
                reader, writer = await asyncio.open_connection(host, port, ssl=tls, limit=_BUFFER)
                writer.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if secret is not None:
                await _prove(reader, writer, secret, server=False)
    except PermissionError:
        raise
    except (OSError, EOFError) as error:
        raise ConnectionError(f"{address}: {error or 'no answer in time'}") from error
    return Remote(_methods(protocol), reader, writer, errors)


async def close(remote: Any) -> None:
    """End the connection of what `connect` returned; its calls on their way raise ConnectionError."""
    remote._writer.close()
    remote._reading.cancel()
    await asyncio.gather(remote._reading, return_exceptions=True)


class Blocking:
    """As `connect` (``options``: its own), for threads: methods return when the result is there; after
    ``timeout`` seconds without one they raise TimeoutError. One connection, which threads may share."""

    def __init__(self, protocol: type, address: str, *, timeout: float | None = None, **options: Any) -> None:
        self._timeout = timeout
        self._remote: Remote = _in_loop(connect(protocol, address, **options), None)
        self.close = weakref.finalize(self, lambda remote: _in_loop(close(remote), None), self._remote)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method = getattr(self._remote, name)
        return lambda *args, **kwargs: _in_loop(method(*args, **kwargs), self._timeout)


class Remote:
    """The client's side of one connection, until it has ``ended``: attributes are the Protocol's methods."""

    def __init__(
        self, methods: dict[str, _Method], reader: asyncio.StreamReader, writer: asyncio.StreamWriter,
        errors: Errors,
    ) -> None:  # fmt: skip
        self._methods, self._writer = methods, writer
        known: list[type[Exception]] = [UserError, *errors]
        self._errors = {kind.__name__: kind for kind in known}
        self._calls: dict[int, asyncio.Future[tuple[dict[str, Any], bytes]]] = {}
        self._number = 0
        self.ended = False
        self._reading = asyncio.get_running_loop().create_task(self._read(reader))
        _readers.add(self._reading)
        self._reading.add_done_callback(_readers.discard)

    def __getattr__(self, name: str) -> Callable[..., Coroutine[Any, Any, Any]]:
        if name.startswith("_") or name not in self._methods:
            raise AttributeError(name)
        return functools.partial(self._call, self._methods[name])

    async def _call(self, method: _Method, *args: Any, **kwargs: Any) -> Any:
        arguments = method.signature.bind(None, *args, **kwargs).arguments
        raw = arguments.pop(method.raw, b"") if method.raw else b""
        plain = {name: to_plain(value) for name, value in list(arguments.items())[1:]}
        if self.ended:
            raise ConnectionError("the connection has ended")
        self._number += 1
        number = self._number
        answer = self._calls[number] = asyncio.get_running_loop().create_future()
        try:
            await _send(self._writer, {"id": number, "do": method.name, "with": plain}, raw)
            message, data = await answer
        except asyncio.CancelledError:
            with contextlib.suppress(OSError):
                await _send(self._writer, {"id": number, "cancel": True})
            raise
        finally:
            self._calls.pop(number, None)
            answer.cancel()
        if "error" in message:
            kind, text = message["error"], message["text"]
            if "errno" in message:
                raise OSError(message["errno"], text)
            raise self._errors[kind](text) if kind in self._errors else RemoteError(f"{kind}: {text}")
        return data if method.returns is bytes else _from(method.returns, message.get("value"))

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


@dataclass(frozen=True)
class _Method:
    """``raw``: the parameter that is bytes, or ""; ``kinds``: of all other parameters."""

    name: str
    signature: inspect.Signature
    kinds: dict[str, Any]
    raw: str
    returns: Any


@functools.cache
def _methods(protocol: type) -> dict[str, _Method]:
    methods = {}
    for name, function in vars(protocol).items():
        if name.startswith("_") or not inspect.iscoroutinefunction(function):
            continue
        kinds = typing.get_type_hints(function)
        returns = kinds.pop("return", type(None))
        raw = next((name for name, hint in kinds.items() if hint is bytes), "")
        kinds.pop(raw, None)
        methods[name] = _Method(name, inspect.signature(function), kinds, raw, returns)
    return methods


async def _answer_calls(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, methods: dict[str, _Method], target: object,
    errors: Errors,
) -> None:  # fmt: skip
    tasks: dict[int, asyncio.Task[None]] = {}

    async def answer(number: int, message: dict[str, Any], data: bytes) -> None:
        reply: dict[str, Any]
        result = b""
        try:
            method = methods.get(message["do"])
            if method is None:
                raise UserError(f"method {message['do']!r} is unknown; accepted are {', '.join(methods)}")
            given = {name: _from(method.kinds[name], value) for name, value in message["with"].items()}
            if method.raw:
                given[method.raw] = data
            value = await getattr(target, method.name)(**given)
            if method.returns is bytes:
                result, value = value, None
            reply = {"value": to_plain(value)}
        except Exception as error:
            reply = _error(error, errors)
        finally:
            tasks.pop(number, None)
        await _send(writer, {"id": number, **reply}, result)

    try:
        while True:
            message, data = await _receive(reader)
            number = message["id"]
            if "cancel" in message:
                if number in tasks:
                    tasks[number].cancel()
                continue
            tasks[number] = asyncio.get_running_loop().create_task(answer(number, message, data))
    finally:
        for task in list(tasks.values()):
            task.cancel()


def _error(error: Exception, errors: Errors) -> dict[str, Any]:
    if isinstance(error, OSError) and error.errno is not None:
        return {"error": "OSError", "errno": error.errno, "text": error.strerror or str(error)}
    known: list[type[Exception]] = [UserError, *errors]
    kinds = [kind for kind in known if isinstance(error, kind)]
    return {"error": (kinds or [type(error)])[0].__name__, "text": str(error)}


def _from(kind: Any, value: Any) -> Any:
    return None if kind is type(None) else from_plain(kind, value)


async def _send(writer: asyncio.StreamWriter, message: dict[str, Any], data: bytes = b"") -> None:
    head = json.dumps(message, separators=(",", ":")).encode()
    writer.write(b"".join((_LENGTHS.pack(len(head), len(data)), head, data)))
    if writer.transport.get_write_buffer_size():
        await writer.drain()


async def _receive(reader: asyncio.StreamReader) -> tuple[dict[str, Any], bytes]:
    head, raw = _LENGTHS.unpack(await reader.readexactly(_LENGTHS.size))
    if max(head, raw) > _LARGEST:
        raise ValueError(f"a message of {max(head, raw)} bytes")
    both = await reader.readexactly(head + raw)
    message = json.loads(both[:head])
    if not isinstance(message, dict) or not isinstance(message.get("id"), int):
        raise ValueError("no message")
    return message, both[head:]


async def _prove(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, secret: bytes, *, server: bool
) -> None:
    """Each side sends a nonce, then its proof. Raises PermissionError: the peer does not know the secret."""
    own = secrets.token_bytes(_NONCE)
    writer.write(own)
    await writer.drain()
    theirs = await reader.readexactly(_NONCE)

    def proof(role: bytes, first: bytes, second: bytes) -> bytes:
        return hmac.digest(secret, role + first + second, hashlib.sha256)

    mine, peer = (b"server", b"client") if server else (b"client", b"server")
    if not server:
        writer.write(proof(mine, own, theirs))
        await writer.drain()
    try:
        answer = await reader.readexactly(hashlib.sha256().digest_size)
    except EOFError:
        answer = b""  # who does not take our proof hangs up
    if not hmac.compare_digest(answer, proof(peer, theirs, own)):
        raise PermissionError("the peer does not know the secret")
    if server:
        writer.write(proof(mine, own, theirs))
        await writer.drain()


def _parse(address: str, secret: bytes | None) -> tuple[str, str, int]:
    kind, _, rest = address.partition(":")
    if kind == "unix" and rest:
        return kind, rest, 0
    host, _, port = rest.rpartition(":")
    if kind != "tcp" or not host or not port.isdigit():
        raise UserError(f"address {address!r} is not accepted; accepted are unix:PATH and tcp:HOST:PORT")
    if secret is None:
        raise UserError(f"address {address!r} is TCP, which is accepted only with a secret")
    return kind, host, int(port)


async def _remove_stale(path: str) -> None:
    """Take away the socket of a server that is gone. Raises OSError: one that lives has it."""
    if not Path(path).is_socket():
        return
    with contextlib.suppress(ConnectionRefusedError):
        _, writer = await asyncio.open_unix_connection(path)
        writer.close()
        raise OSError(None, "another server answers there")
    Path(path).unlink(missing_ok=True)


_loops: dict[int, asyncio.AbstractEventLoop] = {}  # by process: a fork has no threads of its parent
_starting = threading.Lock()


def _in_loop(call: Coroutine[Any, Any, T], timeout: float | None) -> T:
    with _starting:
        loop = _loops.get(os.getpid())
        if loop is None:
            loop = _loops[os.getpid()] = asyncio.new_event_loop()
            threading.Thread(target=loop.run_forever, daemon=True, name="rpc").start()
    future = asyncio.run_coroutine_threadsafe(call, loop)
    try:
        return future.result(timeout)
    except TimeoutError:
        future.cancel()
        raise
