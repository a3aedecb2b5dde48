"""What runs on each host of a live run: a program of its own, which needs nothing but Python.

It is the first process of the host's process namespace: when it ends, however that comes, the kernel ends all
that it has started. It ends when the other end of its standard input, a socket, is closed.

Packets there are JSON, one a message. It is asked to ``["send", number, address, bytes]``, to
``["spin", number, seconds]`` and to ``["run", number, words, environment]``; it tells
``[]`` once it listens, ``[number]`` where a flow ended, ``[number, status, seconds of CPU]`` of a process.
Numbers are places in a memory that all hosts share, 8 bytes each: bytes received, or nanoseconds of CPU.
"""

from __future__ import annotations

import json
import mmap
import os
import selectors
import socket
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial

PORT, FIRST, CLASSES = 9_999, 10_000, 3
"""Where hosts listen; flow n comes from port FIRST + n, and belongs to class CLASSES + n."""
_RCVBUFFORCE = 33
_AHEAD = -10
"""Niceness, of the session too: what carries bytes goes before what computes, in sessions of its own."""
_PIECE = 1 << 18


class TaskAgent:
    """``counts``: of 8 bytes each. ``window``: bytes that a flow may have under way."""

    def __init__(self, control: socket.socket, counts: memoryview, window: int) -> None:
        self._control, self._counts = control, counts
        self._poll = selectors.DefaultSelector()
        self._running: dict[int, int] = {}
        self._data, self._room = memoryview(bytes(_PIECE)), bytearray(_PIECE)
        server = socket.create_server(("", PORT), backlog=512)
        server.setsockopt(socket.SOL_SOCKET, _RCVBUFFORCE, window)
        self._poll.register(server, selectors.EVENT_READ, partial(self._accept, server))
        self._poll.register(control, selectors.EVENT_READ, self._read_request)
        self._tell()

    def serve(self) -> None:
        """Until it is not wanted any more."""
        while True:
            for key, _ in self._poll.select():
                key.data()

    def _tell(self, *words: float) -> None:
        self._control.send(json.dumps(words).encode())

    def _read_request(self) -> None:
        message = self._control.recv(1 << 16)
        if not message:
            os._exit(0)
        kind, number, *rest = json.loads(message)
        todo: dict[str, Callable[..., None]] = {"send": self._send, "spin": self._spin, "run": self._run}
        todo[kind](number, *rest)

    def _send(self, number: int, address: str, size: int) -> None:
        plug = socket.socket()
        # without losses, which there are none of below the window, it fills any line
        plug.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"reno")
        plug.setsockopt(socket.SOL_SOCKET, socket.SO_PRIORITY, 0x10000 | number + CLASSES)
        plug.bind(("", FIRST + number))
        plug.setblocking(False)
        plug.connect_ex((address, PORT))
        left = size

        def more() -> None:
            nonlocal left
            try:
                left -= plug.send(self._data[: min(left, _PIECE)])
            except (ConnectionResetError, BrokenPipeError):  # the other host is gone, and that is told
                left = 0
            if not left:
                self._poll.unregister(plug)
                plug.close()

        self._poll.register(plug, selectors.EVENT_WRITE, more)

    def _accept(self, server: socket.socket) -> None:
        plug, (_, port) = server.accept()
        number = port - FIRST

        def more() -> None:
            got = 0
            with suppress(ConnectionResetError):
                got = plug.recv_into(self._room, 0, socket.MSG_TRUNC)
            self._counts[number] += got
            if not got:
                self._poll.unregister(plug)
                plug.close()
                self._tell(number)

        self._poll.register(plug, selectors.EVENT_READ, more)

    def _spin(self, number: int, seconds: float) -> None:
        def work() -> None:
            while (spent := time.process_time()) < seconds:
                self._counts[number] = int(spent * 1e9)
                for _ in range(5000):
                    pass

        self._start(number, work)

    def _run(self, number: int, words: list[str], environment: dict[str, str]) -> None:
        def work() -> None:
            nothing = os.open(os.devnull, os.O_RDONLY)
            os.dup2(nothing, 0)
            try:
                os.execvpe(words[0], words, {**os.environ, **environment})
            except OSError as error:
                print(f"{words[0]}: {error.strerror}", file=sys.stderr, flush=True)
                os._exit(127)

        self._start(number, work)

    def _start(self, number: int, work: Callable[[], None]) -> None:
        child = os.fork()
        if not child:
            try:
                os.setsid()
                os.nice(-_AHEAD)
                work()
            except BaseException as error:
                print(error, file=sys.stderr, flush=True)
                os._exit(1)
            os._exit(0)
        self._running[child] = number
        handle = os.pidfd_open(child)
        self._poll.register(handle, selectors.EVENT_READ, partial(self._ended, handle))

    def _ended(self, handle: int) -> None:
        self._poll.unregister(handle)
        os.close(handle)
        while True:  # also whom others left behind
            try:
                child, status, used = os.wait4(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if not child:
                return
            if child in self._running:
                code = os.waitstatus_to_exitcode(status)
                self._tell(self._running.pop(child), code, used.ru_utime + used.ru_stime)


def main(memory: str, window: str) -> None:
    os.nice(_AHEAD)
    with suppress(OSError), open("/proc/self/autogroup", "w") as session:
        session.write(str(_AHEAD))
    counts = memoryview(mmap.mmap(int(memory), 0)).cast("Q")
    TaskAgent(socket.socket(fileno=0), counts, int(window)).serve()


if __name__ == "__main__":
    main(*sys.argv[1:])
