"""The mounts of a sandbox: its own, read-only below every mount, and made again where they were weakened; its
network."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from windtunnel.agents.sandbox.machine import Machine, walls
from windtunnel.linux import mounts, namespaces

pytestmark = pytest.mark.root


def from_outside(box: Machine, work: Callable[[], object]) -> None:
    namespaces.within(f"/proc/{box.pid}/ns/mnt", work, "mnt")


def test_every_sandbox_has_a_dev_of_its_own_that_no_mount_makes_writable(
    start: Callable[..., Machine],
) -> None:
    box, other = start("one"), start("two")
    inside = [Path(f"/proc/{box.pid}/root/dev").stat().st_dev for box in (box, other)]
    assert inside[0] != inside[1]
    for point in ("/dev", "/proc/keys"):
        from_outside(
            box, lambda at=point: mounts.mount("none", Path(at), flags=mounts.MS_REMOUNT | mounts.MS_BIND)
        )
    assert {"/dev", "/proc/keys"} <= walls.weak(box.pid).keys()
    for change in ("chmod 600 /dev/null", "chmod 600 /proc/keys", "touch /dev/masked", "touch /dev/x"):
        done = box.run(change)
        assert done.exit_code != 0 and b"Read-only file system" in done.stderr, (change, done)


def test_what_is_missing_is_made_again(box: Machine) -> None:
    assert walls.weak(box.pid) == {}
    before = mounts.table(Path(f"/proc/{box.pid}/mountinfo"))

    def tear() -> None:
        mounts.unmount(Path("/proc/keys"))
        mounts.unmount(Path("/proc/sys"))
        mounts.mount("none", Path("/dev/shm"), flags=mounts.MS_REMOUNT | mounts.MS_BIND)

    from_outside(box, tear)
    assert walls.weak(box.pid) == {
        "/proc/keys": {"ro", "nosuid", "noexec"},
        "/proc/sys": {"ro", "nosuid", "nodev", "noexec"},
        "/dev/shm": {"nosuid", "nodev"},
    }
    walls.seal(box.pid)
    assert walls.weak(box.pid) == {}
    assert box.run("cat /proc/keys; echo x >/proc/sys/kernel/hostname").stdout == b""
    after = mounts.table(Path(f"/proc/{box.pid}/mountinfo"))
    assert {(each.point, each.flags) for each in after} == {(each.point, each.flags) for each in before}


def test_what_a_killed_host_leaves_is_made_anew(box: Machine) -> None:
    point = walls.devices(box.home, "half")
    mounts.mount("dev", point, flags=mounts.MS_REMOUNT)
    (point / "null").unlink()  # as if it had been killed while it made them
    assert walls.devices(box.home, "half") == point and (point / "null").is_char_device()
    assert os.statvfs(point).f_flag & os.ST_RDONLY
    walls.release(box.home, "half")
    assert not point.exists()


def test_a_listener_inside_belongs_to_the_host(box: Machine) -> None:
    with walls.socket_inside(box.externals.netns, "listen on", 8400) as listener:
        served = threading.Thread(target=lambda: listener.accept()[0].sendall(b"from the host"))
        served.start()
        assert box.run("cat </dev/tcp/127.0.0.1/8400", timeout=60).text == "from the host"
        served.join()
        with pytest.raises(OSError):
            socket.create_connection(("127.0.0.1", 8400), 1)
