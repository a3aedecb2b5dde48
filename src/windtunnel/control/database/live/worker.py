"""A worker: runs the tasks that are assigned to it as commands, each in a process group of its own.

It holds a lease and renews it; once it is fenced (the lease was lost, or another worker has its name) it
kills its commands, tells nobody of them, and joins again with a new epoch. A command ends with its worker;
what it has started itself is killed when a worker of this name begins again on this host."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import IO, Any

from windtunnel.base.errors import WindtunnelError
from windtunnel.control.database.live.control import Control
from windtunnel.linux.processes import kill_carrying
from windtunnel.linux.system import tied_command

TAIL = 4096
"""Bytes of a task's output that are kept: the last ones."""


@dataclass
class RunningCommand:
    """One that runs. ``task``: what `claim` gave; ``handle``: a descriptor, readable when it has ended."""

    task: dict[str, Any]
    process: subprocess.Popen[bytes]
    output: IO[bytes]
    handle: int

    def result(self) -> list[Any]:
        """As `finish` takes it, once it has ended."""
        status = self.process.wait()
        self.output.seek(max(0, self.output.seek(0, os.SEEK_END) - TAIL))
        text = self.output.read().decode(errors="replace").replace("\0", "\ufffd")
        error = f"killed by signal {-status}" if status < 0 else f"exit status {status}" if status else ""
        return [self.task["task"], self.task["worker"], self.task["epoch"], status, error, text]

    def close(self) -> None:
        """Kill what is left of it."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.output.close()
        os.close(self.handle)


@dataclass
class WorkerProcess:
    """Holds ``slots``; ``data``: what it has; ``lease``: seconds; ``say`` is told of troubles."""

    control: Control
    name: str
    slots: int
    data: str = ""
    lease: float = 10.0
    say: Callable[[str], object] = lambda words: None
    epoch: int = 0
    claimed: list[dict[str, Any]] = field(default_factory=list)
    """Tasks whose commands are to begin: only while the lease is fresh, as starting many takes long."""
    commands: dict[int, RunningCommand] = field(default_factory=dict)
    results: list[list[Any]] = field(default_factory=list)
    """Of commands that have ended, and are not written down yet."""
    renewed: float = 0.0

    def run(self, stop: threading.Event) -> None:
        """Work until ``stop``; what is not done then is pending again."""
        kill_carrying("=".join(self._mark))
        while not stop.is_set():
            try:
                with contextlib.closing(self.control.listen("worker", self.name)) as listener:
                    rung = True
                    while not stop.is_set():
                        self.turn(rung)
                        busy = self.results or self.claimed
                        wait = 0.0 if busy else self._due - time.monotonic()
                        rung = listener.wait(
                            wait, stop, [command.handle for command in self.commands.values()]
                        )
            except WindtunnelError as error:
                self.say(str(error))
                if time.monotonic() > self.renewed + self.lease:
                    self.end()  # others may have its tasks by now
                    self.epoch = 0  # and where they do not, only a worker that joins gives them back
                stop.wait(min(1.0, self.lease / 3))
        self.end()
        with contextlib.suppress(WindtunnelError):
            self.control.run("renew", worker=self.name, epoch=self.epoch, lease=0.0)

    def turn(self, rung: bool = True) -> None:
        """Keep the lease, write down what has ended, begin what is assigned (if it ``rung``, or the lease was
        due).

        Raises:
            DatabaseError: the database cannot be used; nothing is lost by that.
        """
        now, identity = time.monotonic(), {"worker": self.name, "epoch": self.epoch, "lease": self.lease}
        if not self.epoch or now >= self._due:
            if not self.epoch or not self.control.runner.run("renew", **identity):
                if self.epoch:
                    self.say(f"{self.name} was fenced, {len(self.commands)} commands are killed")
                self.end()
                workers = [[self.name, self.slots, self.data]]
                self.epoch = self.control.run("join", workers=workers, lease=self.lease)[self.name]
            rung, self.renewed = True, now
        for number, command in list(self.commands.items()):
            if command.process.poll() is not None:
                self.results.append(command.result())
                self.commands.pop(number).close()
        if self.results:
            self.control.run("finish", results=self.results)
            self.results = []
        if rung:
            epoch, self.epoch = self.epoch, 0  # a claim that fails may have been committed: then join anew
            self.claimed += self.control.run("claim", workers=[[self.name, epoch]])
            self.epoch = epoch
        while self.claimed and time.monotonic() < self._due:
            self._start(self.claimed.pop(0))

    def end(self) -> None:
        """Kill all commands, and forget what they did."""
        while self.commands:
            self.commands.popitem()[1].close()
        self.results, self.claimed = [], []

    @property
    def _due(self) -> float:
        """When the lease is to be renewed."""
        return self.renewed + self.lease / 3

    @property
    def _mark(self) -> tuple[str, str]:
        """In the environment of all that its commands start."""
        return "WINDTUNNEL_WORKER", f"{self.name}@{self.control.engine.url.database}"

    def _start(self, task: dict[str, Any]) -> None:
        own = {"WINDTUNNEL_TASK": str(task["task"]), "WINDTUNNEL_KEY": task["key"],
               "WINDTUNNEL_ATTEMPT": str(task["attempt"]), **dict([self._mark])}  # fmt: skip
        output = tempfile.TemporaryFile()  # noqa: SIM115
        try:
            process = subprocess.Popen(
                tied_command(json.loads(task["command"])), stdin=subprocess.DEVNULL, stdout=output,
                stderr=output, start_new_session=True, env={**os.environ, **own},
            )  # fmt: skip
        except (OSError, ValueError, subprocess.SubprocessError) as error:
            output.close()
            self.results.append(
                [task["task"], task["worker"], task["epoch"], 127, f"cannot begin: {error}", ""]
            )
        else:
            self.commands[task["task"]] = RunningCommand(task, process, output, os.pidfd_open(process.pid))
