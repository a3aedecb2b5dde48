"""What the workers print: passed on line by line as it comes, and always kept in a file of its own.

Lines of rank 0 pass as they are, those of the others with their rank before them, so that a program which
prints on rank 0 alone looks as it does without a launcher.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import threading
from collections import deque
from pathlib import Path

TAIL = 60  # lines of stderr that are kept to say why a worker failed
LONGEST = 1 << 16


class Stream:
    """One worker's stdout and stderr: the write ends for the worker, the lines so far for the agent."""

    def __init__(self, log: Path, rank: int) -> None:
        self.rank = rank
        self.log = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        out_read, self.out = os.pipe()
        err_read, self.err = os.pipe()
        self.reads = {out_read: 1, err_read: 2}
        self.parts = {1: b"", 2: b""}
        self.tail: deque[str] = deque(maxlen=TAIL)
        self.ended = threading.Event()

    def given(self) -> None:
        """The worker has its ends: close ours, so that the stream ends with the worker."""
        os.close(self.out)
        os.close(self.err)

    def discard(self) -> None:
        """No worker came of it."""
        self.given()
        for fd in (*self.reads, self.log):
            os.close(fd)

    @property
    def last_lines(self) -> str:
        return "\n".join(self.tail)


class Outputs:
    """One thread that reads all streams."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._wake, self._wakened = os.pipe()
        self._selector.register(self._wake, selectors.EVENT_READ, None)
        self._new: deque[Stream] = deque()
        self._ended = False
        self._thread = threading.Thread(target=self._read_for_ever, name="output", daemon=True)
        self._thread.start()

    def add(self, stream: Stream) -> None:
        """Read ``stream`` from now on."""
        self._new.append(stream)
        os.write(self._wakened, b".")

    def close(self) -> None:
        """Pass on what is there, and end."""
        self._ended = True
        os.write(self._wakened, b".")
        self._thread.join(5.0)

    def _read_for_ever(self) -> None:
        while True:
            ready = self._selector.select(0.0 if self._ended else None)
            if self._ended and not ready:
                return
            for key, _ in ready:
                if key.data is None:
                    os.read(self._wake, 4096)
                    while self._new:
                        stream = self._new.popleft()
                        for fd in stream.reads:
                            self._selector.register(fd, selectors.EVENT_READ, stream)
                else:
                    self._read(key.data, key.fd)

    def _read(self, stream: Stream, fd: int) -> None:
        data = os.read(fd, LONGEST)
        target = stream.reads[fd]
        if data:
            os.write(stream.log, data)
            *lines, rest = (stream.parts[target] + data).split(b"\n")
            if len(rest) > LONGEST:
                lines.append(rest)
                rest = b""
            stream.parts[target] = rest
            _pass_on(stream, target, lines)
            return
        self._selector.unregister(fd)
        os.close(fd)
        del stream.reads[fd]
        if stream.parts[target]:
            _pass_on(stream, target, [stream.parts[target]])
        if not stream.reads:
            os.close(stream.log)
            stream.ended.set()


def _pass_on(stream: Stream, target: int, lines: list[bytes]) -> None:
    if not lines:
        return
    if target == 2:
        stream.tail.extend(line.decode(errors="replace") for line in lines)
    mark = b"" if stream.rank == 0 else f"[rank {stream.rank}] ".encode()
    # One write for whole lines: several agents share a terminal.
    text = b"".join(mark + line + b"\n" for line in lines)
    with contextlib.suppress(OSError):  # nobody reads; the file has it
        while text:
            text = text[os.write(target, text) :]
