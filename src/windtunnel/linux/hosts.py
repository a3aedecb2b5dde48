"""Hosts that an engine has: Ray, Slurm or Kubernetes.

windtunnel starts nothing on other hosts by itself. It asks an engine that its user has anyway, which places
and restarts:

- **Ray** has an object on a host as an actor (`RayCluster.actor`), and makes it again where it is lost.
- **Slurm** runs a command on each host of an allocation (`srun`), and a whole job again after a failure
  (`batch_script`).
- **Kubernetes** runs a container on each host, and again where it ends, as a JobSet says (`job_set`).

    with RayCluster("ray") as cluster:
        counter = cluster.actor(Counter, 5)
        assert counter.call("add", 2).result() == 7

Sources: docs.ray.io (actors), slurm.schedmd.com (sbatch, srun), jobset.sigs.k8s.io (v1alpha2).
"""

from __future__ import annotations

import contextlib
import logging
import os
import shlex
import socket
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from windtunnel.base.errors import HostError, UserError

RAY, SLURM, KUBERNETES = "ray", "slurm", "kubernetes"
ENGINES = f"{RAY}, {RAY}://HOST:PORT, {SLURM}, {KUBERNETES}"
PATIENCE = 5.0  # seconds for a cluster's port to answer: Ray itself would try for minutes
SHARED = ("WINDTUNNEL_HOME", "WINDTUNNEL_STORE")
"""Variables of this process that actors get: where runs are stored."""


def is_ray(on: str) -> bool:
    """Whether the option ``on`` names a Ray cluster."""
    return on == RAY or on.startswith(f"{RAY}://")


def is_engine(on: str) -> bool:
    """Whether the option ``on`` names one of `ENGINES`."""
    return is_ray(on) or on in (SLURM, KUBERNETES)


