"""Hosts of a job: a process is the agent of one (`serve`), with its memory service, without torch.

Emulated ones are ``python -m windtunnel.training.hosts CONFIG``, with the JSON of `AgentConfig`. Others are
lent, by hand or by an engine that places and restarts them. Each of these runs `lend`: it asks the launcher
for the job, is the agent until the job ends, and leaves nothing behind. By hand that is ``windtunnel host
HOST:PORT``. On Ray an actor a host calls it, on Slurm a task, on Kubernetes a pod (`linux.hosts`); where one
is killed the engine runs it again, and it comes back as a new host, of which the policy says what becomes.

Ray's actors outlive a launcher that dies: the next one (`resume`) finds them by their names. Slurm and
Kubernetes start the launcher itself again, with ``--resume``, of a job that `queue` or `manifest` described.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from windtunnel.base import atomic, keys
from windtunnel.base.errors import HostError, UserError, WindtunnelError
from windtunnel.base.keys import Keys
from windtunnel.base.remote import RemoteLink
from windtunnel.base.rpc import RpcServer, RpcService
from windtunnel.base.tls import OPTIONS, Certificates
from windtunnel.linux import hosts
from windtunnel.linux.forkserver_client import ForkServerKeeper
from windtunnel.linux.hosts import Actor, ActorCall, ActorLost, RayCluster, own_address
from windtunnel.store import eventlog
from windtunnel.training import cleanup
from windtunnel.training.checkpoint.live.memory import MemoryLimits, MemoryService
from windtunnel.training.elastic.live.agent.agent import Agent
from windtunnel.training.elastic.live.agent.config import MODULE, AgentConfig
from windtunnel.training.elastic.spec import JobSpec

JOB = "job.json"
"""In the folder of a run that was described and has not begun: its `JobSpec`."""
PORT = 29400
FOLDER = "/run/windtunnel"
NAME = "windtunnel"
BETWEEN = 0.2  # seconds between looks at Ray's actors
PATIENCE = 10.0
COMMAND = (sys.executable, "-c", "from windtunnel.cli.main import main; main()")


def serve(config: AgentConfig) -> int:
    """Be the agent of a host until its end: the exit status that the supervisor gave, 1 as an orphan.
    Where nobody else keeps a fork server, one is kept here."""
    keeper = None
    if config.forkserver is None:
        Path(config.memory_root).mkdir(parents=True, exist_ok=True)
        path = Path(config.memory_root) / f"forkserver-{os.getpid()}.sock"
        keeper = ForkServerKeeper(path, (MODULE, *config.job.preload), dict(os.environ))
    try:
        agent = Agent(config, keeper.path if keeper else Path(config.forkserver or ""), keeper)
        limits = MemoryLimits(**config.job.waits("memory"))
        agent.service = MemoryService(
            agent.memory / "shards", config.address, keys=agent.keys, context=agent, limits=limits
        )
        signal.signal(signal.SIGTERM, lambda *_: agent.stop(1))
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the launcher's
        return agent.run()
    finally:
        if keeper is not None:
            keeper.close()
            with contextlib.suppress(OSError):
                Path(config.memory_root).rmdir()


def lend(launcher: str, secret: Keys, address: str = "", domain: str = "") -> int:
    """Be a host of the job that the ``launcher`` has begun: the exit status. ``secret``: of the job, with the
    certificates of this host. ``address``: of this host for its peers, that of the connection unless given.

    Raises:
        UserError: another secret than the job's, or no certificate that it takes; nobody listens there; the
            script is not on this host.
    """
    if secret.tls:
        secret.tls.verify()
    config = ask_job(launcher, secret, address, domain)
    if not Path(config.job.script).is_file():
        raise UserError(f"{config.job.script}: no such file on this host; the job at {launcher} needs it")
    try:
        Path(config.run).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{config.run}: the run's folder cannot be made here ({error.strerror})") from error
    cleanup.sweep()
    memory = cleanup.claim(f"{Path(config.memory_root).name}-{os.getpid()}")
    name = f"host-{os.uname().nodename}-{os.getpid()}"
    os.write(2, f"windtunnel this host is lent to the job at {launcher} until that ends\n".encode())
    try:
        secret.write(memory / keys.NAME)
        own = str(memory / keys.NAME)
        return serve(replace(config, name=name, memory_root=str(memory), secret=own, tls=secret.files))
    finally:
        shutil.rmtree(memory, ignore_errors=True)


class Jobs(Protocol):
    """What a launcher serves to hosts that are not emulated; both show that they know the secret."""

    def config(self) -> dict[str, Any]:
        """`AgentConfig.plain`; the names of files of secret and certificates are to be set by the host."""


class Offer:
    """Serves at ``address`` ("host:port") what ``config()`` makes."""

    def __init__(self, address: str, keys: Keys, config: Callable[[], AgentConfig]) -> None:
        split_address(address, "--listen")
        self._config = config
        try:
            self._server = RpcServer(RpcService.of(Jobs, self), f"tcp:{address}", keys)
        except UserError as error:
            raise UserError(f"--listen {address}: {error}") from error
        self.address = self._server.address.removeprefix("tcp:")
        self.close = self._server.close

    def config(self) -> dict[str, Any]:
        """As `Jobs`."""
        return self._config().plain()


def ask_job(launcher: str, keys: Keys, address: str = "", domain: str = "") -> AgentConfig:
    """What the ``launcher`` wants a host to do; ``secret`` and ``tls`` are to be set to files of this host.

    Raises:
        UserError: nobody listens there, or somebody else, or the secret is not that of the job, or one side
            does not take the other's certificate.
    """
    host, _ = split_address(launcher, "host")
    link = RemoteLink(f"tcp:{launcher}", keys=keys, timeout=PATIENCE)
    try:
        plain = link.call(Jobs, "config", "")
    except PermissionError as error:
        raise UserError(f"host {launcher}: {error}; give this host the secret of that job") from error
    except (OSError, HostError) as error:
        raise UserError(
            f"host {launcher}: no launcher with --external-hosts answers there ({error})"
        ) from error
    finally:
        link.close()
    config = AgentConfig.of(plain)
    return replace(
        config,
        address=address or own_address(host),
        domain=domain,
        forkserver=None,
        memory_root=f"{config.memory_root}-host",
    )


def split_address(address: str, option: str) -> tuple[str, int]:
    """ "host:port" in its parts.

    Raises:
        UserError: it is none.
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or int(port) > 65535:
        raise UserError(f"{option} {address}: accepted is HOST:PORT")
    return host, int(port)


