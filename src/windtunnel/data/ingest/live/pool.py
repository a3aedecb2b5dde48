"""Where a master's workers run: processes of this host, or actors of Ray; the same `WorkerServer`."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from windtunnel.base.keys import Keys
from windtunnel.base.tls import Certificates
from windtunnel.linux.hosts import Actor, ActorCall, RayCluster, host_of_actor

MODULE = "windtunnel.data.ingest.live.worker"


class WorkerLauncher(Protocol):
    """Workers by their names."""

    def start(self, name: str, master: str) -> None: ...
    def ended(self, name: str) -> str | None:
        """Why a worker that was started runs no more; None while it does, or is not ours."""
        ...

    def kill(self, name: str) -> None: ...


@dataclass
class ProcessLauncher:
    """Processes of this host, which serve at its address ``host``. ``owner``: the process with which they
    end, as text; none: they outlive the master by their ``patience``."""

    secret: Path
    keys: Keys
    owner: str = ""
    host: str = "127.0.0.1"
    _running: dict[str, tuple[subprocess.Popen[bytes], Any]] = field(default_factory=dict)

    def start(self, name: str, master: str) -> None:
        settings = {
            "name": name, "master": master, "secret": str(self.secret), "tls": self.keys.files,
            "host": self.host, "owner": self.owner,
        }  # fmt: skip
        temporary_file = tempfile.TemporaryFile()  # noqa: SIM115  # open as long as the worker
        command = [sys.executable, "-m", MODULE, json.dumps(settings)]
        # A session of its own: Ctrl-C is for the master, who then lets them go.
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=temporary_file,
            stderr=temporary_file,
            start_new_session=True,
        )
        self._running[name] = (process, temporary_file)

    def ended(self, name: str) -> str | None:
        if name not in self._running or (status := self._running[name][0].poll()) is None:
            return None
        _, output = self._running.pop(name)
        output.seek(0)
        lines = output.read()[-4000:].decode(errors="replace").strip().splitlines()
        output.close()
        return f"ended with status {status}{': ' + lines[-1] if lines else ''}"

    def kill(self, name: str) -> None:
        if name in self._running:
            process, output = self._running.pop(name)
            process.kill()
            process.wait()
            output.close()


class RayLauncher:
    """Actors of a Ray cluster (`RayCluster`). They go with the master.

    Raises:
        UserError: Ray is not installed, or there is no such cluster.
    """

    def __init__(self, on: str, secret: Path, keys: Keys) -> None:
        self._cluster, self._secret, self._tls = RayCluster(on), secret.read_bytes(), keys.files
        self._running: dict[str, tuple[Actor, ActorCall]] = {}

    def start(self, name: str, master: str) -> None:
        actor = self._cluster.actor(_Actor, cpus=1)
        self._running[name] = actor, actor.call("run", name, master, self._secret, self._tls)

    def ended(self, name: str) -> str | None:
        if name not in self._running or not self._running[name][1].done:
            return None
        _, call = self._running.pop(name)
        try:
            return str(call.result())
        except Exception as error:  # of the worker, or of Ray
            return str(error)

    def kill(self, name: str) -> None:
        if name in self._running:
            self._running.pop(name)[0].kill()


class _Actor:
    """A worker as an actor: it serves at its host's address in the cluster."""

    def run(self, name: str, master: str, secret: bytes, tls: tuple[str, ...]) -> str:
        from windtunnel.data.ingest.live.worker import WorkerServer

        keys = Keys(secret.strip(), Certificates.load(tls) if tls else None)
        WorkerServer(name, master, keys, host_of_actor()[0]).run()
        return "let go"
