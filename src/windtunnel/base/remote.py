"""A client of `rpc` for threads, without asyncio.

    Blocking(Counter, "unix:/run/counter").add(2)

A connection carries one call at a time, so a client has as many as threads that call. When one ends, the call
on it raises ConnectionError, and nobody knows whether it was performed.
"""

from __future__ import annotations

import contextlib
import functools
import io
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import IO, TYPE_CHECKING, Any, TypeVar

from windtunnel.base import wire
from windtunnel.base.calls import (
    PATIENCE,
    SERVICE,
    Errors,
    Message,
    Method,
    error_of,
    method,
    methods,
    parsed,
    receive,
    referred,
    result,
)
from windtunnel.base.plain import to_plain

if TYPE_CHECKING:
    from windtunnel.base.keys import Keys

T = TypeVar("T", bound=type)
_CANCEL = 0.05  # seconds from one look at an event to the next
_PAUSES = (0.0, 0.01, 0.1, 1.0, None)  # seconds: one that is just dying still takes connections for a moment


class CallLost(ConnectionError):
    """The connection ended before the answer: nobody knows whether the call was performed."""


class _Unread(CallLost):
    """What listened there closed with the call unread, as the kernel tells of Unix sockets."""


class NobodyAnswers(ConnectionError):
    """Nobody answers there: nothing was performed."""


class _Ours(Exception):
    """Not the connection failed, but what the caller gave: a file, a function."""

    def __init__(self, error: Exception) -> None:
        self.error = error


class _Connection:
    """One call at a time; another thread may send meanwhile. Messages of another number than that of the
    call at work are left of an earlier one, and belong to none."""

    def __init__(self, sock: socket.socket) -> None:
        self.socket, self.number, self._sending = sock, 0, threading.Lock()

    def send(self, message: Message, data: bytes = b"") -> None:
        with self._sending:
            wire.send(self.socket, {"id": self.number, **message}, data)


