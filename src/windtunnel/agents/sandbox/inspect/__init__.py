"""What a sandbox's turn did to its files and processes: asked of the kernel by eBPF, or else by comparing.

By eBPF every system call is seen that changes a file or moves data. Where that cannot be, and for sandboxes
without root, files are compared with the newest snapshot, so every difference is found; of processes it is
told who ran, and which memory they wrote where that can be watched, but not what they received, so whoever
wrote memory may have changed. Where no process image is kept, processes count as kept with the files.

Whatever cannot be seen is reported as unknown or as a doubt, never as unchanged.

Source: Crab (arXiv 2604.28138), section 4.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from windtunnel.agents.sandbox.errors import InspectError, PoolError
from windtunnel.agents.sandbox.inspect import kernel, memory
from windtunnel.agents.sandbox.inspect.files import LISTED, ChangeWindow, Root
from windtunnel.agents.sandbox.inspect.kernel import DOUBTS, FileEvent, KernelTracker
from windtunnel.agents.sandbox.inspect.tasks import Tasks, references
from windtunnel.agents.sandbox.model import EffectDoubt, FileChange, References, SandboxPart, TurnEffects
from windtunnel.linux.snapshot import SnapshotProcess, read_snapshot

__all__ = ["DiffInspector", "Inspector"]


@dataclass
class _Watched:
    """One sandbox. ``at_files`` and ``at_image``: the kernel's counters when each part was last kept."""

    root: Root
    tasks: Tasks
    window: ChangeWindow
    slot: int = -1
    identity: int = 0
    lost: int = 0
    at_files: tuple[int, ...] = ()
    at_image: tuple[int, ...] = ()
    elsewhere: dict[str, tuple[int, int, int]] = field(default_factory=dict)
    """Of each path that only process images keep: inode, size, and when it was last changed; where it is
    compared."""


class Inspector:
    """Watches any number of sandboxes by eBPF. ``misses`` says in words what it cannot tell."""

    kind = "ebpf"
    misses: tuple[str, ...] = ()

    def __init__(self) -> None:
        reason = memory.missing()
        self._track = not reason
        self._boxes: dict[str, _Watched] = {}
        self._slots: dict[int, _Watched] = {}
        self._lock = threading.RLock()
        self._holds = 0
        self._epochs = itertools.count(1)
        self._kernel = KernelTracker(self._take)
        if reason:
            self.misses = (f"which memory was written: {reason}",)

    def watch(
        self,
        box: str,
        *,
        cgroup: Path,
        members: Callable[[], Collection[int]],
        root: Path,
        init: int,
        shells: Callable[[], Mapping[str, int]],
    ) -> None:
        """Look at a sandbox from now on, as it is: everything until now counts as kept. ``members``: its
        processes now.

        Raises InspectError when it cannot be watched; then it is not.
        """
        with self._lock:
            self.unwatch(box)
            slot = self._free_slot()
            count = partial(self._kernel.count, slot) if slot >= 0 else None
            tree = Root(root, init)
            tasks = Tasks(members, init, lambda: shells().values(), tree.path_inside, count, self._track)
            watched = self._boxes[box] = _Watched(tree, tasks, ChangeWindow(tree), slot)
            try:
                if slot >= 0:
                    self._slots[slot] = watched
                    self._kernel.open()
                    identity = os.stat(cgroup).st_ino
                    self._kernel.set_epoch(identity, slot, next(self._epochs))
                    watched.identity = identity
                self.rebase(box, read_snapshot(members()))
            except BaseException as error:
                self.unwatch(box)
                if isinstance(error, OSError):
                    raise InspectError(f"sandbox {box} cannot be watched: {error.strerror}") from error
                raise

    def _free_slot(self) -> int:
        """-1: the kernel is not asked."""
        if (slot := next((n for n in range(kernel.SLOTS) if n not in self._slots), -1)) < 0:
            raise InspectError(f"more than {kernel.SLOTS} sandboxes cannot be watched")
        return slot

    @contextlib.contextmanager
    def holding(self) -> Iterator[None]:
        """Within the block the programs stay in the kernel though no sandbox may be watched: to put them
        there takes as long as to restore one."""
        with self._lock:
            self._holds += 1
        try:
            yield
        finally:
            with self._lock:
                self._holds -= 1
                self._leave()

    def unwatch(self, box: str) -> None:
        """Look away (idempotent). With the last sandbox the programs leave the kernel."""
        with self._lock:
            if (watched := self._boxes.pop(box, None)) is None:
                return
            if watched.identity:
                self._kernel.remove(watched.identity, watched.slot)
                self._kernel.drain()
            self._slots.pop(watched.slot, None)
            self._leave()
            watched.tasks.close()
            watched.root.close()

    def _leave(self) -> None:
        if not self._slots and not self._holds:
            self._kernel.close()

    def close(self) -> None:
        for box in list(self._boxes):
            self.unwatch(box)

    def arm(self, box: str) -> None:
        """Before the freeze: put memory trackers into the processes that have none. Takes about 2 ms for
        each of those, half a second at most."""
        self._watched(box).tasks.arm()

    def rebase(self, box: str, snapshot: Sequence[SnapshotProcess] | None = None) -> None:
        """While the sandbox is frozen: what was until now is kept, of files and, where a ``snapshot`` of the
        processes is given, of these."""
        watched = self._watched(box)
        self._kernel.drain()
        watched.window.clear()
        watched.tasks.rebase(snapshot)
        self._kernel.set_epoch(watched.identity, watched.slot, next(self._epochs))
        watched.lost = self._kernel.lost(watched.slot)
        watched.at_files = self._kernel.doubts(watched.slot)
        if snapshot is not None:
            watched.at_image = watched.at_files

    def effects(self, box: str) -> TurnEffects:
        """What the sandbox did since each part of it was last kept. Everything that happened before the call
        is in it."""
        watched = self._watched(box)
        self._kernel.drain()
        now = watched.tasks.alive()
        for path in watched.tasks.stored(now):
            watched.window.touched(path)
        files, total, doubts = watched.window.effect({pid for pid, _ in now})
        doubts.extend(self._kernel_doubts(watched))
        return TurnEffects(tuple(files), total, watched.tasks.effects(now), doubts=tuple(doubts))

    def touched(self, box: str, path: str) -> None:
        """The host itself changed a path inside (put a file there, say): nobody else would tell."""
        self._watched(box).window.touched(path)

    def references(self, box: str, snapshot: Sequence[SnapshotProcess]) -> References:
        """The paths inside to which the processes of the frozen sandbox refer, by a look at them."""
        return references(snapshot, self._watched(box).root.path_inside)

    def _watched(self, box: str) -> _Watched:
        try:
            return self._boxes[box]
        except KeyError:
            raise InspectError(f"sandbox {box} is not watched") from None

    def _take(self, slot: int, event: FileEvent) -> None:
        watched = self._slots.get(slot)
        if watched is not None:
            watched.window.add(event)

    def _kernel_doubts(self, watched: _Watched) -> list[EffectDoubt]:
        doubts = [EffectDoubt(SandboxPart.PROCESSES, self._kernel.broken)] if self._kernel.broken else []
        lost = self._kernel.lost(watched.slot) - watched.lost
        if lost:
            doubts.append(EffectDoubt(SandboxPart.FILES, f"{lost} events were lost"))
        counted = self._kernel.doubts(watched.slot)
        for doubt, now, files, image in zip(DOUBTS, counted, watched.at_files, watched.at_image, strict=True):
            if now > (files if doubt.part is SandboxPart.FILES else image):
                doubts.append(doubt)
        return doubts


