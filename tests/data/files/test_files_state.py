"""Names and contents against an in-memory file system, published and after crashes."""

from __future__ import annotations

import errno
import os
import posixpath
import tempfile
from mmap import PAGESIZE
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from windtunnel.data.files.check import check
from windtunnel.data.files.live.area import FilesState, PublicArea, newest
from windtunnel.data.files.log import LogFrame, LogRing, frame
from windtunnel.data.files.model import Operation, OperationKind, Position
from windtunnel.data.files.tree import CLIENTS, FileTree

NAMES = ("a", "b", "a-b")
PATHS = st.lists(st.sampled_from(NAMES), min_size=1, max_size=3).map(lambda parts: "/" + "/".join(parts))


class Model:
    """A file system as a dictionary: path to bytes, or None for a folder."""

    def __init__(self) -> None:
        self.nodes: dict[str, bytes | None] = {"/": None}

    def perform(self, kind: OperationKind, path: str, target: str, offset: int, data: bytes) -> int | None:
        """The errno that it fails with, or None."""
        nodes, parent = self.nodes, posixpath.dirname(path)
        inside = [name for name in nodes if name.startswith(f"{path}/")]
        if kind in (OperationKind.CREATE, OperationKind.MKDIR):
            if path in nodes:
                return errno.EEXIST
            if nodes.get(parent, b"") is not None:
                return errno.ENOENT if parent not in nodes and self._above(parent) else errno.ENOTDIR
            nodes[path] = b"" if kind == OperationKind.CREATE else None
            return None
        if path not in nodes:
            return errno.ENOTDIR if nodes.get(parent) is not None else errno.ENOENT
        content = nodes[path]
        if kind in (OperationKind.WRITE, OperationKind.TRUNCATE, OperationKind.UNLINK):
            if content is None:
                return errno.EISDIR
            if kind == OperationKind.WRITE:
                at = len(content) if offset < 0 else offset
                nodes[path] = content[:at].ljust(at, b"\0") + data + content[at + len(data) :]
            elif kind == OperationKind.TRUNCATE:
                nodes[path] = content[:offset].ljust(offset, b"\0")
            else:
                del nodes[path]
            return None
        if kind == OperationKind.RMDIR:
            if content is not None:
                return errno.ENOTDIR
            if inside:
                return errno.ENOTEMPTY
            del nodes[path]
            return None
        return self._rename(path, target, inside)

    def _above(self, path: str) -> bool:
        """Whether what is above a path that is not there is a folder, or not there either."""
        return self.nodes.get(posixpath.dirname(path)) is None

    def _rename(self, path: str, target: str, inside: list[str]) -> int | None:
        nodes, parent = self.nodes, posixpath.dirname(target)
        if target.startswith(f"{path}/"):
            return errno.EINVAL
        if nodes.get(parent, b"") is not None:
            return errno.ENOENT if parent not in nodes and self._above(parent) else errno.ENOTDIR
        if target == path:
            return None
        if target in nodes:
            folders = (nodes[path] is None, nodes[target] is None)
            if folders[0] != folders[1]:
                return errno.EISDIR if folders[1] else errno.ENOTDIR
            if any(name.startswith(f"{target}/") for name in nodes):
                return errno.ENOTEMPTY
        for name in [path, *inside]:
            nodes[target + name[len(path) :]] = nodes.pop(name)
        return None


