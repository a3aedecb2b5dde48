"""Replicas on a Ray cluster: actors that hold one loaded model each, in place of processes of this host.

Which replica a request goes to, and how many there are, is the policy's to say, so replicas are plain actors:
the router and the autoscaler of Ray Serve would decide it once more. Ray places them by their threads; an
actor that dies is not restarted by Ray, since the policy says whether there should be another. The hosts of
the cluster need windtunnel with its extra ``serve`` installed, not the files: those are sent.
"""

from __future__ import annotations

import tempfile
from functools import lru_cache
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from windtunnel.linux.hosts import Actor, RayCluster
from windtunnel.serving.variants.live import replica
from windtunnel.serving.variants.live.replica import Died, Failed
from windtunnel.serving.variants.live.tensors import Arrays


class ReplicaActor:
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

    def __init__(self, actor: Actor) -> None:
        self._actor = actor

    def loaded(self) -> None:
        """Wait until it can answer.

        Raises:
            Died: it cannot.
        """
        self._result("ready", timeout=replica.LOADS)

    def ask(self, inputs: Arrays) -> tuple[list[NDArray[Any]], float]:
        """The outputs, and the seconds that they took there.

        Raises:
            Died: the actor went, or has not answered for `replica.PATIENCE` seconds.
            Failed: the inputs were refused.
        """
        outputs, seconds = self._result("ask", dict(inputs), timeout=replica.PATIENCE)
        if isinstance(outputs, str):
            raise Failed(outputs)
        return outputs, seconds

    def _result(self, method: str, *arguments: Any, timeout: float) -> Any:
        try:
            return self._actor.call(method, *arguments).result(timeout)
        except Exception as error:  # of the file that is loaded there, or of Ray
            raise Died(str(error)) from error

    def end(self) -> None:
        self._actor.kill()


class ReplicaCluster:
    """A Ray cluster (`RayCluster`). ``cores`` and `free`: of all its hosts together.

    Raises:
        UserError: Ray is not installed here, or nobody answers there.
    """

    def __init__(self, on: str) -> None:
        self._ray = RayCluster(on)
        self._files = lru_cache(maxsize=None)(self._sent)
        self.cores = self._ray.total("CPU")

    def free(self) -> int:
        """Bytes that no actor has asked for."""
        return self._ray.free("memory")

    def _sent(self, file: Path) -> Any:
        files = [file, *file.parent.glob(f"{file.stem}.data")]
        return self._ray.shared([(file.name, file.read_bytes()) for file in files])

    def replica(self, file: Path, threads: int) -> Remote:
        """One more, which loads from now on."""
        return Remote(self._ray.actor(ReplicaActor, self._files(file), threads, cpus=threads))
