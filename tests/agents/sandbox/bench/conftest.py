"""A stand-in for a sandbox: a persistent bash in a folder of its own, without namespaces or checkpoints."""

from __future__ import annotations

import os
import select
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from benchmarks.agents.sandbox.sessions import Observation, Output, observe
from support.ports import free_port
from windtunnel.agents.sandbox.model import TurnResult


class StandInBox:
    """Runs commands in one bash; ``root`` is what would be the sandbox's root."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "root"
        self.workdir = self.root / "workspace"
        self.channel = folder / "channel"
        for place in (self.root, self.channel, self.root / "tmp"):
            place.mkdir(parents=True, exist_ok=True)
        self.bash = self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        environment = {"PATH": "/usr/bin:/bin", "HOME": str(self.root), "TMPDIR": str(self.root / "tmp")}
        return subprocess.Popen(
            ["bash", "--noprofile", "--norc"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd=self.root,
            env=environment,
            start_new_session=True,
        )

    def run(self, command: str, *, shell: str = "main", timeout: float | None = None) -> TurnResult:
        assert self.bash.stdin and self.bash.stdout
        text, out, err = (self.channel / name for name in ("text", "out", "err"))
        text.write_bytes(command.encode("utf-8", "surrogateescape") + b"\n")
        started = time.monotonic()
        line = f"source {text} >{out} 2>{err} </dev/null; echo $?\n"
        try:
            self.bash.stdin.write(line.encode())
            self.bash.stdin.flush()
        except BrokenPipeError:
            return TurnResult(b"", b"", None, 0.0, "shell-died")
        if not select.select([self.bash.stdout], [], [], timeout or 60)[0]:
            return TurnResult(out.read_bytes(), err.read_bytes(), None, timeout or 60, "timeout")
        code = self.bash.stdout.readline()
        seconds = time.monotonic() - started
        if not code:
            return TurnResult(out.read_bytes(), err.read_bytes(), None, seconds, "shell-died")
        return TurnResult(out.read_bytes(), err.read_bytes(), int(code), seconds)

    def processes(self) -> list[str]:
        """Command lines of what runs under the shell, itself not included."""
        found = []
        for child in psutil.Process(self.bash.pid).children(recursive=True):
            try:
                if child.status() != psutil.STATUS_ZOMBIE:
                    found.append(" ".join(child.cmdline()))
            except psutil.NoSuchProcess:
                continue
        return found

    def kill(self) -> None:
        """End everything that runs in it."""
        if self.bash.poll() is None:
            os.killpg(self.bash.pid, signal.SIGKILL)
        self.bash.wait()
        for pipe in (self.bash.stdin, self.bash.stdout):
            if pipe:
                pipe.close()

    def look(self, outputs: tuple[Output, ...] = (), probes: dict[str, str] | None = None) -> Observation:
        seen = observe(self, self.root, self.processes(), probes or {}, outputs)
        return replace(seen, probes={name: text for name, text in seen.probes.items() if name != "ports"})


@pytest.fixture
def new_box(tmp_path: Path) -> Iterator[Callable[[], StandInBox]]:
    """Make stand-ins; they all lie at the same path, one after the other, so that outputs can be equal."""
    if not shutil.which("bash"):
        pytest.skip("needs bash")
    made: list[StandInBox] = []

    def new() -> StandInBox:
        for box in made:
            box.kill()
        folder = tmp_path / "box"
        if folder.exists():
            shutil.rmtree(folder)
        made.append(StandInBox(folder))
        return made[-1]

    yield new
    for box in made:
        box.kill()


@pytest.fixture
def first_port() -> int:
    """A port from which some in a row are free."""
    return free_port(12)
