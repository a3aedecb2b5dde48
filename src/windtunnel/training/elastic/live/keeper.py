"""The supervisor's process as its launcher sees it: begun, watched and replaced in one way.

A supervisor is started after another one, named by its epoch (0: the first). It is replaced when it ends
before the run does, and when it gives no sign of life: soon where the kernel says that it is stopped, later
where it may only want for a processor. SIGKILL ends a stopped process, too. It gets signs of life in turn.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from windtunnel.base.processes import Identity
from windtunnel.linux import processes
from windtunnel.training.elastic.live.supervise import ALIVE, STUCK, SUPERSEDED
from windtunnel.training.elastic.live.supervisor.leadership import Record

MOST = 20
"""Supervisors that follow each other."""
LOOK = 0.1
PATIENCE = 10.0


class GaveUp(Exception):
    """There is no supervisor any more, in words. ``superseded``: since another launcher has the run."""

    def __init__(self, reason: str, superseded: bool = False) -> None:
        super().__init__(reason)
        self.superseded = superseded


class SupervisorKeeper:
    """Keeps a supervisor with the ``config`` (a file, see `supervise`), the first ``after`` that epoch.

    ``lease``: seconds without a sign of life after which it is replaced if it is stopped; ``start``: seconds
    until it must have said where it listens. ``over``: whether
    the run has ended, asked before a supervisor that ended is replaced. ``record``: of the run's leader.

    Raises:
        GaveUp: it does not start, or another launcher was faster.
    """

    def __init__(
        self,
        config: Path,
        env: dict[str, str],
        record: Record,
        after: int,
        *,
        lease: float,
        start: float,
        over: Callable[[], bool],
    ) -> None:
        self.restarts = 0
        self.ordered = 0
        """Hosts that supervisors have ordered so far."""
        self._config, self._env, self._record = config, env, record
        self._lease, self._within, self._over = lease, start, over
        self._lifeline, self._held = os.pipe()
        os.set_blocking(self._held, False)
        self._due = 0.0  # when a sign of this process is
        self._late = 0
        self._start(after)

    def _start(self, after: int) -> None:
        """Start one after another until one says where it listens. One that ended, or was stopped, before it
        could say so may have taken the lead, and is followed then."""
        self.address = ""
        while not self.address:
            self._spawn(after)
            why = self._told()
            if why is not None:
                leader = self._record.read()
                after = leader.epoch if leader.holder == self._identity else after
                self._count(why)

    def _spawn(self, after: int) -> None:
        command = [sys.executable, "-m", "windtunnel.training.elastic.live.supervise", str(self._config)]
        command += ["--after", str(after), "--lifeline", str(self._lifeline)]
        self.process = subprocess.Popen(
            command,
            env=self._env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            pass_fds=[self._lifeline],
        )
        assert self.process.stdout is not None
        self._out, self._unread = self.process.stdout, b""
        os.set_blocking(self._out.fileno(), False)
        self._identity = str(Identity.of(self.process.pid))

    def _told(self) -> str | None:
        """Wait until it has said where it listens; else why it does not, in words."""
        begun = stood = time.monotonic()
        while not self.address:
            ready, _, _ = select.select([self._out], [], [], LOOK)
            now = time.monotonic()
            if ready and not self._read(now):
                status = self.process.wait(PATIENCE)
                self._ended(status)
                return f"it ended with status {status} before it listened"
            stood = stood if self._stopped else now
            if now - stood > self._lease or now - begun > self._within:
                self._kill()
                return f"it did not listen within {now - begun:.2f} s"
        return None

    @property
    def _stopped(self) -> bool:
        return processes.state(self.process.pid) in ("T", "t")

    def _kill(self) -> None:
        self.process.kill()
        self.process.wait(PATIENCE)

    def _read(self, now: float) -> bool:
        """What it said; False when it has ended."""
        while True:
            try:
                part = os.read(self._out.fileno(), 1 << 16)
            except BlockingIOError:
                return True
            if not part:
                return False
            self._heard, self._late = now, 0
            *lines, self._unread = (self._unread + part).split(b"\n")
            for line in lines:
                said = json.loads(line)
                self.ordered += said.get("order", 0)
                if "address" in said:
                    self.address, self.epoch = said["address"], said["epoch"]

    def tend(self, now: float) -> str | None:
        """Why the supervisor was replaced, in words; None if it was not.

        Raises:
            GaveUp: nothing more can be done.
        """
        if now >= self._due:
            self._due = now + ALIVE
            with contextlib.suppress(BlockingIOError):  # it is stopped, and does not read
                os.write(self._held, b".")
        if self._read(now) and self.process.poll() is None:
            return self._look(now)
        status = self.process.wait(PATIENCE)
        if self._over():
            return None
        self._ended(status)
        return self._replace(f"it ended with status {status}")

    def _look(self, now: float) -> str | None:
        """Twice in a row, so that signs which came while this process itself stood still are read first."""
        silent, stopped = now - self._heard, self._stopped
        self._late = self._late + 1 if silent > (self._lease if stopped else max(STUCK, self._lease)) else 0
        if self._late < 2:
            return None
        self._kill()
        how = "it is stopped" if stopped else "it does not answer"
        return self._replace(f"{how}: no sign of life for {silent:.2f} s")

    def _replace(self, why: str) -> str:
        self._read(time.monotonic())
        self._count(why)
        self._start(self.epoch)
        return why

    def _count(self, why: str) -> None:
        self._out.close()
        self.restarts += 1
        if self.restarts > MOST:
            raise GaveUp(f"the supervisor was replaced {MOST} times; the last time, {why}")

    def _ended(self, status: int) -> None:
        if status == SUPERSEDED:
            raise GaveUp("another launcher has this run now", superseded=True)
        if status == 2:
            raise GaveUp("the supervisor ended with status 2: it was refused what it needs")

    def end(self, timeout: float, *, tell: bool) -> None:
        """Let it end, and ``tell`` it to end the run; killed if it has not gone after ``timeout`` seconds."""
        if tell:
            self.process.terminate()
        try:
            self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(PATIENCE)
        self._out.close()
        for fd in (self._held, self._lifeline):
            os.close(fd)
