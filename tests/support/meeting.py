"""What agents of hosts do for the groups of their trainers, for tests that have none."""

from __future__ import annotations

import threading

from windtunnel.base.rpc import RpcServer, RpcService
from windtunnel.training.elastic.live.calls import HostAgent


class Meeting:
    """`HostAgent.meet` for all ranks. Generations before ``generation`` are over, but for 0, in which the
    tests say what is their own."""

    def __init__(self) -> None:
        self.generation = 1
        self._said: dict[int, dict[str, str]] = {}
        self._changed = threading.Condition()

    def meet(
        self, generation: int, said: dict[str, str], keys: list[str], within: float
    ) -> dict[str, str] | None:
        with self._changed:
            all_said = self._said.setdefault(generation, {})
            all_said |= said
            self._changed.notify_all()
            if not self._changed.wait_for(
                lambda: self._is_over(generation) or all_said.keys() >= set(keys), within
            ):
                raise TimeoutError(f"nobody said {keys}")
            return None if self._is_over(generation) else {key: all_said[key] for key in keys}

    def compare_set(
        self, generation: int, key: str, expected: str, desired: str, within: float
    ) -> tuple[bool, str]:
        with self._changed:
            all_said = self._said.setdefault(generation, {})
            so = all_said.get(key, "") == expected
            if so:
                all_said[key] = desired
                self._changed.notify_all()
            return so, all_said.get(key, "")

    def form(self, generation: int) -> None:
        """A newer generation."""
        with self._changed:
            self.generation = generation
            self._changed.notify_all()

    def _is_over(self, generation: int) -> bool:
        return 0 < generation < self.generation


class MeetingServer(Meeting):
    """At ``path``, a Unix socket."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self._server = RpcServer(RpcService.of(HostAgent, self), f"unix:{path}")
        self.address, self.close = self._server.address, self._server.close
