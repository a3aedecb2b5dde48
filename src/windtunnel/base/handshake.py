"""Both ends of a connection show each other that they know the job's secret, before either says a word.

    client                                             server
    hello   MAGIC, which service is meant, nonce   ->
                                                   <-  nonce, proof of the server     answer
    proof   of the client                          ->
    frames of `wire`, each with its tag           <->  frames of `wire`, each with its tag

All keys are derived by HKDF (RFC 5869: extract, then expand) from the secret, salted with both nonces, and
bound to the service and to the certificates in use. The proofs and the keys of the two directions have labels
of their own. So nothing of one connection is of any use on another: a proof that was recorded is for a nonce
that never comes again; one that is sent back to its author has the wrong label; one that was made for the
memory of a host is none for its supervisor, nor for the memory of another host. Where the connection is
encrypted (`tls`), its own handshake goes before.

A service is named by what both ends take it for: "rpc", or "memory" with the address that its clients know.
Whoever has not shown that he knows the secret has sent at most `STRANGE` bytes (of what is encrypted).
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import secrets
import socket
import struct
import time

from windtunnel.base import tls, wire
from windtunnel.base.keys import Keys
from windtunnel.base.wire import Secured, WireError, WireSession

MAGIC = b"wtunnel1"
PATIENCE = 5.0
"""Seconds in which a stranger must have shown that he knows the secret."""
NONCE, PROOF = 32, 32
_HELLO = struct.Struct(f"!{len(MAGIC)}s32s{NONCE}s")
_ANSWER = struct.Struct(f"!{NONCE}s{PROOF}s")
STRANGE = _HELLO.size + PROOF


class HandshakeRefused(WireError):
    """The peer does not know the secret."""


class _Derived:
    """What both sides can derive once they know both nonces."""

    def __init__(self, keys: Keys, service: bytes, client: bytes, server: bytes, binding: bytes) -> None:
        self._root = hmac.digest(client + server, keys.secret, "sha256")
        self._about = MAGIC + service + binding

    def expand(self, label: bytes) -> bytes:
        return hmac.digest(self._root, self._about + label + b"\x01", "sha256")

    def client_session(self) -> WireSession:
        return WireSession(self.expand(b"client sends"), self.expand(b"server sends"))

    def server_session(self) -> WireSession:
        return WireSession(self.expand(b"server sends"), self.expand(b"client sends"))


def named(service: str) -> bytes:
    """The name of a service as it is sent."""
    return hashlib.sha256(service.encode()).digest()


class ClientHandshake:
    """The client's side, without a socket: send `hello`, receive `ANSWER` bytes, send what `prove` says."""

    ANSWER = _ANSWER.size

    def __init__(self, keys: Keys, service: str, binding: bytes = b"") -> None:
        self._keys, self._service, self._binding = keys, named(service), binding
        self._nonce = secrets.token_bytes(NONCE)
        self.hello = _HELLO.pack(MAGIC, self._service, self._nonce)

    def prove(self, answer: bytes) -> tuple[bytes, WireSession]:
        """The client's proof, and the session that begins with it.

        Raises:
            Refused: whoever answered does not know the secret.
        """
        nonce, proof = _ANSWER.unpack(answer)
        derived = _Derived(self._keys, self._service, self._nonce, nonce, self._binding)
        if not hmac.compare_digest(derived.expand(b"server proves"), proof):
            raise HandshakeRefused("whoever listens there does not know the job's secret")
        return derived.expand(b"client proves"), derived.client_session()


