"""Roots of sandboxes on btrfs: every image, live root and snapshot is a subvolume.

A snapshot shares every block with its origin, so that it costs a transaction whatever the tree's size; a
rollback renames one subvolume away and makes a writable snapshot in its place.

Two subvolumes are compared by what each wrote since they parted. btrfs itself knows only the direct parent,
and forgets it when the parent is removed. So each live root and each snapshot has a note with the chain of
its origins: (identity, generation up to which both are the same). A note that is missing or belongs to an
earlier subvolume of the same name only makes the comparison slower.

What a live root may still write: with simple quotas the kernel counts for each subvolume what that wrote,
for as long as anything refers to it. So a root that begins as a snapshot of another begins with nothing
counted, and what it deletes stays counted while an older snapshot has it. What a limit means is what a root
*uses*: all that it refers to and that is newer than its image. Both differ by a number, the root's *offset*:
use = count + offset. The kernel is given the limit less the offset. Whatever is written raises count and use
by the same, and nothing else raises the use; so between two looks the kernel holds the limit.

The offset is known where a root is made: none over an image, the use of the snapshot over a snapshot. It is
looked at again at a snapshot, once the use comes near the limit: the use is then no more than what a search
of the snapshot finds, since what was deleted is not in it. Data are found to the byte. Of the trees a search
shows the items and not the leaves that they lie in; a leaf is taken to be no less than a third full, which is
what the kernel merges by. That is too much for a root of many small files, but count and old offset bound it
as well.

Source: Documentation of btrfs, "Quota groups", simple quotas; fs/btrfs/ctree.c (leaves) and qgroup.c.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import IO, Any

from windtunnel.agents.sandbox.errors import PoolError
from windtunnel.agents.sandbox.files import archive, btrfs
from windtunnel.agents.sandbox.files.pool import Pool, checked, faults
from windtunnel.agents.sandbox.files.tree import Comparison
from windtunnel.agents.sandbox.model import FileChange
from windtunnel.linux import mounts
from windtunnel.linux.system import opened

LONGEST = 64
CHANNEL_MOST = 1 << 30
"""Bytes of a channel: the outputs that the host has not read yet."""
FORGOTTEN = 64
"""Roots that are dropped from one time to the next that their quota groups are."""
FOREIGN = "the quotas of a btrfs of the host's own are left as they are"

NEAR = 0.9
"""Share of the limit from which on it is looked at what is used indeed."""
LEAST_FILL = 1 / 3
FRESHENED = 512 << 10
"""Bytes that the kernel wants to see free before it makes two small files; it takes a tenth of them."""


@dataclass(frozen=True)
class Usage:
    """What a root uses, in bytes, when the kernel counts ``counted`` for it; of a snapshot, as it was made of
    the root ``of``, and never less than it uses.

    ``since``: the generation up to which everything is the image's; ``limit``: None for none; ``brought``: of
    ``used``, what came from another pool, where it cannot be told from the image any more.
    """

    since: int
    used: int = 0
    counted: int = 0
    of: str = ""
    limit: int | None = None
    brought: int = 0

    def hold(self, root: Path, more: int = 0) -> None:
        """Have the kernel hold the limit, with so many bytes on top. Raises OSError."""
        if self.limit is not None:
            btrfs.limit(root, max(0, self.limit - self.used + self.counted) + more)

    def near(self, used: int) -> bool:
        return self.limit is not None and used > NEAR * self.limit

    def looked_up(self, snapshot: Path) -> Usage:
        """That of the snapshot, as its trees tell; takes as long as it has inodes newer than the image."""
        with opened(snapshot) as given:
            data, _, items = btrfs.newer(given, self.since + 1)
        return replace(self, used=min(self.used, self.brought + data + int(items / LEAST_FILL)))


Chain = list[tuple[str, int]]
"""A subvolume's own identity, then its origins, nearest first."""


