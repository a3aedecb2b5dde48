"""Calls between processes: how they are declared, and what travels. `rpc` serves them, `remote` makes them.

    class Counter(Protocol):
        def add(self, amount: int) -> int: ...

    server = rpc.RpcServer(rpc.RpcService.of(Counter, counter), "unix:/run/counter")
    remote.Blocking(Counter, server.address).add(2)

At "tcp:HOST:PORT" both sides prove that they know the secret of their `Keys`, and all of it is encrypted
where these have certificates (`handshake`); a Unix socket is for its user alone.

A method is declared once, in a Protocol; its type hints say how arguments and results travel (`plain`). What
a hint makes of a parameter:

* ``bytes``: it travels raw, as a result that is ``bytes`` does.
* ``bytes | IO[bytes]``: the other side reads it a piece at a time, when it wants one.
* ``IO[bytes]``: what the other side writes comes here as it is written.
* ``Callable[[…, bytes], None]``: is called here when it is called there; the last argument travels raw.
* ``threading.Event``: is set there when it is set here, or when this side goes away.
* ``Departure | None``: is not given here; is set there when this side goes away. The call has another that is
  written or called meanwhile.
* a Protocol that is served too, as a result: it stays there, and its name travels.

An exception arrives as what it was where it is an `OSError` (by its number), a `UserError`, a TimeoutError,
or of the classes that both sides name in ``errors``; any other as a `RemoteError`. ``travels`` of a class
names the attributes that go with it, and their types.
"""

from __future__ import annotations

import collections.abc
import functools
import inspect
import socket
import threading
import types
import typing
from collections.abc import Sequence
from dataclasses import dataclass
from typing import IO, Any

from windtunnel.base import wire
from windtunnel.base.errors import HostError, UserError
from windtunnel.base.plain import from_plain, to_plain

if typing.TYPE_CHECKING:
    from windtunnel.base.keys import Keys

Errors = Sequence[type[Exception]]
Message = dict[str, Any]
SERVICE = "rpc"
LARGEST = 1 << 28
"""Raw bytes of a message."""
PATIENCE = 10.0
"""Seconds for connecting and the proofs."""


class RemoteError(HostError):
    """A method failed at the other side, with an exception that is none of those that travel."""


class Departure(threading.Event):
    """Set when whoever called goes away: ``then`` is called at that moment."""

    then: collections.abc.Callable[[], object] = staticmethod(lambda: None)

    def set(self) -> None:
        super().set()
        self.then()


def local(method: Any) -> Any:
    """Of a Protocol's method: it is not served."""
    method.is_local = True
    return method


