"""What a sandbox's turn did to its files and processes, asked of the kernel by eBPF.

It sees every system call that changes a file or moves data. Whatever it cannot see is reported as unknown or
as a doubt, never as unchanged.

Source: Crab (arXiv 2604.28138), section 4.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from windtunnel.agents.sandbox.errors import InspectError
from windtunnel.agents.sandbox.inspect import kernel, memory
from windtunnel.agents.sandbox.inspect.files import Window
from windtunnel.agents.sandbox.inspect.kernel import Event, Kernel
from windtunnel.agents.sandbox.inspect.paths import Root
from windtunnel.agents.sandbox.inspect.syscalls import DOUBTS
from windtunnel.agents.sandbox.inspect.tasks import Tasks, references
from windtunnel.agents.sandbox.model import Doubt, Effects, Part, References
from windtunnel.linux.cgroup import pids_of
from windtunnel.linux.snapshot import Process, read_snapshot


@dataclass
class _Watched:
    """One sandbox. ``at_files`` and ``at_image``: the kernel's counters when each part was last kept."""

    root: Root
    tasks: Tasks
    window: Window
    slot: int
    identity: int = 0
    lost: int = 0
    at_files: tuple[int, ...] = ()
    at_image: tuple[int, ...] = ()


class Inspector:
    """Watches any number of sandboxes. ``misses`` says in words what it cannot tell."""

    kind = "ebpf"

    def __init__(self) -> None:
        reason = memory.missing()
        self._track = not reason
        self._boxes: dict[str, _Watched] = {}
        self._slots: dict[int, _Watched] = {}
        self._lock = threading.RLock()
        self._holds = 0
        self._epochs = itertools.count(1)
        self._kernel = Kernel(self._taken)
        self.misses = (f"which memory was written: {reason}",) if reason else ()

    def watch(
        self,
        box: str,
        *,
        cgroup: Path,
        root: Path,
        init: int,
        shells: Callable[[], Mapping[str, int]],
    ) -> None:
        """Look at a sandbox from now on, as it is: everything until now counts as kept.

        Raises InspectError when it cannot be watched; then it is not.
        """
        with self._lock:
            self.unwatch(box)
            if (slot := next((n for n in range(kernel.SLOTS) if n not in self._slots), -1)) < 0:
                raise InspectError(f"more than {kernel.SLOTS} sandboxes cannot be watched")
            tree = Root(root, init)
            members, count = partial(pids_of, cgroup), partial(self._kernel.count, slot)
            tasks = Tasks(members, init, lambda: shells().values(), tree.seen, count, self._track)
            watched = self._boxes[box] = self._slots[slot] = _Watched(tree, tasks, Window(tree), slot)
            try:
                self._kernel.open()
                watched.identity = self._kernel.add(slot, cgroup, next(self._epochs))
                self.rebase(box, read_snapshot(members()))
            except BaseException as error:
                self.unwatch(box)
                if isinstance(error, OSError):
                    raise InspectError(f"sandbox {box} cannot be watched: {error.strerror}") from error
                raise

    @contextlib.contextmanager
    def kept(self) -> Iterator[None]:
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

    def rebase(self, box: str, snapshot: Sequence[Process] | None = None) -> None:
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

    def effects(self, box: str) -> Effects:
        """What the sandbox did since each part of it was last kept. Everything that happened before the call
        is in it."""
        watched = self._watched(box)
        self._kernel.drain()
        now = watched.tasks.alive()
        for path in watched.tasks.stored(now):
            watched.window.touched(path.encode(errors="surrogateescape"))
        files, total, doubts = watched.window.effect({pid for pid, _ in now})
        effects = watched.tasks.effects(now)
        doubts.extend(self._kernel_doubts(watched, self._kernel))
        return Effects(tuple(files), total, effects, doubts=tuple(doubts))

    def touched(self, box: str, path: str) -> None:
        """The host itself changed a path inside (put a file there, say): nobody else would tell."""
        self._watched(box).window.touched(path.encode(errors="surrogateescape"))

    def references(self, box: str, snapshot: Sequence[Process]) -> References:
        """The paths inside to which the processes of the frozen sandbox refer, by a look at them."""
        return references(snapshot, self._watched(box).root.seen)

    def _watched(self, box: str) -> _Watched:
        try:
            return self._boxes[box]
        except KeyError:
            raise InspectError(f"sandbox {box} is not watched") from None

    def _taken(self, slot: int, event: Event) -> None:
        watched = self._slots.get(slot)
        if watched is not None:
            watched.window.add(event)

    def _kernel_doubts(self, watched: _Watched, source: Kernel) -> list[Doubt]:
        doubts = [Doubt(Part.PROCESSES, source.broken)] if source.broken else []
        lost = source.lost(watched.slot) - watched.lost
        if lost:
            doubts.append(Doubt(Part.FILES, f"{lost} events were lost"))
        counted = source.doubts(watched.slot)
        for doubt, now, files, image in zip(DOUBTS, counted, watched.at_files, watched.at_image, strict=True):
            if now > (files if doubt.part is Part.FILES else image):
                doubts.append(doubt)
        return doubts
