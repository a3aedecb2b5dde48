"""What shuts a sandbox in: mounts (a /dev of its own, what of /proc is covered or read-only, their flags) and
a network of its own.

/dev is a small file system in memory of each sandbox alone. The host mounts it in the sandbox's folder, so
that it outlives the processes and a restore finds it, and makes the *file system* read-only, not only its
mounts: whatever flags a mount of it gets, nobody inside changes a mode, an owner or a time that anyone else
could read. Its own root is what is mounted, so the table of mounts inside names no path of the host.

CRIU brings mounts that come from outside back without their flags, and knows nothing of files of /proc that
only this kernel has. So after a restore every mount is compared with what the launcher makes, and what is
missing is made from outside, in the mount namespace of the sandbox.

The network namespace is bound to a file, ``netns``, in the sandbox's folder on the host, so that it outlives
the processes. It has a loopback device and nothing else; for ``proxy`` and ``egress`` the host listens there.

Source: mount(2), mount_namespaces(7), proc(5); the lists after Docker's masked and read-only paths.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import socket
import stat
import subprocess
import sys
from pathlib import Path
from typing import Literal

from windtunnel.agents.sandbox.errors import MachineError
from windtunnel.agents.sandbox.machine import listener
from windtunnel.agents.sandbox.machine.group import UserProcesses
from windtunnel.agents.sandbox.place import CHANNEL, Home
from windtunnel.base.native import Freestanding
from windtunnel.linux import mounts, namespaces

COMPILED = (
    "-Os", "-static", "-nostdlib", "-ffreestanding", "-fno-builtin", "-fno-stack-protector", "-fno-pie",
    "-no-pie", "-fno-asynchronous-unwind-tables", "-Wall", "-Wextra", "-Werror", "-Wl,--build-id=none",
    "-Wl,-z,noexecstack", "-s",
)  # fmt: skip
PROGRAM = Freestanding(Path(__file__).parent / "init" / "main.c", "init", "", COMPILED, "sandbox init")
"""The launcher and init, one static program; this file, run as a module, builds it anew."""


NODES = {
    "null": (1, 3),
    "zero": (1, 5),
    "full": (1, 7),
    "random": (1, 8),
    "urandom": (1, 9),
    "tty": (5, 0),
    "masked": (1, 3),
}
LINKS = {
    "fd": "/proc/self/fd",
    "stdin": "/proc/self/fd/0",
    "stdout": "/proc/self/fd/1",
    "stderr": "/proc/self/fd/2",
    "ptmx": "pts/ptmx",
}
_LAUNCHER = (PROGRAM.folder / "launch.h").read_text(encoding="utf-8")


def _listed(name: str) -> tuple[str, ...]:
    """A list of the launcher's, without /proc."""
    return tuple(re.findall(r'"/proc/([^"]+)"', _LAUNCHER.partition(f"{name}[] = {{")[2].partition("}")[0]))


MASKED = _listed("masked")
"""Files of /proc that the launcher covers with /dev/masked."""
READ_ONLY = _listed("read_only")
"""Parts of /proc that the launcher makes read-only."""
FLAGS = {
    "ro": mounts.MS_RDONLY,
    "nosuid": mounts.MS_NOSUID,
    "nodev": mounts.MS_NODEV,
    "noexec": mounts.MS_NOEXEC,
}
WALLS = {
    "/": {"nodev"},
    "/proc": {"nosuid", "nodev", "noexec"},
    f"/{CHANNEL}": {"nosuid", "nodev"},
    "/dev": {"ro", "nosuid", "noexec"},
    "/dev/shm": {"nosuid", "nodev"},
    "/dev/pts": {"nosuid", "noexec"},
}
"""Mounts of every sandbox, with the flags that each must have."""


def walls() -> dict[str, set[str]]:
    """`WALLS`, and what is covered or read-only of this kernel's /proc."""
    result = dict(WALLS)
    for name in READ_ONLY:
        if Path("/proc", name).exists():
            result[f"/proc/{name}"] = {"ro", "nosuid", "nodev", "noexec"}
    for name in MASKED:
        if Path("/proc", name).exists():
            result[f"/proc/{name}"] = {"ro", "nosuid", "noexec"}
    return result


def devices(home: Home, box: str) -> Path:
    """Where the sandbox's /dev is mounted on the host; made when it is not there. Raises MachineError."""
    point = home.box(box) / "dev"
    try:
        # one that was made to its end is read-only, which is the last step
        if mounts.is_point(point) and os.statvfs(point).f_flag & os.ST_RDONLY:
            return point
        release(home, box)
        point.mkdir(parents=True)
        flags = mounts.MS_NOSUID | mounts.MS_NOEXEC
        mounts.mount("dev", point, "tmpfs", flags, "mode=755,size=64k,nr_inodes=64")
        for name, number in NODES.items():
            os.mknod(point / name, 0o666 | stat.S_IFCHR, os.makedev(*number))
            (point / name).chmod(0o666)
        for name, target in LINKS.items():
            (point / name).symlink_to(target)
        for name in ("shm", "pts"):
            (point / name).mkdir()
        mounts.mount("dev", point, flags=flags | mounts.MS_REMOUNT | mounts.MS_RDONLY)
    except OSError as error:
        raise MachineError(f"the sandbox's /dev could not be made: {error.strerror} ({point})") from error
    return point


