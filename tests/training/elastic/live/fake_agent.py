"""A agent for tests of the trainer's side: a thread that speaks the protocol and nothing more."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from worker_worlds import BOUND

from windtunnel.base import wire
from windtunnel.training.elastic.model import Membership

Message = dict[str, Any]


class FakeAgent:
    """One for all ranks. Agreements are decided as soon as all ranks of the generation have posted, unless
    ``decides`` (of a key) says no."""

    def __init__(self, folder: Path, membership: Membership, faults: tuple[str, ...] = ()) -> None:
        self.path = f"unix:{folder}/agent"
        self.membership = membership
        self.faults = list(faults)
        self.said: list[tuple[int, Message]] = []
        self.decides: Callable[[str], bool] = lambda key: True
        self.durable: dict[str, dict[int, Any]] = {}
        self._posts: dict[tuple[int, str], dict[int, Any]] = {}
        self._socks: dict[int, socket.socket] = {}
        self._changed = threading.Condition(threading.RLock())
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(f"{folder}/agent")
        self._listener.listen()
        threading.Thread(target=self._accept, daemon=True).start()

    def wait_for(self, op: str, rank: int | None = None, count: int = 1, **fields: Any) -> list[Message]:
        """The first ``count`` messages of that kind, once they have come."""

        def found() -> list[Message]:
            return [
                message
                for sender, message in self.said
                if message["op"] == op
                and rank in (None, sender)
                and all(message.get(name) == value for name, value in fields.items())
            ]

        with self._changed:
            came = self._changed.wait_for(lambda: len(found()) >= count, BOUND)
            assert came, (
                f"no {op} {fields} of {rank}; said: {[(r, m) for r, m in self.said if m['op'] != 'beat']}"
            )
            return found()[:count]

    def form(self, membership: Membership, places: dict[int, int | None] | None = None) -> None:
        """A newer generation for all that are connected; ``places`` by the rank they had."""
        with self._changed:
            self.membership = membership
            for rank, sock in self._socks.items():
                place = rank if places is None else places.get(rank)
                message = {"op": "membership", "membership": membership.plain(), "place": place}
                try:
                    wire.send(sock, message)
                except OSError:
                    continue

    def drop(self, rank: int) -> None:
        """The agent is gone, as ``rank`` sees it."""
        self._socks[rank].shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(sock,), daemon=True).start()

    def _serve(self, sock: socket.socket) -> None:
        rank = -1
        try:
            while True:
                message, _ = wire.receive(sock)
                if message["op"] == "hello":
                    rank = message["rank"]
                    with self._changed:
                        self._socks[rank] = sock
                        wire.send(
                            sock,
                            {
                                "op": "welcome",
                                "membership": self.membership.plain(),
                                "place": rank,
                                "host": 10 + rank,
                                "memory_path": "/nowhere",
                                "faults": self.faults,
                                "config": {"beat": 0.05, "generation": 20.0},
                            },
                        )
                self._heard(rank, message)
        except OSError:
            self._heard(rank, {"op": "closed", "t": time.time()})
            sock.close()

    def _heard(self, rank: int, message: Message) -> None:
        with self._changed:
            self.said.append((rank, message))
            if message["op"] == "post" and message["generation"] == self.membership.generation:
                key = message["generation"], message["key"]
                posts = self._posts.setdefault(key, {})
                posts[message["rank"]] = message["value"]
                if len(posts) == self.membership.world and self.decides(message["key"]):
                    if message["key"].startswith("commit/"):
                        self.durable[message["key"]] = dict(posts)
                    self._all({"op": "decided", "generation": key[0], "key": key[1], "values": posts})
            elif message["op"] == "ask":
                values = self.durable.get(message["key"])
                wire.send(self._socks[rank], {"op": "answer", "key": message["key"], "values": values})
            self._changed.notify_all()

    def _all(self, message: Message) -> None:
        for sock in self._socks.values():
            with suppress(OSError):  # a rank that has ended: no matter of the one whose word this follows
                wire.send(sock, message)
