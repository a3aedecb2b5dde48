"""The store in which the ranks of a group meet, as torch wants one.

What is set goes to the supervisor, and from there to the agents of all hosts; a rank waits at its agent. So
the store needs no process, port or authentication of its own, it begins empty with each generation, and
whoever waits in it comes out as soon as a newer generation is known. What a supervisor that dies has heard,
the agents say to the next one.
"""

from __future__ import annotations

import os
import sys
from base64 import b64decode, b64encode
from datetime import timedelta
from typing import Any

from torch.distributed import DistStoreError, Store  # type: ignore[attr-defined]

from windtunnel.base.remote import RemoteLink
from windtunnel.training.elastic.live.calls import HostAgent

LIMIT = timedelta(minutes=30)  # as torch's own


class MeetingStore(Store):
    """That of ``generation``; ``agent``: the way to the agent of this host, for this store alone."""

    def __init__(self, agent: RemoteLink, generation: int, timeout: timedelta = LIMIT) -> None:
        super().__init__()
        self._agent, self._generation, self._limit = agent, generation, timeout

    def set(self, key: str, value: str | bytes) -> None:
        self._meet([], self._limit, {key: _text(value)})

    def get(self, key: str) -> bytes:
        return self.multi_get([key])[0]

    def multi_get(self, keys: list[str]) -> list[bytes]:
        values = self._meet(keys, self._limit)
        return [b64decode(values[key]) for key in keys]

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:  # type: ignore[override]
        self._meet(keys, self._limit if timeout is None else timeout)

    def check(self, keys: list[str]) -> bool:
        try:
            self._meet(keys, timedelta())
        except DistStoreError:
            return False
        return True

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        _, now = self._compare_set(key, _text(expected), _text(desired))
        return b64decode(now or _text(expected))

    def add(self, key: str, amount: int) -> int:
        changed, now = False, ""
        while not changed:
            changed, now = self._compare_set(key, now, _text(str(int(b64decode(now) or 0) + amount)))
        return int(b64decode(now))

    def set_timeout(self, timeout: timedelta) -> None:
        self._limit = timeout

    @property
    def timeout(self) -> timedelta:
        return self._limit

    def clone(self) -> MeetingStore:
        return self

    def _meet(self, keys: list[str], limit: timedelta, said: dict[str, str] | None = None) -> dict[str, str]:
        values: dict[str, str] = self._called("meet", said or {}, keys, limit.total_seconds())
        return values

    def _compare_set(self, key: str, expected: str, desired: str) -> tuple[bool, str]:
        answer: tuple[bool, str] = self._called(
            "compare_set", key, expected, desired, self._limit.total_seconds()
        )
        return answer

    def _called(self, name: str, *arguments: Any) -> Any:
        try:
            value = self._agent.call(HostAgent, name, "", self._generation, *arguments)
        except OSError as error:
            raise DistStoreError(str(error)) from error
        if value is None:
            raise DistStoreError(f"generation {self._generation} is over")
        return value


def _text(value: str | bytes) -> str:
    return b64encode(value.encode() if isinstance(value, str) else bytes(value)).decode()


_kept: list[MeetingStore] = []


def use_in_environment() -> None:
    """Let ``env://`` of a script that does not use `elastic.run` meet here."""
    rendezvous: Any = sys.modules["torch.distributed.rendezvous"]  # the package has a function of that name

    def create(*arguments: Any, timeout: timedelta = LIMIT, **options: Any) -> Store:
        agent = RemoteLink(os.environ["WINDTUNNEL_AGENT"])
        _kept.append(MeetingStore(agent, int(os.environ["WINDTUNNEL_GENERATION"]), timeout))
        return _kept[-1]  # C++ alone would not keep what of it is Python

    rendezvous._create_c10d_store = create
