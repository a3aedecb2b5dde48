"""What a sandbox's turn did to its files and processes, asked of the kernel.

Three kinds, strongest first. ``ebpf`` sees every system call that changes a file or moves data. ``fanotify``
sees changes of files only. ``activity`` sees that processes ran, and asks the pool which files were written.
Whatever a kind cannot see is reported as unknown or as a doubt, never as unchanged.

Source: Crab (arXiv 2604.28138), section 4; fanotify(7).
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from windtunnel.agents.sandbox.errors import InspectError
from windtunnel.agents.sandbox.live.inspect import kernel, memory
from windtunnel.agents.sandbox.live.inspect.files import Window
from windtunnel.agents.sandbox.live.inspect.kernel import Event, Kernel
from windtunnel.agents.sandbox.live.inspect.marks import Marks
from windtunnel.agents.sandbox.live.inspect.paths import Root
from windtunnel.agents.sandbox.live.inspect.syscalls import DOUBTS
from windtunnel.agents.sandbox.live.inspect.tasks import Tasks, referred
from windtunnel.agents.sandbox.model import Doubt, Effects, FileChange, Part, References
from windtunnel.base.errors import UserError

Kind = Literal["ebpf", "fanotify", "activity"]
KINDS: tuple[Kind, ...] = ("ebpf", "fanotify", "activity")


@dataclass
class _Watched:
    """One sandbox. ``at_files`` and ``at_image``: the kernel's counters when each part was last kept."""

    root: Root
    tasks: Tasks
    window: Window
    generation: Callable[[], int]
    find_new: Callable[[int], list[str] | None]
    slot: int = -1
    identity: int = 0
    lost: int = 0
    at_files: tuple[int, ...] = ()
    at_image: tuple[int, ...] = ()
    began: int = -1


class Inspector:
    """Watches any number of sandboxes. ``covers`` and ``misses`` say in words what it can tell."""

    def __init__(self, kind: Kind) -> None:
        self.kind: Kind = kind
        reason = memory.missing()
        self._track = not reason
        self._boxes: dict[str, _Watched] = {}
        self._slots: dict[int, _Watched] = {}
        self._lock = threading.RLock()
        self._holds = 0
        self._epochs = itertools.count(1)
        self._kernel = Kernel(self._taken) if kind == "ebpf" else None
        self._marks = Marks() if kind == "fanotify" else None
        self.covers, self.misses = _words(kind, reason)

    def watch(
        self,
        box: str,
        *,
        cgroup: Path,
        root: Path,
        init: int,
        shells: Callable[[], Mapping[str, int]],
        pool_generation: Callable[[], int],
        find_new: Callable[[int], list[str] | None],
    ) -> None:
        """Look at a sandbox from now on, as it is: everything until now counts as kept.

        Raises InspectError when it cannot be watched; then it is not.
        """
        with self._lock:
            self.unwatch(box)
            tree = Root(root, init)
            watched: _Watched | None = None
            slot = -1
            try:
                if self._kernel is not None:
                    slot = self._free_slot()
                    self._kernel.open()
                count = self._counter(slot) if self._kernel is not None else None
                tasks = Tasks(cgroup, init, lambda: shells().values(), tree.seen, count, self._track)
                watched = _Watched(tree, tasks, Window(tree), pool_generation, find_new, slot)
                if self._kernel is not None:
                    self._slots[slot] = watched
                    watched.identity = self._kernel.add(slot, cgroup, next(self._epochs))
                if self._marks is not None:
                    self._marks.add(box, tree, watched.window)
                self._boxes[box] = watched
                self.rebase(box, files=True, processes=True)
            except BaseException as error:
                self._let_go(box, watched, slot)
                if watched is None:
                    tree.close()
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
            watched = self._boxes.pop(box, None)
            if watched is not None:
                self._let_go(box, watched, watched.slot)

    def _let_go(self, box: str, watched: _Watched | None, slot: int) -> None:
        self._boxes.pop(box, None)
        if self._marks is not None:
            self._marks.remove(box)
        if self._kernel is not None:
            if watched is not None and watched.identity:
                self._kernel.remove(watched.identity, slot)
                self._kernel.drain()
            self._slots.pop(slot, None)
            self._leave()
        if watched is not None:
            watched.tasks.close()
            watched.root.close()

    def _leave(self) -> None:
        if self._kernel is not None and not self._slots and not self._holds:
            self._kernel.close()

    def close(self) -> None:
        for box in list(self._boxes):
            self.unwatch(box)
        if self._marks is not None:
            self._marks.close()

    def arm(self, box: str) -> None:
        """Before the freeze: put memory trackers into the processes that have none. Takes about 2 ms for
        each of those, half a second at most."""
        self._watched(box).tasks.arm()

    def rebase(self, box: str, *, files: bool, processes: bool) -> None:
        """While the sandbox is frozen: what was until now is kept."""
        watched = self._watched(box)
        self._drain()
        if files:
            watched.window.clear()
            watched.began = watched.generation() if self.kind == "activity" else -1
            watched.tasks.rebase_files()
            if self._kernel is not None:
                self._kernel.set_epoch(watched.identity, watched.slot, next(self._epochs))
                watched.lost = self._kernel.lost(watched.slot)
                watched.at_files = self._kernel.doubts(watched.slot)
        if processes:
            watched.tasks.rebase()
            if self._kernel is not None:
                watched.at_image = self._kernel.doubts(watched.slot)

    def effects(self, box: str) -> Effects:
        """What the sandbox did since each part of it was last kept. Everything that happened before the call
        is in it."""
        watched = self._watched(box)
        self._drain()
        now = watched.tasks.alive()
        for path in watched.tasks.stored(now):
            watched.window.touched(path.encode(errors="surrogateescape"))
        files, total, doubts = watched.window.effect({pid for pid, _ in now})
        effects = watched.tasks.effects(now)
        if self._kernel is not None:
            doubts.extend(self._kernel_doubts(watched, self._kernel))
        elif self._marks is None:
            files, total, more = _asked(watched)
            doubts.extend(more)
        return Effects(tuple(files), total, effects, doubts=tuple(doubts))

    def touched(self, box: str, path: str) -> None:
        """The host itself changed a path inside (put a file there, say): nobody else would tell."""
        self._watched(box).window.touched(path.encode(errors="surrogateescape"))

    def references(self, box: str) -> References:
        """While the sandbox is frozen: the paths inside that its processes refer to."""
        watched = self._watched(box)
        paths: set[str] = set()
        mapped: set[str] = set()
        for pid, _ in watched.tasks.alive():
            some, of_memory = referred(pid, watched.root.seen)
            paths |= some
            mapped |= of_memory
        return References(frozenset(paths), frozenset(mapped))

    def _watched(self, box: str) -> _Watched:
        try:
            return self._boxes[box]
        except KeyError:
            raise InspectError(f"sandbox {box} is not watched") from None

    def _drain(self) -> None:
        if self._kernel is not None:
            self._kernel.drain()
        elif self._marks is not None:
            self._marks.drain()

    def _taken(self, slot: int, event: Event) -> None:
        watched = self._slots.get(slot)
        if watched is not None:
            watched.window.add(event)

    def _free_slot(self) -> int:
        for slot in range(kernel.SLOTS):
            if slot not in self._slots:
                return slot
        raise InspectError(f"more than {kernel.SLOTS} sandboxes cannot be watched")

    def _counter(self, slot: int) -> Callable[[int], kernel.Count]:
        assert self._kernel is not None
        source = self._kernel
        return lambda pid: source.count(slot, pid)

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


