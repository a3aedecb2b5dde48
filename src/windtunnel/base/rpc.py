"""The server of `calls`: what is served, who calls, and the connections.

    server = Server(Service.of(Counter, counter), "unix:/run/counter")  # "tcp:HOST:PORT"; 0: any port

A function runs in a thread to its end, and what it writes for a caller who has gone is dropped. A caller who
is slow makes that thread wait: what waits for him is one piece.
"""

from __future__ import annotations

import contextlib
import functools
import io
import os
import queue
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from windtunnel.base import wire
from windtunnel.base.calls import (
    PATIENCE,
    SERVICE,
    Departure,
    Errors,
    Message,
    error_message,
    method,
    parsed,
    receive,
    referred,
)
from windtunnel.base.errors import UserError
from windtunnel.base.listener import Listener
from windtunnel.base.plain import to_plain

if TYPE_CHECKING:
    from windtunnel.base.keys import Keys

_BUFFER = 1 << 20  # bytes that are read ahead
_SLOW = 0.05  # seconds that a function waits for a slow caller before BlockingIOError


@dataclass
class RpcService:
    """What is served. ``find``: the object of a protocol by its name; ``refer``: the name of one that a
    method returned. ``explain``: makes an exception into the one that the caller gets."""

    protocols: tuple[type, ...]
    find: Callable[[type, str], object]
    refer: Callable[[Any], str] = str
    errors: Errors = ()
    explain: Callable[[Exception], Exception] = lambda error: error
    busy: int = field(default=0, init=False)
    """Calls at work."""
    last: float = field(default_factory=time.monotonic, init=False)
    """When the last one ended."""
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False)

    @staticmethod
    def of(protocol: type, target: object, errors: Errors = ()) -> RpcService:
        return RpcService((protocol,), lambda kind, name: target, errors=errors)

    @contextlib.contextmanager
    def at_work(self) -> Iterator[None]:
        """A call, with its answer."""
        with self._lock:
            self.busy += 1
        try:
            yield
        finally:
            with self._lock:
                self.busy -= 1
                self.last = time.monotonic()

    def perform(
        self, message: Message, data: bytes = b"", caller: RpcCaller | None = None
    ) -> tuple[Message, bytes]:
        """The answer to one call, and what of it travels raw."""
        try:
            kind, _, name = message["do"].rpartition(".")
            protocol = next(
                (protocol_type for protocol_type in self.protocols if protocol_type.__name__ == kind), None
            )
            if protocol is None:
                accepted = ", ".join(protocol_type.__name__ for protocol_type in self.protocols)
                raise UserError(f"protocol {kind!r} is unknown; accepted are {accepted}")
            declared = method(protocol, name)
            arguments = declared.arguments(message["with"])
            if raw := declared.role("raw"):
                arguments.setdefault(raw, data)
            if caller is not None:
                streams = {*message.get("streams", ()), declared.role("departure")} - {""}
                arguments |= {key: caller.parameter(key, declared.roles[key]) for key in streams}
            member = getattr(self.find(protocol, message.get("on", "")), name)
            value = member if declared.is_property else member(**arguments)
            if declared.returns is bytes:
                return {"value": None}, value
            referring, several = referred(declared.returns, self.protocols)
            if referring is not None:
                value = [self.refer(each) for each in value] if several else self.refer(value)
            return {"value": to_plain(value)}, b""
        except Exception as error:
            return error_message(self.explain(error), self.errors), b""


class RpcCaller:
    """Who made one call: what its function exchanges with him meanwhile."""

    def __init__(self, sock: socket.socket, sending: threading.Lock, number: int) -> None:
        self._sock, self._sending, self.number = sock, sending, number
        self._pieces: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._passing: list[_Passing] = []
        self.cancel = threading.Event()
        self.departure = Departure()
        self.gone = self._over = False

    def send(self, message: Message, data: bytes = b"") -> None:
        with self._sending:
            wire.send(self._sock, {"id": self.number, **message}, data)

    def parameter(self, name: str, role: str) -> Any:
        """What the function gets for a parameter."""
        if role == "cancel":
            return self.cancel
        if role == "departure":
            return self.departure
        if role == "call":
            self._passing.append(_Passing(self, name))
            return self._passing[-1]
        return io.BufferedReader(_Incoming(self, name), _BUFFER) if role == "read" else _Outgoing(self, name)

    def take(self, message: Message, data: bytes) -> None:
        """What he sent: a piece that was asked for (or none: the file is not whole), or that it is to end."""
        if "piece" in message:
            self._pieces.put(data if message["piece"] else None)
        else:
            self.cancel.set()

    def read(self, name: str, size: int) -> bytes:
        if not (self.gone or self._over):
            self.send({"read": name, "size": size})
            if (piece := self._pieces.get()) is not None:
                return piece
        raise OSError("the caller went away before the whole file was sent")

    def leave(self) -> None:
        """He has gone."""
        self.gone = True
        self.cancel.set()
        self.departure.set()
        self._pieces.put(None)

    def finish(self) -> None:
        """The function has ended: he gets what it passed on, and what still reads for it reads no more."""
        for passing in self._passing:
            passing.close()
        self._over = True
        self._pieces.put(None)