class DiffInspector(Inspector):
    """The same by comparing; nothing of it is in the kernel.

    ``changed``: what differs from a sandbox's newest snapshot; PoolError where that cannot be told.
    ``images``: whether process images are kept.
    """

    kind = "comparison"

    def __init__(self, changed: Callable[[str], list[FileChange]], *, images: bool) -> None:
        super().__init__()
        self._changed, self._images = changed, images
        self._track = self._track and images
        self.misses = ("what a process received and wrote", *self.misses)

    def _free_slot(self) -> int:
        return -1

    def touched(self, box: str, path: str) -> None:
        """The comparison finds it."""

    def rebase(self, box: str, snapshot: Sequence[SnapshotProcess] | None = None) -> None:
        watched = self._watched(box)
        if snapshot is None and not self._images:
            snapshot = read_snapshot(watched.tasks.pids())
        watched.tasks.rebase(snapshot)
        if snapshot is not None:
            watched.elsewhere = self._elsewhere(watched)

    def references(self, box: str, snapshot: Sequence[SnapshotProcess]) -> References:
        return super().references(box, snapshot) if self._images else References()

    def effects(self, box: str) -> TurnEffects:
        watched = self._watched(box)
        processes = watched.tasks.effects(watched.tasks.alive())
        doubts: tuple[EffectDoubt, ...] = ()
        now = self._elsewhere(watched)
        if other := {path for path, _ in now.items() ^ watched.elsewhere.items()}:
            words = f"{min(other)} is kept by process images only and was changed"
            doubts = (EffectDoubt(SandboxPart.PROCESSES, words),)
        try:
            files = self._changed(box)
        except PoolError as error:
            # a file that goes away while it is compared, for one
            return TurnEffects(
                processes=processes, doubts=(*doubts, EffectDoubt(SandboxPart.FILES, str(error)))
            )
        return TurnEffects(tuple(files[:LISTED]), len(files), processes, doubts=doubts)

    def _elsewhere(self, watched: _Watched) -> dict[str, tuple[int, int, int]]:
        elsewhere: dict[str, tuple[int, int, int]] = {}
        if self._images:
            watched.root.refresh()
            for point in watched.root.elsewhere():
                for folder, folders, files in os.walk(watched.root.outside(point)):
                    for name in (*folders, *files):
                        with contextlib.suppress(OSError):
                            of = os.lstat(path := os.path.join(folder, name))
                            elsewhere[path] = (of.st_ino, of.st_size, max(of.st_mtime_ns, of.st_ctime_ns))
        return elsewhere
