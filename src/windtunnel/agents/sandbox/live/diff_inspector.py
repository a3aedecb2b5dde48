"""What a turn did, told without any right to ask the kernel: by comparing, for sandboxes without root.

Files are compared with the newest snapshot, so every difference is found, also of what was put from outside.
What processes did to their memory cannot be told, and no checkpoint keeps it here either: whatever runs
beside the shells is reported as perhaps changed, so that a turn never looks safer than it is.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from windtunnel.agents.sandbox.errors import PoolError
from windtunnel.agents.sandbox.model import Doubt, Effects, FileChange, Part, ProcessEffect, References
from windtunnel.linux import processes

LISTED = 4096


@dataclass
class _Watched:
    init: int
    shells: Callable[[], Mapping[str, int]]
    known: dict[int, str] = field(default_factory=dict)
    """Command line of each process when the last checkpoint was made."""


class DiffInspector:
    """Looks at any number of sandboxes; it has the methods of ``Inspector``.

    ``pids``: the processes of a sandbox now. ``changed``: what differs from its newest snapshot; PoolError
    where that cannot be told.
    """

    kind = "comparison"
    covers = ("changes of files", "processes that started or ended")
    misses = ("which memory was written", "what a process received and wrote")

    def __init__(self, pids: Callable[[str], set[int]], changed: Callable[[str], list[FileChange]]) -> None:
        self._pids, self._changed = pids, changed
        self._boxes: dict[str, _Watched] = {}

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
        """Look at a sandbox from now on, as it is."""
        self._boxes[box] = _Watched(init, shells)
        self.rebase(box, files=True, processes=True)

    def kept(self) -> contextlib.AbstractContextManager[None]:
        """There is nothing in the kernel."""
        return contextlib.nullcontext()

    def unwatch(self, box: str) -> None:
        self._boxes.pop(box, None)

    def close(self) -> None:
        self._boxes.clear()

    def arm(self, box: str) -> None:
        """There is nothing to put into processes."""

    def touched(self, box: str, path: str) -> None:
        """The comparison finds it."""

    def rebase(self, box: str, *, files: bool, processes: bool) -> None:
        """What was until now is kept, as far as it can be: processes by name alone, with the files."""
        watched = self._boxes[box]
        watched.known = self._others(box, watched)

    def references(self, box: str) -> References:
        """No process image refers to anything."""
        return References()

    def effects(self, box: str) -> Effects:
        """What the sandbox did since its newest checkpoint."""
        watched = self._boxes[box]
        now = self._others(box, watched)
        effects = [
            ProcessEffect(
                pid, command, started=pid not in watched.known, dirty_pages=None, inputs=None, writes=None
            )
            for pid, command in sorted(now.items())
        ]
        effects += [
            ProcessEffect(pid, command, ended=True)
            for pid, command in sorted(watched.known.items())
            if pid not in now
        ]
        try:
            files = self._changed(box)
        except PoolError as error:
            # a file that goes away while it is compared, for one
            return Effects(processes=tuple(effects), doubts=(Doubt(Part.FILES, str(error)),))
        return Effects(tuple(files[:LISTED]), len(files), tuple(effects))

    def _others(self, box: str, watched: _Watched) -> dict[int, str]:
        """Command lines of the processes that are neither init nor a shell."""
        own = {watched.init, *watched.shells().values()}
        lines = {pid: processes.command_line(pid) for pid in self._pids(box) - own}
        return {pid: line for pid, line in lines.items() if line}
