"""The slots that a host has: *shelves* of `SLOTS`, one shelf for each shard of each size of the job.

The host's own shards and the copies that it holds for peers lie alike; which is which the membership says,
and that changes. A shelf that nobody has asked for in the present generation is *left over*: its steps may
still be what the job goes back to, so it stays until a newer step is committed, and is deleted then.

Memory that is not there is refused before it is touched. A tmpfs file takes room of its file system, of the
host's memory, and of the control group of who touches it. Reaching the first is an error that one can handle,
the other two end in a killed process: so all are asked (`free`).

Shelves that go are only let go of, never unmapped: a request may still read or fill one of their slots. The
memory goes back when the last that holds a slot is done with it.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import psutil
import xxhash

from windtunnel.base import atomic
from windtunnel.base.errors import UserError
from windtunnel.base.units import amount
from windtunnel.training.checkpoint.live import slot as slots
from windtunnel.training.checkpoint.live.slot import SlotFile
from windtunnel.training.checkpoint.model import Copy, Shard
from windtunnel.training.checkpoint.policy.slots import EMPTY, SLOTS, may_overwrite, slot_for


@dataclass(eq=False)
class Shelf:
    """The slots of one shard in a job of ``world`` ranks.

    ``generation``: the newest in which somebody asked for it. ``writing``: slots that the service itself
    fills now, with the step.
    """

    shard: str
    world: int
    capacity: int
    slots: dict[int, SlotFile] = field(default_factory=dict)
    generation: int = -1
    writing: dict[int, int] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        return len(self.slots) * (slots.HEADER + self.capacity)

    def slot_steps(self) -> list[int]:
        """The step in each slot, `EMPTY` where none is complete; one that the service writes counts as
        there."""
        there = [self.slots[index].whole for index in range(len(self.slots))]
        return [self.writing.get(i, EMPTY if it is None else it.step) for i, it in enumerate(there)]

    def target(self, step: int, committed: int, base: int, keeps: Collection[int]) -> int | None:
        """The slot that a peer's copy of ``step`` may be written to now, None where it must wait.

        The rule is the owner's (`policy.slots`), and the owner has applied it: ``keeps`` are the steps that
        it still has itself. What it has overwritten may go here too, but for ``base``, the step that all
        went back to last: an owner that is new keeps nothing, and this may be the only copy.
        """
        slot_steps = self.slot_steps()
        if not slot_steps or self.writing:
            return None
        index = slot_for(step, slot_steps)
        abandoned = slot_steps[index] not in keeps and slot_steps[index] != base
        return index if abandoned or may_overwrite(step, slot_steps, committed) else None

    def needed(self, step: int, course: int, generation: int) -> bool:
        """Whether something is here that may still be wanted after ``step``, whose copies carry ``course``,
        is committed in ``generation``: that very step, too, where the shards grew since it was gone back to.
        """
        shards = [header.shard for slot in self.slots.values() if (header := slot.header) is not None]
        later = any(shard.generation == generation and shard.step >= step for shard in shards)
        return bool(self.writing) or later or any((it.step, it.generation) == (step, course) for it in shards)

    def find(self, step: int) -> tuple[SlotFile, Shard] | None:
        """The complete copy of ``step``."""
        for slot in self.slots.values():
            it = slot.whole
            if it is not None and it.step == step:
                return slot, it
        return None


class Folder:
    """All shelves of a host. Hold ``lock`` around everything but `ensure`, which takes it when it needs
    it."""

    def __init__(self, path: Path, lock: threading.Condition) -> None:
        self.path = path
        self._lock = lock
        self._growing = threading.Lock()  # touching gigabytes takes seconds: not under the lock of all
        self.shelves: list[Shelf] = []
        self._layouts: dict[str, int] = {}  # digest: the newest generation that asked for it
        path.mkdir(parents=True, exist_ok=True, mode=0o700)

    def look(self) -> None:
        """Forget shelves whose files somebody has removed: that memory is lost, though we still have it
        mapped."""
        for shelf in list(self.shelves):
            if not all(slot.path.exists() for slot in shelf.slots.values()):
                self._drop(shelf, list(shelf.slots))
        self.path.mkdir(parents=True, exist_ok=True, mode=0o700)

    def shelf(self, shard: str, world: int, nbytes: int = 0) -> Shelf | None:
        """The shelf of a shard with room for ``nbytes``; of several, that which was asked for last."""
        fitting = [s for s in self.shelves if (s.shard, s.world) == (shard, world) and s.capacity >= nbytes]
        return max(fitting, key=lambda s: (s.generation, -s.capacity), default=None)

    def find(self, shard: str, step: int, world: int | None = None) -> tuple[SlotFile, Shard] | None:
        """The complete copy of a shard at ``step``; of several, that of the newest generation."""
        self.look()
        copies = [
            copy
            for shelf in self.shelves
            if shelf.shard == shard and world in (None, shelf.world) and (copy := shelf.find(step))
        ]
        return max(copies, key=lambda copy: copy[1].generation, default=None)

    def copies(self, place: int) -> list[Copy]:
        """All complete copies."""
        self.look()
        shards: dict[tuple[str, int, int], Shard] = {}
        for shelf in self.shelves:
            for slot in shelf.slots.values():
                it = slot.whole
                if it is None:
                    continue
                key = (it.name, it.step, it.world)
                if key not in shards or shards[key].generation < it.generation:
                    shards[key] = it
        return [Copy(place, shard) for shard in shards.values()]

    def stands(self, shard: str, world: int, nbytes: int) -> bool:
        """Whether all slots for ``nbytes`` each are there."""
        with self._lock:
            shelf = self.shelf(shard, world, nbytes)
            return shelf is not None and len(shelf.slots) == SLOTS

    def ensure(self, shard: str, world: int, nbytes: int, generation: int, base: int) -> Shelf:
        """The shelf of a shard with slots for ``nbytes`` each, made where it is missing.

        ``base``: the step that all went back to last; what is older may go if there is no room else.

        Raises:
            UserError: it does not fit; with the sum.
        """
        with self._growing:
            with self._lock:
                self.look()
                shelf = self.shelf(shard, world, nbytes)
                if shelf is None:
                    shelf = Shelf(slots.require_name(shard), world, nbytes)
                missing = [index for index in range(SLOTS) if index not in shelf.slots]
            if missing:
                more = len(missing) * (slots.HEADER + shelf.capacity)
                self.require(more, partial(self._sum, shelf), world, base)
            for index in missing:
                path = self.path / slots.file_name(shard, world, shelf.capacity, index)
                path.unlink(missing_ok=True)
                try:
                    slot = SlotFile.create(path, shard, world, shelf.capacity)
                except OSError as error:
                    with self._lock:
                        if shelf not in self.shelves:
                            self._drop(shelf, list(shelf.slots))
                    raise UserError(
                        f"{self._sum(shelf)}, and that failed: {error.strerror or error}"
                    ) from error
                with self._lock:
                    shelf.slots[index] = slot
            with self._lock:
                for other in self.shelves:
                    if (other.shard, other.world) == (shard, world):
                        other.generation = min(other.generation, generation - 1)
                shelf.generation = generation
                if shelf not in self.shelves:
                    self.shelves.append(shelf)
            return shelf

    def retire(self, step: int, course: int, generation: int) -> list[SlotFile]:
        """``step``, whose copies carry ``course``, is committed in ``generation``: shelves that nobody asked
        for in it go, and layouts of none.

        The slots that were theirs are returned, to be let go of without the lock: that gives gigabytes back.
        """
        left_over = [shelf for shelf in self.shelves if shelf.generation < generation]
        gone = [shelf for shelf in left_over if not shelf.needed(step, course, generation)]
        self.shelves = [shelf for shelf in self.shelves if shelf not in gone]
        used = {
            header.shard.layout
            for shelf in self.shelves
            for slot in shelf.slots.values()
            if (header := slot.header) is not None
        }
        for digest, since in list(self._layouts.items()):
            if since < generation and digest not in used:
                del self._layouts[digest]
                self._layout(digest).unlink(missing_ok=True)
        dropped = [old_slot for shelf in gone for old_slot in shelf.slots.values()]
        for slot in dropped:
            slot.path.unlink(missing_ok=True)
        return dropped

    def keep_layout(self, digest: str, blob: bytes, generation: int) -> None:
        """Keep a layout under its digest.

        Raises:
            ValueError: it is not that of ``blob``.
        """
        if xxhash.xxh3_128_hexdigest(blob) != digest:
            raise ValueError(f"a layout of {len(blob)} bytes does not have the digest {digest!r}")
        if self.layout(digest) is None:
            atomic.replace(self._layout(digest), blob)
        self._layouts[digest] = generation

    def layout(self, digest: str) -> bytes | None:
        """The layout with this digest; None where it is not here, or is not what its digest says."""
        try:
            blob = self._layout(digest).read_bytes()
        except (OSError, ValueError):
            return None
        return blob if xxhash.xxh3_128_hexdigest(blob) == digest else None

    def _layout(self, digest: str) -> Path:
        return self.path / f"layout-{slots.require_name(digest)}"

    def close(self) -> None:
        """Unmap all."""
        for shelf in self.shelves:
            for slot in shelf.slots.values():
                slot.close()

    def require(self, more: int, describe: Callable[[], str], world: int, base: int) -> None:
        """Refuse ``more`` bytes that are not there.

        Raises:
            UserError: ``told()``, what is missing and what there is.
        """
        if more <= free(self.path)[0]:
            return
        with self._lock:
            # Left over of another size of the job, and older than what all went back to: nobody wants them.
            for other in [shelf for shelf in self.shelves if shelf.world != world]:
                steps = other.slot_steps()
                self._drop(other, [i for i, s in enumerate(steps) if s < base and i not in other.writing])
        there, bound = free(self.path)
        if more > there:
            raise UserError(
                f"{describe()}; {amount(more)} more are needed, and {amount(there)} are {bound}: "
                f"use fewer copies, or hosts with more memory"
            )

    def _sum(self, shelf: Shelf) -> str:
        with self._lock:
            others = sum(other.nbytes for other in self.shelves if other is not shelf)
        return (
            f"checkpoints in memory: shard {shelf.shard!r} needs {SLOTS} slots x "
            f"{amount(slots.HEADER + shelf.capacity)} beside {amount(others)} of other shards "
            f"on this host"
        )

    def _drop(self, shelf: Shelf, indices: list[int]) -> None:
        if len(indices) < len(shelf.slots):
            return self._shrink(shelf, indices)
        for slot in shelf.slots.values():
            slot.path.unlink(missing_ok=True)
        if shelf in self.shelves:
            self.shelves.remove(shelf)

    def _shrink(self, shelf: Shelf, indices: list[int]) -> None:
        old_slots = [old_slot for index, old_slot in sorted(shelf.slots.items()) if index not in indices]
        for index in indices:
            shelf.slots[index].path.unlink(missing_ok=True)
        # Slots are numbered without gaps: those that stay move down.
        shelf.slots = {}
        for index, slot in enumerate(old_slots):
            target = slot.path.with_name(slots.file_name(shelf.shard, shelf.world, shelf.capacity, index))
            slot.path.rename(target)
            slot.path = target
            shelf.slots[index] = slot


def free(folder: Path) -> tuple[int, str]:
    """Bytes that slots in ``folder`` may still take, and what bounds them, in words."""
    return min(_bounds(folder))


def _bounds(folder: Path) -> Iterator[tuple[int, str]]:
    state = os.statvfs(folder)
    yield state.f_bavail * state.f_frsize, f"free in the file system of {folder}"
    yield psutil.virtual_memory().available, "MemAvailable of the host"
    yield from _groups()


def _groups() -> Iterator[tuple[int, str]]:
    """Head room in the control group of this process and those above it (version 2)."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        if not line.startswith("0::"):
            continue
        group = Path("/sys/fs/cgroup") / line[3:].strip("/")
        for at in (group, *group.parents):
            if at == Path("/sys/fs"):
                break
            try:
                most = (at / "memory.max").read_text().strip()
                now = int((at / "memory.current").read_text())
            except (OSError, ValueError):
                continue
            if most != "max":
                yield max(0, int(most) - now), f"left of memory.max of the control group {at}"