@dataclass(frozen=True)
class Method:
    """``kinds``: the type hints of its parameters; ``roles``: of those that do not travel as JSON, how they
    do: raw, read, write, call, cancel or departure."""

    name: str
    function: Any
    is_property: bool
    kinds: dict[str, Any]
    roles: dict[str, str]
    returns: Any

    def named(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Arguments by name. Raises TypeError."""
        arguments = inspect.signature(self.function).bind(None, *args, **kwargs).arguments
        return dict(list(arguments.items())[1:])

    def arguments(self, plain: dict[str, Any]) -> dict[str, Any]:
        """Those that came. Raises UserError: one is unknown, missing, or of another type."""
        try:
            files = ("raw", "read")
            kinds = {key: bytes if self.roles.get(key) in files else kind for key, kind in self.kinds.items()}
            read = {key: result(kinds[key], value) for key, value in plain.items()}
            needed = {key: None for key, role in self.roles.items() if role}
            inspect.signature(self.function).bind(None, **(needed | read))
            return read
        except KeyError as error:
            accepted = ", ".join(self.kinds) or "none"
            raise UserError(f"{self.name}: {error.args[0]!r} is unknown; accepted are {accepted}") from error
        except (TypeError, ValueError) as error:
            raise UserError(f"{self.name}: {error}") from error

    def role(self, wanted: str) -> str:
        """The parameter of that role, or ""."""
        return next((name for name, role in self.roles.items() if role == wanted), "")


@functools.cache
def methods(protocol: type) -> dict[str, Any]:
    """The names of what can be called of it, and their functions or properties."""
    return {
        name: member
        for name, member in vars(protocol).items()
        if not name.startswith("_")
        and (inspect.isfunction(member) or isinstance(member, property))
        and not hasattr(member, "is_local")
    }


@functools.cache
def method(protocol: type, name: str) -> Method:
    """Raises UserError: it has none of that name."""
    member = methods(protocol).get(name)
    if member is None:
        accepted = ", ".join(methods(protocol))
        raise UserError(f"method {name!r} of {protocol.__name__} is unknown; accepted are {accepted}")
    function = member.fget if isinstance(member, property) else member
    kinds = typing.get_type_hints(function)
    returns = kinds.pop("return", type(None))
    roles = {key: role for key, hint in kinds.items() if (role := _role(hint))}
    return Method(name, function, isinstance(member, property), kinds, roles, returns)


def _role(hint: Any) -> str:
    union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    parts = [part for part in (typing.get_args(hint) if union else (hint,)) if part is not type(None)]
    if IO[bytes] in parts:
        return "read" if bytes in parts else "write"
    if hint is bytes:
        return "raw"
    if threading.Event in parts:
        return "cancel"
    if Departure in parts:
        return "departure"
    return "call" if typing.get_origin(parts[0]) is collections.abc.Callable else ""


def referred(returns: Any, protocols: Sequence[type]) -> tuple[type | None, bool]:
    """The protocol whose objects a result is, if it is one; and whether it is a sequence of them."""
    inside = typing.get_args(returns)
    several = len(inside) == 1 and inside[0] in protocols
    if several:
        return inside[0], True
    return (returns if returns in protocols else None), False


def result(kind: Any, value: Any, *, foreign: bool = False) -> Any:
    """A value that came as JSON. ``foreign``: fields that are unknown here are left out."""
    return None if kind is type(None) else from_plain(kind, value, foreign=foreign)


_KNOWN: tuple[type[Exception], ...] = (UserError, TimeoutError)


def error_message(error: Exception, errors: Errors) -> Message:
    """An exception as JSON; one of ``errors`` by the first class there that it is one of."""
    if isinstance(error, OSError) and error.errno is not None:
        return {"error": "OSError", "errno": error.errno, "text": error.strerror or str(error)}
    kind = next(
        (error_type for error_type in (*_KNOWN, *errors) if isinstance(error, error_type)), type(error)
    )
    message: Message = {"error": kind.__name__, "text": str(error) or kind.__name__}
    if attributes := getattr(kind, "travels", {}):
        message["with"] = {name: to_plain(getattr(error, name)) for name in attributes}
    return message


def error_of(message: Message, errors: Errors) -> Exception:
    """The exception that a message tells."""
    name, text = message["error"], message["text"]
    if "errno" in message:
        return OSError(message["errno"], text)
    kind = next((error_type for error_type in (*_KNOWN, *errors) if error_type.__name__ == name), None)
    if kind is None:
        return RemoteError(f"{name}: {text}")
    attributes_sent = message.get("with", {})
    attributes = getattr(kind, "travels", {}).items()
    return kind(
        text, **{name: from_plain(hint, attributes_sent[name], foreign=True) for name, hint in attributes}
    )


def parsed(address: str, keys: Keys | None) -> str:
    """The address as `wire` has it. Raises UserError: it is no address, or TCP without a secret."""
    kind, _, rest = address.partition(":")
    host, _, port = rest.rpartition(":")
    if kind == "unix" and rest:
        return address
    if kind != "tcp" or not host or not port.isdigit() or int(port) > 65535:
        raise UserError(f"address {address!r} is not accepted; accepted are unix:PATH and tcp:HOST:PORT")
    if keys is None:
        raise UserError(f"address {address!r} is TCP, which is accepted only with a secret")
    return rest


def receive(sock: socket.socket) -> tuple[Message, bytes]:
    message, size = wire.receive(sock)
    if size > LARGEST or not isinstance(message.get("id"), int):
        raise wire.WireError("a message is none of a call")
    return message, bytes(wire.rest(sock, size))