def release(home: Home, box: str) -> None:
    """Let go of the sandbox's /dev; absent is fine. Raises MachineError."""
    point = home.box(box) / "dev"
    try:
        while mounts.is_point(point) and mounts.unmount(point):
            pass
    except OSError as error:
        raise MachineError(f"the sandbox's /dev cannot be unmounted: {error.strerror} ({point})") from error
    with contextlib.suppress(FileNotFoundError):
        shutil.rmtree(point)


def weak(pid: int) -> dict[str, set[str]]:
    """Mounts of a sandbox that are not as its launcher makes them: the flags that each lacks (all of them
    where nothing is mounted there). Raises OSError when the process is gone."""
    # of mounts one above the other the last is what is seen
    there = {each.point: each.flags for each in mounts.table(Path(f"/proc/{pid}/mountinfo"))}
    lacking = {point: flags - there.get(point, frozenset()) for point, flags in walls().items()}
    return {point: flags for point, flags in lacking.items() if flags or point not in there}


def seal(pid: int) -> None:
    """Make the mounts of a restored sandbox what they were. ``pid``: its first process.

    Raises MachineError when one stays weaker; the sandbox must not run then.
    """
    try:
        missing = weak(pid)
        if not missing:
            return
        there = {each.point: each for each in mounts.table(Path(f"/proc/{pid}/mountinfo"))}

        def make() -> None:
            for point in missing:
                present = there.get(point)
                if present is None:
                    covered = point.removeprefix("/proc/") in MASKED
                    mounts.mount("/dev/masked" if covered else point, Path(point), flags=mounts.MS_BIND)
                required = walls()[point] | (present.flags if present else frozenset())
                flags = sum(FLAGS[flag] for flag in required & FLAGS.keys())
                mounts.mount("none", Path(point), flags=mounts.MS_REMOUNT | mounts.MS_BIND | flags)

        namespaces.within(f"/proc/{pid}/ns/mnt", make, "mnt")
        missing = weak(pid)
    except OSError as error:
        raise MachineError(f"the sandbox's mounts cannot be made as they were: {error}") from error
    if missing:
        words = ", ".join(f"{point} lacks {'+'.join(sorted(flags))}" for point, flags in missing.items())
        raise MachineError(f"the sandbox's mounts are weaker than they were: {words}")


Use = Literal["listen on", "receive on", "connect to"]


def netns_file(home: Home, box: str) -> Path:
    return home.box(box) / "netns"


def make_network(file: Path) -> None:
    """The sandbox's network namespace, held by that file; one that exists stays. Raises MachineError."""
    file.parent.mkdir(parents=True, exist_ok=True)
    try:
        if not namespaces.holds_namespace(file):
            namespaces.make_network(file)
    except OSError as error:
        raise MachineError(f"the sandbox's network could not be made: {error.strerror}") from error


def remove_network(home: Home, box: str) -> None:
    """Let go of the namespace; what is gone already is fine."""
    file = netns_file(home, box)
    try:
        namespaces.release(file)
    except OSError as error:
        raise MachineError(f"cannot release the network namespace {file}: {error.strerror}") from error


def socket_inside(netns: Path, use: Use, port: int) -> socket.socket:
    """A socket of that network namespace, held by this process: one that listens on 127.0.0.1:``port`` (by
    TCP), one that receives there (by UDP), or one that is connected to it (by TCP).

    Raises MachineError when the port is taken, nobody listens on it, or the namespace is gone.
    """
    try:
        if os.geteuid() == 0:
            return namespaces.within(netns, lambda: listener.open_socket(use, port))
        return _socket_of_user(netns, use, port)
    except OSError as error:
        raise MachineError(f"cannot {use} port {port} inside the sandbox: {error.strerror}") from error


def _socket_of_user(netns: Path, use: Use, port: int) -> socket.socket:
    """The same where the namespace is that of a sandbox's processes, not bound to ``netns``."""
    init = UserProcesses(Home(netns.parents[2]), netns.parent.name).init()
    if not init:
        raise MachineError(f"cannot {use} port {port} inside the sandbox: it does not run")
    own, its = socket.socketpair()
    with own, its:
        inside = ["nsenter", f"--target={init}", "--user", "--net", "--preserve-credentials"]
        done = subprocess.run(
            [*inside, sys.executable, "-I", listener.__file__, use, str(port), str(its.fileno())],
            pass_fds=(its.fileno(),), stdin=subprocess.DEVNULL, capture_output=True, text=True,
        )  # fmt: skip
        if done.returncode != 0:
            raise MachineError(f"cannot {use} port {port} inside the sandbox: {done.stderr.strip()}")
        _, fds, _, _ = socket.recv_fds(own, 1, 1)
    return socket.socket(fileno=fds[0])


def launcher_words(output: str) -> str:
    """What the launcher said, as words: ``error 1 make namespaces`` becomes a reason."""
    for line in output.splitlines():
        kind, _, rest = line.partition(" ")
        number, _, what = rest.partition(" ")
        if kind == "error" and number.isdigit():
            return f"cannot {what}: {os.strerror(int(number))}"
    return "the launcher ended without a word"


if __name__ == "__main__":
    PROGRAM.rebuild()
