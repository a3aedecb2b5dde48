"""HTTP to a daemon with the standard library, over its Unix socket or to a URL.

A command of the command line is one request: `http.client` is imported in a tenth of the time that httpx
takes. Connections are kept for the next request; answers are read piece by piece as they come.
"""

from __future__ import annotations

import contextlib
import errno
import json
import select
import socket
import threading
from collections.abc import Iterator, Mapping
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from typing import Any
from urllib.parse import urlencode, urlsplit

from windtunnel.base.errors import UserError

REACH_SECONDS = 10.0
"""A command or a restore takes as long as it takes; only reaching the daemon has a limit."""
KEPT = 32
"""Connections that are kept open for the next request."""
PIECE = 1 << 16


class Unreachable(Exception):
    """Nobody listens there, so nothing was sent."""


class Untaken(Unreachable):
    """Whoever had it to read has ended before all of it was read, so nothing was done."""


class Broken(Exception):
    """The connection ended before the answer did."""


class Pool:
    """Connections to one daemon; any thread may use it.

    Args:
        url: its base URL, with a path where a proxy gives it one.
        path: its Unix socket; None: by TCP to the host of the URL.
        headers: sent with every request.

    Raises:
        UserError: the URL names no host or port.
    """

    def __init__(self, url: str, path: str | None, headers: Mapping[str, str]) -> None:
        try:
            parts = urlsplit(url)
            self._port, self._host = parts.port, parts.hostname
        except ValueError as error:
            raise UserError(f"sandbox: {url!r} is no URL: {error}") from error
        if not self._host or any(one.isspace() or not one.isprintable() for one in url):
            raise UserError(f"sandbox: {url!r} is no URL; write http://HOST:PORT")
        self._secure, self._prefix = parts.scheme == "https", parts.path.rstrip("/")
        self._socket, self._headers = path, dict(headers)
        self._idle: list[HTTPConnection] = []
        self._lock = threading.Lock()
        self._open = True

    def send(
        self,
        method: str,
        path: str,
        query: Mapping[str, Any],
        body: Any = None,
        content: Iterator[bytes] | None = None,
    ) -> Answer:
        """One request, with a JSON ``body`` or with ``content``; the answer, still to be read and closed.

        Raises:
            Unreachable: nothing was sent.
            Untaken: not all of it was read; told on a Unix socket, and not of an upload.
            Broken: the connection ended before an answer began.
        """
        target = self._prefix + path
        if query:
            plain = {key: str(one).lower() if isinstance(one, bool) else one for key, one in query.items()}
            target += "?" + urlencode(plain, errors="surrogateescape")
        headers, data = dict(self._headers), None
        if body is not None:
            headers["Content-Type"] = "application/json"
            data = json.dumps(body, separators=(",", ":")).encode()
        elif content is not None:
            headers["Transfer-Encoding"] = "chunked"
        upload = None if content is None else _Upload(content)
        connection = self._connection()
        try:
            # it may have answered before it had all of an upload
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                connection.request(
                    method, target, data if upload is None else upload, headers, encode_chunked=True
                )
            return Answer(self, connection, connection.getresponse())
        except BaseException as error:
            connection.close()
            if upload is not None and upload.failed is not None:
                raise upload.failed from None
            if isinstance(error, OSError | HTTPException):
                # a Unix socket tells its end after all was read from one with something unread in it
                unread = isinstance(error, OSError) and error.errno == errno.ECONNRESET
                if unread and self._socket is not None and upload is None:
                    raise Untaken(_words(error)) from error
                raise Broken(_words(error)) from error
            raise

    def close(self) -> None:
        """Close the connections that no request uses; one in use is closed when its answer is."""
        with self._lock:
            self._open = False
            idle, self._idle = self._idle, []
        for one in idle:
            one.close()

    def _connection(self) -> HTTPConnection:
        while True:
            with self._lock:
                kept = self._idle.pop() if self._idle else None
            if kept is None:
                return self._connected()
            # what can be read on a connection without a request is its end
            if kept.sock is not None and not select.select([kept.sock], [], [], 0)[0]:
                return kept
            kept.close()

    def _connected(self) -> HTTPConnection:
        made: HTTPConnection
        if self._socket is not None:
            made = _Local(self._socket)
        else:
            kind = HTTPSConnection if self._secure else HTTPConnection
            made = kind(str(self._host), self._port, timeout=REACH_SECONDS)
        try:
            made.connect()
        except OSError as error:
            made.close()
            raise Unreachable(_words(error)) from error
        made.sock.settimeout(None)
        return made

    def give_back(self, connection: HTTPConnection) -> None:
        """Nothing of its answer is left to read."""
        with self._lock:
            if self._open and connection.sock is not None and len(self._idle) < KEPT:
                self._idle.append(connection)
                return
        connection.close()


class Answer:
    """The answer to one request. Closing it before its end ends it at the daemon too."""

    def __init__(self, pool: Pool, connection: HTTPConnection, response: HTTPResponse) -> None:
        self._pool, self._connection, self._response = pool, connection, response
        self.status = response.status
        self._whole = False

    def pieces(self) -> Iterator[bytes]:
        """Its bytes as they come. Raises Broken when it ends too early."""
        while True:
            try:
                piece = self._response.read1(PIECE)
            except (OSError, HTTPException) as error:
                raise Broken(_words(error)) from error
            if not piece:
                break
            yield piece
        if self._response.length:
            raise Broken("the answer was cut short")
        self._whole = True

    def close(self) -> None:
        self._response.close()
        if self._whole:
            self._pool.give_back(self._connection)
        else:
            self._connection.close()


class _Upload(Iterator[bytes]):
    """The pieces of an upload. ``failed``: what their source raised, which is no fault of the connection."""

    def __init__(self, pieces: Iterator[bytes]) -> None:
        self._pieces = pieces
        self.failed: Exception | None = None

    def __next__(self) -> bytes:
        try:
            return next(self._pieces)
        except StopIteration:
            raise
        except Exception as error:
            self.failed = error
            raise


class _Local(HTTPConnection):
    """To a Unix socket."""

    def __init__(self, path: str) -> None:
        super().__init__("sandbox")
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(REACH_SECONDS)
        self.sock.connect(self._path)


def _words(error: Exception) -> str:
    return str(error) or type(error).__name__
