"""What a sandbox answers: lines in a shell's ``ack`` FIFO, and the death of init."""

from __future__ import annotations

import contextlib
import os
import select
import time
from collections.abc import Callable
from dataclasses import dataclass

from windtunnel.agents.sandbox.live.machine.group import Cgroup, Group
from windtunnel.agents.sandbox.live.machine.inside import Folder


@dataclass(frozen=True)
class Init:
    """Pid 1 of the sandbox as the host holds it."""

    pid: int
    handle: int
    requests: int
    cgroup: Cgroup | Group

    def alive(self) -> bool:
        poll = select.poll()
        poll.register(self.handle, select.POLLIN)
        return not poll.poll(0)


class Answers:
    """The host's end of one shell's two FIFOs."""

    def __init__(self, script: int, answers: int, init: Init) -> None:
        self._script, self._answers, self._init = script, answers, init
        self._heard = b""

    @classmethod
    def fresh(cls, folder: Folder, init: Init) -> Answers:
        """New FIFOs. Raises OSError."""
        return cls._both(folder.fifo("in"), folder, init, folder.fifo)

    @classmethod
    def existing(cls, folder: Folder, init: Init) -> Answers:
        """Those that are there. Raises OSError."""
        return cls._both(folder.existing_fifo("in"), folder, init, folder.existing_fifo)

    @classmethod
    def _both(cls, script: int, folder: Folder, init: Init, second: Callable[[str], int]) -> Answers:
        try:
            return cls(script, second("ack"), init)
        except BaseException:
            os.close(script)
            raise

    def close(self) -> None:
        for descriptor in (self._script, self._answers):
            if descriptor >= 0:
                os.close(descriptor)
        self._script = self._answers = -1

    def send(self, lines: bytes) -> None:
        """Lines for the shell to read. Raises OSError."""
        os.write(self._script, lines)

    def replaced(self, folder: Folder) -> bool:
        """Whether what has the FIFO's name is another file now, so that no answer will come."""
        own = os.fstat(self._answers)
        return folder.identity("ack") != (own.st_dev, own.st_ino)

    def line(self, wake: float) -> bytes | None:
        """The next answer, or None at ``wake`` or when the sandbox died."""
        while True:
            line, newline, rest = self._heard.partition(b"\n")
            if newline:
                self._heard = rest
                return line
            left = wake - time.monotonic()
            poll = select.poll()
            poll.register(self._answers, select.POLLIN)
            poll.register(self._init.handle, select.POLLIN)
            ready = [descriptor for descriptor, _ in poll.poll(max(left, 0) * 1000)]
            if self._answers not in ready:
                return None
            with contextlib.suppress(BlockingIOError):
                self._heard = (self._heard + os.read(self._answers, 4096))[-8192:]