class RemoteLink:
    """Connections to ``address``, one for each call at a time; any thread may use it.

    ``timeout``: seconds after which a call without a result raises TimeoutError. ``start``: called where
    nobody answers, before the only second try. ``objects``: makes what is returned for an object that stays
    there.
    """

    def __init__(
        self, address: str, *, keys: Keys | None = None, errors: Errors = (), timeout: float | None = None,
        start: Callable[[], None] | None = None, objects: dict[type, Callable[[str], Any]] | None = None,
    ) -> None:  # fmt: skip
        self.address, self._where, self._keys = address, parsed(address, keys), keys
        self._errors, self._timeout, self._start, self._objects = errors, timeout, start, objects or {}
        self._idle: list[_Connection] = []

    def call(self, protocol: type, name: str, on: str, /, *args: Any, **kwargs: Any) -> Any:
        """The result of a method of the object ``on``.

        Raises:
            ConnectionError: nobody answers, or not any more.
            PermissionError: the peer does not know the secret.
        """
        declared = method(protocol, name)
        arguments = declared.named(*args, **kwargs)
        streams = {
            key: arguments.pop(key) for key in list(arguments) if declared.roles.get(key, "raw") != "raw"
        }
        streams = {key: value for key, value in streams.items() if value is not None}
        data = arguments.pop(declared.role("raw"), b"")
        message = {
            "do": f"{protocol.__name__}.{name}", "on": on, "with": to_plain(arguments),
            "streams": sorted(streams),
        }  # fmt: skip
        for pause in _PAUSES:
            try:
                answer, raw = self._performed(declared, message, data, streams)
                break
            except _Unread:
                if pause is None:
                    raise
                time.sleep(pause)
        if "error" in answer:
            raise error_of(answer, self._errors)
        if declared.returns is bytes:
            return raw
        kind, several = referred(declared.returns, tuple(self._objects))
        if kind is not None:
            make, value = self._objects[kind], answer["value"]
            return [make(each) for each in value] if several else make(value)
        return result(declared.returns, answer.get("value"), foreign=True)

    def connect(self) -> None:
        """Make sure that somebody answers. Raises as `call` does."""
        with self._connected():
            pass

    def close(self) -> None:
        """Close the connections that no call uses."""
        idle, self._idle = self._idle, []
        for connection in idle:
            connection.socket.close()

    def _performed(
        self, declared: Method, message: Message, data: bytes, streams: dict[str, Any]
    ) -> tuple[Message, bytes]:
        """Raises _Unread: the other side closed before it had read the whole call, so it did nothing."""
        answered: list[bool] = []
        try:
            with self._connected() as connection:
                connection.number += 1
                connection.send(message, data)
                return self._answer(connection, declared, streams, answered)
        except CallLost as error:
            unread = isinstance(error.__cause__, ConnectionResetError | BrokenPipeError)
            if unread and not answered and self.address.startswith("unix:"):
                raise _Unread(str(error)) from error
            raise

    @contextlib.contextmanager
    def _connected(self) -> Iterator[_Connection]:
        """A connection; where the block is left by an exception, the call ends at the other side too."""
        connection = self._take_connection()
        try:
            connection.socket.settimeout(self._timeout)
            yield connection
        except BaseException as error:
            connection.socket.close()
            if isinstance(error, _Ours):
                raise error.error from None
            if isinstance(error, OSError) and not isinstance(error, TimeoutError):
                raise CallLost("the connection ended before the answer") from error
            raise
        self._idle.append(connection)

    def _take_connection(self) -> _Connection:
        with contextlib.suppress(IndexError):
            while connection := self._idle.pop():
                if not wire.wait(connection.socket, 0):
                    return connection
                connection.socket.close()  # whoever was there has gone
        for last in (self._start is None, True):
            try:
                return _Connection(self._dialled())
            except PermissionError:
                raise
            except OSError as error:
                if last:
                    raise NobodyAnswers(f"{self.address}: {error or 'no answer in time'}") from error
                assert self._start is not None
                self._start()
        raise AssertionError  # the second try raises

    def _dialled(self) -> socket.socket:
        patience = min(PATIENCE, self._timeout or PATIENCE)
        if self.address is self._where:
            return wire.connect(self._where, patience)
        from windtunnel.base import handshake

        assert self._keys is not None
        try:
            return handshake.connect(self._where, patience, self._keys, SERVICE)
        except handshake.HandshakeRefused as error:
            raise PermissionError(str(error)) from error

    def _answer(
        self, connection: _Connection, declared: Method, streams: dict[str, Any], answered: list[bool]
    ) -> tuple[Message, bytes]:
        """What the call comes to, with what it asks for meanwhile. ``answered``: set by the first message."""
        cancel: threading.Event | None = streams.get(declared.role("cancel"))
        failed: list[Exception] = []
        while True:
            while cancel is not None and not wire.wait(connection.socket, _CANCEL):
                if cancel.is_set():
                    answered.append(True)
                    connection.send({"cancel": True})
                    cancel = None
            message, data = receive(connection.socket)
            if message["id"] != connection.number:
                continue
            answered.append(True)
            if "read" in message:
                source = streams[message["read"]]
                source = io.BytesIO(source) if isinstance(source, bytes) else source
                streams[message["read"]] = source
                work = functools.partial(_send_piece, connection, source, message["size"], failed)
                threading.Thread(target=work, name="rpc-read", daemon=True).start()
            elif "to" in message:
                stream = streams[message["to"]]
                take = stream if declared.roles[message["to"]] == "call" else stream.write
                try:
                    take(*message["with"], data)
                except Exception as error:
                    raise _Ours(error) from error
            elif failed:
                raise _Ours(failed[0])
            else:
                return message, data


def _send_piece(connection: _Connection, source: IO[bytes], size: int, failed: list[Exception]) -> None:
    """Read a piece and send it, aside: what is written there goes on coming."""
    number = connection.number
    try:
        piece: bytes | None = source.read(size)
    except Exception as error:
        failed.append(error)
        piece = None
    with contextlib.suppress(OSError):
        connection.send({"id": number, "piece": piece is not None}, piece or b"")


class Blocking:
    """The object at an address: its methods are those of ``protocol`` (``options``: of `RemoteLink`)."""

    def __init__(self, protocol: type, address: str, **options: Any) -> None:
        self._protocol, self._link = protocol, RemoteLink(address, **options)
        self.close = self._link.close
        self._link.connect()

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("_") or name not in methods(self._protocol):
            raise AttributeError(name)
        return functools.partial(self._link.call, self._protocol, name, "")


def forwards(protocol: type) -> Callable[[T], T]:
    """Gives a class the methods of ``protocol`` that it has not: they call the object ``_on`` over its
    ``_link``."""

    def fill(kind: T) -> T:
        for name, member in methods(protocol).items():
            if name in vars(kind):
                continue
            if isinstance(member, property):
                setattr(kind, name, property(_forward(protocol, name, member.fget)))
            else:
                setattr(kind, name, _forward(protocol, name, member))
        return kind

    return fill


def _forward(protocol: type, name: str, declared: Any) -> Any:
    @functools.wraps(declared)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self._link.call(protocol, name, self._on, *args, **kwargs)

    return call
