"""A host of the files: its two processes, started, kept alive, and ended together.

`hosts` are several on this computer, each with a folder of its own: for tests, benchmarks and the demo.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psutil

from windtunnel.base import atomic
from windtunnel.base.keys import Keys
from windtunnel.base.plain import to_plain
from windtunnel.data.files.live.client import FileClient, place
from windtunnel.data.files.model import FilesHostSpec

PARTS = ("nic", "server")
_AGAIN = 0.2  # seconds until a process that ended is started again


class HostProcesses:
    """The server and the pipeline of one host (which starts the engine)."""

    def __init__(self, spec: FilesHostSpec) -> None:
        self.spec = spec
        Path(spec.folder).mkdir(parents=True, exist_ok=True)
        self.processes = {part: self._start(part) for part in PARTS}

    def _start(self, part: str) -> subprocess.Popen[bytes]:
        command = [
            sys.executable,
            "-m",
            f"windtunnel.data.files.live.{part}",
            json.dumps(to_plain(self.spec)),
        ]
        with open(Path(self.spec.folder, f"{part}.log"), "ab") as log:
            return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)

    def revive(self) -> None:
        """Start again what has ended by itself."""
        for part, process in self.processes.items():
            if process.poll() is not None:
                self.processes[part] = self._start(part)

    def pids(self, part: str | None = None) -> list[int]:
        """Of all its processes, or of one part with what it started."""
        roots = [self.processes[part]] if part else self.processes.values()
        pids = []
        for root in roots:
            with contextlib.suppress(psutil.NoSuchProcess):
                pids += [
                    root.pid,
                    *(child.pid for child in psutil.Process(root.pid).children(recursive=True)),
                ]
        return pids

    def signal(self, number: int, part: str | None = None) -> None:
        for pid in self.pids(part):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def kill(self) -> None:
        """All of it, as a power cut would."""
        self.signal(signal.SIGKILL)
        for process in self.processes.values():
            process.wait()

    def stop(self) -> None:
        """End what runs, in order."""
        for process in self.processes.values():
            process.terminate()
        for process in self.processes.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(10.0)
        self.kill()


def remember(name: str, spec: FilesHostSpec) -> None:
    """Let this user's programs find the files of ``spec`` under ``name``."""
    folder = place(name)
    folder.mkdir(parents=True, exist_ok=True)
    atomic.replace(folder / "access.json", json.dumps({"store": spec.store, "secret": spec.secret}))


def serve(spec: FilesHostSpec, name: str) -> None:
    """Be a host until SIGTERM or SIGINT. ``name``: under which this user's programs find the files."""
    remember(name, spec)
    host, ended = HostProcesses(spec), list[int]()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda received, frame: ended.append(received))
    try:
        while not ended:
            time.sleep(_AGAIN)
            host.revive()
    finally:
        host.stop()


@contextlib.contextmanager
def hosts(folder: Path, count: int, spec: FilesHostSpec) -> Iterator[list[HostProcesses]]:
    """So many hosts in folders of their own below ``folder``; ``spec``: what they have in common."""
    folder.mkdir(parents=True, exist_ok=True)
    secret = folder / "secret"
    if not secret.exists():
        Keys.new().write(secret)
    common = replace(spec, store=str(folder / "store"), secret=str(secret), copies=count)
    running: list[HostProcesses] = []
    try:
        for number in range(count):
            name = f"host{number}"
            running.append(HostProcesses(replace(common, name=name, folder=str(folder / name))))
        yield running
    finally:
        for host in running:
            host.stop()


def client(folder: Path, timeout: float = 30.0) -> FileClient:
    """Of the hosts below ``folder``."""
    return FileClient(str(folder / "store"), Keys.read(folder / "secret").secret, timeout)


def complete(files: FileClient, count: int, timeout: float = 60.0) -> None:
    """Wait until ``count`` hosts hold the files. Raises TimeoutError."""
    end = time.monotonic() + timeout
    while True:
        rows = files.status()
        leads = [row for row in rows if not isinstance(row, str) and row.leads and len(row.chain) == count]
        if leads and len(rows) == count:
            return
        if time.monotonic() > end:
            raise TimeoutError(f"{count} hosts are not there after {timeout:g} s: {rows}")
        time.sleep(0.05)
