"""TLS for the connections of a job, with certificates that its user gives.

Both sides of a connection show a certificate and verify the other's chain against the CA; TLS 1.3, nothing
older. The name in a certificate is not looked at: hosts of a job come under addresses of all kinds, so who
has a certificate of this CA is taken for one of its hosts. What lets a peer in is the job's secret as before
(`handshake`), whose proofs hold for the two certificates of the connection alone: somebody in the middle with
a certificate of his own finds that neither side takes the other's proof.

The three files are read when a process starts, and travel between processes as their names. No session is
ever resumed: each connection verifies anew.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import re
import select
import socket
import ssl
import stat
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from typing_extensions import Buffer

from windtunnel.base.errors import UserError
from windtunnel.base.wire import Secured, WireError

T = TypeVar("T")

OPTIONS = ("--tls-cert", "--tls-key", "--tls-ca")
ALERT = bytes.fromhex("15030300020246")
"""What TLS says to one who speaks something else: an alert, "protocol version" (RFC 8446, 6)."""
_PEM = re.compile(r"-----BEGIN CERTIFICATE-----.+?-----END CERTIFICATE-----", re.DOTALL)
_NOT_TLS = ("WRONG_VERSION_NUMBER", "HTTP_REQUEST", "HTTPS_PROXY_REQUEST")


class Untrusted(WireError):
    """The peer has no certificate of the job's CA, or does not take ours, or speaks no TLS 1.3."""


@dataclass(frozen=True)
class Certificates:
    """What one host shows, and what it verifies with. ``paths``: of its certificate (with what lies between
    it and the CA), its private key, the CA. ``own``: SHA-256 of the certificate."""

    paths: tuple[str, str, str]
    own: bytes = field(repr=False)
    server: ssl.SSLContext = field(repr=False, compare=False)
    client: ssl.SSLContext = field(repr=False, compare=False)

    @staticmethod
    def load(paths: Sequence[str]) -> Certificates:
        """Read the three files.

        Raises:
            UserError: one cannot be read, others may read the key, or it belongs to another certificate.
        """
        certificate, key, ca = (
            _read(option, path, private=option == "--tls-key")
            for option, path in zip(OPTIONS, paths, strict=True)
        )
        contexts = []
        for protocol in (ssl.PROTOCOL_TLS_SERVER, ssl.PROTOCOL_TLS_CLIENT):
            context = ssl.SSLContext(protocol)
            context.minimum_version = ssl.TLSVersion.TLSv1_3
            context.check_hostname = False
            context.verify_mode = ssl.CERT_REQUIRED
            context.options |= ssl.OP_IGNORE_UNEXPECTED_EOF  # see `Encrypted`
            context.sslsocket_class = Encrypted
            _load(context, certificate, key, ca)
            contexts.append(context)
        contexts[0].num_tickets = 0
        first = _PEM.search(certificate.text)
        assert first is not None  # it was loaded
        own = hashlib.sha256(ssl.PEM_cert_to_DER_cert(first[0])).digest()
        return Certificates((certificate.path, key.path, ca.path), own, *contexts)

    def verify(self) -> None:
        """Connect with ourselves, in memory: what any peer would find wrong is found now.

        Raises:
            UserError: the certificate is not from this CA, not valid now, or not for both sides.
        """
        there, back = ssl.MemoryBIO(), ssl.MemoryBIO()
        client = self.client.wrap_bio(back, there)
        server = self.server.wrap_bio(there, back, server_side=True)
        for _ in range(2):
            for side in (client, server):
                try:
                    with contextlib.suppress(ssl.SSLWantReadError):
                        side.do_handshake()
                except ssl.SSLCertVerificationError as error:
                    raise UserError(
                        f"--tls-cert {self.paths[0]}: it does not hold against --tls-ca {self.paths[2]}: "
                        f"{error.verify_message}"
                    ) from error
                except ssl.SSLError as error:
                    raise UserError(f"--tls-cert {self.paths[0]}: {reason_of(error)}") from error

    def accepted(self, sock: socket.socket) -> Encrypted:
        """A connection that has just been accepted; its first use makes the handshake.

        Raises:
            OSError: it has ended already.
        """
        return self._wrapped(sock, self.server)

    def connected(self, sock: socket.socket, timeout: float) -> Encrypted:
        """A connection that we have made, with its handshake; ``timeout`` stays on it.

        Raises:
            Untrusted: the peer shows no certificate of the CA, or speaks no TLS.
            OSError: it ended, or took longer than ``timeout`` seconds.
        """
        encrypted = self._wrapped(sock, self.client)
        try:
            encrypted.settimeout(timeout)
            encrypted.do_handshake()
        except ConnectionResetError as error:
            encrypted.close()
            raise Untrusted("who listens there ends the handshake of TLS; it may speak without") from error
        except BaseException:
            encrypted.close()
            raise
        return encrypted

    def _wrapped(self, sock: socket.socket, context: ssl.SSLContext) -> Encrypted:
        server = context is self.server
        try:
            encrypted = context.wrap_socket(sock, server_side=server, do_handshake_on_connect=False)
        except BaseException:
            sock.close()
            raise
        assert isinstance(encrypted, Encrypted)
        encrypted.own, encrypted.is_server = self.own, server
        return encrypted


