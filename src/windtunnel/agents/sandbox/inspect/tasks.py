"""What the processes of one sandbox did since a process image was taken, by what /proc tells of them: which
there are, whether they ran, what they have open."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from windtunnel.agents.sandbox.errors import InspectError
from windtunnel.agents.sandbox.inspect import memory
from windtunnel.agents.sandbox.inspect.kernel import Count
from windtunnel.agents.sandbox.model import ProcessEffect, References
from windtunnel.agents.sandbox.place import CHANNEL
from windtunnel.linux import processes
from windtunnel.linux.snapshot import Descriptor, SnapshotProcess, read_descriptors, read_file, read_status
from windtunnel.linux.system import copied, process_handle, unread

_CHANNEL = f"/{CHANNEL}/"
ARM_SECONDS = 0.5
"""All trackers of one sandbox together may take this long; what is left over stays unknown."""

Key = tuple[int, int]
"""Pid and start time: a pid alone may be another process by now."""
Descriptors = frozenset[tuple[str, str, int]]
"""Number, target, and what waits there or where it stands: in a form that compares."""


@dataclass(frozen=True)
class Alive:
    """One process at one moment. ``ran`` differs when any of its threads ran in between."""

    pid: int
    started: int
    command: str
    cpu: float
    ran: tuple[int, ...]
    settings: tuple[object, ...] = ()
    """What another process may set for it, without that it runs: priority, CPUs, place in the order of those
    that end when memory is short, and last its limits, which a shell's own state keeps."""


def alive(pid: int) -> Alive | None:
    """None: it ended, or is a zombie."""
    words = processes.stat(pid)
    if not words or words[0] in "ZX":
        return None
    try:
        command = read_file(f"/proc/{pid}/comm", short=True).rstrip(b"\n").decode(errors="replace")
        threads = [str(pid)] if words[17] == "1" else os.listdir(f"/proc/{pid}/task")
        ran = [int(words[11]), int(words[12]), len(threads)]
        for thread in threads:
            ran.extend(_ran(pid, thread))
        settings = (*words[15:17], *words[37:39], *_settings(pid, threads))
    except (OSError, ValueError, IndexError):
        return None
    cpu = (int(words[11]) + int(words[12])) / processes.TICKS
    return Alive(pid, int(words[19]), command, cpu, tuple(ran), settings)


def _settings(pid: int, threads: list[str]) -> tuple[object, ...]:
    cpus = tuple(frozenset(os.sched_getaffinity(int(thread))) for thread in threads)
    files = ("coredump_filter", "timerslack_ns", "oom_score_adj", "limits")
    disk = tuple(processes.disk_priority(int(thread)) for thread in threads)
    return cpus, disk, *(read_file(f"/proc/{pid}/{name}", short=True) for name in files)


def _ran(pid: int, thread: str) -> list[int]:
    """Nanoseconds that a thread ran, or where the kernel does not count them, how often it was switched."""
    if counted := read_file(f"/proc/{pid}/task/{thread}/schedstat", short=True):
        return [int(counted.split()[0])]
    status = read_status(pid, thread)
    return [int(value) for name, value in status.items() if "ctxt_switches" in name]


def list_descriptors(
    pid: int, have: Mapping[int, Descriptor], inner_path: Callable[[str], str], *, positions: bool = False
) -> Descriptors:
    """What a process has open: number and target of each descriptor, with the bytes that wait in a pipe or
    socket and, on request, the position in a regular file. The channel's own files do not count."""
    rows: list[tuple[str, str, int]] = []
    with contextlib.suppress(OSError), process_handle(pid) as handle:
        for number, descriptor in have.items():
            target, waiting = inner_path(descriptor.link), 0
            if target.startswith(_CHANNEL):
                continue
            if target.startswith(("pipe:", "socket:")):
                waiting = _waiting(handle, number)
            elif positions and descriptor.regular and not target.startswith("/dev/"):
                waiting = descriptor.position
            rows.append((str(number), target, waiting))
    return frozenset(rows)


def _waiting(pidfd: int, number: int) -> int:
    """Bytes that wait to be read from a pipe or socket of another process; -1: not known."""
    with contextlib.suppress(OSError), copied(pidfd, number) as copy:
        return unread(copy)
    return -1


def shared(pid: int, inner_path: Callable[[str], str]) -> set[str]:
    """Files of the sandbox that a process has mapped shared and writable."""
    with contextlib.suppress(OSError):
        stored = {each.path for each in processes.mappings(pid) if each.rights[1::2] == "ws"}
        return _inside({path for path in stored if not path.endswith(" (deleted)")}, inner_path)
    return set()


def references(snapshot: Sequence[SnapshotProcess], inner_path: Callable[[str], str]) -> References:
    """The paths inside that processes refer to, and among them those whose size a restore insists on.

    These are the mapped ones, and open regular files, except those that are open for appending alone (CRIU,
    files-reg.c: the size is compared for whoever may read, or write at a position).
    """
    others: set[str] = set()
    mapped: set[str] = set()
    for process in snapshot:
        mapped |= process.maps
        others.update(process.links.values())
        for descriptor in process.descriptors.values():
            appends = descriptor.flags & os.O_ACCMODE == os.O_WRONLY and descriptor.flags & os.O_APPEND
            (mapped if descriptor.regular and not appends else others).add(descriptor.link)
    inside = _inside(mapped, inner_path)
    return References(frozenset(inside | _inside(others, inner_path)), frozenset(inside))


