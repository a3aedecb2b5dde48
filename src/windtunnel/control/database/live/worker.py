"""A worker: runs the tasks that are assigned to it as commands, each in a process group of its own.

It holds a lease and renews it; when it is fenced (the lease was lost, or another worker has its name) it kills
all its commands, tells nobody of them, and joins again with a new epoch. A command ends with its worker; what it
has started itself is killed when a worker of this name begins again on this host.
"""

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
from windtunnel.control.database.live.bell import Listener
from windtunnel.control.database.live.control import Control
from windtunnel.linux.processes import kill_carrying
from windtunnel.linux.system import end_with_parent
from windtunnel.store.eventlog import EventLog

TAIL = 4096
"""Bytes of a task's output that are kept: the last ones."""


@dataclass
class Command:
    """One that runs. ``task``: what `claim` said of it."""

    task: dict[str, Any]
    process: subprocess.Popen[bytes]
    output: IO[bytes]
    handle: int

    def result(self) -> list[Any]:
        """As `finish` takes it."""
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
    """``slots``: as many commands of one slot at a time; ``data``: what it holds; ``lease``: seconds."""

    control: Control
    name: str
    slots: int
    data: str = ""
    lease: float = 10.0
    log: EventLog | None = None
    say: Callable[[str], object] = lambda words: None
    epoch: int = 0
    commands: dict[int, Command] = field(default_factory=dict)
    results: list[list[Any]] = field(default_factory=list)
    """Ended, and not written down yet."""
    _renewed: float = 0.0

    @property
    def mark(self) -> str:
        """In the environment of all that its commands start."""
        return f"WINDTUNNEL_WORKER={self.name}@{self.control.engine.url.database}"

    def run(self, stop: threading.Event) -> None:
        """Work until ``stop``; what is not done then is pending again."""
        kill_carrying(self.mark)
        listener: Listener | None = None
        while not stop.is_set():
            try:
                listener = listener or self.control.listen("worker", self.name)
                self.turn()
                wait = 0.0 if self.results else self._renewed + self.lease / 3 - time.monotonic()
                listener.wait(wait, [command.handle for command in self.commands.values()])
            except WindtunnelError as error:
                self.say(str(error))
                if time.monotonic() > self._renewed + self.lease:
                    self.end()  # others may have its tasks by now
                if listener is not None:
                    listener.close()
                    listener = None
                stop.wait(min(1.0, self.lease / 3))
        self.end()
        if listener is not None:
            listener.close()
        with contextlib.suppress(WindtunnelError):
            self.control.run("leave", worker=self.name, epoch=self.epoch)

    def turn(self) -> None:
        """Keep the lease, write down what has ended, begin what is assigned.

        Raises:
            DatabaseError: the database cannot be used; nothing is lost by that.
        """
        now = time.monotonic()
        if self.epoch == 0 or now >= self._renewed + self.lease / 3:
            if self.epoch == 0 or not self.control.run(
                "renew", worker=self.name, epoch=self.epoch, lease=self.lease
            ):
                if self.epoch:
                    self.say(f"{self.name} was fenced: {len(self.commands)} commands are killed")
                self.end()
                workers = [[self.name, self.slots, self.data]]
                self.epoch = self.control.run("join", workers=workers, lease=self.lease)[self.name]
            self._renewed = now
        for number, command in list(self.commands.items()):
            if command.process.poll() is not None:
                self.results.append(command.result())
                command.close()
                del self.commands[number]
        if self.results:
            self.control.run("finish", results=self.results)
            self.results = []
        for task in self.control.run("claim", workers=[[self.name, self.epoch]]):
            self.start(task)

    def start(self, task: dict[str, Any]) -> None:
        name, _, value = self.mark.partition("=")
        own = {name: value, "WINDTUNNEL_TASK": str(task["task"]), "WINDTUNNEL_KEY": task["key"],
               "WINDTUNNEL_ATTEMPT": str(task["attempt"])}  # fmt: skip
        if self.log is not None:
            self.log.append("effect", capability="control.database", started=[task["task"], self.name])
        output = tempfile.TemporaryFile()
        try:
            process = subprocess.Popen(
                json.loads(task["command"]), stdin=subprocess.DEVNULL, stdout=output, stderr=output,
                start_new_session=True, env={**os.environ, **own}, preexec_fn=end_with_parent,
            )  # fmt: skip
        except OSError as error:
            output.close()
            self.results.append([task["task"], self.name, self.epoch, 127, f"it cannot be started: {error}", ""])
            return
        self.commands[task["task"]] = Command(task, process, output, os.pidfd_open(process.pid))

    def end(self) -> None:
        """Kill all commands, and forget what they did."""
        for command in self.commands.values():
            command.close()
        self.commands, self.results = {}, []
