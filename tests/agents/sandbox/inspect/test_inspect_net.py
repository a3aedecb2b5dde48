"""The net effect of any sequence of changes, against a tree in memory and against a real one."""

from __future__ import annotations

import os
import stat
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agents.sandbox.inspect.inspect_cell import Cell, files_may_have_changed
from windtunnel.agents.sandbox.inspect import Inspector
from windtunnel.agents.sandbox.inspect.files import MOST, ChangedPaths
from windtunnel.agents.sandbox.inspect.kernel import CREATED, DELETED, MODIFIED, RENAMED
from windtunnel.linux.snapshot import read_snapshot

NAMES = st.sampled_from(["a", "b", "d", "d/a", "d/b", "e", "e/a", "L", "L/a"])
STEPS = st.lists(
    st.one_of(
        st.tuples(
            st.sampled_from(["write", "append", "mkdir", "remove", "rmdir", "chmod", "truncate"]), NAMES
        ),
        st.tuples(st.sampled_from(["rename", "link", "symlink"]), NAMES, NAMES),
    ),
    max_size=10,
)

Tree = dict[str, Any]


class Model:
    """A tree of files as a dictionary; every step tells the changes as the kernel would."""

    def __init__(self) -> None:
        self.files: Tree = {"/d": "dir", "/a": object(), "/d/a": object()}
        self.changes = ChangedPaths()

    def step(self, kind: str, *names: str) -> None:
        path = "/" + names[0]
        parent = os.path.dirname(path)
        if parent != "/" and self.files.get(parent) != "dir":
            return
        here = self.files.get(path)
        if kind in ("write", "append", "truncate") and here != "dir":
            self.changes.note(MODIFIED if here else CREATED, path)
            self.files[path] = object()
        elif kind == "mkdir" and here is None:
            self.files[path] = "dir"
            self.changes.note(CREATED, path)
        elif (kind == "remove" and here not in (None, "dir")) or (
            kind == "rmdir" and here == "dir" and not self.under(path)
        ):
            del self.files[path]
            self.changes.note(DELETED, path)
        elif kind == "rename" and here is not None:
            self.rename(path, "/" + names[1])

    def under(self, path: str) -> list[str]:
        return [path for path in self.files if path.startswith(path + "/")]

    def rename(self, old: str, new: str) -> None:
        parent, there = os.path.dirname(new), self.files.get(new)
        if old == new or new.startswith(old + "/") or (parent != "/" and self.files.get(parent) != "dir"):
            return
        if there is not None and ((there == "dir") != (self.files[old] == "dir") or self.under(new)):
            return
        moved = {new + path[len(old) :]: self.files.pop(path) for path in [*self.under(old), old]}
        self.files.update(moved)
        self.changes.note(DELETED, old)
        self.changes.note(RENAMED, new)


@given(STEPS)
@settings(max_examples=1000, deadline=None)
def test_no_sequence_of_changes_is_missed(steps: list[tuple[str, ...]]) -> None:
    model = Model()
    before = dict(model.files)
    for step in steps:
        model.step(*step)
    entry = os.stat_result((stat.S_IFREG, 0, 0, 0, 0, 0, 0, 0, 0, 0))
    changes, total = model.changes.net(lambda path: entry if path in model.files else None)
    paths = {change.path for change in changes}
    assert total == len(changes)
    for path in before.keys() | model.files.keys():
        if before.get(path) != model.files.get(path):
            above = {path[:at] for at in range(1, len(path) + 1) if path[at : at + 1] in ("/", "")}
            assert paths & above, f"{path!r} changed, and neither it nor a directory above it is told"


def test_created_then_deleted_cancels_and_a_directory_covers_what_is_in_it() -> None:
    changes = ChangedPaths()
    changes.note(CREATED, "/t")
    changes.note(MODIFIED, "/t/x")
    changes.note(DELETED, "/t/x")
    changes.note(RENAMED, "/t/y")
    changes.note(DELETED, "/t/y")
    changes.note(DELETED, "/t")
    assert changes.net(lambda path: None) == ([], 0)


def test_more_paths_than_are_remembered_are_still_counted() -> None:
    changes = ChangedPaths()
    for number in range(MOST + 7):
        changes.note(CREATED, f"/{number}")
    assert changes.net(lambda path: None)[1] == 7


SCRIPT = {
    "write": "echo x > {0}",
    "append": "echo y >> {0}",
    "mkdir": "mkdir {0}",
    "remove": "rm {0}",
    "rmdir": "rmdir {0}",
    "chmod": "chmod 600 {0}",
    "truncate": "truncate -s 3 /workspace/{0}",
    "rename": "mv -T {0} /workspace/{1}",
    "link": "ln {0} {1}",
    "symlink": "ln -sfn /workspace/{0} {1}",
}


@pytest.mark.conformance
@pytest.mark.root
@given(st.lists(STEPS, min_size=4, max_size=4))
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_real_sequence_is_missed(
    cell: Cell, inspector: Inspector, rounds: list[list[tuple[str, ...]]]
) -> None:
    for steps in rounds:
        cell.run("cd /workspace; rm -rf ./*; mkdir d; echo 1 > a; echo 2 > d/a; ln -s d L")
        if not inspector._boxes:
            cell.watch(inspector)
        inspector.rebase(cell.name, read_snapshot(cell.pids()))
        before = cell.tree()
        cell.run(
            "{ "
            + "; ".join([SCRIPT[kind].format(*names) for kind, *names in steps] or [":"])
            + "; } 2>/dev/null"
        )
        effects = inspector.effects(cell.name)
        if cell.tree() != before:
            assert files_may_have_changed(effects)
