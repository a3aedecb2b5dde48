"""What an agent is told when it starts (JSON that the launcher writes), and what its workers begin with."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from windtunnel.base.errors import UserError
from windtunnel.training.checkpoint.settings import VARIABLE
from windtunnel.training.elastic.model import Membership
from windtunnel.training.elastic.spec import JobSpec

MODULE = __name__
PREPARE = f"{__name__}:prepare"


@dataclass(frozen=True)
class AgentConfig:
    """The ``job``, and what only this host has: ``run``, the run's folder; ``supervisor``, its "host:port";
    ``secret`` and ``tls``, files with the job's secret and, where connections are encrypted, certificates
    (`Keys.of_job`); ``address``, under which peers reach it; ``memory_root``, the folder in tmpfs under which
    it keeps its own.

    ``forkserver``: the socket of a fork server that somebody else keeps; None: the agent keeps one.
    ``namespace``: path of the network namespace in which the workers run, None for the fork server's own.
    """

    run: str
    supervisor: str
    secret: str
    job: JobSpec
    tls: tuple[str, ...] = ()
    address: str = "127.0.0.1"
    domain: str = ""
    memory_root: str = "/dev/shm/windtunnel"
    forkserver: str | None = None
    namespace: str | None = None
    name: str = "agent"

    @property
    def worker(self) -> dict[str, float]:
        """Seconds that a worker is told (`live.run`)."""
        return {"beat": min(0.2, self.job.frozen_after / 4), **self.job.waits("trainer")}

    def plain(self) -> dict[str, Any]:
        """As values of JSON."""
        return {**asdict(self), "job": self.job.plain()}

    def write(self, path: Path) -> None:
        """Write it as JSON."""
        path.write_text(json.dumps(self.plain(), indent=1) + "\n")

    @staticmethod
    def read(path: Path) -> AgentConfig:
        """The inverse of `write`."""
        return AgentConfig.of(json.loads(path.read_text()))

    @staticmethod
    def of(plain: dict[str, Any]) -> AgentConfig:
        """The inverse of `plain`.

        Raises:
            UserError: it is none.
        """
        try:
            return AgentConfig(**{**plain, "tls": tuple(plain["tls"]), "job": JobSpec.of(plain["job"])})
        except (KeyError, TypeError) as error:
            raise UserError(f"the job's launcher is of another version ({error})") from error


def environment(
    config: AgentConfig, member: Membership, local: Path, rank: int, place: int | None
) -> dict[str, str]:
    """The environment of a worker: as torchrun's, so that ``env://`` works (`live.store`), and ours."""
    return {
        "OMP_NUM_THREADS": "1",
        "RES_OPTIONS": "timeout:1 attempts:3",  # of the C library: a lost answer of a name costs 1 s, not 5
        **os.environ,
        VARIABLE: json.dumps(config.job.checkpoints),
        **config.job.env,
        "RANK": str(rank),
        "WORLD_SIZE": str(member.world),
        "LOCAL_RANK": str(rank % member.per_host),
        "LOCAL_WORLD_SIZE": str(member.per_host),
        "GROUP_RANK": str(place),
        "GROUP_WORLD_SIZE": str(len(member.hosts)),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "1",  # programs may want one to read: nothing listens there
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": str(member.generation - 1),
        "TORCHELASTIC_MAX_RESTARTS": str(config.job.max_restarts),
        "TORCHELASTIC_RUN_ID": f"{Path(config.run).name}/{member.epoch}.{member.generation}",
        "WINDTUNNEL_AGENT": f"unix:{local}",
        "WINDTUNNEL_RUN": config.run,
        "WINDTUNNEL_GENERATION": str(member.generation),
    }


def prepare() -> None:
    """In a worker, before its script: its own number of threads (the fork server has one, since a pool must
    not exist when it forks), the store of its generation, and a DDP that sums alike whenever it is made.

    The fork server knows nothing of torch; a job without torch passes untouched.
    """
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS") or 1))
    if "torch.nn.parallel" in sys.modules:
        from windtunnel.training.elastic.live import exactness

        exactness.settle()
    if "torch.distributed.rendezvous" in sys.modules:
        from windtunnel.training.elastic.live import store

        store.use_in_environment()
