"""Calls between the master, workers and clients of a session, over Arrow Flight, and who may make them.

A call is a Flight action with JSON both ways. Whoever connects shows first that he knows the session's
secret, and the server shows it to him (`base.handshake`, inside Flight's own handshake); he is then given a
random token for the calls of this connection. So the secret itself never travels. With certificates
(`base.tls`) both sides verify the other's, and the name in the server's is the address that is called;
without them what is sent can be read, and a token stolen, by who listens on the wire: so a server that is not
on loopback is no more than its network is trusted for.

A call that is refused (no token, not understood, too long) ends in an error at the caller; nothing changes.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import socket
import ssl
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pyarrow.flight as fl

from windtunnel.base import handshake
from windtunnel.base.errors import HostError, UserError
from windtunnel.base.keys import Keys
from windtunnel.base.tls import OPTIONS

SERVICE = "ingest"
LONGEST = 1 << 20
"""Bytes of a call, both ways."""
TOKENS = 4096
"""Connections that may be known at a time; the oldest are forgotten, and prove themselves anew."""
TIMEOUT = 5.0
PERMANENT = "permanent: "
"""An error of a stream begins so where another worker would meet it, too."""


class ServerLost(HostError):
    """Nobody answers there."""


class CallRefused(HostError):
    """The server does not take this call."""


class SecretServerAuth(fl.ServerAuthHandler):  # type: ignore[misc]  # pyarrow has no types
    """Lets in who knows the secret."""

    def __init__(self, keys: Keys) -> None:
        super().__init__()
        self._keys = keys
        self._tokens: OrderedDict[bytes, None] = OrderedDict()
        self._turn = threading.Lock()

    def authenticate(self, outgoing: Any, incoming: Any) -> None:
        server = handshake.ServerHandshake(self._keys, (SERVICE,))
        try:
            answer, _ = server.take(bytearray(incoming.read()))
            outgoing.write(answer)
            _, session = server.take(bytearray(incoming.read()))
        except handshake.HandshakeRefused as error:
            raise fl.FlightUnauthenticatedError(str(error)) from error
        if session is None:
            raise fl.FlightUnauthenticatedError("a stranger does not know the session's secret")
        token = secrets.token_bytes(32)
        with self._turn:
            self._tokens[token] = None
            while len(self._tokens) > TOKENS:
                self._tokens.popitem(last=False)
        outgoing.write(token)

    def is_valid(self, token: bytes) -> bytes:
        with self._turn:
            if token not in self._tokens:
                raise fl.FlightUnauthenticatedError("whoever calls has not shown that he knows the secret")
        return b"peer"


class _SecretClientAuth(fl.ClientAuthHandler):  # type: ignore[misc]
    def __init__(self, keys: Keys) -> None:
        super().__init__()
        self._keys, self._token = keys, b""

    def authenticate(self, outgoing: Any, incoming: Any) -> None:
        client = handshake.ClientHandshake(self._keys, SERVICE)
        outgoing.write(client.hello)
        answer = incoming.read()
        if len(answer) != client.ANSWER:
            raise handshake.HandshakeRefused("whoever listens there speaks something else")
        outgoing.write(client.prove(answer)[0])
        self._token = incoming.read()

    def get_token(self) -> bytes:
        return self._token


def settings(keys: Keys) -> dict[str, Any]:
    """What a Flight server is made with: who may come in, and its certificate."""
    if keys.tls is None:
        return {"auth_handler": SecretServerAuth(keys)}
    cert, key, ca = (Path(path).read_bytes() for path in keys.tls.paths)
    tls = {"tls_certificates": [(cert, key)], "root_certificates": ca, "verify_client": True}
    return {"auth_handler": SecretServerAuth(keys), **tls}


def location(keys: Keys, host: str, port: int) -> str:
    return f"grpc{'+tls' if keys.tls else ''}://{f'[{host}]' if ':' in host else host}:{port}"


class SecretServer(fl.FlightServerBase):  # type: ignore[misc]
    """A server at ``address`` for those who know the secret. Raises HostError where it cannot listen."""

    def __init__(self, keys: Keys, host: str, port: int) -> None:
        try:
            super().__init__(location(keys, host, port), **settings(keys))
        except Exception as error:
            raise HostError(
                f"`host`, `port`: nobody can listen on {host}:{port}: it is taken, or not here"
            ) from error
        self.address = location(keys, host, self.port)


def body(action: Any) -> dict[str, Any]:
    """The fields of a call.

    Raises:
        FlightServerError: they are not understood.
    """
    size = 0 if action.body is None else action.body.size
    if size > LONGEST:
        raise fl.FlightServerError(f"a call of {size} bytes; accepted are at most {LONGEST}")
    return parsed(action.body.to_pybytes() if size else b"{}")


def parsed(text: bytes) -> dict[str, Any]:
    """A JSON object. Raises FlightServerError when it is none."""
    with contextlib.suppress(ValueError, RecursionError):
        content = json.loads(text)
        if isinstance(content, dict):
            return content
    raise fl.FlightServerError("a call is not understood: its body is no JSON object")


def result(answer: dict[str, Any]) -> list[Any]:
    return [fl.Result(json.dumps(answer).encode())]


class FlightLink:
    """A connection to the server at ``address``, made when it is first used and again whenever it is gone.
    Threads may share one. Raises UserError where it is no address."""

    def __init__(self, address: str, keys: Keys) -> None:
        self.address = address if "://" in address else f"grpc{'+tls' if keys.tls else ''}://{address}"
        place = _place(self.address)
        if place is None:
            raise UserError(f"{address!r} is no address of a master, accepted is HOST:PORT")
        self._place = place
        self._keys = keys
        self._client: Any = None
        self._turn = threading.Lock()

    def call(self, action: str, **fields: Any) -> dict[str, Any]:
        """The server's answer.

        Raises:
            ServerLost: nobody answers.
            CallRefused: the server does not take it.
        """
        with self.errors():
            options = fl.FlightCallOptions(timeout=TIMEOUT)
            request = fl.Action(action, json.dumps(fields).encode())
            answers = list(self._connected().do_action(request, options))
            response: dict[str, Any] = json.loads(answers[0].body.to_pybytes())
            return response

    def persist(self, action: str, patience: float, stop: threading.Event, **fields: Any) -> dict[str, Any]:
        """`call`, tried again for ``patience`` seconds while nobody answers, or until ``stop``.

        Raises:
            ServerLost, CallRefused: as `call`.
        """
        last = time.monotonic() + patience
        while True:
            try:
                return self.call(action, **fields)
            except ServerLost as error:
                if time.monotonic() > last:
                    raise ServerLost(f"{error}, for {patience:g} s") from error
                if stop.wait(0.1):
                    raise

    def stream(self, ticket: dict[str, Any]) -> Any:
        """A reader of record batches. Raises as `call`, which its use may, too: see `errors`."""
        with self.errors():
            return self._connected().do_get(fl.Ticket(json.dumps(ticket).encode()))

    @contextlib.contextmanager
    def errors(self) -> Iterator[None]:
        """Flight's errors as ours."""
        try:
            yield
        except (fl.FlightUnavailableError, fl.FlightTimedOutError, fl.FlightCancelledError) as error:
            self.close()
            text = _sentence(error)
            if "handshake failed" in text:
                raise UserError(f"{self.address}: no TLS with it: {text.rpartition('::')[2]}") from error
            if "Socket closed" in text and self._keys.tls is None and _asks_for_tls(self._place):
                raise UserError(f"{self.address} asks for TLS, accepted are {', '.join(OPTIONS)}") from error
            raise ServerLost(f"{self.address} does not answer: {text}") from error
        except fl.FlightUnauthenticatedError as error:
            self.close()
            raise ServerLost(f"{self.address} does not know us any more") from error
        except handshake.HandshakeRefused as error:
            self.close()
            raise UserError(f"{self.address}: whoever listens there does not know the secret") from error
        except (fl.FlightError, OSError, ValueError) as error:
            raise CallRefused(_sentence(error)) from error

    def close(self) -> None:
        """The connection ends with its last call: Flight's own close pulls it from under other threads."""
        with self._turn:
            self._client = None

    def _connected(self) -> Any:
        with self._turn:
            if self._client is None:
                tls_options: dict[str, Any] = {}
                if self._keys.tls is None and self.address.startswith("grpc+tls"):
                    raise UserError(f"{self.address} asks for TLS, accepted are {', '.join(OPTIONS)}")
                if self._keys.tls is not None:
                    cert, key, ca = (Path(path).read_bytes() for path in self._keys.tls.paths)
                    tls_options = {"cert_chain": cert, "private_key": key, "tls_root_certs": ca}
                client = fl.connect(self.address, **tls_options)
                try:
                    client.authenticate(_SecretClientAuth(self._keys), fl.FlightCallOptions(timeout=TIMEOUT))
                except fl.FlightUnauthenticatedError as error:
                    raise UserError(f"{self.address}: it does not take our secret") from error
                self._client = client
            return self._client


def _sentence(error: BaseException) -> str:
    """What the server said, without what Flight and gRPC put around it."""
    text = str(error)
    for start in ("with message: ", "returned "):
        text = text.rpartition(start)[2] if start in text else text
    return text.split(". Detail:")[0].split(". gRPC client debug")[0].strip()


def _asks_for_tls(place: tuple[str, int]) -> bool:
    """What gRPC itself does not say of a server that closes the connection."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with contextlib.suppress(OSError), socket.create_connection(place, 1.0) as plain:
        plain.settimeout(1.0)
        with context.wrap_socket(plain):
            return True
    return False


def _place(address: str) -> tuple[str, int] | None:
    """Host and port; None where it has not both."""
    with contextlib.suppress(ValueError):
        parts = urlsplit(address)
        if parts.hostname and parts.port and " " not in address:
            return parts.hostname, parts.port
    return None
