"""What the events of one sandbox say of its files: the net effect of a stream of changes, from the kernel's
names to paths inside, and which of its mounts a path lies on.

What was born and is gone again does not count. For every path that was touched it is remembered whether it
existed when the window began, as far as the stream tells: a path that is created was not there before, one
that is deleted or written was, and the target of a rename may or may not have been. Whether it exists *now*
is asked of the tree itself at the end, so the order in which two processes' events arrive cannot hide a
change. All doubt falls on the side of a change.

Source: the net-change rule of Crab (arXiv 2604.28138), section 4.
"""

from __future__ import annotations

import contextlib
import os
import stat
import threading
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from windtunnel.agents.sandbox.errors import InspectError
from windtunnel.agents.sandbox.inspect.kernel import (
    CREATED,
    DELETED,
    METADATA,
    MODIFIED,
    NUMBERS,
    RENAMED,
    FileEvent,
)
from windtunnel.agents.sandbox.model import Change, EffectDoubt, FileChange, SandboxPart
from windtunnel.agents.sandbox.place import CHANNEL
from windtunnel.linux.mounts import MountEntry, table
from windtunnel.linux.system import held, open_inside

Place = Literal["root", "elsewhere", "ignored"]
"""root: in what a snapshot of files holds. elsewhere: kept only by a process image (tmpfs). ignored: no
state."""

_IGNORED = frozenset((
    "proc", "sysfs", "devpts", "devtmpfs", "cgroup", "cgroup2", "debugfs", "tracefs", "securityfs", "bpf",
    "binfmt_misc", "configfs",
))  # fmt: skip
_CHANNEL = f"/{CHANNEL}"


def below(path: str, folder: str) -> str | None:
    """What of ``path`` follows ``folder``: empty for itself, None when it lies elsewhere."""
    if folder == "/":
        return "" if path == "/" else path
    if path.startswith(folder) and path[len(folder) : len(folder) + 1] in ("", "/"):
        return path[len(folder) :]
    return None


