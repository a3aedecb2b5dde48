"""What a turn did, by comparing: for hosts without BPF, and for sandboxes without root.

Files are compared with the newest snapshot, so every difference is found, also of what was put from outside.
Of processes it is told who ran, and which memory they wrote where that can be watched; what they received is
not known, so whoever wrote memory may have changed. Where no process image is kept, processes count as kept
with the files.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from windtunnel.agents.sandbox.errors import InspectError, PoolError
from windtunnel.agents.sandbox.inspect import memory
from windtunnel.agents.sandbox.inspect.paths import Root
from windtunnel.agents.sandbox.inspect.tasks import Tasks, references
from windtunnel.agents.sandbox.model import Doubt, Effects, FileChange, Part, References
from windtunnel.linux.snapshot import Process, read_snapshot

LISTED = 4096
Elsewhere = dict[bytes, tuple[int, int, int]]
"""Of each path that only process images keep: inode, size, and when it was last changed."""


@dataclass
class _Watched:
    root: Root
    tasks: Tasks
    elsewhere: Elsewhere = field(default_factory=dict)


class DiffInspector:
    """Looks at any number of sandboxes; it has the methods of ``Inspector``.

    ``pids``: the processes of a sandbox now. ``changed``: what differs from its newest snapshot; PoolError
    where that cannot be told. ``images``: whether process images are kept.
    """

    kind = "comparison"
    misses = ("what a process received and wrote",)

    def __init__(
        self,
        pids: Callable[[str], Collection[int]],
        changed: Callable[[str], list[FileChange]],
        *,
        images: bool,
    ) -> None:
        self._pids, self._changed, self._images = pids, changed, images
        self._track = images and not memory.missing()
        self._boxes: dict[str, _Watched] = {}

    def watch(
        self, box: str, *, cgroup: Path, root: Path, init: int, shells: Callable[[], Mapping[str, int]]
    ) -> None:
        """Look at a sandbox from now on, as it is."""
        self.unwatch(box)
        tree = Root(root, init)
        tasks = Tasks(lambda: self._pids(box), init, lambda: shells().values(), tree.seen, None, self._track)
        self._boxes[box] = _Watched(tree, tasks)
        self.rebase(box, read_snapshot(self._pids(box)))

    def kept(self) -> contextlib.AbstractContextManager[None]:
        """There is nothing in the kernel."""
        return contextlib.nullcontext()

    def unwatch(self, box: str) -> None:
        if (watched := self._boxes.pop(box, None)) is not None:
            watched.tasks.close()
            watched.root.close()

    def close(self) -> None:
        for box in list(self._boxes):
            self.unwatch(box)

    def arm(self, box: str) -> None:
        """Before the freeze: put memory trackers into the processes that have none."""
        self._watched(box).tasks.arm()

    def touched(self, box: str, path: str) -> None:
        """The comparison finds it."""

    def rebase(self, box: str, snapshot: Sequence[Process] | None = None) -> None:
        """While the sandbox is frozen: what was until now is kept."""
        watched = self._watched(box)
        if snapshot is None and not self._images:
            snapshot = read_snapshot(self._pids(box))
        watched.tasks.rebase(snapshot)
        if snapshot is not None:
            watched.elsewhere = self._elsewhere(watched)

    def references(self, box: str, snapshot: Sequence[Process]) -> References:
        """The paths inside to which the processes of the frozen sandbox refer, by a look at them."""
        return references(snapshot, self._watched(box).root.seen) if self._images else References()

    def effects(self, box: str) -> Effects:
        """What the sandbox did since its newest checkpoint."""
        watched = self._watched(box)
        processes = watched.tasks.effects(watched.tasks.alive())
        doubts: tuple[Doubt, ...] = ()
        now = self._elsewhere(watched)
        if other := {path for path, _ in now.items() ^ watched.elsewhere.items()}:
            words = f"{os.fsdecode(min(other))} is kept by process images only and was changed"
            doubts = (Doubt(Part.PROCESSES, words),)
        try:
            files = self._changed(box)
        except PoolError as error:
            # a file that goes away while it is compared, for one
            return Effects(processes=processes, doubts=(*doubts, Doubt(Part.FILES, str(error))))
        return Effects(tuple(files[:LISTED]), len(files), processes, doubts=doubts)

    def _elsewhere(self, watched: _Watched) -> Elsewhere:
        elsewhere: Elsewhere = {}
        if self._images:
            watched.root.refresh()
            for point in watched.root.elsewhere():
                for folder, folders, files in os.walk(watched.root.outside(point)):
                    for name in (*folders, *files):
                        with contextlib.suppress(OSError):
                            of = os.lstat(path := os.path.join(folder, name))
                            elsewhere[path] = (of.st_ino, of.st_size, max(of.st_mtime_ns, of.st_ctime_ns))
        return elsewhere

    def _watched(self, box: str) -> _Watched:
        try:
            return self._boxes[box]
        except KeyError:
            raise InspectError(f"sandbox {box} is not watched") from None
