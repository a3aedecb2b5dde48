"""Replicas on a Ray cluster: actors that hold one loaded model each, in place of processes of this host.

Which replica a request goes to, and how many there are, is the policy's to say, so replicas are plain actors:
the router and the autoscaler of Ray Serve would decide it once more. Ray places them by their threads; an
actor that dies is not restarted by Ray, since the policy says whether there should be another. The hosts of
the cluster need windtunnel with its extra ``serve`` installed, not the files: those are sent.
"""

from __future__ import annotations

import socket
import tempfile
from functools import lru_cache
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from windtunnel.base.errors import UserError
from windtunnel.serving.variants.live import replica
from windtunnel.serving.variants.live.replica import Died, Failed
from windtunnel.serving.variants.live.tensors import Arrays


class Held:
    """What the actor does. ``files``: names and contents, first the one to load."""

    def __init__(self, files: list[tuple[str, bytes]], threads: int) -> None:
        with tempfile.TemporaryDirectory() as folder:
            for name, content in files:
                (Path(folder) / name).write_bytes(content)
            self._run = replica.program(Path(folder) / files[0][0], threads)

    def ready(self) -> None:
        """It is loaded."""

    def ask(self, inputs: Arrays) -> tuple[list[NDArray[Any]] | str, float]:
        """The outputs, or why there are none; and the seconds."""
        return replica.timed(self._run, inputs)


class Remote:
    """An actor, from this side; as `replica.Replica`."""

    def __init__(self, ray: Any, files: Any, threads: int) -> None:
        self._ray = ray
        self._actor = ray.remote(num_cpus=threads, max_restarts=0)(Held).remote(files, threads)

    def loaded(self) -> None:
        """Wait until it can answer.

        Raises:
            Died: it cannot.
        """
        self._got(self._actor.ready.remote(), replica.LOADS)

    def ask(self, inputs: Arrays) -> tuple[list[NDArray[Any]], float]:
        """The outputs, and the seconds that they took there.

        Raises:
            Died: the actor went, or has not answered for `replica.PATIENCE` seconds.
            Failed: the inputs were refused.
        """
        made, seconds = self._got(self._actor.ask.remote(dict(inputs)), replica.PATIENCE)
        if isinstance(made, str):
            raise Failed(made)
        return made, seconds

    def _got(self, asked: Any, seconds: float) -> Any:
        try:
            return self._ray.get(asked, timeout=seconds)
        except self._ray.exceptions.RayError as fault:
            raise Died(str(fault).partition("\n")[0]) from fault

    def end(self) -> None:
        self._ray.kill(self._actor)


class Cluster:
    """What is at ``address`` (``auto``: the cluster that this host is in). ``cores`` and `free`: of all its
    hosts together.

    Raises:
        UserError: Ray is not installed here, or nobody answers there.
    """

    def __init__(self, address: str) -> None:
        try:
            import ray
        except ImportError as fault:
            raise UserError("variants serve: `ray` needs ray; use pip install windtunnel[ray]") from fault
        try:
            if ":" in address:  # Ray itself would wait for minutes
                name, _, port = address.removeprefix("ray://").rpartition(":")
                socket.create_connection((name, int(port)), timeout=5).close()
            ray.init(address, ignore_reinit_error=True, log_to_driver=False, configure_logging=False)
        except Exception as fault:  # Ray's own are no family of exceptions
            words = str(fault).partition("\n")[0]
            raise UserError(
                f"variants serve: `ray` {address!r}: no cluster answers there: {words}"
            ) from fault
        self._ray = ray
        self._files = lru_cache(maxsize=None)(self._sent)
        self.cores = int(ray.cluster_resources().get("CPU", 0))

    def free(self) -> int:
        """Bytes that no actor has asked for."""
        return int(self._ray.available_resources().get("memory", 0))

    def _sent(self, file: Path) -> Any:
        files = [file, *file.parent.glob(f"{file.stem}.data")]
        return self._ray.put([(file.name, file.read_bytes()) for file in files])

    def replica(self, file: Path, threads: int) -> Remote:
        """One more, which loads from now on."""
        return Remote(self._ray, self._files(file), threads)