def own_address(peer: str = "203.0.113.1") -> str:
    """The address from which this host would reach ``peer``, unless given any: the loopback where it has no
    way there."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock, contextlib.suppress(OSError):
        sock.connect((peer, 9))  # nothing is sent
        return str(sock.getsockname()[0])
    return "127.0.0.1"


# -- Ray --------------------------------------------------------------------------------------------------


class ActorLost(HostError):
    """An actor is gone, or did not answer in time."""


class RayCluster:
    """A Ray cluster, until it is closed. ``on``: "ray", which is the cluster of ``RAY_ADDRESS``, else the one
    of this host, else a new one of this host alone; or "ray://HOST:PORT", where a Ray client server listens.
    The cluster that this process is connected to already is used as it is.

    ``namespace``: of named actors. ``output``: what actors print is printed here.

    Raises:
        UserError: Ray is not installed, or no cluster answers there.
    """

    def __init__(self, on: str, *, namespace: str | None = None, output: bool = False) -> None:
        try:
            os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # a new cluster reports to nobody
            os.environ.setdefault("RAY_DEDUP_LOGS", "0")
            import ray
        except ImportError:
            raise UserError(
                f"`on` {on}: Ray is not installed, get it by: pip install 'windtunnel[ray]'"
            ) from None
        self._ray, self._namespace = ray, namespace
        self._places: Any = None
        self._connected = not ray.is_initialized()
        if self._connected:
            try:
                address = os.environ.get("RAY_ADDRESS", "") if on == RAY else on
                if ":" in address:
                    host, _, port = address.removeprefix(f"{RAY}://").rpartition(":")
                    socket.create_connection((host, int(port)), timeout=PATIENCE).close()
                ray.init(
                    None if on == RAY else on, namespace=namespace, log_to_driver=output,
                    logging_level=logging.ERROR, include_dashboard=None if address else False,
                )  # fmt: skip
            except Exception as error:  # Ray's own are no family of exceptions
                raise UserError(
                    f"`on` {on}: no Ray cluster answers there ({_first_line(error)}); accepted are {RAY} and "
                    f"{RAY}://HOST:PORT"
                ) from None

    def total(self, resource: str) -> int:
        """What all hosts have of it: "CPU" and "GPU" are counted, "memory" is in bytes."""
        return int(self._ray.cluster_resources().get(resource, 0))

    def free(self, resource: str) -> int:
        """What of `total` no actor has asked for."""
        return int(self._ray.available_resources().get(resource, 0))

    def shared(self, value: Any) -> Any:
        """``value`` for an argument of several actors: it is sent once to each host."""
        return self._ray.put(value)

    def actor(
        self,
        kind: type,
        *arguments: Any,
        cpus: int | None = None,
        gpus: int | None = None,
        restarts: bool = False,
        name: str | None = None,
        place: Any = "SPREAD",
    ) -> Actor:
        """An object of ``kind`` on some host, or at one of `places`.

        ``cpus`` and ``gpus``: that it has for itself, None for none in particular. ``restarts``: where it is
        lost it is made again, on another host if need be; further calls wait for that. ``name``: it outlives
        this process, and is the one of that name where there is one.
        """
        options: dict[str, Any] = {
            "num_cpus": cpus,
            "num_gpus": gpus,
            "scheduling_strategy": place,
            "max_restarts": -1 if restarts else 0,
            "runtime_env": {"env_vars": {key: os.environ[key] for key in SHARED if key in os.environ}},
        }
        if name is not None:
            options |= {
                "name": name, "namespace": self._namespace, "lifetime": "detached", "get_if_exists": True,
            }  # fmt: skip
        return Actor(self._ray, self._ray.remote(kind).options(**options).remote(*arguments))

    def places(self, count: int, gpus: int | None = None) -> list[Any]:
        """Places for so many actors, each on a host of its own with ``gpus``; Ray finds another for one whose
        host is lost. They outlive this process; they are the same for all that are in ``namespace``. In a
        cluster of one host they are all there.
        """
        if sum("CPU" in node["Resources"] for node in self._ray.nodes() if node["Alive"]) <= 1:
            return ["SPREAD"] * count
        from ray.util import get_placement_group, placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy as At

        try:
            self._places = get_placement_group("places")
        except ValueError:  # there is none
            bundles = [{"CPU": 1, **({"GPU": gpus} if gpus else {})}] * count
            self._places = placement_group(bundles, "STRICT_SPREAD", "places", "detached")
        return [At(self._places, number) for number in range(count)]

    def release(self) -> None:
        """Give the `places` back."""
        if self._places is not None:
            self._ray.util.remove_placement_group(self._places)

    def first(self, calls: Iterable[ActorCall]) -> ActorCall:
        """One of them whose result is there; waited for."""
        by_reference = {call.reference: call for call in calls}
        return by_reference[self._ray.wait([*by_reference], num_returns=1)[0][0]]

    def close(self) -> None:
        """Leave the cluster; one that was started for this process ends."""
        if self._connected:
            self._ray.shutdown()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Actor:
    """An object on a host of the cluster."""

    def __init__(self, ray: Any, handle: Any) -> None:
        self._ray, self._handle = ray, handle

    def call(self, method: str, *arguments: Any) -> ActorCall:
        """Call one of its methods; calls are run one after the other."""
        return ActorCall(self._ray, getattr(self._handle, method).remote(*arguments))

    def kill(self) -> None:
        """End it, also where it would be made again."""
        with contextlib.suppress(Exception):  # it has ended, or the cluster has
            self._ray.kill(self._handle)


class ActorCall:
    """What was called on an actor."""

    def __init__(self, ray: Any, reference: Any) -> None:
        self._ray, self.reference = ray, reference

    @property
    def done(self) -> bool:
        """Whether `result` would return at once."""
        return bool(self._ray.wait([self.reference], timeout=0)[0])

    def result(self, timeout: float | None = None) -> Any:
        """What the method returned; waited for, ``timeout`` seconds at the most.

        Raises:
            Lost: the actor is gone, or nothing came in time.
            Exception: what the method raised.
        """
        try:
            return self._ray.get(self.reference, timeout=timeout)
        except self._ray.exceptions.RayTaskError as error:
            raise error.cause from None
        except self._ray.exceptions.RayError as error:
            raise ActorLost(f"Ray lost an actor ({_first_line(error)})") from None


def exit_actor() -> None:
    """End the actor in which this is called; it is not made again."""
    import ray

    ray.actor.exit_actor()


def host_of_actor() -> tuple[str, str]:
    """The host of the actor in which this is called: its address, and its name in the cluster."""
    import ray

    return str(ray.util.get_node_ip_address()), str(ray.get_runtime_context().get_node_id())


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]


# -- Slurm ------------------------------------------------------------------------------------------------


def in_allocation() -> bool:
    """Whether this process is one of a Slurm job."""
    return "SLURM_JOB_ID" in os.environ


def srun(hosts: int, command: Sequence[str]) -> list[str]:
    """The command that runs ``command`` on each of so many hosts of the allocation, and again where a signal
    ended it. A host that is lost does not end the others."""
    again = f'while {shlex.join(command)}; [ "$?" -gt 128 ]; do :; done'
    return [
        "srun", f"--nodes={hosts}", f"--ntasks={hosts}", "--ntasks-per-node=1", "--overlap", "--no-kill",
        "--kill-on-bad-exit=0", "--wait=0", "--mpi=none", "sh", "-c", again,
    ]  # fmt: skip


def batch_script(name: str, hosts: int, folder: Path, command: Sequence[str]) -> str:
    """The script of a job that has so many hosts for itself, and on the first of them runs ``command``: from
    the beginning, too, when Slurm puts the job back into the queue. Its output goes to ``folder``."""
    return f"""#!/bin/sh