def _inside(paths: set[str], inner_path: Callable[[str], str]) -> set[str]:
    """Those that are files of the root. A file that is deleted keeps its name here: should it be made anew,
    the image would find the wrong one."""
    plain = {inner_path(path.removesuffix(" (deleted)")) for path in paths if path.startswith("/")}
    return {
        path
        for path in plain
        if not path.startswith(("/dev/", "/proc/", "/sys/", "/memfd:", "/SYSV", _CHANNEL))
        and path not in ("/dev", "/proc", "/sys")
    }


@dataclass(frozen=True)
class _Base:
    alive: Alive
    descriptors: Descriptors
    count: Count | None


class Tasks:
    """``pids`` says which there are now; ``count`` what one received and wrote, None where nothing counts
    that."""

    def __init__(
        self,
        pids: Callable[[], Collection[int]],
        init: int,
        shells: Callable[[], Collection[int]],
        inner_path: Callable[[str], str],
        count: Callable[[int], Count] | None,
        track: bool,
    ) -> None:
        self.pids, self._init, self._shells = pids, init, shells
        self._inner_path, self._count, self._track = inner_path, count, track
        self._base: dict[Key, _Base] = {}
        self._trackers: dict[Key, memory.Tracker] = {}
        self._shared: dict[Key, tuple[Alive, set[str]]] = {}

    def close(self) -> None:
        for key in list(self._trackers):
            self._drop(key)

    def alive(self) -> dict[Key, Alive]:
        """All processes that are no zombies."""
        tasks = map(alive, self.pids())
        return {(task.pid, task.started): task for task in tasks if task is not None}

    def arm(self) -> None:
        """Put a memory tracker into every process that has none; shells and init need none."""
        now = self.alive() if self._track else {}
        for key in self._trackers.keys() - now.keys():
            self._drop(key)
        exempt = {self._init, *self._shells()}
        untracked = [key for key in now if key[0] not in exempt and key not in self._trackers]
        if untracked:
            # the thread that traces must end: its end frees whatever did not stop in time
            thread = threading.Thread(target=self._arm, args=(untracked,), name="windtunnel-arm")
            thread.start()
            thread.join()

    def _arm(self, untracked: list[Key]) -> None:
        deadline = time.monotonic() + ARM_SECONDS
        for key in untracked:
            if time.monotonic() > deadline:
                return
            with contextlib.suppress(InspectError, OSError):
                self._trackers[key] = memory.Tracker(key[0])

    def _drop(self, key: Key) -> None:
        self._trackers.pop(key).close()

    def rebase(self, snapshot: Sequence[SnapshotProcess] | None = None) -> None:
        """What was until now is covered by a snapshot of files, and where ``snapshot`` of the processes is
        given, by an image of them, too."""
        now = self.alive()
        stores = {}
        for key, task in now.items():
            # who can write to mapped files; that one did not run has what it had
            previous = self._shared.get(key)
            ran = previous is None or previous[0].ran != task.ran
            stores[key] = (task, shared(key[0], self._inner_path) if ran or previous is None else previous[1])
        self._shared = stores
        if snapshot is None:
            return
        have, shells = {process.pid: process.descriptors for process in snapshot}, set(self._shells())
        self._base = {
            key: _Base(
                task,
                self._descriptors(task.pid, have.get(task.pid, {}), key[0] in shells),
                self._count(task.pid) if self._count is not None else None,
            )
            for key, task in now.items()
        }
        for key, tracker in list(self._trackers.items()):
            try:
                if key not in self._base:
                    raise InspectError("it ended")
                tracker.reset()
            except (InspectError, OSError):
                self._drop(key)

    def _descriptors(self, pid: int, have: Mapping[int, Descriptor], shell: bool) -> Descriptors:
        # a shell's memory is not looked at, so where it stands in its files has to be
        return (
            list_descriptors(pid, have, self._inner_path, positions=shell)
            if pid != self._init
            else frozenset()
        )

    def stored(self, now: dict[Key, Alive]) -> set[str]:
        """Files to which a process may have stored through a mapping since: it had one, and it ran."""
        stored: set[str] = set()
        for key, (task, paths) in self._shared.items():
            current = now.get(key)
            if paths and (current is None or current.ran != task.ran):
                stored.update(paths)
        return stored

    def effects(self, now: dict[Key, Alive]) -> tuple[ProcessEffect, ...]:
        """Those processes that did anything."""
        shells = set(self._shells())
        process_effects = [
            ProcessEffect(key[0], base.alive.command, ended=True, shell=key[0] in shells)
            for key, base in self._base.items()
            if key not in now and key[0] != self._init
        ]
        for key, task in now.items():
            if key[0] == self._init:
                continue
            base = self._base.get(key)
            if base is None:
                process_effects.append(
                    ProcessEffect(task.pid, task.command, started=True, shell=key[0] in shells)
                )
            elif base.alive.ran != task.ran or base.alive.settings != task.settings:
                process_effects.append(self._effect(key, task, base, key[0] in shells))
        return tuple(process_effects)

    def _effect(self, key: Key, task: Alive, base: _Base, shell: bool) -> ProcessEffect:
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
            pid=task.pid,
            command=task.command,
            # another program in the same process
            started=replaced,
            shell=shell,
            dirty_pages=dirty,
            new_mappings=fresh,
            inputs=inputs,
            writes=writes,
            cpu=task.cpu - base.alive.cpu,
            descriptors_changed=self._descriptors(key[0], read_descriptors(key[0]), shell)
            != base.descriptors,
            settings_changed=task.settings[: -1 if shell else None]
            != base.alive.settings[: -1 if shell else None],
        )

    def _memory(self, key: Key) -> tuple[int | None, int]:
        tracker = self._trackers.get(key)
        if tracker is None:
            return None, 0
        try:
            return tracker.written()
        except (InspectError, OSError):
            return None, 0