class _Passing:
    """A function of the caller's, which is called by a thread: one call of it is on its way at most."""

    def __init__(self, caller: RpcCaller, name: str) -> None:
        self._caller, self._name, self._free = caller, name, threading.Event()
        self._calls: queue.SimpleQueue[tuple[Any, ...] | None] = queue.SimpleQueue()
        self._free.set()
        threading.Thread(target=self._run, name="rpc-pass", daemon=True).start()

    def __call__(self, *arguments: Any) -> None:
        """Raises BlockingIOError: the caller has not taken yet what came before."""
        if self._caller.gone:
            return
        if not self._free.wait(_SLOW):
            raise BlockingIOError("the caller is slow")
        self._free.clear()
        self._calls.put(arguments)

    def _run(self) -> None:
        while (arguments := self._calls.get()) is not None:
            *plain, data = arguments
            try:
                self._caller.send({"to": self._name, "with": plain}, bytes(data))
            except OSError:
                self._caller.leave()
            self._free.set()

    def close(self) -> None:
        self._free.wait()
        self._calls.put(None)


class _Incoming(io.RawIOBase):
    def __init__(self, caller: RpcCaller, name: str) -> None:
        self._caller, self._name = caller, name

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        piece = self._caller.read(self._name, len(buffer))
        buffer[: len(piece)] = piece
        return len(piece)


class _Outgoing(io.RawIOBase):
    def __init__(self, caller: RpcCaller, name: str) -> None:
        self._caller, self._name = caller, name

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        """Raises OSError: the caller has gone."""
        self._caller.send({"to": self._name, "with": []}, bytes(data))
        return len(data)


class RpcServer:
    """Answers at ``address`` until it is closed.

    Raises:
        UserError: ``address`` is none, is in use, or is TCP without a secret.
    """

    def __init__(self, service: RpcService, address: str, keys: Keys | None = None) -> None:
        where = parsed(address, keys)
        try:
            sock = _bound(where)
        except OSError as error:
            raise UserError(
                f"address {address!r} cannot be listened on: {error.strerror or error}"
            ) from error
        unix = address is where
        self.address = address if unix else f"{address.rpartition(':')[0]}:{sock.getsockname()[1]}"
        self._service = service
        self._listener = Listener(
            sock, self._converse, keys=None if unix else keys, services=lambda: (SERVICE,), name="rpc"
        )

    def refuse(self) -> None:
        """Take no further connection."""
        self._listener.refuse()

    def close(self) -> None:
        """End all connections: whoever called has gone, for the functions at work."""
        self._listener.close()

    def _converse(self, sock: socket.socket) -> None:
        caller, sending = None, threading.Lock()
        try:
            while True:
                message, data = receive(sock)
                if "do" in message:
                    caller = RpcCaller(sock, sending, message["id"])
                    if message.get("streams"):  # what he sends meanwhile is read here
                        work = functools.partial(self._answer, caller, message, data)
                        threading.Thread(target=work, name="rpc-call", daemon=True).start()
                    else:
                        self._answer(caller, message, data)
                elif caller is not None and message["id"] == caller.number:
                    caller.take(message, data)
        finally:
            if caller is not None:
                caller.leave()

    def _answer(self, caller: RpcCaller, message: Message, data: bytes) -> None:
        with self._service.at_work(), contextlib.suppress(OSError):  # OSError: the caller has gone
            reply, raw = self._service.perform(message, data, caller)
            caller.finish()
            caller.send(reply, raw)


def _bound(where: str) -> socket.socket:
    """A listening socket. One of a Unix server that is gone is taken away. Raises OSError."""
    if not where.startswith("unix:"):
        host, _, port = where.rpartition(":")
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host.strip("[]"), int(port)), family=family)
    path = Path(where.removeprefix("unix:"))
    if path.is_socket():
        with contextlib.suppress(ConnectionRefusedError):
            wire.connect(where, PATIENCE).close()
            raise OSError("another server answers there")
        path.unlink(missing_ok=True)
    sock, before = socket.socket(socket.AF_UNIX), os.umask(0o177)
    try:
        sock.bind(str(path))
        sock.listen(1024)
    except BaseException:
        sock.close()
        raise
    finally:
        os.umask(before)
    return sock