#SBATCH --job-name={name}
#SBATCH --nodes={hosts}
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH --no-kill
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output={folder / "slurm.log"}
exec {shlex.join(command)}
"""


def submit(script: Path) -> str:
    """Queue the job of a `batch_script`: its number. Partition, account and time limit are those of the
    environment (``SBATCH_PARTITION`` and so on).

    Raises:
        UserError: Slurm is not installed here, or did not accept the job.
    """
    try:
        done = subprocess.run(
            ["sbatch", "--parsable", str(script)], capture_output=True, text=True, check=True
        )
    except FileNotFoundError:
        raise UserError(f"`on` {SLURM}: there is no sbatch on this host") from None
    except subprocess.CalledProcessError as error:
        raise UserError(f"`on` {SLURM}: sbatch refused {script} ({error.stderr.strip()})") from None
    return done.stdout.strip().partition(";")[0]


# -- Kubernetes -------------------------------------------------------------------------------------------


def job_set(
    name: str,
    image: str,
    leader: Sequence[str],
    hosts: int,
    command: Sequence[str],
    *,
    files: Mapping[str, str],
    folder: str,
    secret: str,
) -> dict[str, Any]:
    """A list of manifests: a ConfigMap of ``files``, and a JobSet. One pod of it runs ``leader``; ``hosts``
    others, each on a host of its own, run ``command``. A container that fails is run again, a lost pod made
    anew. The job has ended when the leader has.

    ``folder``: where the leader has the ``files``, and keeps its own in a claim called ``name``. ``secret``:
    a variable of all containers, which is the key of that name of the Secret ``name``.
    """
    env = [{"name": secret, "valueFrom": {"secretKeyRef": {"name": name, "key": secret}}}]
    memory = {"name": "memory", "emptyDir": {"medium": "Memory"}}  # else /dev/shm has 64 MiB
    shared = {"name": "memory", "mountPath": "/dev/shm"}
    label = {"windtunnel/hosts-of": name}

    def replicated(role: str, count: int, words: Sequence[str], mounts: list[Any], **pod: Any) -> Any:
        volumes = pod.pop("volumes", [])
        container = {
            "name": role, "image": image, "command": list(words), "env": env,
            "volumeMounts": [shared, *mounts],
        }  # fmt: skip
        spec = {"restartPolicy": "OnFailure", "containers": [container], "volumes": [memory, *volumes], **pod}
        template = {"metadata": {"labels": label if role == "host" else {}}, "spec": spec}
        job = {"parallelism": count, "completions": count, "backoffLimit": 1_000_000, "template": template}
        return {"name": role, "replicas": 1, "template": {"spec": job}}

    volumes = [
        {"name": "run", "persistentVolumeClaim": {"claimName": name}},
        {"name": "files", "configMap": {"name": name}},
    ]
    mounts = [
        {"name": "run", "mountPath": folder},
        *({"name": "files", "mountPath": f"{folder}/{file}", "subPath": file} for file in files),
    ]
    apart = {
        "podAntiAffinity": {
            "requiredDuringSchedulingIgnoredDuringExecution": [
                {"labelSelector": {"matchLabels": label}, "topologyKey": "kubernetes.io/hostname"}
            ]
        }
    }
    spec = {
        "network": {"enableDNSHostnames": True, "subdomain": name},
        "successPolicy": {"operator": "All", "targetReplicatedJobs": ["leader"]},
        "replicatedJobs": [
            replicated("leader", 1, leader, mounts, volumes=volumes),
            replicated("host", hosts, command, [], affinity=apart),
        ],
    }
    config = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name}, "data": dict(files)}
    jobs = {
        "apiVersion": "jobset.x-k8s.io/v1alpha2", "kind": "JobSet", "metadata": {"name": name}, "spec": spec,
    }  # fmt: skip
    return {"apiVersion": "v1", "kind": "List", "items": [config, jobs]}


def leader_address(name: str) -> str:
    """The host name of the leader's pod of `job_set`."""
    return f"{name}-leader-0-0.{name}"
