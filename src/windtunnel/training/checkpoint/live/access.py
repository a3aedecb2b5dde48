"""Where checkpoints are written and read, as the trainer sees it: this machine's memory, peers', storage.

A thin face over `LocalMemory` (the agent's memory service) and `storage`: `checkpointer` and `restore` need
not know which slot file, which address or which URL something lies at.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from windtunnel.training.checkpoint.live import objects, snapshot, storage
from windtunnel.training.checkpoint.live.layout import SHARED, digest
from windtunnel.training.checkpoint.live.memory import LocalMemory
from windtunnel.training.checkpoint.live.settings import Settings
from windtunnel.training.checkpoint.live.slot import CopyError, Header
from windtunnel.training.checkpoint.live.snapshot import Plan, Tensors
from windtunnel.training.checkpoint.model import Copy, Health, Source
from windtunnel.training.checkpoint.policy.restore import StoredStep
from windtunnel.training.checkpoint.policy.slots import EMPTY


def attach(job: Any, settings: Settings) -> Access | None:
    """Access to the memory of this machine's agent; None where there is no agent.

    Raises:
        OSError: the agent does not answer.
    """
    if job.memory is None:
        return None
    memory = LocalMemory(job.memory, job.rank, job.generation, job.timeout)
    return Access(job, settings, memory)


class Access:
    """This rank's slots, and all that can be read. ``memory``: a `LocalMemory`."""

    def __init__(self, job: Any, settings: Settings, memory: Any) -> None:
        self._job, self._settings, self._memory = job, settings, memory
        self._stored = Stored(settings)
        self._slots: dict[str, list[Any]] = {}

    def writes(self, shard: str) -> bool:
        """Whether this rank writes ``shard``: its own, and for its machine what all hold alike."""
        return shard != SHARED or self._job.local_rank == 0

    def reserve(self, plan: Plan) -> list[int]:
        """Slots for the shards of ``plan``; the complete step in each, `slots.EMPTY` for none.

        Raises:
            UserError: there is not memory enough; the message has the sum.
        """
        chosen = self._settings
        self._let_go()
        for shard, layout in plan.layouts.items():
            if self.writes(shard):
                self._slots.update(
                    self._memory.reserve(
                        plan.blobs[shard],
                        {shard: layout.nbytes},
                        slots=chosen.slots,
                        copies=1 if shard == SHARED else chosen.copies,
                        placement={"kind": chosen.placement, "domains": chosen.domains},
                        mode=chosen.mode,
                        chunk=max(1, chosen.buffer // chosen.parts),
                        bandwidth=chosen.bandwidth,
                        startup=chosen.startup,
                    )
                )
        return [
            min(_held(slots[number].header) for slots in self._slots.values())
            for number in range(chosen.slots)
        ]

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

    def restored(self, step: int) -> None:
        """All ranks go on from ``step``, -1 from the beginning: commits count from there."""
        self._memory.restored(step)

    def saved(self, shard: str, slot: int, step: int, replicate: bool) -> None:
        self._memory.saved(shard, slot, step, replicate)

    def committed(self) -> int:
        return self._memory.committed()

    def wait_committed(self, step: int, timeout: float) -> bool:
        return self._memory.wait_committed(step, timeout)

    def health(self) -> Health:
        return self._memory.health()

    def open_window(self, seconds: float) -> None:
        self._memory.open_window(seconds)

    def close_window(self) -> None:
        self._memory.close_window()

    def send_now(self) -> None:
        """In idle mode: without waiting for the network to be idle."""
        self._memory.flush()

    def persist_due(self, step: int) -> None:
        """Have the agent write ``step`` to storage, if it is time to."""
        chosen = self._settings
        if chosen.persist and (step + 1) % chosen.persist_every < chosen.every and self._job.local_rank == 0:
            self._job.at("before_persist", step)
            self._memory.persist(step, chosen.persist)

    def copies(self) -> Sequence[Copy]:
        return self._memory.copies()

    def stored(self) -> Sequence[StoredStep]:
        return self._stored.stored() if self._settings.persist else []

    def layout(self, source: Source, step: int, shard: str, digest: str) -> bytes:
        if source.place is None:
            return self._stored.layout(source, step, shard, digest)
        try:
            return self._memory.layout(digest)
        except OSError as error:
            raise CopyError(f"layout {digest}: {error}") from error

    def fetch(self, source: Source, step: int, shard: str, world: int, into: memoryview) -> str:
        if source.place is None:
            return self._stored.fetch(source, step, shard, world, into)
        try:
            return self._memory.fetch(source.place, shard, step, into, world=world)
        except OSError as error:
            raise CopyError(f"{shard} of step {step}: {error}") from error

    def close(self) -> None:
        self._let_go()
        self._memory.close()

    def _let_go(self) -> None:
        for slots in self._slots.values():
            for one in slots:
                one.close()
        self._slots = {}


class Stored:
    """What can be read where there is no agent: storage."""

    def __init__(self, settings: Settings) -> None:
        self._url = settings.persist or ""

    def copies(self) -> Sequence[Copy]:
        return []

    def stored(self) -> Sequence[StoredStep]:
        return storage.steps(self._url)

    def layout(self, source: Source, step: int, shard: str, digest: str) -> bytes:
        try:
            return storage.layout(self._url, digest)
        except (OSError, storage.StorageError) as error:
            raise CopyError(f"layout {digest}: {error}") from error

    def fetch(self, source: Source, step: int, shard: str, world: int, into: memoryview) -> str:
        try:
            return storage.read_shard(self._url, step, shard, into)
        except (OSError, storage.StorageError) as error:
            raise CopyError(f"{shard} of step {step}: {error}") from error


def store(job: Any, url: str, step: int, tensors: Tensors, others: dict[str, Any], serial: str) -> None:
    """Write every rank's shard to storage, then the word that the step is complete. All ranks call it.

    Raises:
        StorageError: it cannot be written.
        TimeoutError: not all ranks came.
    """
    packed = objects.pack(others)
    plan = snapshot.plan(tensors, tuple(others), len(packed), None, job.world, job.rank)
    shard = f"rank{job.rank}"
    layout, moves = plan.layouts[shard], plan.moves[shard]
    data = memoryview(bytearray(layout.nbytes))
    snapshot.put_objects(packed, layout.tail, data)
    snapshot.copy(tensors, moves, snapshot.views(layout, moves, data))
    told: dict[str, Any] = {"world": job.world, "has_shared": False, "generation": job.generation}
    checksum = snapshot.checksum(data)
    storage.write_shard(url, step, shard, data, layout=plan.digests[shard], checksum=checksum, **told)
    layouts = job.agree(f"stored/{serial}", plan.blobs[shard].decode())
    if job.rank == 0:
        blobs = [blob.encode() for blob in layouts.values()]
        storage.complete_step(url, step, layouts={digest(blob): blob for blob in blobs}, **told)
    job.agree(f"stored-complete/{serial}")


def _held(header: Header | None) -> int:
    return header.step if header is not None and header.complete else EMPTY
