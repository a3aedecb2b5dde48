"""The workers of a host as processes: started through the fork server, watched, killed.

A worker belongs to a local rank and lives through many generations; its rank in the job changes when places
are renumbered. At most one process of a local rank lives at a time: the next is started when the one before
is gone. How a worker ended is told by the fork server; if that is gone too, its pidfd tells that it ended.

What they print is passed on line by line as it comes, and always kept in a file of its own: lines of rank 0
as they are, those of the others with their rank before them, so that a program which prints on rank 0 alone
looks as it does without a launcher.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from windtunnel.linux.forkserver_client import ForkServerClient

TAIL = 400  # lines of stderr that are kept to say why a worker failed
LONGEST = 1 << 16


class TrainerStream:
    """What one worker prints: its ends for the worker, and a thread behind each that passes lines on.
    ``tail``: the last of stderr."""

    def __init__(self, log: Path, rank: int) -> None:
        self.rank, self._log = rank, log
        self.tail: deque[str] = deque(maxlen=TAIL)
        (out, self.out), (err, self.err) = os.pipe(), os.pipe()
        self._threads = [
            threading.Thread(target=self._pass_on, args=(read, target), name="output", daemon=True)
            for read, target in ((out, 1), (err, 2))
        ]

    def begin(self) -> None:
        """The worker has its ends, or none came of it: ours are closed, so that the stream ends with it."""
        os.close(self.out)
        os.close(self.err)
        for thread in self._threads:
            thread.start()

    def wait(self, seconds: float) -> None:
        """For the end of what it prints, at most so long for each of both."""
        for thread in self._threads:
            thread.join(seconds)

    def _pass_on(self, read: int, target: int) -> None:
        with os.fdopen(read, "rb") as pipe, self._log.open("ab", buffering=0) as log:
            while line := pipe.readline(LONGEST):
                if target == 2:
                    self.tail.append(line.rstrip(b"\n").decode(errors="replace"))
                mark = b"" if self.rank == 0 else f"[rank {self.rank}] ".encode()
                # one write for a whole line: several agents share a terminal
                text = mark + line + (b"" if line.endswith(b"\n") else b"\n")
                with contextlib.suppress(OSError):
                    log.write(line)
                with contextlib.suppress(OSError):  # nobody reads; the file has it
                    while text:
                        text = text[os.write(target, text) :]


Enqueue = Callable[[Callable[[], None]], None]
UNTOLD = 0.5  # seconds to wait for the fork server to say how a worker ended, once its pidfd says that it did
LAST_WORDS = 0.3  # seconds to wait for the end of what a worker printed


@dataclass
class TrainerProcess:
    """One process. ``pid`` is None until it has been forked. ``stopped``: we ended it ourselves."""

    local: int
    rank: int
    generation: int
    stream: TrainerStream
    pid: int | None = None
    pidfd: int | None = None
    spoke: bool = False
    done: bool = False
    stopped: bool = False
    ended: bool = False
    frozen: bool = False
    error: str = ""
    less: bool = False

    def fail(self, error: str, *, less: bool) -> None:
        """It says why it will end."""
        self.error, self.less = error, less


class Workers:
    """``enqueue`` runs a function in the agent's own thread; there ``started(worker)`` is called for every
    process and ``gone(worker, status, signal)`` for every end."""

    def __init__(
        self,
        forks: ForkServerClient,
        enqueue: Enqueue,
        started: Callable[[TrainerProcess], None],
        gone: Callable[[TrainerProcess, int | None, int | None], None],
    ) -> None:
        self.by_local: dict[int, TrainerProcess] = {}
        self._forks = forks
        self._enqueue, self._begun, self._gone = enqueue, started, gone

    def start(self, worker: TrainerProcess, request: dict[str, Any]) -> None:
        """Start a process for ``worker``.

        Raises:
            OSError: there is no fork server now; try again later.
        """

        def answered(message: dict[str, Any]) -> None:
            self._enqueue(lambda: self._started(worker, message))

        self._forks.start(request, answered, (worker.stream.out, worker.stream.err))
        worker.stream.begin()
        self.by_local[worker.local] = worker

    def kill(self, worker: TrainerProcess, number: int = signal.SIGKILL) -> None:
        """Send a signal to the worker's session."""
        if worker.pid is not None and not worker.ended:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(worker.pid, number)

    def stop(self, worker: TrainerProcess) -> None:
        """End a worker that is no longer wanted; nothing is reported of it."""
        worker.stopped = True
        self.kill(worker)

    def of_pid(self, pid: int) -> TrainerProcess | None:
        return next((w for w in self.by_local.values() if w.pid == pid and not w.ended), None)

    def living(self) -> list[TrainerProcess]:
        return [worker for worker in self.by_local.values() if not worker.ended]

    def exited(self, message: dict[str, Any]) -> None:
        """The fork server says that a child ended (in the agent's thread)."""
        worker = self.of_pid(message["pid"])
        if worker is not None:
            self._end(worker, message["status"], message["signal"])

    def _started(self, worker: TrainerProcess, message: dict[str, Any]) -> None:
        if message["op"] != "started":
            worker.error = message.get("error", "")
            self._end(worker, None, None)
            return
        worker.pid = message["pid"]
        if worker.stopped:
            self.kill(worker)
        else:
            self._begun(worker)
        try:
            worker.pidfd = os.pidfd_open(worker.pid)
        except ProcessLookupError:
            return  # it ended already, and the fork server says how
        threading.Thread(target=self._watch, args=(worker, worker.pidfd), name="watch", daemon=True).start()

    def _watch(self, worker: TrainerProcess, pidfd: int) -> None:
        poll = select.poll()
        poll.register(pidfd, select.POLLIN)
        poll.poll()
        os.close(pidfd)
        time.sleep(UNTOLD)
        self._enqueue(lambda: self._end(worker, None, None))

    def _end(self, worker: TrainerProcess, status: int | None, number: int | None) -> None:
        if worker.ended:
            return
        worker.ended = True
        # A killed process has no last words worth waiting for; detection should take no longer than it must.
        if number is None and status != 0:
            worker.stream.wait(LAST_WORDS)
        self._gone(worker, status, number)
