"""Hosts with real memory services in one process, and a control plane that agrees as the supervisor does."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import xxhash

from support.secret import KEYS
from windtunnel.base.keys import Keys
from windtunnel.training.checkpoint.live.memory import LocalMemory, MemoryLimits, MemoryService
from windtunnel.training.checkpoint.live.memory.messages import Pace, Reservation
from windtunnel.training.checkpoint.live.slot import SlotFile, checksum_of
from windtunnel.training.checkpoint.model import Shard
from windtunnel.training.checkpoint.policy.placement import Kind
from windtunnel.training.checkpoint.policy.slots import slot_for
from windtunnel.training.elastic.model import MemberHost, Membership

LAYOUT = b'{"some": "layout"}'
DIGEST = xxhash.xxh3_128_hexdigest(LAYOUT)
QUICK = MemoryLimits(connect=1.0, silence=5.0, membership=3.0, slot=0.3, pause=0.05)


def content(shard: str, step: int, nbytes: int) -> bytes:
    """What a shard consists of at a step: different everywhere."""
    seed = f"{shard}/{step}/".encode()
    return (seed * (nbytes // len(seed) + 1))[:nbytes]


def fill(
    slot: SlotFile, shard: str, step: int, nbytes: int, world: int, generation: int, **other: Any
) -> str:
    """Write a step to a slot as a trainer does."""
    about = {"has_shared": False, "layout": DIGEST, **other}
    slot.begin(Shard(shard, step, world, generation=generation, nbytes=nbytes, **about))
    data = slot.data
    data[:] = content(shard, step, nbytes)
    checksum = checksum_of(data)
    slot.complete(checksum)
    return checksum


class Context:
    """An agent, as a memory service sees it."""

    def __init__(self, cluster: Cluster, host: int) -> None:
        self.cluster, self.host = cluster, host
        self.events: list[tuple[str, dict[str, Any]]] = []

    def post(self, key: str, rank: int, value: Any) -> None:
        self.cluster.post(key, rank, value)

    def event(self, kind: str, **fields: Any) -> None:
        self.events.append((kind, fields))


class Cluster:
    """``hosts`` hosts with ``per_host`` ranks each. MemberHost ids are never used again."""

    def __init__(
        self, folder: Path, hosts: int, per_host: int = 1, limits: MemoryLimits = QUICK, keys: Keys = KEYS
    ) -> None:
        self.folder, self.per_host, self.limits, self.keys = folder, per_host, limits, keys
        self.lock = threading.RLock()
        self.posts: dict[str, dict[int, Any]] = {}
        self.decided: list[str] = []
        self.deaf: set[str] = set()  # keys that are never decided
        self.services: dict[int, MemoryService] = {}
        self.contexts: dict[int, Context] = {}
        self.places: list[int] = []
        self.next = 0
        self.generation = 0
        self.ranks: list[LocalMemory] = []
        self.slots: dict[tuple[int, str], list[SlotFile]] = {}
        self.form([self.start() for _ in range(hosts)])

    def start(self) -> int:
        """A new host."""
        host, self.next = self.next, self.next + 1
        self.contexts[host] = Context(self, host)
        folder = self.folder / f"n{host}"
        self.services[host] = MemoryService(
            folder, "127.0.0.1", keys=self.keys, context=self.contexts[host], limits=self.limits
        )
        return host

    def stop(self, host: int) -> None:
        """Lose a host."""
        self.services.pop(host).close()

    def form(self, places: list[int]) -> Membership:
        """A new generation."""
        self.generation += 1
        hosts = tuple(MemberHost(host, "127.0.0.1", self.services[host].address) for host in places)
        self.membership = Membership(self.generation, 1, hosts, self.per_host, "test")
        with self.lock:
            self.places, self.posts = places, {}
        for host, service in self.services.items():
            service.membership(self.membership, places.index(host) if host in places else None)
        for memory in self.ranks:
            memory.close()
        self.ranks = [
            LocalMemory(self.services[places[r // self.per_host]].path, r, self.generation, 10.0)
            for r in range(self.world)
        ]
        self.slots = {}
        return self.membership

    @property
    def world(self) -> int:
        return len(self.places) * self.per_host

    def service(self, place: int) -> MemoryService:
        return self.services[self.places[place]]

    def post(self, key: str, rank: int, value: Any) -> None:
        with self.lock:
            values = self.posts.setdefault(key, {})
            values[rank] = value
            if len(values) < self.world or key in self.deaf or key in self.decided[-9:]:  # decided once
                return
            if key.rpartition("/")[2].partition(".")[0] != str(self.generation):
                return
            self.decided.append(key)
            services = list(self.services.values())
        for service in services:
            service.decided(key, values)

    def reserve(
        self,
        nbytes: int = 10_000,
        ranks: list[int] | None = None,
        kind: Kind = "mixed",
        **pace: Any,
    ) -> None:
        """All ranks at once, as they do."""
        failed: list[Exception] = []

        def reserve_rank(rank: int) -> None:
            shard = f"rank{rank}"
            try:
                wanted = Reservation(shard, nbytes, DIGEST, kind=kind, pace=Pace(**pace))
                self.slots[rank, shard] = self.ranks[rank].reserve(wanted, LAYOUT)
            except Exception as error:
                failed.append(error)

        together([lambda rank=rank: reserve_rank(rank) for rank in ranks or range(self.world)])
        if failed:
            raise failed[0]

    def save(
        self, step: int, index: int, nbytes: int = 10_000, ranks: list[int] | None = None, **other: Any
    ) -> None:
        """Ranks save ``step`` to slot number ``index``."""
        for rank in range(self.world) if ranks is None else ranks:
            shard = f"rank{rank}"
            fill(self.slots[rank, shard][index], shard, step, nbytes, self.world, self.generation, **other)
            self.ranks[rank].saved(shard, index, step)

    def go_back(self, step: int, nbytes: int = 10_000, ranks: list[int] | None = None) -> None:
        """``ranks`` go on from ``step`` as trainers do: its shards are here again, and saved once more."""
        chosen = range(self.world) if ranks is None else ranks
        for rank in chosen:
            self.ranks[rank].restored(step, 1)
        self.reserve(nbytes, list(chosen))
        for rank in chosen:
            shard, slots = f"rank{rank}", self.slots[rank, f"rank{rank}"]
            held = [-1 if slot.whole is None else slot.whole.step for slot in slots]
            index = slot_for(step, held)
            if held[index] != step:
                fill(slots[index], shard, step, nbytes, self.world, self.generation - 1)
            self.ranks[rank].saved(shard, index, step)

    def wait(self, step: int, timeout: float = 20.0) -> None:
        for memory in self.ranks:
            assert memory.wait_committed(step, timeout)

    def holders(self, shard: str, step: int) -> list[int]:
        """Places with a copy that is complete and, read over the network, what it should be."""
        places = []
        for place, memory in enumerate(self.ranks[:: self.per_host]):
            for copy in memory.copies():
                it = copy.shard
                if (it.name, it.step) == (shard, step):
                    into = memoryview(bytearray(it.nbytes))
                    address = self.service(place).address
                    assert memory.fetch(address, shard, step, into, world=it.world) == it.checksum
                    assert bytes(into) == content(shard, step, it.nbytes)
                    places.append(place)
        return places

    def close(self) -> None:
        for memory in self.ranks:
            memory.close()
        for slots in self.slots.values():
            for slot in slots:
                slot.close()
        for host in list(self.services):
            self.stop(host)


def together(tasks: list[Callable[[], None]]) -> None:
    threads = [threading.Thread(target=task) for task in tasks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30.0)
        assert not thread.is_alive()
