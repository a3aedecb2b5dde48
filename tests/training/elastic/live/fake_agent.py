"""An agent for tests of the trainer's side: it answers what trainers call, and keeps it."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from worker_worlds import BOUND

from support.meeting import Meeting
from windtunnel.base.rpc import RpcServer, RpcService
from windtunnel.training.elastic.live.calls import HostAgent, News, TrainerWelcome
from windtunnel.training.elastic.model import Membership
from windtunnel.training.elastic.spec import JobSpec

Message = dict[str, Any]
BEAT = 0.05


class FakeAgent:
    """One for all ranks. Agreements are decided as soon as all ranks of the generation have posted, unless
    ``decides`` (of a key) says no. ``rank_of``: that of a process."""

    def __init__(
        self,
        folder: Path,
        membership: Membership,
        rank_of: Callable[[int], int],
        faults: tuple[str, ...] = (),
    ) -> None:
        self.path = f"unix:{folder}/agent"
        self.membership = membership
        self.said: list[tuple[int, Message]] = []
        self.decides: Callable[[str], bool] = lambda key: True
        self.durable: dict[str, dict[int, Any]] = {}
        self._faults, self._rank_of = list(faults), rank_of
        self._places: dict[int, int | None] = {}
        self._dropped: set[int] = set()
        self._posts: dict[tuple[int, str], dict[int, Any]] = {}
        self._waiting: dict[tuple[int, str], list[queue.SimpleQueue[Any]]] = {}
        self._changed = threading.Condition(threading.RLock())
        self._meeting = Meeting()
        self.meet = self._meeting.meet
        self._server = RpcServer(RpcService.of(HostAgent, self), self.path)
        self.close = self._server.close

    def wait_for(self, op: str, rank: int | None = None, count: int = 1, **fields: Any) -> list[Message]:
        """The first ``count`` calls of that kind, once they have come."""

        def matching() -> list[Message]:
            return [
                message
                for sender, message in self.said
                if message["op"] == op
                and rank in (None, sender)
                and all(message.get(name) == value for name, value in fields.items())
            ]

        with self._changed:
            came = self._changed.wait_for(lambda: len(matching()) >= count, BOUND)
            said = [(sender, message) for sender, message in self.said if message["op"] != "beat"]
            assert came, f"no {op} {fields} of {rank}; said: {said}"
            return matching()[:count]

    def form(self, membership: Membership, places: dict[int, int | None] | None = None) -> None:
        """A newer generation for all that are there; ``places`` by the rank they had."""
        with self._changed:
            self.membership = membership
            self._meeting.form(membership.generation)
            self._places = {} if places is None else places
            for answers in self._waiting.values():
                for answer in answers:
                    answer.put(None)
            self._waiting.clear()
            self._changed.notify_all()

    def drop(self, rank: int) -> None:
        """``rank`` is no trainer of this host any more."""
        self._dropped.add(rank)

    # as `HostAgent`

    def join(self, pid: int) -> TrainerWelcome:
        rank = self._rank_of(pid)
        self._keep(rank, {"op": "join"})
        plain = News(self.membership.plain(), rank)
        config = {"beat": BEAT, **JobSpec().waits("trainer"), "generation": 20.0}
        return TrainerWelcome(plain, rank, 0, 10 + rank, "/nowhere", self._faults, config)

    def beat(self, pid: int, generation: int) -> News | None:
        rank = self._rank_of(pid)
        self._keep(rank, {"op": "beat"})
        if rank in self._dropped:
            raise ProcessLookupError(3, "no trainer of this host")
        with self._changed:
            if self._changed.wait_for(lambda: self.membership.generation > generation, BEAT):
                return News(self.membership.plain(), self._places.get(rank, rank))
            return None

    def agree(self, pid: int, generation: int, key: str, value: Any, within: float) -> dict[int, Any] | None:
        rank = self._rank_of(pid)
        mine: queue.SimpleQueue[Any] = queue.SimpleQueue()
        with self._changed:
            if generation < self.membership.generation:
                return None
            place = self._places.get(rank, rank)
            self._posts.setdefault((generation, key), {})[place or 0] = value
            self._waiting.setdefault((generation, key), []).append(mine)
            about = {"generation": generation, "key": key, "value": value, "within": within}
            self._keep(rank, {"op": "post", **about})
            posts = self._posts[generation, key]
            if len(posts) == self.membership.world and self.decides(key):
                if key.startswith("commit/"):
                    self.durable[key] = dict(posts)
                for answer in self._waiting.pop((generation, key)):
                    answer.put(dict(posts))
        try:
            values: dict[int, Any] | None = mine.get(timeout=within)
        except queue.Empty:
            raise TimeoutError(f"not all ranks came to {key!r} within {within:g} s") from None
        return values

    def ask(self, pid: int, key: str, within: float) -> dict[int, Any] | None:
        return self.durable.get(key)

    def event(self, pid: int, kind: str, fields: Message) -> None:
        self._keep(self._rank_of(pid), {**fields, "op": "event", "kind": kind})

    def done(self, pid: int, result: Any) -> None:
        about = {"generation": self.membership.generation, "rank": self._places.get(self._rank_of(pid))}
        self._keep(self._rank_of(pid), {"op": "done", "result": result, **about})

    def __getattr__(self, name: str) -> Callable[..., None]:
        def call(pid: int, **fields: Any) -> None:
            self._keep(self._rank_of(pid), {"op": name, **fields})

        return call

    def _keep(self, rank: int, message: Message) -> None:
        with self._changed:
            self.said.append((rank, message))
            self._changed.notify_all()
