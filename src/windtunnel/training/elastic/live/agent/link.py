"""The agent's connections: to the supervisor, and the Unix socket on which its workers speak to it.

That to the supervisor is made again for ever, and nothing said on it is lost in between. After each
connection the agent says ``hello`` with all that is still open; the ``welcome`` makes the link. What is sent
before waits and follows then. The supervisor answers every beat: where nothing comes for `SILENCE` seconds it
is cut off, or stopped, and the connection is made anew, with it or with the one that follows it.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

from windtunnel.base import handshake, schema, wire
from windtunnel.base.keys import Keys
from windtunnel.base.listener import Listener, peer
from windtunnel.training.elastic.live.messages import FROM_SUPERVISOR, FROM_WORKER
from windtunnel.training.elastic.model import SUPERVISOR

LONGEST_PAUSE = 0.2
SILENCE = 5.0
KEPT = 4096
Message = dict[str, Any]


class Link:
    """``hello()`` makes the first message of each connection, ``deliver(message)`` gets all that arrive."""

    def __init__(
        self, address: str, keys: Keys, hello: Callable[[], Message], deliver: Callable[[Message], None]
    ) -> None:
        self.address = address
        self._keys = keys
        self.beat = 0.2
        self.last_heard = time.monotonic()
        self._hello, self._deliver = hello, deliver
        self._lock = threading.Lock()
        self._sock: socket.socket | None = None  # only while welcome
        self._waiting: deque[Message] = deque(maxlen=KEPT)
        self._ended = threading.Event()
        self._threads = [
            threading.Thread(target=target, name=f"link-{target.__name__}", daemon=True)
            for target in (self._connect_for_ever, self._beat_for_ever)
        ]

    def start(self) -> None:
        """Begin to connect."""
        for thread in self._threads:
            thread.start()

    def send(self, message: Message, *, keep: bool = True) -> None:
        """Send, now or (``keep``) after the next welcome."""
        with self._lock:
            if self._sock is not None:
                try:
                    wire.send(self._sock, message)
                    return
                except OSError:
                    self._drop()
            if keep:
                self._waiting.append(message)

    def close(self) -> None:
        """End the connection and its threads."""
        self._ended.set()
        with self._lock:
            self._drop()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(2.0)

    def _drop(self) -> None:
        if self._sock is not None:
            with contextlib.suppress(OSError):
                self._sock.shutdown(socket.SHUT_RDWR)
            self._sock = None

    def _connect_for_ever(self) -> None:
        pause = 0.01
        while not self._ended.is_set():
            try:
                sock = handshake.connect(self.address, 1.0, self._keys, SUPERVISOR)
            except OSError:
                self._ended.wait(pause)
                pause = min(2 * pause, LONGEST_PAUSE)
                continue
            try:
                self._converse(sock)
                pause = 0.01
            except (OSError, wire.WireError):
                self._ended.wait(pause)
                pause = min(2 * pause, LONGEST_PAUSE)
            finally:
                with self._lock:
                    self._drop()
                sock.close()

    def _converse(self, sock: socket.socket) -> None:
        if sock.family in (socket.AF_INET, socket.AF_INET6):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(SILENCE * 1000))
        sock.settimeout(SILENCE)
        wire.send(sock, self._hello())
        while not self._ended.is_set():
            message, following = wire.receive(sock)
            wire.skip(sock, following)
            schema.require(message, FROM_SUPERVISOR)
            self.last_heard = time.monotonic()
            if message["op"] == "welcome":
                self.beat = float(message.get("beat", self.beat))
                self._welcome(sock)
            self._deliver(message)

    def _welcome(self, sock: socket.socket) -> None:
        with self._lock:
            self._sock = sock
            while self._waiting:
                wire.send(sock, self._waiting[0])
                self._waiting.popleft()

    def _beat_for_ever(self) -> None:
        while not self._ended.wait(self.beat):
            with self._lock:
                if self._sock is not None:
                    try:
                        wire.send(self._sock, {"op": "beat"})
                    except OSError:
                        self._drop()


class LocalConnection:
    """One worker's connection. ``pid``: of the process at its other end, as the kernel says."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._lock = threading.Lock()
        self.pid, _ = peer(sock)

    def send(self, message: Message) -> None:
        """Say ``message``; a worker that is gone or frozen shows by other signs, so nothing is raised."""
        with contextlib.suppress(OSError), self._lock:
            wire.send(self._sock, message)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)


class LocalServer:
    """``deliver(connection, message)`` gets what the workers say; a message None says that one is gone."""

    def __init__(self, path: Path, deliver: Callable[[LocalConnection, Message | None], None]) -> None:
        self.path = path
        self._deliver = deliver
        path.unlink(missing_ok=True)
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(str(path))
        os.chmod(path, 0o600)
        listener.listen(64)
        self._listener = Listener(listener, self._read_for_ever, name="local-server")

    def close(self) -> None:
        """No more connections."""
        self._listener.close()
        self.path.unlink(missing_ok=True)

    def _read_for_ever(self, sock: socket.socket) -> None:
        connection = LocalConnection(sock)
        # A frozen worker does not read: what waits for it fills the socket, and must not hold the agent up.
        sock.setsockopt(
            socket.SOL_SOCKET, socket.SO_SNDTIMEO, (0).to_bytes(8, "little") + (200_000).to_bytes(8, "little")
        )
        try:
            while True:
                message, following = wire.receive(sock)
                wire.skip(sock, following)
                self._deliver(connection, schema.require(message, FROM_WORKER))
        finally:
            self._deliver(connection, None)