class Host(RuleBasedStateMachine):
    """A host without its processes: a log, a state, a public area. Another one has its log only."""

    @initialize()
    def begin(self) -> None:
        self.folder = Path(tempfile.mkdtemp(dir=os.environ["FILES_TEST_FOLDER"]))
        (self.folder / "ring").write_bytes(bytes((1 << 20) + PAGESIZE))
        self.ring = LogRing(self.folder / "ring", 1 << 20)
        self.area = PublicArea(self.folder)
        self.state, self.model = FilesState(self.folder), Model()

    @rule(
        kind=st.sampled_from(list(OperationKind)), path=PATHS, goal=PATHS, offset=st.integers(-1, 40),
        data=st.binary(max_size=30),
    )  # fmt: skip
    def operate(self, kind: OperationKind, path: str, goal: str, offset: int, data: bytes) -> None:
        offset = (
            abs(offset) if kind == OperationKind.TRUNCATE else offset if kind == OperationKind.WRITE else 0
        )
        data = data if kind == OperationKind.WRITE else b""
        operation = Operation(kind, path, goal if kind == OperationKind.RENAME else "", offset, 5.0)
        expected = self.model.perform(kind, path, goal, offset, data)
        try:
            checked = self.state.tree.check(operation, len(data))
        except OSError as error:
            assert error.errno == expected, (operation, os.strerror(error.errno or 0))
            return
        assert expected is None, (operation, expected)
        tail = self.state.tail
        framed = frame(checked, data, 1, tail.sequence)
        self.ring.write(tail.offset, framed)
        after = Position(tail.sequence + 1, tail.offset + len(framed), 1)
        self.state.apply(LogFrame(checked, data, tail.sequence, after))

    @rule()
    def publish(self) -> None:
        self.area.apply(self.ring.entries(self.area.applied))

    @rule()
    def checkpoint(self) -> None:
        self.area.checkpoint()
        self.state.overlay.drop(self.area.published.sequence)

    @rule()
    def crash(self) -> None:
        """All processes end; what was applied without a checkpoint is in the files, and applied again."""
        self.area.close()
        self.area = PublicArea(self.folder)
        self.state = FilesState.recovered(self.folder, self.ring)

    @invariant()
    def equal(self) -> None:
        if not hasattr(self, "model"):
            return
        nodes = self.model.nodes
        assert set(self.state.tree.nodes) == set(nodes)
        for path, content in nodes.items():
            stat = self.state.tree.stat(path)
            if content is None:
                prefix = path.rstrip("/") + "/"
                inside = {
                    name[len(prefix) :].split("/")[0]
                    for name in nodes
                    if name != "/" and name.startswith(prefix)
                }
                assert set(self.state.tree.names(path)) == inside
            else:
                assert (stat.size, self.state.read(path, 0, 100)) == (len(content), content)
                assert self.state.read(path, 3, 5) == content[3:8]

    def teardown(self) -> None:
        if hasattr(self, "area"):
            contents = check(self.folder)
            assert contents.damage == () and set(contents.digests) == set(self.model.nodes)
            self.area.close()
            self.ring.close()


def test_a_host_is_a_file_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FILES_TEST_FOLDER", str(tmp_path))
    run_state_machine_as_test(Host, settings=settings(max_examples=60, stateful_step_count=30, deadline=None))


def test_the_tree_survives_being_written_and_read() -> None:
    tree = FileTree()
    for number, path in enumerate(("/d", "/d/x", "/d-e", "/f")):
        kind = OperationKind.CREATE if number == 3 else OperationKind.MKDIR
        tree.apply(tree.check(Operation(kind, path, client=number + 1, request=4, time=2.0), 0), 0)
    again = FileTree.of(tree.plain())
    assert (again.nodes, again.children, again.clients) == (tree.nodes, tree.children, tree.clients)
    assert again.last_inode == tree.last_inode


def test_only_so_many_clients_are_remembered() -> None:
    tree = FileTree()
    for client in range(1, CLIENTS + 3):
        tree.apply(Operation(OperationKind.MKDIR, f"/{client}", client=client, request=1), 0)
    assert len(tree.clients) == CLIENTS and 1 not in tree.clients and CLIENTS + 2 in tree.clients


@pytest.mark.parametrize("path", ["", "a", "/", "//a", "/a/", "/a/../b", "/a/./b", "/a\0", f"/{'x' * 256}"])
def test_paths_that_are_none(path: str) -> None:
    with pytest.raises(OSError):
        FileTree().check(Operation(OperationKind.CREATE, path), 0)


def test_files_that_are_copied_anew_at_the_same_position_are_published_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    area, position = PublicArea(tmp_path), Position(3, 200, 1)
    tree = FileTree()
    tree.apply(Operation(OperationKind.CREATE, "/f"), 0)
    tree.apply(Operation(OperationKind.WRITE, "/f"), 4)
    inode = tree.stat("/f").inode
    synced: list[str] = []
    fdatasync = os.fdatasync
    monkeypatch.setattr(
        os, "fdatasync", lambda file: (synced.append(os.readlink(f"/proc/self/fd/{file}")), fdatasync(file))
    )
    for content in (b"once", b"anew"):
        area.clear()
        assert newest(tmp_path) == (FileTree(), Position())  # a crash now names no file that is gone
        area.write(inode, 0, content)
        synced.clear()
        area.install(tree, position)
        assert str(tmp_path / "inodes" / str(inode)) in synced
        assert newest(tmp_path) == (tree, position)
        assert (tmp_path / "inodes" / str(inode)).read_bytes() == content
    area.close()