class BtrfsPool(Pool):
    """``own``: the file system is a loop file of the pool, unmounted by ``close(unmount=True)``."""

    kind = "btrfs"
    vouched = "checksums of btrfs"

    def __init__(self, folder: Path, *, own: bool) -> None:
        super().__init__(folder)
        self._own = own
        self._unbounded = self._quotas() if own else FOREIGN
        self._dropped = 0
        if own and not self._unbounded:
            with faults(f"the pool {folder} cannot be used"):
                btrfs.forget_groups(folder)

    def _tree(self, path: Path) -> Path:
        return path

    def _make(self, path: Path) -> None:
        btrfs.create(path)

    def _publish(self, path: Path, name: Path) -> None:
        # as a read-only snapshot, in one step: a read-only subvolume could not be renamed
        btrfs.snapshot(path, name, read_only=True)

    def _go_on(self, layer: Path, path: Path) -> None:
        btrfs.snapshot(layer, path, read_only=False)

    def _share(self, path: Path, layer: Path) -> None:
        if not layer.exists():
            btrfs.snapshot(path, layer, read_only=True)

    def _remove(self, path: Path) -> None:
        btrfs.destroy(path)

    def create(self, box: str, image: str, limit: int | None = None) -> None:
        origin = self._image(image)
        self._root(box, origin, Usage(btrfs.subvolume(origin).born, limit=limit))

    def clone(self, box: str, snapshot: str, limit: int | None = None) -> None:
        origin = self._snap(snapshot)
        usage = replace(self._usage(origin), limit=limit)
        if usage.near(usage.used):
            usage = usage.looked_up(origin)
        usage = replace(usage, counted=0, of="")
        try:
            self._root(box, origin, usage)
        except PoolError as error:
            cause = error.__cause__
            full = isinstance(cause, OSError) and cause.errno == errno.ENOSPC
            if not full or not (self._lives / box).exists():
                raise
            # the root that is given up anyway may hold the room that is missing; its limit is remembered
            super().drop_box(box)
            btrfs.waited_for_room(self._folder)
            self._root(box, origin, usage)

    def _root(self, box: str, origin: Path, usage: Usage) -> None:
        """The live root of ``box`` is a writable snapshot of ``origin``, in place of what it was."""
        live = self._lives / checked(box)
        with (
            faults(f"sandbox {box!r} cannot get a root"),
            self._draft(box, lambda path: btrfs.snapshot(origin, path, read_only=False)) as draft,
        ):
            self._note(draft, live, self._chain(origin), usage)
            usage.hold(draft)
            self.unmount(box)
            self._discard(live)
            os.rename(draft, live)
            channel = self._channels / box
            self._discard(channel)
            btrfs.create(channel)
            if not self._unbounded:
                btrfs.limit(channel, CHANNEL_MOST)

    def _discard(self, path: Path) -> None:
        try:
            super()._discard(path)
        except OSError as error:
            # on a full disk nothing can be renamed, but the kernel keeps room for what frees room
            if error.errno != errno.ENOSPC or not path.exists():
                raise
            btrfs.destroy(path)

    def snapshot(self, box: str, snapshot: str) -> None:
        live, path = self._live(box), self._unused(snapshot)
        with faults(f"no snapshot of sandbox {box!r}"):
            chain, usage = self._chain(live), self._usage(live)
            btrfs.snapshot(live, path, read_only=True)
            # what was written was counted when the snapshot was made, and the sandbox stands still
            counted = btrfs.counted(live)
            used = usage.used - usage.counted + counted
            usage = replace(usage, used=used, counted=counted, of=chain[0][0])
            with suppress(OSError):  # where the disk is full, what was made is good without its note
                self._note(path, path, chain, usage)

    def bytes_new(self, snapshot: str, older: str = "") -> int:
        """Bytes of file data in ``snapshot`` that ``older``, or else its nearest origin but the live root,
        did not have."""
        path = self._snap(snapshot)
        with faults(f"the size of snapshot {snapshot!r} cannot be read"):
            chain = self._chain(path)
            since = _parted(self._chain(self._snap(older)), chain) if older else None
            if since is None:
                # the first origin of a snapshot is the live root, which has all that the snapshot has
                since = chain[2][1] if len(chain) > 2 else 0
            with opened(path) as given:
                data, inline, _ = btrfs.newer(given, since + 1)
                return data + inline

    def drop_box(self, box: str) -> None:
        super().drop_box(box)
        with faults(f"the root of sandbox {box!r} cannot be removed"):
            self._note_of(self._lives / box).unlink(missing_ok=True)
            self._dropped += 1
            if self._own and not self._unbounded and self._dropped % FORGOTTEN == 0:
                btrfs.forget_groups(self._folder)

    def drop_snapshot(self, snapshot: str) -> None:
        path = self._snaps / checked(snapshot)
        with faults(f"snapshot {snapshot!r} cannot be removed"):
            if path.exists():
                btrfs.destroy(path)
            self._note_of(path).unlink(missing_ok=True)

    def _compared(self, first: Path, second: Path) -> list[FileChange]:
        if second.parent == self._lives:
            btrfs.sync(second)
        parted = _parted(self._chain(first), self._chain(second))
        if parted is not None:
            return _changed_since(first, second, parted + 1)
        return super()._compared(first, second)

    def flush(self, box: str) -> None:
        with faults(f"what sandbox {box!r} wrote cannot be flushed"):
            btrfs.sync(self._live(box))

    def unbounded(self, *, limited: bool) -> str:
        if limited and self._unbounded == FOREIGN:
            self._unbounded = self._quotas()
        return self._unbounded

    def _quotas(self) -> str:
        """Turn simple quotas on; why that cannot be, or nothing."""
        try:
            btrfs.enable_simple_quotas(self._folder)
        except OSError as error:
            return "this kernel has no simple quotas" if error.errno == errno.EINVAL else str(error.strerror)
        return ""

    def settle(self, box: str, snapshot: str) -> None:
        live, path = self._live(box), self._snap(snapshot)
        usage, before = self._usage(live), self._usage(path)
        if not usage.near(before.used) or before.of != self._chain(live)[0][0]:
            return
        with faults(f"what sandbox {box!r} uses cannot be read"):
            now = before.looked_up(path)
            if now.used < before.used:
                usage = replace(usage, used=now.used, counted=now.counted)
                self._write_note(live, {**self._noted(live), "usage": asdict(usage)})
                usage.hold(live)
                with suppress(OSError):
                    self._write_note(path, {**self._noted(path), "usage": asdict(now)})

    @contextmanager
    def relaxed(self, box: str) -> Iterator[None]:
        live = self._live(box)
        usage = self._usage(live)
        with faults(f"the limit of sandbox {box!r} cannot be moved"):
            usage.hold(live, FRESHENED)
        try:
            yield
        finally:
            usage.hold(live)

    def _used(self, snapshot: str) -> int:
        return self._usage(self._snap(snapshot)).used

    def _usage(self, path: Path) -> Usage:
        # a note that was lost is that of a root that begins now
        noted = self._noted(path).get("usage")
        return Usage(**noted) if noted else Usage(btrfs.subvolume(path).born)

    def receive(self, snapshot: str, source: IO[bytes]) -> None:
        draft = self._unused(snapshot)
        with faults(f"snapshot {snapshot!r} cannot be received"), self._draft(snapshot) as path:
            used = archive.receive(path, source)
            btrfs.snapshot(path, draft, read_only=True)
            with suppress(OSError):
                self._note(draft, draft, [], Usage(btrfs.subvolume(draft).born, used, brought=used))

    def sync(self, snapshot: str) -> None:
        with faults(f"snapshot {snapshot!r} cannot be brought to the disk"):
            btrfs.sync(self._snap(snapshot))

    def close(self, *, unmount: bool = False) -> None:
        super().close(unmount=unmount)
        if unmount and self._own:
            with faults(f"the pool {self._folder} cannot be unmounted"):
                # the loop device clears itself with its last user
                mounts.unmount(self._folder)

    def scrubbed(self) -> tuple[bool, int]:
        if not self._own:
            return False, 0
        try:
            btrfs.forgotten(btrfs.image_of(self._folder))
            read, errors = btrfs.scrub(self._folder)
        except OSError:
            return False, 0
        return errors == 0, read

    def _note_of(self, path: Path) -> Path:
        return self._notes / f"{path.parent.name}-{path.name}"

    def _note(self, path: Path, name: Path, origin: Chain, usage: Usage) -> None:
        """Remember that the subvolume ``made``, which ``name`` will be, was just snapshotted from one whose
        chain is ``origin``, and what it uses. Raises OSError."""
        own = btrfs.subvolume(path)
        chain = [(identity, min(generation, own.born)) for identity, generation in origin][:LONGEST]
        self._write_note(name, {"of": own.uuid.hex(), "chain": chain, "usage": asdict(usage)})

    def _write_note(self, path: Path, note: dict[str, object]) -> None:
        part = self._note_of(path).with_suffix(".part")
        part.write_text(json.dumps(note), encoding="ascii")
        os.rename(part, self._note_of(path))

    def _noted(self, path: Path) -> dict[str, Any]:
        try:
            note: dict[str, Any] = json.loads(self._note_of(path).read_text(encoding="ascii"))
        except (OSError, ValueError):
            return {}
        return note

    def _chain(self, path: Path) -> Chain:
        own = btrfs.subvolume(path)
        start: Chain = [(own.uuid.hex(), 2**63)]
        note = self._noted(path)
        if note.get("of") == own.uuid.hex():
            return start + [(identity, generation) for identity, generation in note["chain"]]
        return [*start, (own.parent.hex(), own.born)] if any(own.parent) else start


def _parted(first: Chain, second: Chain) -> int | None:
    """The generation up to which both subvolumes are the same; None where they share no origin."""
    others = dict(reversed(second))
    for identity, generation in first:
        if identity in others:
            return min(generation, others[identity])
    return None


def _changed_since(first: Path, second: Path, newer: int) -> list[FileChange]:
    """What differs between two subvolumes that were the same before generation ``newer``."""
    before, after = btrfs.written_in(first, newer), btrfs.written_in(second, newer)
    touched = before | after
    compared = Comparison(
        first, second, lambda path, old, new: old.st_ino == new.st_ino and old.st_ino not in touched
    )
    for path in sorted({*_paths(first, touched), *_paths(second, touched)}):
        inside = f"/{path}" if path else ""
        compared.folder(inside)
        if inside:
            compared.entry(inside, deep=False)
    return compared.result()


def _paths(subvolume: Path, inodes: set[int]) -> set[str]:
    """All paths of ``inodes`` in ``subvolume``; an inode that is not in it has none."""
    with opened(subvolume) as given:
        return {path for inode in inodes for path in btrfs.paths(given, inode)}
