"""A job in one process: ranks as threads, memory as slots in folders, agreement by a barrier."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from support.slots import read_header
from windtunnel.training.checkpoint.live import slot as slots
from windtunnel.training.checkpoint.live.layout import digest
from windtunnel.training.checkpoint.live.memory.messages import Reservation
from windtunnel.training.checkpoint.live.slot import CopyError, SlotFile
from windtunnel.training.checkpoint.model import SHARED, Copy
from windtunnel.training.checkpoint.policy.slots import SLOTS


class Regrouped(BaseException):
    """As `MembershipChanged`."""


@dataclass
class Cluster:
    """Hosts with memory: ``folder/place`` each; a copy goes to the next place."""

    folder: Path
    world: int
    per_host: int = 1
    copies: int = 2
    replicate: bool = True
    generation: int = 1
    committed: int = -1
    ready: dict[int, set[int]] = field(default_factory=dict)
    layouts: dict[str, bytes] = field(default_factory=dict)
    events: list[dict[str, Any]] = field(default_factory=list)
    said: dict[tuple[int, str], dict[int, Any]] = field(default_factory=dict)
    persisted: list[int] = field(default_factory=list)
    log: dict[str, Any] | None = None  # of a supervisor
    changed: threading.Condition = field(default_factory=threading.Condition)

    @property
    def places(self) -> int:
        return self.world // self.per_host

    def at(self, place: int) -> Path:
        path = self.folder / str(place)
        path.mkdir(parents=True, exist_ok=True)
        return path

    def regroup(self, world: int) -> None:
        self.world, self.committed, self.generation = world, -1, self.generation + 1
        self.ready.clear()

    def wipe(self, place: int) -> None:
        for path in self.at(place).glob("*.slot"):
            path.unlink()

    def files(self, place: int, shard: str = "*", step: int | None = None) -> list[Path]:
        paths = sorted(self.at(place).glob(f"{shard}.*.slot"))
        return [p for p in paths if step is None or _step(p) == step]

    def flip(self, place: int, shard: str, step: int) -> None:
        for path in self.files(place, shard, step):
            with open(path, "r+b") as file:
                file.seek(slots.HEADER + 5000)
                byte = file.read(1)
                file.seek(slots.HEADER + 5000)
                file.write(bytes([byte[0] ^ 1]))

    def notes(self) -> list[str]:
        return [e["text"] for e in self.events if e["kind"] == "note"]


def _step(path: Path) -> int:
    header = read_header(path)
    return header.shard.step if header is not None and header.complete else -1


class FakeMemory:
    """The face of `LocalMemory` that the trainer uses."""

    def __init__(self, cluster: Cluster, rank: int) -> None:
        self.cluster, self.rank = cluster, rank
        self.place = rank // cluster.per_host
        self.windows: list[float] = []
        self.needs = ""
        self.slots: dict[str, list[SlotFile]] = {}

    def reserve(self, wanted: Reservation, layout: bytes) -> list[SlotFile]:
        self.cluster.layouts[digest(layout)] = layout
        shard, size = wanted.shard, wanted.nbytes
        self.slots[shard] = [self._slot(self.place, shard, size, i) for i in range(SLOTS)]
        return self.slots[shard]

    def _slot(self, place: int, shard: str, size: int, index: int) -> SlotFile:
        path = self.cluster.at(place) / slots.file_name(shard, self.cluster.world, size, index)
        if path.exists():
            return SlotFile.open(path)
        return SlotFile.create(path, shard, self.cluster.world, size)

    def saved(self, shard: str, index: int, step: int) -> None:
        header = read_header(self.slots[shard][index].path)
        assert header is not None and header.complete and header.shard.step == step
        if shard == SHARED or not self.cluster.replicate:
            return
        for jump in range(1, min(self.cluster.copies, self.cluster.places)):
            other = self._slot((self.place + jump) % self.cluster.places, shard, header.capacity, index)
            other.begin(header.shard)
            other.data[:] = self.slots[shard][index].data
            other.complete(header.shard.checksum)
        with self.cluster.changed:
            self.cluster.ready.setdefault(step, set()).add(self.rank)
            if len(self.cluster.ready[step]) == self.cluster.world:
                self.cluster.committed = max(self.cluster.committed, step)
            self.cluster.changed.notify_all()

    def restored(self, step: int, course: int) -> int:
        self.cluster.committed = step
        return 0

    def flush(self) -> None: ...

    def committed(self) -> int:
        return self.cluster.committed

    def wait_committed(self, step: int, timeout: float) -> bool:
        with self.cluster.changed:
            return self.cluster.changed.wait_for(lambda: self.cluster.committed >= step, timeout)

    def open_window(self, seconds: float) -> None:
        self.windows.append(seconds)

    def close_window(self) -> None:
        self.windows.append(0.0)

    def copies(self) -> list[Copy]:
        headers = [read_header(path) for path in self.cluster.files(self.place)]
        return [Copy(self.place, h.shard) for h in headers if h is not None and h.complete]

    def fetch(self, place: int, shard: str, step: int, into: memoryview, *, world: int | None = None) -> str:
        for path in self.cluster.files(place, shard, step):
            return slots.load(path, into, step=step).checksum
        raise CopyError(f"{shard} of step {step} is not at {place}")

    def layout(self, digest: str) -> bytes:
        if digest not in self.cluster.layouts:
            raise CopyError(digest)
        return self.cluster.layouts[digest]

    def persist(self, step: int, url: str, keep: int = 0) -> None:
        self.cluster.persisted.append(step)

    def close(self) -> None:
        for held in self.slots.values():
            for slot in held:
                slot.close()


class FakeJob:
    """One rank of a `Cluster`."""

    def __init__(self, cluster: Cluster, rank: int, kept: dict[str, Any] | None = None) -> None:
        self.cluster, self.rank, self.world = cluster, rank, cluster.world
        self.local_rank, self.place = rank % cluster.per_host, rank // cluster.per_host
        self.host, self.generation = self.place, cluster.generation
        self.memory: str | None = "unix:/nowhere"
        self.membership = None
        self.supervised, self.timeout, self.folder = True, 30.0, cluster.folder
        self.kept = {} if kept is None else kept
        self.points: list[tuple[str, int | None]] = []

    def agree(self, key: str, value: Any = None, timeout: float | None = None) -> dict[int, Any]:
        with self.cluster.changed:
            said = self.cluster.said.setdefault((self.generation, key), {})
            assert self.rank not in said, f"{key} is used twice"
            said[self.rank] = value
            self.cluster.changed.notify_all()
            end = time.monotonic() + (self.timeout if timeout is None else timeout)
            while len(said) < self.world:
                if not self.cluster.changed.wait(max(0.0, end - time.monotonic())):
                    raise TimeoutError(key)
            return dict(said)

    def checkpoints(self) -> dict[str, Any] | None:
        return self.cluster.log

    def check(self) -> None:
        if self.cluster.generation != self.generation:
            raise Regrouped

    def keep(self, name: str, make: Any) -> Any:
        if name not in self.kept:
            self.kept[name] = make()
        return self.kept[name]

    def at_end(self, call: Any) -> None:
        self.kept.setdefault("endings", []).append(call)

    def at(self, point: str, step: int | None = None) -> None:
        self.points.append((point, step))

    def step(self, step: int, **fields: Any) -> None: ...

    def guarantee(self, doubts: Any = (), *, any_world: bool = False) -> None:
        self.event("guarantee", doubts=list(doubts), any_world=any_world)

    def event(self, kind: str, **fields: Any) -> None:
        self.cluster.events.append({"kind": kind, "rank": self.rank, **fields})


def together(world: int, act: Any) -> list[Any]:
    """``act(rank)`` on all ranks at once; their results, or the first error."""
    out: list[Any] = [None] * world
    errors: list[BaseException] = []

    def run_rank(rank: int) -> None:
        try:
            out[rank] = act(rank)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run_rank, args=(rank,)) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    if errors:
        raise errors[0]
    return out
