"""The public area of a host: its files as the log has made them, and how they are read while it goes on.

A checkpoint is: the files that changed are on the disk, then a snapshot of the tree, then a superblock that
names it. What lies between two checkpoints is done again from the log after a crash: an operation on a file
that has it already changes nothing.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from windtunnel.base import atomic
from windtunnel.data.files.log import LogFrame, LogRing, Superblocks
from windtunnel.data.files.model import OperationKind, Position
from windtunnel.data.files.tree import FileTree

_OPEN = 64  # files that are kept open


class PublicArea:
    """``tree``: as of ``applied``, which is what the files hold; ``published``: what is durably so."""

    def __init__(self, folder: Path) -> None:
        self._inodes = folder / "inodes"
        self._inodes.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._blocks = Superblocks(folder / "superblocks")
        self.tree = snapshot(folder, self._blocks.turn)
        self.applied = self._blocks.published
        self._open: dict[int, int] = {}
        self._changed: set[int] = set()

    @property
    def published(self) -> Position:
        return self._blocks.published

    def apply(self, entries: Iterable[LogFrame]) -> None:
        """Perform operations, in their order, from ``applied`` on."""
        for entry in entries:
            operation = entry.operation
            if operation.kind in (OperationKind.WRITE, OperationKind.TRUNCATE):
                inode = self.tree.nodes[operation.path].inode
                if operation.kind == OperationKind.WRITE:
                    os.pwrite(self._file(inode), entry.data, operation.offset)
                else:
                    os.ftruncate(self._file(inode), operation.offset)
                self._changed.add(inode)
            for inode in self.tree.apply(operation, len(entry.data)):
                self._forget(inode)
            self.applied = entry.after

    def checkpoint(self) -> None:
        """All that was applied is published: durably, and in one step."""
        if self.applied == self.published:
            return
        for inode in self._changed:
            os.fdatasync(self._file(inode))
        self._changed.clear()
        atomic.sync_folder(self._inodes)
        name = f"tree-{self._blocks.turn + 1}"
        atomic.replace(self._folder / name, json.dumps(self.tree.plain()), durable=True)
        old = self._folder / f"tree-{self._blocks.turn}"
        self._blocks.write(self.applied)
        old.unlink(missing_ok=True)

    def install(self, tree: FileTree, published: Position) -> None:
        """Another host's files were copied here: take them for published."""
        self.tree, self.applied = tree, published
        self._changed = {node.inode for node in tree.files() if self._path(node.inode).exists()}
        self.checkpoint()

    def write(self, inode: int, offset: int, data: bytes) -> None:
        """A part of another host's file."""
        os.pwrite(self._file(inode), data, offset)

    def clear(self) -> None:
        """Forget all files, before another host's are copied here. That nothing is published is on the disk
        first: no checkpoint may name files that are gone, nor stand for those that come."""
        self.tree, self.applied = FileTree(), Position()
        self._changed.clear()
        self.checkpoint()
        for path in self._inodes.iterdir():
            self._forget(int(path.name))

    def _path(self, inode: int) -> Path:
        return self._inodes / str(inode)

    def _file(self, inode: int) -> int:
        file = self._open.pop(inode, -1)
        if file < 0:
            file = os.open(self._path(inode), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            if len(self._open) >= _OPEN:
                os.close(self._open.pop(next(iter(self._open))))
        self._open[inode] = file
        return file

    def _forget(self, inode: int) -> None:
        if inode in self._open:
            os.close(self._open.pop(inode))
        self._changed.discard(inode)
        self._path(inode).unlink(missing_ok=True)

    def close(self) -> None:
        for file in self._open.values():
            os.close(file)
        self._blocks.close()


def snapshot(folder: Path, turn: int) -> FileTree:
    """The tree of a checkpoint; an empty one before the first. Raises FileNotFoundError: a newer is there."""
    return FileTree.of(json.loads((folder / f"tree-{turn}").read_text())) if turn else FileTree()


def newest(folder: Path) -> tuple[FileTree, Position]:
    """The tree of the newest checkpoint and its position, while another process may make the next."""
    while True:
        blocks = Superblocks(folder / "superblocks")
        blocks.close()
        with contextlib.suppress(FileNotFoundError):
            return snapshot(folder, blocks.turn), blocks.published


def read(folder: Path, inode: int, offset: int, length: int) -> bytes:
    """Bytes of a file of the public area; less than ``length`` where it ends, or was never written."""
    try:
        file = os.open(folder / "inodes" / str(inode), os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return b""
    try:
        return os.pread(file, length, offset)
    finally:
        os.close(file)


class Overlay:
    """What the log has of files that the public area may not have yet, so that it is read at once.

    Of each inode the writes and truncations since some published position, in their order. Over bytes that
    have some of them already, all of them together give the same.
    """

    def __init__(self) -> None:
        self._changes: dict[int, list[tuple[int, int, bytes | None]]] = {}  # sequence, offset, data

    def add(self, inode: int, sequence: int, offset: int, data: bytes | None) -> None:
        """A write, or (without data) a truncation to ``offset``."""
        self._changes.setdefault(inode, []).append((sequence, offset, data))

    def drop(self, published: int) -> None:
        """Changes before the sequence number ``published`` are in the public area."""
        for inode, changes in list(self._changes.items()):
            rest = [change for change in changes if change[0] >= published]
            if rest:
                self._changes[inode] = rest
            else:
                del self._changes[inode]

    def read(self, inode: int, offset: int, length: int, below: bytes) -> bytes:
        """``below``: what the public area has of these bytes."""
        data = bytearray(below.ljust(length, b"\0"))
        for start, part in self._parts(inode, offset, length):
            data[start : start + len(part)] = part
        return bytes(data)

    def _parts(self, inode: int, offset: int, length: int) -> Iterator[tuple[int, bytes]]:
        end = offset + length
        for _, at, data in self._changes.get(inode, ()):
            if data is None:
                cut = max(at, offset)
                if cut < end:
                    yield cut - offset, bytes(end - cut)
            elif at < end and at + len(data) > offset:
                first = max(at, offset)
                yield first - offset, data[first - at : end - at]


class FilesState:
    """Names and contents as the log of a host has them, to its end, which is ``tail``."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.tree, self.overlay, self.tail = FileTree(), Overlay(), Position()

    @staticmethod
    def recovered(folder: Path, ring: LogRing) -> FilesState:
        """From the newest checkpoint, and what the log has beyond it."""
        state = FilesState(folder)
        state.tree, state.tail = newest(folder)
        for entry in ring.entries(state.tail):
            state.apply(entry)
        return state

    def apply(self, entry: LogFrame) -> None:
        operation = entry.operation
        if operation.kind in (OperationKind.WRITE, OperationKind.TRUNCATE):
            content = entry.data if operation.kind == OperationKind.WRITE else None
            inode = self.tree.nodes[operation.path].inode
            self.overlay.add(inode, entry.sequence, operation.offset, content)
        self.tree.apply(operation, len(entry.data))
        self.tail = entry.after

    def read(self, path: str, offset: int, length: int) -> bytes:
        """Bytes of a file, less at its end. Raises OSError."""
        node = self.tree.stat(path)
        if node.folder:
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
        length = min(length, node.size - offset)
        if length <= 0:
            return b""
        return self.overlay.read(node.inode, offset, length, read(self.folder, node.inode, offset, length))
