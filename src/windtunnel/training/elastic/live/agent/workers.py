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
import selectors
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

    def close_writers(self) -> None:
        """The worker has its ends: close ours, so that the stream ends with the worker."""
        os.close(self.out)
        os.close(self.err)

    def discard(self) -> None:
        """No worker came of it."""
        self.close_writers()
        for fd in (*self.reads, self.log):
            os.close(fd)


class TrainerOutputs:
    """One thread that reads all streams."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._wake, self._wakened = os.pipe()
        self._selector.register(self._wake, selectors.EVENT_READ, None)
        self._new: deque[TrainerStream] = deque()
        self._ended = False
        self._thread = threading.Thread(target=self._read_for_ever, name="output", daemon=True)
        self._thread.start()

    def add(self, stream: TrainerStream) -> None:
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

    def _read(self, stream: TrainerStream, fd: int) -> None:
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


def _pass_on(stream: TrainerStream, target: int, lines: list[bytes]) -> None:
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
        outputs: TrainerOutputs,
        enqueue: Enqueue,
        started: Callable[[TrainerProcess], None],
        gone: Callable[[TrainerProcess, int | None, int | None], None],
    ) -> None:
        self.by_local: dict[int, TrainerProcess] = {}
        self._forks, self._outputs = forks, outputs
        self._enqueue, self._begun, self._gone = enqueue, started, gone

    def start(self, worker: TrainerProcess, request: dict[str, Any]) -> None:
        """Start a process for ``worker``.

        Raises:
            OSError: there is no fork server now; try again later.
        """

        def answered(message: dict[str, Any]) -> None:
            self._enqueue(lambda: self._started(worker, message))

        self._forks.start(request, answered, (worker.stream.out, worker.stream.err))
        worker.stream.close_writers()
        self._outputs.add(worker.stream)
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
            worker.stream.ended.wait(LAST_WORDS)
        self._gone(worker, status, number)
