"""Limits, freezing and killing by control groups."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from windtunnel.agents.sandbox.errors import MachineError
from windtunnel.agents.sandbox.host import removed
from windtunnel.agents.sandbox.machine import Machine, launch
from windtunnel.agents.sandbox.machine.group import Cgroup
from windtunnel.agents.sandbox.machine.launch import unclaimed
from windtunnel.agents.sandbox.model import SandboxLimits, SandboxSpec
from windtunnel.agents.sandbox.place import Home
from windtunnel.linux.processes import look


@pytest.mark.root
def test_memory_over_the_limit_kills_inside_only(start: Callable[..., Machine]) -> None:
    box = start(limits=SandboxLimits(memory=64 * 2**20))
    assert box.limits_missed == []
    result = box.run("python3 -c 'x = bytearray(300 << 20); print(len(x))'", timeout=120)
    assert result.exit_code == 137 and result.stdout == b""
    assert box.run("echo fine", timeout=60).stdout == b"fine\n"


@pytest.mark.root
def test_a_fork_bomb_is_bounded_and_can_be_killed(start: Callable[..., Machine]) -> None:
    box = start(limits=SandboxLimits(pids=40))
    result = box.run("bomb() { bomb | bomb & }; bomb; sleep 1000", timeout=1)
    assert result.ended in ("timeout", "exit")
    assert len(box.cgroup.pids()) <= 40
    launch.clear(box.home, box.spec.name)
    assert not box.cgroup.exists() and not box.alive()


@pytest.mark.root
def test_limits_are_where_the_kernel_reads_them(start: Callable[..., Machine]) -> None:
    box = start(limits=SandboxLimits(memory=100 * 2**20, cpus=0.5, pids=50))
    v1 = box.cgroup.v1
    pids = v1.get("pids", box.cgroup.path) / "pids.max"
    assert pids.read_text() == "50\n"
    if "cpu" in v1:
        assert (v1["cpu"] / "cpu.cfs_quota_us").read_text() == "50000\n"
    else:
        assert (box.cgroup.path / "cpu.max").read_text() == "50000 100000\n"
    for limits in (
        SandboxLimits(200 * 2**20, 1.5, 60),
        SandboxLimits(50 * 2**20, None, None),
        SandboxLimits(None, None, None),
    ):
        assert box.cgroup.create(limits) == []
    assert pids.read_text() == "max\n"


@pytest.mark.root
def test_a_frozen_sandbox_stands_still_and_goes_on(box: Machine) -> None:
    box.run("(while :; do echo x >>/tmp/ticks; done) & until [ -s /tmp/ticks ]; do :; done")
    box.cgroup.freeze()
    states = {pid: look(pid) for pid in box.cgroup.pids()}
    ticks = box.externals.root / "tmp/ticks"
    before = ticks.stat().st_size
    for pid, then in states.items():
        now = look(pid)
        assert now is not None and then is not None and now.state == then.state
    assert ticks.stat().st_size == before
    box.cgroup.thaw()
    assert box.run("kill %1; echo on", timeout=60).stdout == b"on\n"


@pytest.mark.root
def test_leftovers_are_found_and_removed(home: Home, start: Callable[..., Machine]) -> None:
    box = start("lost")
    start("kept")
    pid = box.pid
    box.close()  # as after a kill -9 of the daemon
    assert unclaimed(home, {"kept", "lost"}) == []
    leftovers = unclaimed(home, {"kept"})
    assert [words for words, _ in leftovers] == ["what is left of sandbox lost"]
    removed(leftovers)
    assert unclaimed(home, {"kept"}) == []
    left = look(pid)
    assert left is None or left.state in "ZX"
    assert Cgroup(home.tag, "kept").pids()


@pytest.mark.root
def test_a_start_that_fails_leaves_nothing(home: Home, make_root: Callable[[str], Path]) -> None:
    root = make_root("broken")
    (root / "proc").rmdir()
    (root / "proc").symlink_to("/etc")
    with pytest.raises(MachineError, match=r"could not be started: .*/proc"):
        Machine.start(home, SandboxSpec("broken"), root)
    assert unclaimed(home, set()) == []
