"""Comparison, what each inspector says it cannot tell, and what is said where one cannot work at all."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from agents.sandbox.inspect.inspect_cell import Cell
from windtunnel.agents.sandbox.errors import InspectError, PoolError
from windtunnel.agents.sandbox.inspect import DiffInspector, Inspector, kernel
from windtunnel.agents.sandbox.model import FileChange, References, SandboxPart, TurnClass
from windtunnel.agents.sandbox.policy.effects import class_of
from windtunnel.linux import bpf
from windtunnel.linux.snapshot import read_snapshot


def compared(cell: Cell, changed: Callable[[str], list[FileChange]], *, images: bool = True) -> DiffInspector:
    inspector = DiffInspector(changed, images=images)
    cell.watch(inspector)
    return inspector


@pytest.mark.root
def test_comparison_does_not_know_what_a_process_received(cell: Cell) -> None:
    inspector = compared(cell, lambda box: [FileChange("/workspace/a", "created")])
    cell.run(":")
    effects = inspector.effects(cell.name)
    shell = cell.child(effects, "bash")
    assert shell.inputs is None and shell.writes is None
    assert [change.path for change in effects.files] == ["/workspace/a"] and not effects.doubts
    assert any("received" in miss for miss in inspector.misses)
    inspector.close()


@pytest.mark.root
def test_comparison_sees_what_only_images_keep(cell: Cell) -> None:
    inspector = compared(cell, lambda box: [])
    cell.run("echo x > /dev/shm/f")
    (doubt,) = inspector.effects(cell.name).doubts
    assert doubt.part is SandboxPart.PROCESSES and "/dev/shm/f is kept by process images only" in doubt.text
    inspector.rebase(cell.name)
    assert inspector.effects(cell.name).doubts, "no image was made"
    inspector.rebase(cell.name, read_snapshot(cell.pids()))
    assert class_of(inspector.effects(cell.name), References())[0] is TurnClass.NONE
    cell.run("rm /dev/shm/f")
    assert inspector.effects(cell.name).doubts
    inspector.close()


@pytest.mark.root
def test_without_images_processes_count_as_kept_with_the_files(cell: Cell) -> None:
    def fails(box: str) -> list[FileChange]:
        raise PoolError("it went away")

    inspector = compared(cell, fails, images=False)
    begun = "until read -r name </proc/$!/comm && [ $name = sleep ]; do :; done"
    cell.run(f"echo x > /dev/shm/f; sleep 1000 & SLEEPS=$!; {begun}")
    cell.settled()
    effects = inspector.effects(cell.name)
    assert cell.child(effects, "sleep").started
    assert [doubt.part for doubt in effects.doubts] == [SandboxPart.FILES]
    inspector.rebase(cell.name)
    cell.settled()
    assert not [process for process in inspector.effects(cell.name).processes if not process.shell]
    cell.run("kill $SLEEPS; wait")
    assert cell.child(inspector.effects(cell.name), "sleep").ended
    with pytest.raises(InspectError, match="is not watched"):
        inspector.effects("other")
    inspector.close()


@pytest.mark.root
def test_nothing_stays_attached_after_the_last_sandbox(
    cells: Callable[[], Cell], inspector: Inspector
) -> None:
    def held() -> int:
        folder = Path("/proc/self/fd")
        return sum(
            "bpf" in os.readlink(descriptor) for descriptor in folder.iterdir() if descriptor.is_symlink()
        )

    first, second = cells(), cells()
    assert not held()
    first.watch(inspector)
    second.watch(inspector)
    inspector.unwatch(first.name)
    assert held()
    second.run("echo x > new")
    assert inspector.effects(second.name).files_total == 1
    inspector.unwatch(second.name)
    assert not held()
    with pytest.raises(InspectError, match="is not watched"):
        inspector.effects(second.name)
    second.watch(inspector)
    assert not inspector.effects(second.name).files_total


def test_without_rights_the_reason_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert kernel.missing() == "needs root"


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
    programs = bpf.programs((tmp_path / "made.o").read_bytes())
    assert programs == kernel.OBJECT.programs()


def test_every_call_has_one_number_and_one_rule() -> None:
    from windtunnel.agents.sandbox.inspect.kernel import NUMBERS, RULES

    assert set(NUMBERS.values()) == set(RULES) and len(NUMBERS) == len(RULES) > 80
    assert max(RULES) < 512