class ServerHandshake:
    """The server's side, without a socket. ``services``: the names under which it is meant."""

    def __init__(self, keys: Keys, services: tuple[str, ...], binding: bytes = b"") -> None:
        self._keys, self._binding = keys, binding
        self._services = {named(service) for service in services}
        self._derived: _Derived | None = None

    def take(self, buffer: bytearray) -> tuple[bytes, WireSession | None]:
        """Take what a stranger has sent so far out of ``buffer``: what to send him, and his session once he
        is none any more.

        Raises:
            Refused: he does not know the secret, or means another service.
        """
        if self._derived is None:
            # Before the answer nobody can have anything more to say.
            if len(buffer) > _HELLO.size or not MAGIC.startswith(buffer[: len(MAGIC)]):
                raise HandshakeRefused("a stranger speaks something else")
            if len(buffer) < _HELLO.size:
                return b"", None
            _, service, client = _HELLO.unpack(buffer)
            if service not in self._services:
                raise HandshakeRefused("a stranger means another service")
            buffer.clear()
            server = secrets.token_bytes(NONCE)
            self._derived = _Derived(self._keys, service, client, server, self._binding)
            return _ANSWER.pack(server, self._derived.expand(b"server proves")), None
        if len(buffer) < PROOF:
            return b"", None
        if not hmac.compare_digest(self._derived.expand(b"client proves"), bytes(buffer[:PROOF])):
            raise HandshakeRefused("a stranger does not know the job's secret")
        del buffer[:PROOF]
        return b"", self._derived.server_session()


def connect(address: str, timeout: float, keys: Keys, service: str) -> socket.socket:
    """A connection to ``service`` at "host:port" or "unix:/path", with ``timeout`` on it; over TCP both
    sides know that the other knows the secret when the first answer is there, and it is encrypted where the
    ``keys`` have certificates.

    Raises:
        Refused: whoever listens there does not know the secret.
        tls.Untrusted: it has no certificate that we take, or does not take ours; one side has none.
        OSError: nobody listens there, or answers within ``timeout``.
    """
    if address.startswith("unix:"):
        return wire.connect(address, timeout)
    end = time.monotonic() + timeout
    plain = wire.connect(address, timeout)
    sock = keys.tls.connected(plain, timeout) if keys.tls else Secured(fileno=plain.detach())
    try:
        client = ClientHandshake(keys, service, sock.binding)
        sock.settimeout(timeout)
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # reading will say why
            sock.sendall(client.hello)
        answer = bytearray(ClientHandshake.ANSWER)
        try:
            _fill_by(sock, memoryview(answer), end)
        except OSError as error:
            if answer.startswith(tls.ALERT[:2]):
                raise tls.Untrusted(
                    f"who listens there asks for TLS; give {', '.join(tls.OPTIONS)}"
                ) from error
            raise
        proof, sock.authentic = client.prove(bytes(answer))
        sock.sendall(proof)
        sock.settimeout(timeout)
    except BaseException:
        sock.close()
        raise
    return sock


def admit(sock: Secured, keys: Keys, services: tuple[str, ...]) -> None:
    """The server's side on a socket that has just been accepted; it has a session afterwards.

    Raises:
        Refused: the stranger does not know the secret. tls.Untrusted: it has no certificate that we take.
        OSError: he is gone, or took longer than `PATIENCE`.
    """
    end = time.monotonic() + PATIENCE
    if isinstance(sock, tls.Encrypted):
        sock.settimeout(PATIENCE)
        sock.do_handshake()
    server, got = ServerHandshake(keys, services, sock.binding), bytearray()
    while sock.authentic is None:
        # Never more than the handshake takes: what follows is the reader's.
        part = bytearray((_HELLO.size if server._derived is None else PROOF) - len(got))
        _fill_by(sock, memoryview(part), end)
        got += part
        answer, sock.authentic = server.take(got)
        if answer:
            sock.sendall(answer)


def _fill_by(sock: socket.socket, view: memoryview, end: float) -> None:
    """`wire.fill`, all of it until ``end``: a peer that sends a byte now and then gets no more time."""
    at = 0
    while at < len(view):
        left = end - time.monotonic()
        if left <= 0:
            raise TimeoutError("the handshake took too long")
        sock.settimeout(left)
        count = sock.recv_into(view[at:])
        if count == 0:
            raise WireError("the peer closed the connection before it had shown that it knows the secret")
        at += count