class Encrypted(ssl.SSLSocket, Secured):
    """A TCP socket whose bytes are encrypted, to be used as one that is not: one thread may send while
    another receives.

    OpenSSL lets only one thread at a time use a connection. So the socket itself never waits: each call takes
    its turn, and whoever has to wait does so outside of it, for the time that `settimeout` allows. Made by
    `Certificates` alone. `shutdown` is that of TCP: frames say how long they are, so an end that TLS has not
    announced cuts off nothing that was whole.
    """

    own: bytes
    is_server: bool
    _turn: threading.RLock  # type: ignore[valid-type]
    _patience: float | None

    def __new__(cls, *arguments: Any, **named: Any) -> Encrypted:
        self = super().__new__(cls, *arguments, **named)
        self._turn, self._patience = threading.RLock(), None
        return self

    @property
    def binding(self) -> bytes:
        """The two certificates of the connection, the client's first; once its handshake is over."""
        theirs = self.getpeercert(binary_form=True)
        assert theirs is not None  # both sides must show one
        peer = hashlib.sha256(theirs).digest()
        return peer + self.own if self.is_server else self.own + peer

    def settimeout(self, value: float | None) -> None:
        self._patience = value
        super().settimeout(0.0)

    def gettimeout(self) -> float | None:
        return self._patience

    def setblocking(self, flag: bool) -> None:
        self.settimeout(None if flag else 0.0)

    def do_handshake(self, block: bool = False) -> None:
        self._patiently(super().do_handshake, self._end())

    def recv(self, buflen: int = 1024, flags: int = 0) -> bytes:
        assert not flags
        return self._patiently(lambda: self.read(buflen), self._end())

    def recv_into(self, buffer: Buffer, nbytes: int | None = None, flags: int = 0) -> int:
        assert not flags
        view = memoryview(buffer)
        count = nbytes or len(view)
        # With a buffer it is the count that is returned.
        return int(self._patiently(lambda: self.read(count, view), self._end()))  # type: ignore[call-overload]

    def send(self, data: Buffer, flags: int = 0) -> int:
        assert not flags
        return self._patiently(lambda: self.write(data), self._end())

    def sendall(self, data: Buffer, flags: int = 0) -> None:
        assert not flags
        view, end = memoryview(data).cast("B"), self._end()
        at = 0
        while at < len(view):
            rest = view[at:]
            at += self._patiently(lambda: self.write(rest), end)  # noqa: B023 (called at once)

    def shutdown(self, how: int) -> None:
        # SSLSocket's own would go on without encryption.
        socket.socket.shutdown(self, how)

    def _real_close(self) -> None:
        # Its number may be another socket's an instant later, whose bytes a read under way would take.
        with self._turn:
            super()._real_close()  # type: ignore[misc]

    def _end(self) -> float | None:
        return None if self._patience is None else time.monotonic() + self._patience

    def _patiently(self, step: Callable[[], T], end: float | None) -> T:
        """What ``step`` returns, once it need not wait any more.

        Raises:
            Untrusted: the handshake failed, or what came is not from the peer.
            OSError: the connection ended; it took longer than until ``end``.
        """
        while True:
            try:
                with self._turn:
                    return step()
            except ssl.SSLWantReadError:
                event = select.POLLIN
            except ssl.SSLWantWriteError:
                event = select.POLLOUT
            except (ssl.SSLEOFError, ssl.SSLZeroReturnError) as error:
                raise ConnectionResetError(errno.ECONNRESET, os.strerror(errno.ECONNRESET)) from error
            except ssl.SSLError as error:
                self._fail(error)
            except ValueError as error:  # somebody has closed it
                raise OSError(errno.EBADF, os.strerror(errno.EBADF)) from error
            self._wait(event, end)

    def _wait(self, event: int, end: float | None) -> None:
        left = None if end is None else end - time.monotonic()
        if self._patience == 0.0:
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        poll = select.poll()
        try:
            poll.register(self.fileno(), event)
        except ValueError as error:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF)) from error
        if (left is not None and left <= 0) or not poll.poll(None if left is None else 1000 * left):
            raise TimeoutError(errno.ETIMEDOUT, "timed out")

    def _fail(self, error: ssl.SSLError) -> NoReturn:
        if error.reason in _NOT_TLS and self.is_server:
            with contextlib.suppress(OSError):  # so that it learns why; what it said is dropped
                socket.socket.send(self, ALERT)
                socket.socket.recv(self, 1 << 12)
        raise Untrusted(reason_of(error)) from error