def begin(
    job: JobSpec, launcher: str, secret: Keys, folder: Path, output: int | None
) -> RayHosts | SlurmHosts:
    """Have the engine ``job.on`` run all hosts of the job, spares too. ``launcher``: where they ask for it.

    Raises:
        UserError: there is no such engine here.
    """
    if hosts.is_ray(job.on):
        return RayHosts(job, launcher, secret, folder)
    return SlurmHosts(job, launcher, folder, output)


class LentHost:
    """What an actor of Ray is. It runs on the actor's main thread, as `serve` demands."""

    def lend(self, launcher: str, secret: bytes, tls: tuple[str, ...]) -> int:
        """Be a host of the job; what is on the same host of Ray fails together with it."""
        keys_of_job = Keys(secret, Certificates.load(tls) if tls else None)
        address, domain = hosts.host_of_actor()
        status = lend(launcher, keys_of_job, address, domain)
        if status != 0:  # as an orphan, whom nobody would end
            hosts.exit_actor()
        return status


class RayHosts:
    """Actors of a Ray cluster, one a host. The run in ``folder`` has a namespace in which they are named."""

    def __init__(self, job: JobSpec, launcher: str, secret: Keys, folder: Path) -> None:
        began = eventlog.read(folder / eventlog.NAME)[0]["t"]
        self._cluster = RayCluster(job.on, namespace=f"windtunnel-{folder.name}-{began}", output=True)
        self._gpus = job.per_host if self._cluster.total("GPU") else None
        self._arguments = launcher, secret.secret, job.tls
        count = job.hosts + job.spares
        self._places = self._cluster.places(count, self._gpus)
        self._running = [self._run(number) for number in range(count)]
        self._next = 0.0

    def _run(self, number: int) -> tuple[Actor, ActorCall]:
        name, place = f"host-{number}", self._places[number]
        actor = self._cluster.actor(LentHost, gpus=self._gpus, restarts=True, name=name, place=place)
        return actor, actor.call("lend", *self._arguments)

    def tend(self) -> str | None:
        """A host that was killed, or that the supervisor sent away, comes again. Why there will be none; None
        while there may be."""
        if time.monotonic() < self._next:
            return None
        self._next = time.monotonic() + BETWEEN
        for number, (_, call) in enumerate(self._running):
            if call.done:
                try:
                    call.result()
                except ActorLost:
                    pass
                except WindtunnelError as error:
                    return str(error)
                self._running[number] = self._run(number)
        return None

    def leave(self) -> None:
        """Leave them to the next launcher."""
        self._cluster.close()

    def close(self) -> None:
        last = time.monotonic() + PATIENCE
        for actor, call in self._running:
            with contextlib.suppress(WindtunnelError):
                call.result(max(0.0, last - time.monotonic()))
            actor.kill()
        self._cluster.release()
        self._cluster.close()


