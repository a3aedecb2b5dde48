"""Where checkpoints are written and read, as the trainer sees it: this host's memory, peers', storage.

Over `LocalMemory` (the agent's memory service) and `storage`: `checkpointer` and `restore` need not know
which slot file, which address or which URL something lies at.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from windtunnel.store.objects.files import ObjectError
from windtunnel.training.checkpoint.live import snapshot, storage
from windtunnel.training.checkpoint.live.layout import digest
from windtunnel.training.checkpoint.live.memory import LocalMemory
from windtunnel.training.checkpoint.live.restore import Kept
from windtunnel.training.checkpoint.live.settings import Settings
from windtunnel.training.checkpoint.live.slot import CopyError, Header, checksum_of
from windtunnel.training.checkpoint.live.snapshot import Plan, Tensors
from windtunnel.training.checkpoint.model import SHARED, Copy, Source
from windtunnel.training.checkpoint.policy.restore import StoredStep
from windtunnel.training.checkpoint.policy.slots import EMPTY, slot_for


def attach(job: Any, settings: Settings) -> Access | None:
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


class Access:
    """This rank's slots, and all that can be read. ``memory``: a `LocalMemory`."""

    def __init__(self, job: Any, settings: Settings, memory: Any) -> None:
        self.memory = memory
        self._job, self._settings = job, settings
        self._stored = Stored(settings.persist)
        self._slots: dict[str, list[Any]] = {}

    def writes(self, shard: str) -> bool:
        """Whether this rank writes ``shard``: its own, and for its host what all hold alike."""
        return shard != SHARED or self._job.local_rank == 0

    def reserve(self, plan: Plan) -> list[int]:
        """Slots for the shards of ``plan``; the complete step in each, `slots.EMPTY` for none.

        Raises:
            UserError: there is not memory enough; the message has the sum.
        """
        self._let_go()
        for shard, layout in plan.layouts.items():
            if self.writes(shard):
                self._reserve(shard, plan.blobs[shard], layout.nbytes)
        return [
            min(_held(slots[number].header) for slots in self._slots.values())
            for number in range(self._settings.slots)
        ]

    def _reserve(self, shard: str, layout: bytes, nbytes: int) -> None:
        chosen = self._settings
        self._slots.update(
            self.memory.reserve(
                layout,
                {shard: nbytes},
                slots=chosen.slots,
                copies=1 if shard == SHARED else chosen.copies,
                placement={"kind": chosen.placement, "domains": chosen.domains},
                mode=chosen.mode,
                chunk=max(1, chosen.buffer // chosen.parts),
                bandwidth=chosen.bandwidth,
                startup=chosen.startup,
            )
        )

    def begin(self, plan: Plan, slot: int, step: int) -> None:
        """The slot is being written from now on: nobody takes it for complete."""
        for shard, slots in self._slots.items():
            layout = plan.layouts[shard]
            slots[slot].begin(
                step,
                nbytes=layout.nbytes,
                world=layout.world,
                has_shared=layout.shared,
                generation=self._job.generation,
                layout=plan.digests[shard],
            )

    def data(self, shard: str, slot: int) -> memoryview:
        return self._slots[shard][slot].data

    def complete(self, shard: str, slot: int, checksum: str) -> None:
        self._slots[shard][slot].complete(checksum)

    def save_again(self, step: int, shards: Sequence[Kept]) -> None:
        """Have the shards of ``step``, as it was restored, in this host's memory and all their copies
        made, those that were lost and those that are left over of another course of the job.

        Raises:
            UserError: there is not memory enough.
            MemoryLost: the slots here are.
        """
        mine = sorted((kept for kept in shards if self.writes(kept.shard)), key=lambda k: k.shard != SHARED)
        self._let_go()
        for kept in mine:
            self._reserve(kept.shard, kept.layout, len(kept.data))
        for kept in mine:
            slots = self._slots[kept.shard]
            index = slot_for(len(slots), step, [_held(one.header) for one in slots])
            there = slots[index].header
            if not kept.at_home or there is None or (there.step, there.checksum) != (step, kept.checksum):
                slots[index].begin(
                    step,
                    nbytes=len(kept.data),
                    world=kept.world,
                    has_shared=kept.has_shared,
                    generation=kept.generation,
                    layout=digest(kept.layout),
                )
                slots[index].data[:] = kept.data
                slots[index].complete(kept.checksum)
            elif there.generation != kept.generation:
                slots[index].relabel(kept.generation)
            self.saved(kept.shard, index, step, kept.shard != SHARED)

    def saved(self, shard: str, slot: int, step: int, replicate: bool) -> None:
        try:
            self.memory.saved(shard, slot, step, replicate)
        except CopyError as error:
            raise MemoryLost(str(error)) from error

    def require_there(self) -> None:
        """Raises:
        MemoryLost: somebody removed a slot of this rank.
        """
        for slots in self._slots.values():
            for one in slots:
                if not one.path.exists():
                    raise MemoryLost(f"{one.path} is gone")

    def persist(self, step: int) -> None:
        """Have the agent write ``step`` to storage."""
        self._job.at("before_persist", step)
        self.memory.persist(step, self._settings.persist, self._settings.keep)

    def copies(self) -> Sequence[Copy]:
        """What this host's memory holds."""
        return self.memory.copies()

    def stored(self) -> Sequence[StoredStep]:
        """What storage holds."""
        return self._stored.stored()

    def layout(self, source: Source, step: int, shard: str, digest: str) -> bytes:
        """The layout of that digest.

        Raises:
            CopyError: it cannot be had from there.
        """
        if source.place is None:
            return self._stored.layout(source, step, shard, digest)
        with _had(f"layout {digest}"):
            return self.memory.layout(digest)

    def fetch(self, source: Source, step: int, shard: str, world: int, into: memoryview) -> str:
        """The shard's data into ``into``, verified against its own checksum, which is returned.

        Raises:
            CopyError: it is missing, torn or corrupt.
        """
        if source.place is None:
            return self._stored.fetch(source, step, shard, world, into)
        with _had(f"{shard} of step {step}"):
            return self.memory.fetch(source.place, shard, step, into, world=world)

    def close(self) -> None:
        self._let_go()
        self.memory.close()

    def _let_go(self) -> None:
        for slots in self._slots.values():
            for one in slots:
                one.close()
        self._slots = {}


class Stored:
    """What can be read where there is no agent: storage. Methods as those of `Access`."""

    def __init__(self, url: str | None) -> None:
        self._url = url or ""

    def copies(self) -> Sequence[Copy]:
        return []

    def stored(self) -> Sequence[StoredStep]:
        return storage.steps(self._url) if self._url else []

    def layout(self, source: Source, step: int, shard: str, digest: str) -> bytes:
        with _had(f"layout {digest}"):
            return storage.layout(self._url, digest)

    def fetch(self, source: Source, step: int, shard: str, world: int, into: memoryview) -> str:
        with _had(f"{shard} of step {step}"):
            return storage.read_shard(self._url, step, shard, into)


@contextlib.contextmanager
def _had(what: str) -> Iterator[None]:
    try:
        yield
    except (OSError, ObjectError) as error:
        raise CopyError(f"{what}: {error}") from error


def store(
    job: Any, url: str, step: int, tensors: Tensors, others: dict[str, Any], serial: str, keep: int
) -> None:
    """Write every rank's shard to storage, then the word that the step is complete; all but the newest
    ``keep`` steps go (0: none). All ranks call it.

    Raises:
        ObjectError: it cannot be written.
        TimeoutError: not all ranks came.
    """
    shard = f"rank{job.rank}"
    plan, data = snapshot.whole(tensors, others, job.world, job.rank)
    told: dict[str, Any] = {"world": job.world, "has_shared": False, "generation": job.generation}
    checksum = checksum_of(data)
    storage.write_shard(url, step, shard, data, layout=plan.digests[shard], checksum=checksum, **told)
    layouts = job.agree(f"stored/{serial}", plan.blobs[shard].decode())
    if job.rank == 0:
        blobs = [blob.encode() for blob in layouts.values()]
        storage.complete_step(url, step, layouts={digest(blob): blob for blob in blobs}, **told)
        if keep:
            storage.prune(url, keep)
    job.agree(f"stored-complete/{serial}")


def _held(header: Header | None) -> int:
    return header.step if header is not None and header.complete else EMPTY
