"""Where checkpoints are written and read, as the trainer sees it: this host's memory, peers', storage.

Over `LocalMemory` (the agent's memory service) and `storage`: `checkpointer` and `restore` need not know
which slot file, which address or which URL something lies at.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from windtunnel.store.objects.files import ObjectError
from windtunnel.training.checkpoint.live import storage
from windtunnel.training.checkpoint.live.memory import LocalMemory
from windtunnel.training.checkpoint.live.memory.messages import Pace, Reservation
from windtunnel.training.checkpoint.live.restore import LoadedShard
from windtunnel.training.checkpoint.live.slot import CopyError, SlotFile
from windtunnel.training.checkpoint.live.snapshot import SnapshotPlan
from windtunnel.training.checkpoint.model import SHARED, Copy, StoredStep
from windtunnel.training.checkpoint.policy.slots import EMPTY, SLOTS, slot_for
from windtunnel.training.checkpoint.settings import CheckpointSettings


def attach(job: Any, settings: CheckpointSettings) -> Access | None:
    """Access to the memory of this host's agent; None where there is no agent.

    Raises:
        OSError: the agent does not answer.
    """
    if job.memory is None:
        return None
    memory = LocalMemory(job.memory, job.rank, job.generation, job.timeout)
    return Access(job, settings, memory)


class MemoryLost(ConnectionError):
    """What this host kept in memory is gone, though the host and the program go on. All ranks regroup
    for this as for a peer that is lost, and the other copies serve."""


class Stored:
    """What can be read where there is no agent: storage."""

    def __init__(self, url: str | None) -> None:
        self._url = url or ""

    def copies(self) -> Sequence[Copy]:
        """What this host's memory holds."""
        return []

    def stored(self) -> Sequence[StoredStep]:
        """What storage holds."""
        return storage.steps(self._url) if self._url else []

    def layout(self, copy: Copy) -> bytes:
        """What lies where in it.

        Raises:
            CopyError: it cannot be had from there.
        """
        with _had(f"layout {copy.shard.layout}"):
            return storage.layout(self._url, copy.shard)

    def fetch(self, copy: Copy, into: memoryview) -> str:
        """The shard's data into ``into``, verified against its own checksum, which is returned.

        Raises:
            CopyError: it is missing, torn or corrupt.
        """
        with _had(f"{copy.shard.name} of step {copy.shard.step}"):
            return storage.read_shard(self._url, copy.shard, into)


class Access(Stored):
    """This rank's slots, and all that can be read. ``memory``: a `LocalMemory`."""

    def __init__(self, job: Any, settings: CheckpointSettings, memory: Any) -> None:
        super().__init__(settings.persist)
        self.memory = memory
        self._job, self._settings = job, settings
        self._slots: dict[str, list[SlotFile]] = {}

    def writes(self, shard: str) -> bool:
        """Whether this rank writes ``shard``: its own, and for its host what all hold alike."""
        return shard != SHARED or self._job.local_rank == 0

    def reserve(self, plan: SnapshotPlan) -> list[int]:
        """Slots for the shards of ``plan``; the complete step in each, `slots.EMPTY` for none.

        Raises:
            UserError: there is not memory enough; the message has the sum.
        """
        self._let_go()
        for shard, layout in plan.layouts.items():
            if self.writes(shard):
                self._reserve(shard, plan.digests[shard], plan.blobs[shard], layout.nbytes)
        return [min(_step_in(slots[number]) for slots in self._slots.values()) for number in range(SLOTS)]

    def _reserve(self, shard: str, digest: str, layout: bytes, nbytes: int) -> None:
        chosen = self._settings
        pace = Pace(chosen.mode, max(1, chosen.buffer // chosen.parts), chosen.bandwidth, chosen.startup)
        copies = 1 if shard == SHARED else chosen.copies
        domains = chosen.domains or ()
        wanted = Reservation(shard, nbytes, digest, copies, chosen.placement, domains, pace)
        self._slots[shard] = self.memory.reserve(wanted, layout)

    def begin(self, plan: SnapshotPlan, slot: int, step: int) -> None:
        """The slot is being written from now on: nobody takes it for complete."""
        for name, slots in self._slots.items():
            slots[slot].begin(plan.shard(name, step, self._job.world, self._job.generation))

    def data(self, shard: str, slot: int) -> memoryview:
        return self._slots[shard][slot].data

    def complete(self, shard: str, slot: int, checksum: str) -> None:
        self._slots[shard][slot].complete(checksum)

    def save_again(self, step: int, shards: Sequence[LoadedShard]) -> None:
        """Have the shards of ``step``, as it was restored, in this host's memory and all their copies
        made, those that were lost and those that are left over of another course of the job.

        Raises:
            UserError: there is not memory enough.
            MemoryLost: the slots here are.
        """
        mine = sorted(
            (loaded for loaded in shards if self.writes(loaded.name)), key=lambda k: k.name != SHARED
        )
        self._let_go()
        for loaded in mine:
            self._reserve(loaded.name, loaded.shard.layout, loaded.layout, len(loaded.data))
        for loaded in mine:
            slots, shard = self._slots[loaded.name], loaded.shard
            index = slot_for(step, [_step_in(slot) for slot in slots])
            there = slots[index].whole
            if loaded.at_home and there is not None and there.content == shard.content and there.step == step:
                slots[index].relabel(shard.generation)
            else:
                slots[index].begin(shard)
                slots[index].data[:] = loaded.data
                slots[index].complete(shard.checksum)
            self.saved(loaded.name, index, step)

    def saved(self, shard: str, slot: int, step: int) -> None:
        try:
            self.memory.saved(shard, slot, step)
        except CopyError as error:
            raise MemoryLost(str(error)) from error

    def require_there(self) -> None:
        """Raises:
        MemoryLost: somebody removed a slot of this rank.
        """
        for slots in self._slots.values():
            for slot in slots:
                if not slot.path.exists():
                    raise MemoryLost(f"{slot.path} is gone")

    def persist(self, step: int) -> None:
        """Have the agent write ``step`` to storage."""
        self._job.at("before_persist", step)
        self.memory.persist(step, self._settings.persist, self._settings.keep)

    def copies(self) -> Sequence[Copy]:
        return self.memory.copies()

    def layout(self, copy: Copy) -> bytes:
        if copy.place is None:
            return super().layout(copy)
        with _had(f"layout {copy.shard.layout}"):
            return self.memory.layout(copy.shard.layout)

    def fetch(self, copy: Copy, into: memoryview) -> str:
        if copy.place is None:
            return super().fetch(copy, into)
        it = copy.shard
        with _had(f"{it.name} of step {it.step}"):
            return self.memory.fetch(copy.place, it.name, it.step, into, world=it.world)

    def close(self) -> None:
        self._let_go()
        self.memory.close()

    def _let_go(self) -> None:
        for slots in self._slots.values():
            for slot in slots:
                slot.close()
        self._slots = {}


@contextlib.contextmanager
def _had(what: str) -> Iterator[None]:
    try:
        yield
    except (OSError, ObjectError) as error:
        raise CopyError(f"{what}: {error}") from error


def _step_in(slot: SlotFile) -> int:
    shard = slot.whole
    return EMPTY if shard is None else shard.step
