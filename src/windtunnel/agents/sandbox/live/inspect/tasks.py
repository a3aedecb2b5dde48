"""What the processes of one sandbox did since a process image was taken."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path

from windtunnel.agents.sandbox.errors import InspectError
from windtunnel.agents.sandbox.live.inspect import memory, processes
from windtunnel.agents.sandbox.live.inspect.kernel import Count
from windtunnel.agents.sandbox.live.inspect.processes import Alive, Descriptors
from windtunnel.agents.sandbox.model import ProcessEffect
from windtunnel.linux.cgroup import pids_of

ARM_SECONDS = 0.5
"""All trackers of one sandbox together may take this long; what is left over stays unknown."""

Key = tuple[int, int]
"""Pid and start time: a pid alone may be another process by now."""


@dataclass(frozen=True)
class _Base:
    alive: Alive
    descriptors: Descriptors
    count: Count | None


class Tasks:
    """``count`` says what a process received and wrote, None where nothing counts that."""

    def __init__(
        self,
        cgroup: Path,
        init: int,
        shells: Callable[[], Collection[int]],
        seen: Callable[[str], str],
        count: Callable[[int], Count] | None,
        track: bool,
    ) -> None:
        self._cgroup, self._init, self._shells = cgroup, init, shells
        self._seen, self._count, self._track = seen, count, track
        self._base: dict[Key, _Base] = {}
        self._trackers: dict[Key, memory.Tracker | None] = {}
        self._shared: dict[Key, tuple[Alive, list[str]]] = {}
        self.rebase_files()
        self.rebase()

    def close(self) -> None:
        for tracker in self._trackers.values():
            if tracker is not None:
                tracker.close()
        self._trackers.clear()

    def alive(self) -> dict[Key, Alive]:
        """All processes of the cgroup that are no zombies."""
        found = map(processes.alive, pids_of(self._cgroup))
        return {(one.pid, one.started): one for one in found if one is not None}

    def arm(self) -> None:
        """Put a memory tracker into every process that has none; shells and init need none."""
        now = self.alive() if self._track else {}
        for key in self._trackers.keys() - now.keys():
            self._drop(key)
        exempt = {self._init, *self._shells()}
        wanted = [key for key in now if key[0] not in exempt and self._trackers.get(key) is None]
        if wanted:
            # the thread that traces must end: its end frees whatever did not stop in time
            thread = threading.Thread(target=self._arm, args=(wanted,), name="windtunnel-arm")
            thread.start()
            thread.join()

    def _arm(self, wanted: list[Key]) -> None:
        deadline = time.monotonic() + ARM_SECONDS
        for key in wanted:
            if time.monotonic() > deadline:
                return
            try:
                self._trackers[key] = memory.Tracker(key[0])
            except (InspectError, OSError):
                self._trackers[key] = None

    def _drop(self, key: Key) -> None:
        tracker = self._trackers.pop(key, None)
        if tracker is not None:
            tracker.close()

    def rebase(self) -> None:
        """What was until now is covered by a process image."""
        shells = set(self._shells())
        self._base = {key: self._seen_now(one, key[0] in shells) for key, one in self.alive().items()}
        for key, tracker in list(self._trackers.items()):
            if tracker is None:
                continue
            try:
                if key not in self._base:
                    raise InspectError("it ended")
                tracker.reset()
            except (InspectError, OSError):
                self._drop(key)

    def _seen_now(self, one: Alive, shell: bool) -> _Base:
        count = self._count(one.pid) if self._count is not None else None
        return _Base(one, self._descriptors(one.pid, shell), count)

    def _descriptors(self, pid: int, shell: bool) -> Descriptors:
        # a shell's memory is not looked at, so where it stands in its files has to be
        return processes.opened(pid, self._seen, positions=shell) if pid != self._init else frozenset()

    def rebase_files(self) -> None:
        """What was until now is covered by a snapshot of files: remember who can write to mapped files."""
        shared = {}
        for key, one in self.alive().items():
            known = self._shared.get(key)
            fresh = known is None or known[0].ran != one.ran
            shared[key] = (one, processes.shared(key[0], self._seen) if fresh or known is None else known[1])
        self._shared = shared

    def stored(self, now: dict[Key, Alive]) -> set[str]:
        """Files to which a process may have stored through a mapping since: it had one, and it ran. Where
        nothing tells of mappings as they are made, those that processes have now are read too."""
        found: set[str] = set()
        if self._count is None:
            for key, one in now.items():
                known = self._shared.get(key)
                if known is None or known[0].ran != one.ran:
                    found.update(processes.shared(key[0], self._seen))
        for key, (one, paths) in self._shared.items():
            current = now.get(key)
            if paths and (current is None or current.ran != one.ran):
                found.update(paths)
        return found

    def effects(self, now: dict[Key, Alive]) -> tuple[ProcessEffect, ...]:
        """Those processes that did anything."""
        shells = set(self._shells())
        found = [
            ProcessEffect(key[0], base.alive.command, ended=True, shell=key[0] in shells)
            for key, base in self._base.items()
            if key not in now and key[0] != self._init
        ]
        for key, one in now.items():
            if key[0] == self._init:
                continue
            base = self._base.get(key)
            if base is None:
                found.append(ProcessEffect(one.pid, one.command, started=True, shell=key[0] in shells))
            elif base.alive.ran != one.ran:
                found.append(self._effect(key, one, base, key[0] in shells))
        return tuple(found)

    def _effect(self, key: Key, one: Alive, base: _Base, shell: bool) -> ProcessEffect:
        dirty: int | None = 0
        fresh = 0
        if not shell:
            dirty, fresh = self._memory(key)
        inputs = writes = None
        replaced = False
        if self._count is not None and base.count is not None:
            count = self._count(key[0])
            inputs, writes = count.inputs - base.count.inputs, count.writes - base.count.writes
            replaced = count.execs != base.count.execs
        return ProcessEffect(
            pid=one.pid,
            command=one.command,
            # another program in the same process
            started=replaced,
            shell=shell,
            dirty_pages=dirty,
            new_mappings=fresh,
            inputs=inputs,
            writes=writes,
            cpu=one.cpu - base.alive.cpu,
            descriptors_changed=self._descriptors(key[0], shell) != base.descriptors,
        )

    def _memory(self, key: Key) -> tuple[int | None, int]:
        tracker = self._trackers.get(key)
        if tracker is None:
            return None, 0
        try:
            return tracker.written()
        except (InspectError, OSError):
            return None, 0
