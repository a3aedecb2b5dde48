"""A sandbox of the least that CRIU needs to see one: own namespaces, a root, a cgroup; for tests alone."""

from __future__ import annotations

import itertools
import os
import subprocess
from pathlib import Path

from support.waiting import killed, until
from windtunnel.agents.sandbox.place import Externals

NUMBERS = itertools.count()
ENTER = r"""
set -e
cd "$1"
mount --bind . . && cd "$1"
mount --bind "$2" dev
mount --bind /usr usr
mount -t proc proc proc
mkdir -p .old
pivot_root . .old
umount -l /.old
rmdir /.old
cd /workspace
shift 2
exec </dev/null >/dev/null 2>&1
exec setsid /usr/bin/env -i PATH=/usr/bin:/usr/sbin HOME=/workspace "$@"
"""


def cgroup2() -> Path | None:
    for line in Path("/proc/mounts").read_text().splitlines():
        _, where, kind, *_ = line.split()
        if kind == "cgroup2":
            return Path(where)
    return None


def shell(command: str, *arguments: object) -> None:
    done = subprocess.run(["sh", "-ec", command, "sh", *map(str, arguments)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


class TinyBox:
    """Processes in namespaces of their own under ``folder/root``, with /usr of the host."""

    def __init__(self, folder: Path) -> None:
        top = cgroup2()
        assert top is not None
        folder = folder.resolve()
        self.root = folder / "root"
        self.dev = folder / "dev"
        self.cgroup = top / f"windtunnel-criutest-{os.getpid()}-{next(NUMBERS)}"
        self.pid = 0
        self._launchers: list[subprocess.Popen[bytes]] = []
        for name in ("usr", "proc", "dev", "workspace", "tmp", "etc"):
            (self.root / name).mkdir(parents=True, exist_ok=True)
        for name in ("bin", "sbin", "lib", "lib64"):
            (self.root / name).symlink_to(f"usr/{name}")
        self.dev.mkdir()
        for name, minor in (("null", 3), ("zero", 5), ("random", 8), ("urandom", 9)):
            os.mknod(self.dev / name, 0o20666, os.makedev(1, minor))
        netns = folder / "netns"
        netns.touch()
        self.cgroup.mkdir()
        shell('unshare --net="$1" ip link set lo up; mount --bind "$2" "$2"', netns, self.root)
        self.externals = Externals(
            root=self.root,
            mounts=(("/dev", "dev", self.dev), ("/usr", "usr", Path("/usr"))),
            netns=netns,
            freezer=self.cgroup,
            procs=(self.cgroup / "cgroup.procs",),
        )

    def start(self, *command: str) -> int:
        launcher = subprocess.Popen(
            [
                "sh", "-c", 'echo $$ > "$1"; shift; exec "$@"', "sh", str(self.cgroup / "cgroup.procs"),
                "nsenter", f"--net={self.externals.netns}",
                "unshare", "--mount", "--pid", "--fork", "--ipc", "--uts", "--propagation", "private",
                "sh", "-c", ENTER, "sh", str(self.root), str(self.dev), *command,
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
        )  # fmt: skip
        self._launchers.append(launcher)
        children = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children")
        until(lambda: children.read_text().split() or launcher.poll() is not None, "first process")
        assert launcher.poll() is None
        self.pid = int(children.read_text().split()[0])
        # the launcher is no part of the tree
        shell('echo "$1" > "$2/cgroup.procs"', launcher.pid, self.cgroup.parent)
        return self.pid

    def path(self, inside: str) -> Path:
        return self.root / inside.lstrip("/")

    def pids(self) -> set[int]:
        return {int(pid) for pid in (self.cgroup / "cgroup.procs").read_text().split()}

    def freeze(self, on: bool) -> None:
        (self.cgroup / "cgroup.freeze").write_text("1" if on else "0")
        events = self.cgroup / "cgroup.events"
        until(lambda: ("frozen 1" in events.read_text()) == on, "freezer")

    def kill(self) -> None:
        (self.cgroup / "cgroup.freeze").write_text("0")
        until(lambda: killed(self.pids()))
        for launcher in self._launchers:
            launcher.wait()
        self._launchers.clear()

    def remount(self) -> None:
        """A root mount as a fresh one would be, over the same files."""
        shell('umount "$1"; mount --bind "$1" "$1"', self.root)

    def close(self) -> None:
        self.kill()
        shell('umount -l "$1" || :; umount -l "$2" || :', self.root, self.externals.netns)
        until(lambda: not self.pids(), "end of the processes")
        self.cgroup.rmdir()
