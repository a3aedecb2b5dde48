"""A TCP port of the loopback that nobody can connect to but who opens it: for a service that asks nobody who
he is.

The kernel drops what comes to the listening socket unless its source port is the one that
`ListeningGate.connect` has bound for itself, which nobody else can use meanwhile. No privilege is needed. A
connection keeps the filter that its socket was made under.

Source: Linux, socket(7), SO_ATTACH_FILTER; a filter sees a TCP socket's packets from the TCP header on.
"""

from __future__ import annotations

import ctypes
import socket
import threading
import time

from windtunnel.base import connections

_SO_ATTACH_FILTER = 26
_LOAD_HALF, _JUMP_EQUAL, _RETURN = 0x28, 0x15, 0x06
_NOBODY = 0  # no packet has this source port
_LOOK = 0.0005  # seconds


class _Instruction(ctypes.Structure):
    _fields_ = (
        ("code", ctypes.c_uint16),
        ("true", ctypes.c_uint8),
        ("false", ctypes.c_uint8),
        ("k", ctypes.c_uint32),
    )


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_uint16), ("first", ctypes.POINTER(_Instruction)))


class ListeningGate:
    """Listens at ``address``. ``listener``: for whoever serves it, with `dup`.

    Raises:
        OSError: the address cannot be listened on, or the kernel has no such filters.
    """

    def __init__(self, address: tuple[str, int], backlog: int = 512) -> None:
        self._lock = threading.Lock()
        self.listener = socket.socket()
        try:
            self._admit(_NOBODY)
            self.listener.bind(address)
            self.listener.listen(backlog)
        except BaseException:
            self.listener.close()
            raise
        self.address: tuple[str, int] = self.listener.getsockname()

    def connect(self, timeout: float) -> socket.socket:
        """A connection to it; ``timeout`` stays on it.

        Raises:
            OSError: nobody serves it, or not within ``timeout`` seconds.
        """
        last = time.monotonic() + timeout
        sock = socket.socket()
        try:
            sock.settimeout(timeout)
            sock.bind((self.address[0], 0))
            with self._lock:
                self._admit(sock.getsockname()[1])
                try:
                    sock.connect(self.address)
                    self._established(sock, last)
                finally:
                    self._admit(_NOBODY)
        except BaseException:
            sock.close()
            raise
        return sock

    def _established(self, sock: socket.socket, last: float) -> None:
        """The other end has heard that it is: it would not any more, once nobody is admitted."""
        while True:
            end = connections.end(self.address, sock.getsockname())
            if end is not None and end.state == connections.ESTABLISHED:
                return
            if time.monotonic() > last:
                raise TimeoutError(f"{self.address}: no connection in time")
            time.sleep(_LOOK)

    def _admit(self, port: int) -> None:
        rules = (
            _Instruction(_LOAD_HALF, 0, 0, 0),
            _Instruction(_JUMP_EQUAL, 0, 1, port),
            _Instruction(_RETURN, 0, 0, 0xFFFFFFFF),
            _Instruction(_RETURN, 0, 0, 0),
        )
        instructions = (_Instruction * len(rules))(*rules)
        self.listener.setsockopt(
            socket.SOL_SOCKET, _SO_ATTACH_FILTER, bytes(_Program(len(rules), instructions))
        )
