"""The sandboxes that rows run in, as a row's judge sees them: of a host, or through the command line.

What an operation told by its error or its exit status counts as told; a sentence in a report or a log of one
that succeeded does not.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from windtunnel.agents.sandbox.context import FAULTS
from windtunnel.agents.sandbox.errors import IncompleteError, SandboxError
from windtunnel.agents.sandbox.machine import launch
from windtunnel.agents.sandbox.model import SandboxSpec
from windtunnel.agents.sandbox.place import Home
from windtunnel.agents.sandbox.protocol import AnyHost
from windtunnel.base.errors import UserError

LESS = 3
"""Exit status of what did not reach all that was asked for."""


@dataclass(frozen=True)
class Told:
    """What an operation said. ``id``: the checkpoint. ``lacks``: what is not kept or not back, in words.
    ``fault``: why it failed altogether."""

    id: str = ""
    lacks: tuple[str, ...] = ()
    fault: str = ""

    @property
    def words(self) -> str:
        return "; ".join([*([self.fault] if self.fault else []), *self.lacks])


@dataclass(frozen=True)
class Answer:
    """How a command inside ended: None where it was cut off."""

    status: int | None
    text: str


class Arena(Protocol):
    """What a row's judge does to sandboxes. Only ``create``, ``put`` and ``run`` raise SandboxError."""

    def create(self, name: str, image: str, network: str, environment: Mapping[str, str]) -> None: ...

    def put(self, name: str, path: str, data: bytes) -> None: ...

    def run(self, name: str, command: str, timeout: float) -> Answer: ...

    def checkpoint(self, name: str) -> Told:
        """One with the processes in any case."""
        ...

    def kill(self, name: str) -> None:
        """End every process of it at once, as a host that loses its power does."""
        ...

    def restore(self, name: str) -> Told: ...

    def fork(self, checkpoint: str, name: str, count: int) -> Told: ...

    def remove(self, name: str) -> None: ...


class OfHost:
    """Sandboxes of a host: one in this process, or a daemon's client."""

    def __init__(self, host: AnyHost, home: Home) -> None:
        self._host = host
        self._home = home

    def create(self, name: str, image: str, network: str, environment: Mapping[str, str]) -> None:
        self._host.create(SandboxSpec(name=name, image=image, network=network, environment=dict(environment)))

    def put(self, name: str, path: str, data: bytes) -> None:
        self._host.get(name).put(path, data)

    def run(self, name: str, command: str, timeout: float) -> Answer:
        done = self._host.get(name).run(command, timeout=timeout)
        text = (done.stdout + done.stderr).decode(errors="replace")
        return Answer(done.exit_code, text or ("" if done.ended == "exit" else done.ended))

    def checkpoint(self, name: str) -> Told:
        return _asked(lambda: Told(self._host.get(name).checkpoint(full=True).id))

    def kill(self, name: str) -> None:
        launch.group(self._home, name).kill()

    def restore(self, name: str) -> Told:
        return _asked(lambda: Told(self._host.get(name).restore().checkpoint))

    def fork(self, checkpoint: str, name: str, count: int) -> Told:
        def call() -> Told:
            self._host.fork(checkpoint, count, name=name)
            return Told(checkpoint)

        return _asked(call)

    def remove(self, name: str) -> None:
        with contextlib.suppress(UserError, SandboxError, *FAULTS):  # it may never have been made
            self._host.remove(name)


def _asked(call: Callable[[], Told]) -> Told:
    """What ``call`` said. Words in a report that is no error are nobody's to read: they do not count."""
    try:
        return call()
    except IncompleteError as error:
        id = error.manifest.id if error.manifest is not None else ""
        return Told(id, tuple(map(str, error.lacks)) or (str(error),))
    except (SandboxError, *FAULTS) as error:
        return Told(fault=str(error))


class ByCommand:
    """Sandboxes of a daemon, by the command line: what is told is its exit status and JSON."""

    def __init__(self, home: Path) -> None:
        self._environment = {**os.environ, "WINDTUNNEL_SANDBOX_HOME": str(home)}

    def close(self) -> None:
        """End the daemon; what still runs is the home's."""
        self._call("down")

    def create(self, name: str, image: str, network: str, environment: Mapping[str, str]) -> None:
        given = [word for key, value in environment.items() for word in ("--env", f"{key}={value}")]
        self._must("create", name, "--image", image, "--network", network, *given)

    def put(self, name: str, path: str, data: bytes) -> None:
        self._must("put", name, "-", path, given=data)

    def run(self, name: str, command: str, timeout: float) -> Answer:
        done = self._call("exec", name, "--timeout", f"{timeout:g}", "--", command)
        return Answer(done.returncode, (done.stdout + done.stderr).decode(errors="replace"))

    def checkpoint(self, name: str) -> Told:
        return self._told("checkpoint", name, "--full", "--json")

    def kill(self, name: str) -> None:
        self._must("stop", name)

    def restore(self, name: str) -> Told:
        return self._told("restore", name, "--json")

    def fork(self, checkpoint: str, name: str, count: int) -> Told:
        reply = self._told("fork", checkpoint, "--name", name, "--count", str(count), "--json")
        return reply if reply.words else Told(checkpoint)

    def remove(self, name: str) -> None:
        self._call("rm", "--yes", name)

    def _told(self, *words: str) -> Told:
        done = self._call(*words)
        said = (done.stderr or done.stdout).decode(errors="replace").strip()
        if done.returncode not in (0, LESS):
            return Told(fault=said or f"exit status {done.returncode}")
        with contextlib.suppress(ValueError):
            reply: Any = json.loads(done.stdout)
            fields = reply if isinstance(reply, dict) else {}
            id = str(fields.get("id") or fields.get("checkpoint") or "")
            return Told(id, (said,) if done.returncode == LESS else ())
        return Told(fault=f"no JSON: {said[:200]}")

    def _must(self, *words: str, given: bytes = b"") -> None:
        done = self._call(*words, given=given)
        if done.returncode:
            raise SandboxError(f"sandbox {words[0]}: {done.stderr.decode(errors='replace').strip()}")

    def _call(self, *words: str, given: bytes = b"") -> subprocess.CompletedProcess[bytes]:
        command = [sys.executable, "-c", "from windtunnel.cli.main import main; main()", "sandbox", *words]
        return subprocess.run(command, input=given, capture_output=True, env=self._environment)
