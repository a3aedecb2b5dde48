"""The Unix socket on which the agent's workers speak to it."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from windtunnel.base import wire

Message = dict[str, Any]


class Visitor:
    """One worker's connection. ``pid``: of the process at its other end, as the kernel says."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._lock = threading.Lock()
        credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        self.pid = int.from_bytes(credentials[:4], "little")

    def send(self, message: Message) -> None:
        """Say ``message``; a worker that is gone or frozen shows by other signs, so nothing is raised."""
        with contextlib.suppress(OSError), self._lock:
            wire.send(self._sock, message)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)


class Door:
    """``deliver(visitor, message)`` gets what the workers say; a message None says that one is gone."""

    def __init__(self, path: Path, deliver: Callable[[Visitor, Message | None], None]) -> None:
        self.path = path
        self._deliver = deliver
        path.unlink(missing_ok=True)
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        os.chmod(path, 0o600)
        self._listener.listen(64)
        self._thread = threading.Thread(target=self._accept_for_ever, name="door", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """No more visitors."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join(2.0)
        self._listener.close()
        self.path.unlink(missing_ok=True)

    def _accept_for_ever(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._read_for_ever, args=(sock,), name="visitor", daemon=True).start()

    def _read_for_ever(self, sock: socket.socket) -> None:
        visitor = Visitor(sock)
        # A frozen worker does not read: what waits for it fills the socket, and must not hold the agent up.
        sock.setsockopt(
            socket.SOL_SOCKET, socket.SO_SNDTIMEO, (0).to_bytes(8, "little") + (200_000).to_bytes(8, "little")
        )
        try:
            while True:
                message, following = wire.receive(sock)
                wire.skip(sock, following)
                self._deliver(visitor, message)
        except (OSError, wire.WireError):
            self._deliver(visitor, None)
        finally:
            sock.close()
