"""A job that ``windtunnel train`` runs in processes of its own, seen from outside: its log, files, processes.

So its launcher can be struck as all the others can.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from windtunnel.linux import mounts, namespaces
from windtunnel.store import eventlog
from windtunnel.training import cleanup, site
from windtunnel.training.elastic.events import Event
from windtunnel.training.elastic.policy.state import Outcome

MAIN = "from windtunnel.cli.main import main; main()"
OUTPUT = "output"
END = 30.0
"""Seconds that a launcher has to end its job."""


@dataclass
class Commanded:
    """``process``: of the command. ``hosts``: how many the job has. Its files are in ``folder``."""

    folder: Path
    process: subprocess.Popen[bytes]
    hosts: int
    _events: list[Event] = field(default_factory=list)
    _read: int = 0

    def events(self) -> list[Event]:
        """All so far."""
        with contextlib.suppress(FileNotFoundError), (self.folder / eventlog.NAME).open("rb") as file:
            file.seek(self._read)
            text = file.read()
            whole = text.rfind(b"\n") + 1
            self._read += whole
            self._events += [json.loads(line) for line in text[:whole].splitlines()]
        return list(self._events)

    @property
    def outcome(self) -> Outcome | None:
        """How the job ended, or the command without one; None while it runs."""
        status = self.process.poll()
        outcome = Outcome.of(self.events())
        if outcome is not None or status is None:
            return outcome
        return Outcome(status or 1, f"the command ended with status {status}: {self.said()[-200:]}", {})

    def wait(self, timeout: float | None = None) -> Outcome | None:
        """How the job ended, once the command has; None if that takes longer than ``timeout`` seconds."""
        try:
            self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            return None
        return self.outcome

    def said(self) -> str:
        """What the command and the trainers printed."""
        return (self.folder / OUTPUT).read_text(errors="replace")

    @property
    def token(self) -> str:
        """Of its processes; "" before there are any."""
        return self.site()["token"] or ""

    def restart(self) -> None:
        """As whoever watches the command does once it was killed."""
        self.process.wait()
        self.process = command(["train", "--resume", self.folder], self.folder / OUTPUT)

    def site(self) -> dict[str, str | None]:
        """What its launcher wrote down: ``token`` of its processes, ``network`` of its hosts."""
        try:
            details: dict[str, str | None] = json.loads((self.folder / site.NAME).read_text())
            return details
        except FileNotFoundError:
            return {"token": None, "network": None}


def command(
    words: Sequence[object],
    output: Path,
    *,
    host: str = "",
    memory: str = "",
    env: Mapping[str, str] | None = None,
) -> subprocess.Popen[bytes]:
    """``windtunnel`` with these ``words``; what it prints goes to ``output``. With root: ``host`` is what it
    takes for the name of this computer, ``memory`` the size of a file system of its own for shared memory."""

    def start() -> subprocess.Popen[bytes]:
        if memory:
            mounts.mount("tmpfs", cleanup.MEMORY, "tmpfs", options=f"size={memory}")
        if host:
            socket.sethostname(host)
        with output.open("ab") as file:
            return subprocess.Popen(
                [sys.executable, "-c", MAIN, *map(str, words)],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                env={**os.environ, **(env or {})},
            )

    kinds = [kind for kind, wanted in (("uts", host), ("mnt", memory)) if wanted]
    return namespaces.apart(kinds, start)


@contextlib.contextmanager
def training(
    words: list[object],
    folder: Path,
    hosts: int,
    program: Path,
    *,
    arguments: Sequence[object] = (),
    host: str = "",
    memory: str = "",
) -> Iterator[Commanded]:
    """A job of ``program`` with these options; all of it on this computer ends
    with the block. ``arguments``: of the program."""
    folder.mkdir(parents=True, exist_ok=True)
    words = ["train", *words, "--out", folder, "--hosts", hosts, program, *arguments]
    job = Commanded(folder, command(words, folder / OUTPUT, host=host, memory=memory), hosts)
    try:
        yield job
    finally:
        ended(job.process)
        if job.token:
            cleanup.kill_marked(job.token)
        cleanup.sweep()


def ended(process: subprocess.Popen[bytes]) -> int:
    """Have a command end, in order if it can: its exit status."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(END)
    process.kill()
    return process.wait()