class SlurmHosts:
    """Tasks of a Slurm allocation, one a host, by `hosts.srun`."""

    def __init__(self, job: JobSpec, launcher: str, folder: Path, output: int | None) -> None:
        words = [
            *COMMAND,
            "host",
            launcher,
            "--secret-file",
            str(folder / keys.NAME),
            *_certificates(job.tls),
        ]
        command = hosts.srun(job.hosts + job.spares, words)
        try:
            self._srun = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
        except FileNotFoundError:
            raise UserError(f"`on` {job.on}: there is no srun on this host") from None

    def tend(self) -> str | None:
        status = self._srun.poll()
        return None if status is None else f"srun ended with status {status} before the job did"

    def leave(self) -> None:
        """They end with the job of Slurm."""

    def close(self) -> None:
        try:
            self._srun.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            self._srun.terminate()
            self._srun.wait()


# -- a job whose launcher an engine starts ----------------------------------------------------------------


def queue(job: JobSpec, folder: Path, name: str) -> dict[str, str]:
    """Queue ``job`` as one of Slurm: its number, script and folder, which all hosts share. ``name``: by which
    the run can be resumed.

    Raises:
        UserError: there is no Slurm here, or it does not accept the job.
    """
    folder = folder.absolute()
    describe(job, folder)
    keys.of_run(folder, job.secret_file)
    script = folder / "slurm.sh"
    command = [*COMMAND, "train", "--resume", name]
    atomic.replace(script, hosts.batch_script(NAME, job.hosts + job.spares, folder, command))
    return {"slurm_job": hosts.submit(script), "script": str(script), "directory": str(folder)}


def manifest(job: JobSpec) -> dict[str, Any]:
    """The JobSet that runs ``job``, with what it needs; the script and its folder are in the image.

    Beside it the cluster has to have a PersistentVolumeClaim and a Secret, both called "windtunnel".
    """
    address = f"{hosts.leader_address(NAME)}:{PORT}"
    there = replace(job, on="", image="", external_hosts=True, listen=address, secret_file=None)
    return hosts.job_set(
        NAME,
        job.image,
        ["windtunnel", "train", "--resume", FOLDER],
        job.hosts + job.spares,
        ["windtunnel", "host", address, *_certificates(job.tls)],
        files={JOB: json.dumps(there.plain())},
        folder=FOLDER,
        secret=keys.VARIABLE,
    )


def describe(job: JobSpec, folder: Path) -> None:
    """Write ``job`` down in ``folder``, for the launcher that begins it (`described`)."""
    folder.mkdir(parents=True, exist_ok=True)
    atomic.replace(folder / JOB, json.dumps(job.plain()))


def described(folder: Path) -> JobSpec | None:
    """The job that was written down in ``folder``; None where there is none.

    Raises:
        UserError: it is one of another version.
    """
    path = folder / JOB
    return JobSpec.of(json.loads(path.read_text())) if path.is_file() else None


def _certificates(files: Sequence[str]) -> list[str]:
    return [word for pair in zip(OPTIONS, files, strict=False) for word in pair]


if __name__ == "__main__":
    STATUS = serve(AgentConfig.read(Path(sys.argv[1])))
    sys.stdout.flush()
    os._exit(STATUS)  # threads that wait for a peer need not be waited for
