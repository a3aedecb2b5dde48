"""What a run has on its launcher's computer: memory, a fork server, and the hosts that are emulated there.

All of it outlives the launcher. The agents lead sessions of their own, hold the fork server's lifeline, and
own the folder in memory and the network with the launcher; so the next launcher finds them (``site.json`` in
the run's folder has the token) and takes them up. Where nobody comes they end as orphans, and the fork
server, which notices the end of the last one, sweeps what is left.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from windtunnel.base import atomic, keys
from windtunnel.base.processes import Adopted, Identity, add_owner
from windtunnel.linux import namespaces, network, processes
from windtunnel.linux.forkserver_client import ForkServerKeeper
from windtunnel.training import cleanup
from windtunnel.training.elastic.live.agent.config import MODULE, AgentConfig
from windtunnel.training.elastic.spec import JobSpec

NAME = "site.json"
AT_END = "windtunnel.training.cleanup:sweep"
PATIENCE = 10.0


def statuses(folder: Path, lives: Callable[[int], bool]) -> dict[int, dict[str, Any]]:
    """What stands at each place of the run in ``folder``: the agent's pid, host id, memory folder and workers
    {rank: pid}. ``lives``: whether the agent with that pid does."""
    statuses = []
    for path in (folder / "agents").glob("*.json"):
        with contextlib.suppress(OSError, ValueError):
            statuses.append(json.loads(path.read_text()))
    by_place = {}
    # of two, the older is of a host that was cut off and does not know yet that it was replaced
    for status in sorted(statuses, key=lambda status: int(status["generation"])):
        if status["place"] is not None and lives(status["pid"]):
            status["workers"] = {int(rank): pid for rank, pid in status["workers"].items()}
            by_place[status["place"]] = status
    return by_place


def numbered(folder: Path) -> list[tuple[int, str]]:
    """The emulated hosts that ever were in the run in ``folder``, with their numbers."""
    names = [path.stem for path in (folder / "agents").glob("host-*.config")]
    return sorted((int(name.removeprefix("host-")), name) for name in names)


@dataclass
class SiteHost:
    """One emulated host: its agent's process."""

    name: str
    process: subprocess.Popen[bytes] | Adopted


class Site:
    """Begun, or taken up where the run in ``folder`` left one (``resumed``). ``output``: fd for what the
    trainers print, of which a copy is kept.

    Raises:
        UserError: this computer cannot emulate the network.
    """

    def __init__(self, job: JobSpec, folder: Path, output: int | None) -> None:
        self.folder = folder
        # the caller may close its own, whose number would then be another file's or connection's
        self._output = None if output is None else os.fdopen(os.dup(output), "wb", buffering=0)
        self.output = None if self._output is None else self._output.fileno()
        self.hosts: list[SiteHost] = []
        self.network: network.Network | None = None
        self._agents = folder / "agents"
        self._agents.mkdir(parents=True, exist_ok=True)
        cleanup.sweep()
        before = self._before()
        self.resumed = before is not None
        self.token = before["token"] if before else f"windtunnel-{folder.name[-20:]}-{secrets.token_hex(3)}"
        self.memory = cleanup.MEMORY / self.token if before else cleanup.claim(self.token)
        try:
            if job.network == "netns":
                address = before["network"] if before else None
                names = [name for _, name in numbered(folder)] if before else []
                self.network = network.Network(self.token, job.rate, address, names)
        except BaseException:
            if not before:
                shutil.rmtree(self.memory, ignore_errors=True)
            raise
        self.env = self._environment(job)
        preload = (MODULE, *job.preload)
        self.forkserver = ForkServerKeeper(self.memory / "forkserver", preload, self.env, AT_END)
        if before:
            self._take_up()
        record = {"token": self.token, "network": self.network.address if self.network else None}
        atomic.replace(folder / NAME, json.dumps(record) + "\n")

    def _before(self) -> dict[str, str] | None:
        """What stands of an earlier launcher, with this process for an owner."""
        with contextlib.suppress(OSError, ValueError):
            record: dict[str, str] = json.loads((self.folder / NAME).read_text())
            file = cleanup.MEMORY / record["token"] / cleanup.OWNER
            if file.exists():
                add_owner(file, Identity.own())
                return record
        return None

    def _take_up(self) -> None:
        living = set(cleanup.marked(self.token))
        for _, name in numbered(self.folder):
            with contextlib.suppress(OSError, ValueError):  # it has ended, and removed its file
                pid = int(json.loads((self._agents / f"{name}.json").read_text())["pid"])
                identity = Identity.of(pid)
                if pid in living and identity is not None:
                    self.hosts.append(SiteHost(name, Adopted(identity)))

    def _environment(self, job: JobSpec) -> dict[str, str]:
        env = {**os.environ, **job.env, cleanup.TOKEN: self.token}
        env.pop(keys.VARIABLE, None)  # it is in the run's folder
        env.setdefault("OMP_NUM_THREADS", "1")
        # each cut of a group would print a stack of C++ otherwise
        env.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
        if self.network is None and not job.external_hosts:
            env.setdefault("GLOO_SOCKET_IFNAME", "lo")
        elif self.network is not None:
            env["GLOO_SOCKET_IFNAME"] = network.INTERFACE
        return env

    @property
    def next_number(self) -> int:
        return max((number + 1 for number, _ in numbered(self.folder)), default=0)

    def start(self, config: AgentConfig) -> None:
        """One more host."""
        if self.network is not None:
            namespace, address = self.network.add(config.name)
            config = replace(config, address=address, namespace=namespace)
        path = self._agents / f"{config.name}.config"
        config.write(path)

        def start() -> subprocess.Popen[bytes]:
            return subprocess.Popen(
                [sys.executable, "-m", "windtunnel.training.hosts", str(path)],
                env=self.env,
                stdin=subprocess.DEVNULL,
                stdout=self._output,
                stderr=self._output,
                pass_fds=[self.forkserver.lifeline_fd],
                start_new_session=True,
            )

        process = start() if config.namespace is None else namespaces.within(config.namespace, start)
        self.hosts.append(SiteHost(config.name, process))
        identity = Identity.of(process.pid)
        if identity is not None:
            add_owner(self.memory / cleanup.OWNER, identity)
            if self.network is not None:
                self.network.own(identity)

    def of(self, pid: int) -> SiteHost:
        """The host whose agent has that process id."""
        return next(host for host in self.hosts if host.process.pid == pid)

    def end_agents(self, last: float) -> None:
        """Those that were not told: a spare that came late, a host that was cut off. Until ``last``."""
        for host in self.hosts:
            host.process.terminate()
        for host in self.hosts:
            with contextlib.suppress(subprocess.TimeoutExpired):
                host.process.wait(max(0.0, last - time.monotonic()))

    def leave(self) -> None:
        """Leave what is there to the next launcher."""
        if self.resumed:
            self.forkserver.leave()
            self._close_output()
        else:
            self.close(set())  # which no host has seen

    def _close_output(self) -> None:
        if self._output is not None:
            self._output.close()

    def close(self, orphans: set[int]) -> None:
        """End everything that is left, and reap the ``orphans`` that are children of ours."""
        self.forkserver.close()
        cleanup.kill_marked(self.token)
        for host in self.hosts:
            host.process.wait(PATIENCE)
        processes.reap(orphans)
        if self.network is not None:
            self.network.close()
        self._close_output()
        shutil.rmtree(self.memory, ignore_errors=True)
