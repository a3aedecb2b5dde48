"""Control groups: where they are mounted, and a group's life with a process inside."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from support.waiting import PATIENCE
from windtunnel.linux import LinuxError
from windtunnel.linux.cgroup import HostCgroup, mounts
from windtunnel.linux.processes import stands


def test_mounts_are_found_on_hybrid_and_on_pure_hosts(tmp_path: Path) -> None:
    file = tmp_path / "mountinfo"
    file.write_text(
        "1 0 0:1 / / rw - ext4 /dev/vda rw\n"
        "2 1 0:2 / /cg/cpu rw,relatime shared:1 - cgroup cgroup rw,cpu,cpuacct\n"
        "3 1 0:3 / /cg/unified rw - cgroup2 cgroup2 rw\n"
    )
    assert (mounts(file).unified, mounts(file).v1) == (Path("/cg/unified"), {"cpu": Path("/cg/cpu")})
    file.write_text("3 1 0:3 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n")
    assert (mounts(file).unified, mounts(file).v1) == (Path("/sys/fs/cgroup"), {})
    file.write_text("1 0 0:1 / / rw - ext4 /dev/vda rw\n")
    with pytest.raises(LinuxError, match="no cgroup v2 mount"):
        mounts(file)


@pytest.mark.root
def test_a_group_is_made_frozen_killed_and_removed() -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root")
    group = HostCgroup(Path(f"windtunnel-test-{os.getpid()}") / "one")
    assert group.make(256 << 20, 1.0, 64) == []
    try:
        with subprocess.Popen(["sleep", "600"]) as process:
            for file in group.procs:
                file.write_text(str(process.pid))
            assert group.pids() == {process.pid}
            group.freeze()
            group.thaw()
            assert not stands(process.pid)
            cpu, memory = group.usage()
            assert cpu >= 0 and memory >= 0
            group.freeze()
            group.kill()
            assert process.wait(PATIENCE) == -9
    finally:
        group.kill()
        group.remove()
    assert not group.exists()
    assert not group.path.parent.exists()
    group.kill()
    group.remove()


@pytest.mark.root
def test_a_group_that_goes_first_is_as_others_again_afterwards() -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root")
    favoured, other = (HostCgroup(Path(f"windtunnel-first-{os.getpid()}") / name) for name in ("one", "two"))

    def weights() -> list[int]:
        folders = (group.v1.get("cpu", group.path) for group in (favoured, other))
        files = ((folder / "cpu.shares", folder / "cpu.weight") for folder in folders)
        return [int(next(file for file in pair if file.exists()).read_text()) for pair in files]

    try:
        for group in (favoured, other):
            assert group.make(None, None, None) == []
        usual = weights()
        with favoured.first():
            assert weights()[0] > 50 * usual[0] and weights()[1] == usual[1]
            favoured.make(None, None, None)  # as at the start of a host, after a crash in such a block
            assert weights() == usual
        with pytest.raises(KeyError), favoured.first():
            raise KeyError
        assert weights() == usual
    finally:
        for group in (favoured, other):
            group.remove()
    with favoured.first():  # what is gone weighs nothing
        pass