def _asked(watched: _Watched) -> tuple[list[FileChange], int, list[Doubt]]:
    """The files that the pool says were written since."""
    now = watched.generation()
    if watched.began >= 0 and now == watched.began:
        return [], 0, [Doubt(Part.FILES, "a write that is not on the disk yet cannot be told")]
    paths = watched.find_new(watched.began) if watched.began >= 0 else None
    if paths is None:
        return [], 0, [Doubt(Part.FILES, "it cannot be told which were written")]
    # removed files are in no such list, so the list only adds to the doubt
    found = [FileChange(path, "modified") for path in paths]
    return found, len(found), [Doubt(Part.FILES, "what was removed cannot be told")]


def _words(kind: Kind, no_memory: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    covers = ["processes that started or ended", "descriptors that changed", "processor time"]
    misses = ["changes made by processes outside the sandbox, unless the host tells them"]
    if no_memory:
        misses.append(f"which memory was written: {no_memory}")
    else:
        covers.append("pages of memory that were written")
    if kind == "ebpf":
        covers += ["net changes of files", "what each process received and wrote"]
    elif kind == "fanotify":
        covers.append("net changes of files")
        misses.append("what a process received and wrote")
    else:
        misses += ["which files changed, of which only some are known", "what a process received and wrote"]
    return tuple(covers), tuple(misses)


def open_inspector(kind: str = "auto") -> Inspector:
    """The inspector of that kind; ``auto``: the strongest that works here.

    Raises UserError when the kind is unknown, InspectError in words when it cannot work here.
    """
    if kind not in ("auto", *KINDS):
        raise UserError(f"inspector: kind {kind!r} is not known; use auto, {', '.join(KINDS)}")
    for one in KINDS if kind == "auto" else [one for one in KINDS if one == kind]:
        reason = _missing(one)
        if not reason:
            return Inspector(one)
        if kind != "auto":
            raise InspectError(f"inspector of kind {kind}: {reason}")
    return Inspector("activity")


def _missing(kind: Kind) -> str:
    if kind == "ebpf":
        return kernel.missing()
    return Marks.missing() if kind == "fanotify" else ""