class Root:
    """The root of one sandbox: a folder of the host, and the mounts that its init has on it."""

    def __init__(self, folder: Path, init: int) -> None:
        self.folder = os.path.realpath(folder)
        self._init = init
        self._fd = os.open(self.folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        self._mounts: list[MountEntry] = []
        self._cache: dict[tuple[str, str], str] = {}
        self.refresh()
        if not any(mount.point == "/" for mount in self._mounts):
            self.close()
            raise InspectError(f"the mount of {folder} cannot be found")

    def refresh(self) -> None:
        """Read the mounts inside again."""
        with contextlib.suppress(OSError):  # with its init they are gone
            self._mounts = sorted(
                table(Path(f"/proc/{self._init}/mountinfo")), key=lambda mount: -len(mount.root)
            )
        inside = [mount for mount in self._mounts if mount.point != "/"]
        self._points = sorted(inside, key=lambda mount: -len(mount.point))

    def close(self) -> None:
        os.close(self._fd)

    def inside(self, device: int, names: str) -> str | None:
        """The path inside of what the kernel calls ``names`` on a device; None: on none of its mounts."""
        for mount in self._mounts:
            if mount.device == device:
                rest = below(names, mount.root)
                if rest is not None:
                    return mount.point.rstrip("/") + rest or "/"
        return None

    def place(self, path: str) -> Place:
        """Which part of the state a path inside belongs to."""
        if self.is_channel(path):
            return "ignored"
        for mount in self._points:
            if below(path, mount.point) is not None:
                return "ignored" if mount.kind in _IGNORED else "elsewhere"
        return "root"

    def is_channel(self, path: str) -> bool:
        return below(path, _CHANNEL) is not None

    def forget(self) -> None:
        """Directories may have moved: what was resolved before no longer counts."""
        self._cache.clear()

    def resolved(self, base: str, path: str) -> str:
        """``path`` from the directory ``base``, symbolic links in its directories followed as they are now.
        The last name is not followed."""
        path = path.rstrip("/")
        folder, _, name = path.rpartition("/")
        if name in ("", ".", ".."):
            return self.followed(os.path.normpath(base + "/" + path)) if path else base
        folder = folder.strip("/")
        if not folder:
            return base.rstrip("/") + "/" + name
        key = (base, folder)
        real = self._cache.get(key)
        if real is None:
            real = self._cache[key] = self.followed(base + "/" + folder)
        return real.rstrip("/") + "/" + name

    def followed(self, path: str) -> str:
        """``path`` inside with every symbolic link followed; the plain path where that leads nowhere."""
        plain = os.path.normpath("/" + path.lstrip("/"))
        if self.place(plain) != "root":
            return plain
        rest = None
        with contextlib.suppress(OSError), held(open_inside(self._fd, path, os.O_PATH)) as descriptor:
            rest = below(os.readlink(f"/proc/self/fd/{descriptor}"), self.folder)
        return plain if rest is None else rest or "/"

    def lstat(self, path: str) -> os.stat_result | None:
        """Of a path inside that ``resolved`` gave; None: nothing is there."""
        return _lstat(self.folder + path)

    def outside(self, path: str) -> str:
        """The host's path of one on another mount of the sandbox."""
        return f"/proc/{self._init}/root{path}"

    def elsewhere(self) -> set[str]:
        """Where the file systems are mounted that only process images keep."""
        points = {mount.point for mount in self._points if mount.kind == "tmpfs"}
        return {point for point in points if self.place(point) == "elsewhere"}

    def path_inside(self, path: str) -> str:
        """A path that /proc tells of a process of the sandbox, as a path inside."""
        rest = below(path, self.folder)
        return path if rest is None else rest or "/"


def _lstat(path: str) -> os.stat_result | None:
    try:
        return os.lstat(path)
    except OSError:
        return None


MOST = 50_000
"""Paths that are remembered; beyond, only that there were more."""


@dataclass(slots=True)
class _Entry:
    before: bool | None
    """Did it exist at the start? None: not known."""
    replaced: bool = False
    modified: bool = False
    moved_in: bool = False


@dataclass
class ChangedPaths:
    """Paths are absolute, without symbolic links in their directories."""

    _entries: dict[str, _Entry] = field(default_factory=dict)
    overflow: int = 0

    def __len__(self) -> int:
        return len(self._entries)

    def _touched(self, path: str, before: bool | None) -> _Entry:
        entry = self._entries.get(path)
        if entry is None:
            entry = _Entry(False if before is not False and self._below_new(path) else before)
            if len(self._entries) < MOST:
                self._entries[path] = entry
            else:
                self.overflow += 1
        return entry

    def _below_new(self, path: str) -> bool:
        """Was a directory above it made or moved here within the window? Then nothing of this name was
        there before, or its removal would be known."""
        at = path.rfind("/")
        while at > 0:
            entry = self._entries.get(path[:at])
            if entry is not None and (entry.before is False or entry.moved_in):
                return True
            at = path.rfind("/", 0, at)
        return False

    def note(self, op: int, path: str) -> None:
        """Take in what happened to a path. RENAMED: it is the target, the source counts as deleted."""
        entry = self._touched(path, False if op == CREATED else None if op == RENAMED else True)
        entry.replaced |= op in (CREATED, DELETED, RENAMED)
        entry.modified |= op == MODIFIED
        entry.moved_in |= op == RENAMED

    def net(
        self, lstat: Callable[[str], os.stat_result | None], most: int = 4096
    ) -> tuple[list[FileChange], int]:
        """Up to ``most`` changes that remain, and how many there are."""
        file_changes: list[FileChange] = []
        total = self.overflow
        for path, entry in self._entries.items():
            now = lstat(path)
            if now is None and entry.before is False:
                continue
            total += 1
            if len(file_changes) < most:
                size = now.st_size if now is not None and stat.S_ISREG(now.st_mode) else 0
                file_changes.append(FileChange(path, _word(entry, now is not None), size))
        return file_changes, total


def _word(entry: _Entry, exists: bool) -> Change:
    if not exists:
        return "deleted"
    if entry.before is None:
        return "renamed"
    if entry.before is False or entry.replaced:
        return "created"
    return "modified" if entry.modified else "metadata"


LISTED = 4096
_SYMLINK = {NUMBERS["symlink"], NUMBERS["symlinkat"]}
_LINK = {NUMBERS["link"], NUMBERS["linkat"]}


class ChangeWindow:
    """Changes of the files of one sandbox since a snapshot."""

    def __init__(self, root: Root) -> None:
        self._root = root
        self._lock = threading.Lock()
        self.clear()

    def clear(self) -> None:
        """A new window begins."""
        with self._lock:
            self._in_root, self._elsewhere = ChangedPaths(), ChangedPaths()
            self._links: set[str] = set()
            self._nameless: set[int] = set()
            self._doubts: dict[EffectDoubt, None] = {}

    def add(self, event: FileEvent) -> None:
        """Take one event in. One that cannot be told leaves a doubt, and the reader goes on."""
        with self._lock:
            try:
                self._add(event)
            except (OSError, ValueError) as error:
                self._unsure(f"an event was not understood ({error})")

    def _add(self, event: FileEvent) -> None:
        if event.cut:
            self._unsure("a path was too long to be read")
        base = self._root.inside(event.device, event.names)
        if base is None:
            self._root.refresh()
            base = self._root.inside(event.device, event.names)
        if event.mode:
            self._open_file(event, base)
            return
        if base is None:
            self._unsure("a change on no known mount")
            return
        path = self._root.resolved(base, event.path)
        self._through_proc(path)
        if event.op == RENAMED:
            self._root.forget()
            base2 = self._root.inside(event.device2, event.names2)
            if base2 is None:
                self._unsure("a change on no known mount")
                return
            new = self._root.resolved(base2, event.path2)
            self._through_proc(new)
            if "/" in event.path + event.path2:
                self._through_link(path, new)
            if path in self._links:
                self._links.add(new)
            self._note(DELETED, path)
            self._note(RENAMED, new)
            return
        if "/" in event.path:
            self._through_link(path)
        if event.op == CREATED:
            self._root.forget()
            if event.number in _SYMLINK or (event.number in _LINK and self._may_be_link(path)):
                self._links.add(path)
        elif event.op in (METADATA, MODIFIED):
            if path in self._links:
                self._unsure("a change through a link that was just made")
            path = self._root.followed(path)
        self._note(event.op, path)

    def _unsure(self, words: str) -> None:
        self._doubts[EffectDoubt(SandboxPart.FILES, words)] = None

    def touched(self, path: str) -> None:
        """The host itself wrote a path inside."""
        with self._lock:
            self._note(MODIFIED, self._root.followed(path))

    def _open_file(self, event: FileEvent, path: str | None) -> None:
        if path is None:
            self._nameless.add(event.pid)
        elif event.links or event.op == CREATED:
            self._note(event.op, path)

    def _changes(self, path: str) -> ChangedPaths | None:
        place = self._root.place(path)
        return self._in_root if place == "root" else self._elsewhere if place == "elsewhere" else None

    def _note(self, op: int, path: str) -> None:
        changes = self._changes(path)
        if changes is not None:
            changes.note(op, path)

    def _through_link(self, *paths: str) -> None:
        """A link that was made and perhaps moved within the window may have led elsewhere at the time."""
        for path in paths:
            at = path.rfind("/") if self._links else 0
            while at > 0:
                if path[:at] in self._links and not self._is_folder(path[:at]):
                    self._unsure("a change through a link that was just made")
                at = path.rfind("/", 0, at)

    def _through_proc(self, path: str) -> None:
        """Nothing can be made or removed in /proc itself: the path led through a link of a process."""
        if not self._root.is_channel(path) and self._root.place(path) == "ignored":
            self._unsure("a change by a path through /proc or /dev")

    def _may_be_link(self, path: str) -> bool:
        now = self._root.lstat(path)
        return now is None or stat.S_ISLNK(now.st_mode)

    def _is_folder(self, path: str) -> bool:
        """Is it a plain directory after all?"""
        now = self._root.lstat(path)
        return now is not None and stat.S_ISDIR(now.st_mode)

    def effect(self, alive: Collection[int]) -> tuple[list[FileChange], int, list[EffectDoubt]]:
        """Net changes, how many there are in all, and doubts."""
        with self._lock:
            doubts = list(self._doubts)
            file_changes, total = self._in_root.net(self._root.lstat, LISTED)
            gone, count = self._elsewhere.net(lambda path: _lstat(self._root.outside(path)), 1)
        if count:
            path = gone[0].path if gone else "a file"
            doubts.append(
                EffectDoubt(SandboxPart.PROCESSES, f"{path} is kept by process images only and was changed")
            )
        if self._nameless & set(alive):
            doubts.append(
                EffectDoubt(SandboxPart.PROCESSES, "a process wrote to a file in memory that has no name")
            )
        return file_changes, total, doubts
