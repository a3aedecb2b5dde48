"""What an agent is told when it starts (JSON that the launcher writes), and what it gives its workers."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from windtunnel.training.elastic.model import Membership

# Seconds, where the launcher does not say: what trainers wait for (see `training.deadlines`).
OPERATION = 60.0
GENERATION = 3600.0
CUT = 2.0


@dataclass(frozen=True)
class AgentConfig:
    """``run``: the run's folder. ``supervisor``: its "host:port". ``secret``, ``tls``: this host's files with
    the job's secret and, where connections are encrypted, certificates (`Keys.of_job`). ``address``: under
    which peers reach this host. ``memory_root``: the folder in tmpfs under which this host keeps its own.

    ``forkserver``: the socket of a fork server that somebody else keeps; None: the agent keeps one, with
    ``preload``.
    ``script``, ``arguments``, ``cwd``, ``env``: the trainers' program; ``env`` is added to the agent's own.
    ``faults``: texts of faults, for the workers. ``settings``: passed to the workers as they are.
    ``namespace``: path of the network namespace in which the workers run, None for the fork server's own;
    ``interface``: the network interface that is this host's alone, None if it has none.

    ``limits``: of the memory service (`Limits`), as far as they are not the defaults.

    Seconds: a worker without a sign of life counts as frozen after ``frozen_after`` if the kernel says that
    it is stopped, else after ``stuck_after``: a long call that holds Python's lock is no failure. The agent
    ends ``orphan_after`` without a supervisor. Trainers have ``leave`` to end when the job is finished.
    """

    run: str
    supervisor: str
    secret: str
    script: str
    tls: tuple[str, ...] = ()
    arguments: tuple[str, ...] = ()
    cwd: str = "."
    address: str = "127.0.0.1"
    domain: str = ""
    memory_root: str = "/dev/shm/windtunnel"
    forkserver: str | None = None
    preload: tuple[str, ...] = ("torch", "torch.distributed")
    env: dict[str, str] = field(default_factory=dict)
    faults: tuple[str, ...] = ()
    settings: dict[str, Any] = field(default_factory=dict)
    namespace: str | None = None
    interface: str | None = None
    name: str = "agent"
    frozen_after: float = 1.0
    stuck_after: float = 10.0
    orphan_after: float = 300.0
    leave: float = 5.0
    limits: dict[str, float] = field(default_factory=dict)

    def write(self, path: Path) -> None:
        """Write it as JSON."""
        path.write_text(json.dumps(asdict(self), indent=1) + "\n")

    @staticmethod
    def read(path: Path) -> AgentConfig:
        """The inverse of `write`."""
        return AgentConfig.of(json.loads(path.read_text()))

    @staticmethod
    def of(plain: dict[str, Any]) -> AgentConfig:
        """A config from values of JSON."""
        lists = {name: tuple(plain[name]) for name in ("arguments", "tls", "preload", "faults")}
        return AgentConfig(**{**plain, **lists})


def environment(
    config: AgentConfig, member: Membership, store: str, local: Path, rank: int, place: int | None
) -> dict[str, str]:
    """The environment of a worker: as torchrun's, so that ``env://`` works, and ours. ``store``: where it
    finds the store."""
    host, _, port = store.rpartition(":")
    return {
        "OMP_NUM_THREADS": "1",
        "RES_OPTIONS": "timeout:1 attempts:3",  # of the C library: a lost answer of a name costs 1 s, not 5
        **os.environ,
        **config.env,
        "RANK": str(rank),
        "WORLD_SIZE": str(member.world),
        "LOCAL_RANK": str(rank % member.per_host),
        "LOCAL_WORLD_SIZE": str(member.per_host),
        "GROUP_RANK": str(place),
        "MASTER_ADDR": host,
        "MASTER_PORT": port,
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": str(member.generation),
        "TORCHELASTIC_RUN_ID": f"{Path(config.run).name}/{member.prefix}",
        "WINDTUNNEL_AGENT": f"unix:{local}",
        "WINDTUNNEL_RUN": config.run,
        "WINDTUNNEL_PREFIX": f"{member.prefix}/env",
    }
