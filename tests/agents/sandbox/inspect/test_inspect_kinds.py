"""The weaker kinds, what each says it cannot tell, and what is said where a kind cannot work at all."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from inspect_cell import Cell, files_may_have_changed
from test_inspect_files import AGAIN, BEFORE, CHANGED, KEEP, SAME

from windtunnel.agents.sandbox.errors import InspectError
from windtunnel.agents.sandbox.live.inspect import Inspector, kernel, open_inspector
from windtunnel.agents.sandbox.model import References, TurnClass
from windtunnel.agents.sandbox.policy.effects import class_of
from windtunnel.base.errors import UserError
from windtunnel.linux import bpf


@pytest.fixture
def by_fanotify() -> Iterator[Inspector]:
    try:
        one = open_inspector("fanotify")
    except InspectError as error:
        pytest.skip(str(error))
    yield one
    one.close()


@pytest.mark.root
def test_fanotify_misses_no_change_of_the_table(cell: Cell, by_fanotify: Inspector) -> None:
    try:
        cell.watch(by_fanotify)
    except InspectError as error:
        pytest.skip(str(error))
    cell.run(KEEP)
    for name, command in CHANGED.items():
        cell.run(AGAIN)
        by_fanotify.rebase(cell.name, files=True, processes=True)
        before = cell.tree()
        cell.run(command)
        effects = by_fanotify.effects(cell.name)
        if cell.tree() != before:
            assert files_may_have_changed(effects), name


@pytest.mark.root
@pytest.mark.parametrize("kind", ["ebpf", "fanotify"])
def test_a_root_that_is_a_subvolume(kind: str, btrfs_cell: Cell) -> None:
    try:
        inspector = open_inspector(kind)
    except InspectError as error:
        pytest.skip(str(error))
    try:
        btrfs_cell.run("echo x > a; mkdir d")
        btrfs_cell.watch(inspector)
        assert not files_may_have_changed(inspector.effects(btrfs_cell.name))
        btrfs_cell.run("echo y >> a; echo z > d/b; rmdir d/none 2>/dev/null")
        effects = inspector.effects(btrfs_cell.name)
        assert not effects.doubts
        assert {(change.path, change.change) for change in effects.files} == {
            ("/workspace/a", "modified"),
            ("/workspace/d/b", "created"),
        }
    finally:
        inspector.close()


@pytest.mark.root
@pytest.mark.parametrize("name", ["nothing", "read", "failed delete", "pipes"])
def test_fanotify_is_quiet_where_nothing_changes(name: str, cell: Cell, by_fanotify: Inspector) -> None:
    cell.run(BEFORE)
    cell.watch(by_fanotify)
    cell.run(SAME[name])
    assert not files_may_have_changed(by_fanotify.effects(cell.name))


@pytest.mark.root
def test_weaker_kinds_do_not_know_what_a_process_received(cells: Callable[[], Cell]) -> None:
    for kind in ("fanotify", "activity"):
        inspector = open_inspector(kind)
        cell = cells()
        cell.watch(inspector)
        cell.run(":")
        shell = cell.child(inspector.effects(cell.name), "bash")
        assert shell.inputs is None and shell.writes is None
        assert any("received" in miss for miss in inspector.misses)
        inspector.close()


@pytest.mark.root
def test_activity_alone_never_says_that_files_are_unchanged(cell: Cell) -> None:
    inspector = open_inspector("activity")
    cell.watch(inspector)
    assert class_of(inspector.effects(cell.name), References())[0] is TurnClass.FILES
    inspector.close()


@pytest.mark.root
def test_nothing_stays_attached_after_the_last_sandbox(
    cells: Callable[[], Cell], inspector: Inspector
) -> None:
    def held() -> int:
        folder = Path("/proc/self/fd")
        return sum("bpf" in os.readlink(one) for one in folder.iterdir() if one.is_symlink())

    one, two = cells(), cells()
    assert not held()
    one.watch(inspector)
    two.watch(inspector)
    inspector.unwatch(one.name)
    assert held()
    two.run("echo x > new")
    assert inspector.effects(two.name).files_total == 1
    inspector.unwatch(two.name)
    assert not held()
    with pytest.raises(InspectError, match="is not watched"):
        inspector.effects(two.name)
    two.watch(inspector)
    assert not inspector.effects(two.name).files_total


@pytest.mark.root
def test_a_sandbox_that_is_watched_again_starts_anew(cell: Cell, inspector: Inspector) -> None:
    cell.watch(inspector)
    cell.run("echo x > new")
    cell.watch(inspector)
    assert not files_may_have_changed(inspector.effects(cell.name))


@pytest.mark.root
def test_criu_dumps_a_tracked_process(cell: Cell, inspector: Inspector, tmp_path: Path) -> None:
    from windtunnel.agents.sandbox.live.criu import find_criu

    criu = find_criu()
    if criu is None:
        pytest.skip("needs CRIU")
    from windtunnel.agents.sandbox.live.inspect import memory

    process = subprocess.Popen(
        ["sleep", "1000"], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        start_new_session=True,
    )  # fmt: skip
    try:
        # Popen returns when exec has closed the old descriptors, a moment before the kernel maps the vDSO.
        while b"[vdso]" not in Path(f"/proc/{process.pid}/maps").read_bytes():
            assert process.poll() is None
        tracker = memory.Tracker(process.pid)
        images = tmp_path / "images"
        images.mkdir()
        done = subprocess.run(
            [str(criu.path), "dump", "-t", str(process.pid), "-D", str(images), "--leave-running", "-v2"],
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        tracker.reset()
        assert tracker.written() == (0, 0)
        tracker.close()
    finally:
        process.kill()
        process.wait()


def test_an_unknown_kind_is_the_users_mistake() -> None:
    with pytest.raises(UserError, match=r"kind 'strace' is not known; use auto, ebpf, fanotify, activity"):
        open_inspector("strace")


def test_without_rights_the_reason_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(InspectError, match="ebpf: needs root"):
        open_inspector("ebpf")
    assert open_inspector().kind == "activity"


def test_the_shipped_object_is_built_from_the_source_beside_it() -> None:
    shipped = kernel.OBJECT.locate()
    assert list(shipped.parent.glob("*.o")) == [shipped]
    assert {program.name for program in kernel.OBJECT.programs()} == {
        "sys_exit",
        "sched_process_exec",
        "sched_process_exit",
        "signal_generate",
    }


def test_the_object_can_be_rebuilt(tmp_path: Path) -> None:
    if shutil.which("clang") is None or not Path("/usr/include/bpf/bpf_helpers.h").exists():
        pytest.skip("needs clang and libbpf-dev")
    kernel.OBJECT.build(tmp_path / "made.o")
    made = bpf.programs((tmp_path / "made.o").read_bytes())
    assert made == kernel.OBJECT.programs()


def test_the_machines_know_the_same_effects() -> None:
    from windtunnel.agents.sandbox.live.inspect.syscalls import NUMBERS, RULES

    assert set(NUMBERS["x86_64"]) == set(RULES)
    without_at = {"creat", "open", "mkdir", "mknod", "symlink", "link", "unlink", "rmdir", "rename", "chmod"}
    without_at |= {"chown", "lchown", "utime", "utimes", "futimesat"}
    assert set(RULES) - set(NUMBERS["aarch64"]) == without_at
    for numbers in NUMBERS.values():
        assert len(set(numbers.values())) == len(numbers) and max(numbers.values()) < 512


def test_names_from_the_kernel_are_turned_round() -> None:
    assert kernel._names(b"a\0b c\0tmp\0") == b"/tmp/b c/a"
    assert kernel._names(b"") == b"/"