def certificate_files(*paths: Path | None) -> tuple[str, ...]:
    """The files that a user gives by `OPTIONS`, for `Certificates.load`; nothing where he gives none.

    Raises:
        UserError: he gives some.
    """
    if not any(paths):
        return ()
    for option, path in zip(OPTIONS, paths, strict=True):
        if path is None:
            raise UserError(f"{option} FILE is missing: {', '.join(OPTIONS)} are given together, or none")
    return tuple(str(path.absolute()) for path in paths if path is not None)


def reason_of(error: ssl.SSLError) -> str:
    """What the peer's matter is, in words."""
    reason = error.reason or ""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"the peer's certificate is refused: {error.verify_message}"
    if reason in _NOT_TLS:
        return "the peer does not speak TLS"
    if reason == "PEER_DID_NOT_RETURN_A_CERTIFICATE":
        return "the peer has no certificate"
    if reason == "UNSUPPORTED_PROTOCOL":
        return "the peer does not speak TLS 1.3"
    words = reason.replace("_", " ").lower() or str(error)
    if "alert" not in words:
        return f"TLS: {words}"
    what = "this side's certificate" if "certificate" in words or "unknown ca" in words else "the connection"
    return f"the peer refuses {what} ({words})"


@dataclass(frozen=True)
class _File:
    option: str
    path: str
    text: str = field(repr=False)

    @property
    def where(self) -> str:
        return f"{self.option} {self.path}"


def _read(option: str, path: str, *, private: bool) -> _File:
    try:
        with Path(path).open("rb") as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            text = file.read(1 << 20).decode("ascii", "replace")
    except OSError as error:
        raise UserError(f"{option} {path}: it cannot be read ({error.strerror})") from error
    if private and mode & 0o077:
        raise UserError(
            f"{option} {path}: others may read or write the key (mode {mode:04o}); accepted is mode 0600"
        )
    return _File(option, path, text)


def _load(context: ssl.SSLContext, certificate: _File, key: _File, ca: _File) -> None:
    for file in (certificate, ca):
        if not _PEM.search(file.text):
            raise UserError(f"{file.where}: there is no certificate in it; accepted is PEM")
    try:
        context.load_verify_locations(cadata="\n".join(_PEM.findall(ca.text)))
    except (ssl.SSLError, ValueError) as error:
        raise UserError(f"{ca.where}: a certificate in it cannot be read ({error})") from error

    def encrypted() -> NoReturn:
        raise UserError(f"{key.where}: the key needs a password; accepted is one without")

    try:
        context.load_cert_chain(certificate.path, key.path, encrypted)
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise UserError(f"{key.where}: it is not the key of --tls-cert {certificate.path}") from error
        what = f"{certificate.where} with {key.where}"
        raise UserError(f"{what}: no certificate and key that can be read ({reason_of(error)})") from error
