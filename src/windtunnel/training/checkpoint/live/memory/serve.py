"""Listens, and gives each connection a thread that answers one request after the other."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable
from typing import Any

from windtunnel.base import wire
from windtunnel.base.errors import UserError
from windtunnel.training.checkpoint.live.memory.state import Refused
from windtunnel.training.checkpoint.live.slot import CopyError

Message = dict[str, Any]
Handler = Callable[[socket.socket, Message, int], Message | None]
"""Gets the connection, a request, and how many raw bytes follow it; returns the answer (None: it has
answered)."""


class Listener:
    """``handlers``: one for each op. ``silence``: seconds without a byte within a request end a
    connection."""

    def __init__(self, sock: socket.socket, handlers: dict[str, Handler], silence: float) -> None:
        self._sock, self._handlers, self._silence = sock, handlers, silence
        self._open: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._closed = False
        self._thread = threading.Thread(target=self._accept, name="memory-listener", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Take no more connections, end those that there are."""
        with self._lock:
            self._closed = True
            for sock in self._open:
                with contextlib.suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._thread.join(2.0)
        self._sock.close()

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._sock.accept()
            except OSError:
                return
            with self._lock:
                if self._closed:
                    sock.close()
                    return
                self._open.add(sock)
            threading.Thread(target=self._converse, args=(sock,), name="memory-peer", daemon=True).start()

    def _converse(self, sock: socket.socket) -> None:
        if sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            # A peer that vanished between two requests is noticed by the kernel's probes.
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 10)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
        try:
            while True:
                sock.settimeout(None)
                if not sock.recv(1, socket.MSG_PEEK):
                    return
                sock.settimeout(self._silence)
                message, following = wire.receive(sock)
                answer = self._answer(sock, message, following)
                if answer is not None:
                    wire.send(sock, answer)
        except (OSError, wire.WireError):
            return
        finally:
            with self._lock:
                self._open.discard(sock)
            sock.close()

    def _answer(self, sock: socket.socket, message: Message, following: int) -> Message | None:
        op = str(message.get("op"))
        handler = self._handlers.get(op)
        if handler is None:
            wire.skip(sock, following)
            return {"error": "user", "text": f"{op!r} is no request of this service"}
        try:
            return handler(sock, message, following)
        except Refused as error:
            return {"error": error.kind, "text": str(error)}
        except CopyError as error:
            return {"error": "copy", "text": str(error)}
        except UserError as error:
            return {"error": "user", "text": str(error)}
        except (KeyError, ValueError, TypeError) as error:
            return {"error": "user", "text": f"request {op!r} is malformed: {error!r}"}
