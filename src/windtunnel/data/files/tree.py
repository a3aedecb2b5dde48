"""The state that operations change: names, sizes, who has asked for what. One code on every host, so that
what is the same in all logs is the same in all trees."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from windtunnel.data.files.model import Operation, OperationKind, Stat

ROOT = "/"
CLIENTS = 1024  # whose last request is remembered


@dataclass
class FileTree:
    """``nodes``: by absolute path. ``clients``: the number of the last request of each, and the offset that
    it got, the latest last."""

    nodes: dict[str, Stat] = field(default_factory=lambda: {ROOT: Stat(1, True, 0, 0.0)})
    children: dict[str, set[str]] = field(default_factory=lambda: {ROOT: set()})
    clients: dict[int, tuple[int, int]] = field(default_factory=dict)
    last_inode: int = 1

    def stat(self, path: str) -> Stat:
        """Raises OSError: ENOENT or ENOTDIR, as the kernel would."""
        node = self.nodes.get(path)
        if node is None:
            parent = self.nodes.get(_parent(path))
            raise _error(errno.ENOTDIR if parent is not None and not parent.folder else errno.ENOENT, path)
        return node

    def names(self, path: str) -> tuple[str, ...]:
        """Names in a folder, sorted."""
        if not self.stat(path).folder:
            raise _error(errno.ENOTDIR, path)
        return tuple(sorted(self.children[path]))

    def check(self, operation: Operation, length: int) -> Operation:
        """The operation as it goes into the log (an append at its offset, a long write's end within bounds).

        Raises:
            OSError: it cannot be performed; nothing was changed.
        """
        kind, path = operation.kind, operation.path
        if path == ROOT or "\0" in path or not path.startswith(ROOT) or os.path.normpath(path) != path:
            raise _error(errno.EINVAL, path)
        if len(os.fsencode(path)) > 4095 or len(os.fsencode(os.path.basename(path))) > 255:
            raise _error(errno.ENAMETOOLONG, path)
        if kind in (OperationKind.CREATE, OperationKind.MKDIR):
            if path in self.nodes:
                raise _error(errno.EEXIST, path)
            self._is_folder(_parent(path))
            return operation
        node = self.stat(path)
        if node.folder and kind in (OperationKind.WRITE, OperationKind.TRUNCATE, OperationKind.UNLINK):
            raise _error(errno.EISDIR, path)
        if kind == OperationKind.RMDIR:
            self._is_empty_folder(path)
        if kind == OperationKind.RENAME:
            self._check_rename(path, operation.target)
        if kind == OperationKind.TRUNCATE and operation.offset < 0:
            raise _error(errno.EINVAL, path)
        if kind == OperationKind.WRITE and operation.offset < 0:
            return replace(operation, offset=node.size)
        return operation

    def _check_rename(self, path: str, target: str) -> None:
        if target != os.path.normpath(target) or target == ROOT or target.startswith(f"{path}/"):
            raise _error(errno.EINVAL, target)
        self._is_folder(_parent(target))
        there = self.nodes.get(target)
        if there is None or target == path:
            return
        if there.folder != self.nodes[path].folder:
            raise _error(errno.EISDIR if there.folder else errno.ENOTDIR, target)
        if there.folder:
            self._is_empty_folder(target)

    def _is_folder(self, path: str) -> None:
        if not self.stat(path).folder:
            raise _error(errno.ENOTDIR, path)

    def _is_empty_folder(self, path: str) -> None:
        self._is_folder(path)
        if self.children[path]:
            raise _error(errno.ENOTEMPTY, path)

    def apply(self, operation: Operation, length: int) -> list[int]:
        """Change the state as a checked operation says. Returns the inodes of files that are no more."""
        kind, path, removed = operation.kind, operation.path, list[int]()
        if kind in (OperationKind.CREATE, OperationKind.MKDIR):
            self.last_inode += 1
            self._put(path, Stat(self.last_inode, kind == OperationKind.MKDIR, 0, operation.time))
        elif kind == OperationKind.WRITE:
            node = self.nodes[path]
            size = max(node.size, operation.offset + length)
            self.nodes[path] = replace(node, size=size, modified=operation.time)
        elif kind == OperationKind.TRUNCATE:
            self.nodes[path] = replace(self.nodes[path], size=operation.offset, modified=operation.time)
        elif kind in (OperationKind.UNLINK, OperationKind.RMDIR):
            removed = self._remove(path)
        elif kind == OperationKind.RENAME and operation.target != path:
            if operation.target in self.nodes:
                removed = self._remove(operation.target)
            self._move(path, operation.target)
        if operation.client:
            self.clients.pop(operation.client, None)
            self.clients[operation.client] = (operation.request, max(0, operation.offset))
            if len(self.clients) > CLIENTS:
                del self.clients[next(iter(self.clients))]
        return removed

    def _put(self, path: str, node: Stat) -> None:
        self.nodes[path] = node
        self.children[_parent(path)].add(os.path.basename(path))
        if node.folder:
            self.children.setdefault(path, set())

    def _remove(self, path: str) -> list[int]:
        node = self.nodes.pop(path)
        self.children[_parent(path)].discard(os.path.basename(path))
        self.children.pop(path, None)
        return [] if node.folder else [node.inode]

    def _move(self, path: str, target: str) -> None:
        self.children[_parent(path)].discard(os.path.basename(path))
        node, inside = self.nodes.pop(path), self.children.pop(path, set())
        self._put(target, node)
        for name in list(inside):
            self.children.setdefault(path, set())  # of the folder that is moved, as its children see it
            self._move(f"{path}/{name}", f"{target}/{name}")
        self.children.pop(path, None)

    def files(self) -> Iterator[Stat]:
        return (node for node in self.nodes.values() if not node.folder)

    def plain(self) -> dict[str, Any]:
        """As JSON."""
        rows = [[path, n.inode, n.folder, n.size, n.modified] for path, n in self.nodes.items()]
        return {"nodes": rows, "clients": [[c, *r] for c, r in self.clients.items()], "last": self.last_inode}

    @staticmethod
    def of(plain: dict[str, Any]) -> FileTree:
        tree = FileTree(clients={c: (r, o) for c, r, o in plain["clients"]}, last_inode=plain["last"])
        for path, *fields in sorted(plain["nodes"]):
            if path == ROOT:
                tree.nodes[ROOT] = Stat(*fields)
            else:
                tree._put(path, Stat(*fields))
        return tree


def _parent(path: str) -> str:
    return os.path.dirname(path) or ROOT


def _error(number: int, path: str) -> OSError:
    return OSError(number, os.strerror(number), path)
