"""A small sandbox for tests of the inspector: cgroup, mount namespace, chroot, an init and one shell."""

from __future__ import annotations

import contextlib
import hashlib
import os
import select
import shutil
import subprocess
import time
from pathlib import Path

from support.waiting import PATIENCE, killed, until
from windtunnel.agents.sandbox.inspect import DiffInspector, Inspector
from windtunnel.agents.sandbox.model import ProcessEffect, TurnEffects
from windtunnel.linux.processes import state

_SETUP = """
set -e
mount --make-rprivate /
mount --bind "$ROOT" "$ROOT"
mount --bind -o ro /usr "$ROOT/usr"
mount --bind /dev "$ROOT/dev"
mount -t tmpfs tmpfs "$ROOT/dev/shm"
mount -t proc proc "$ROOT/proc"
exec chroot "$ROOT" /bin/sh -c '/bin/bash --norc --noprofile; exit 0'
"""
TREE = dict[str, tuple[object, ...]]


def unified() -> Path | None:
    """Where the cgroup hierarchy v2 is mounted."""
    for folder in (Path("/sys/fs/cgroup/unified"), Path("/sys/fs/cgroup")):
        if (folder / "cgroup.procs").exists() and (folder / "cgroup.controllers").exists():
            return folder
    return None


class Cell:
    def __init__(self, name: str, folder: Path) -> None:
        self.name = name
        mount = unified()
        assert mount is not None
        self.cgroup = mount / f"windtunnel-inspect-{os.getpid()}-{name}"
        self.cgroup.mkdir()
        self.root = folder / "root"
        for path in ("usr", "dev", "proc", "tmp", "workspace", ".windtunnel"):
            (self.root / path).mkdir(parents=True, exist_ok=True)
        for path in ("bin", "sbin", "lib", "lib64"):
            (self.root / path).symlink_to(f"usr/{path}")
        author = {f"GIT_{who}_{what}": "a@b" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
        environment = {
            "ROOT": str(self.root),
            "PATH": "/usr/bin:/bin:/usr/sbin:/sbin",
            "HOME": "/workspace",
            "LC_ALL": "C.UTF-8",
            "PYTHONDONTWRITEBYTECODE": "1",
            **author,
        }
        launch = f'echo $$ > {self.cgroup}/cgroup.procs && exec unshare --mount -- bash -c "$SETUP"'
        self._process = subprocess.Popen(
            ["bash", "-c", launch],
            env={**environment, "SETUP": _SETUP},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            cwd="/",
        )
        self.init = self._process.pid
        self.run("cd /workspace")
        self.shell = next(pid for pid in self.pids() if pid != self.init)

    def pids(self) -> list[int]:
        return [int(word) for word in (self.cgroup / "cgroup.procs").read_text().split()]

    def run(self, command: str, seconds: float = PATIENCE) -> str:
        """Run a command in the shell: what it printed."""
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None and stdout is not None
        stdin.write(f"{command}\nprintf '\\001'\n".encode())
        stdin.flush()
        text, deadline = b"", time.monotonic() + seconds
        while not text.endswith(b"\1"):
            ready, _, _ = select.select([stdout], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, f"{command!r} did not end; it printed {text!r}"
            data = os.read(stdout.fileno(), 1 << 16)
            assert data, f"the shell ended in {command!r}; it printed {text!r}"
            text += data
        return text[:-1].decode(errors="replace")

    def watch(self, inspector: Inspector | DiffInspector) -> None:
        inspector.watch(
            self.name,
            cgroup=self.cgroup,
            members=self.pids,
            root=self.root,
            init=self.init,
            shells=lambda: {"main": self.shell},
        )

    def tree(self) -> TREE:
        """Everything of the root that a snapshot keeps and that counts."""
        return tree(self.root)

    def child(self, effects: TurnEffects, command: str) -> ProcessEffect:
        return next(process for process in effects.processes if process.command.startswith(command))

    def settled(self) -> None:
        """Wait until every process is blocked: what a freeze would do to them at once."""
        until(lambda: all(state(pid) in ("S", "Z", "X", "") for pid in self.pids()))

    def close(self) -> None:
        def ended() -> bool:
            self._process.poll()  # one that nobody has asked about stays in its group
            return killed(self.pids())

        until(ended)
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):
                pipe.close()
        self._process.wait()
        self.cgroup.rmdir()
        shutil.rmtree(self.root)


def tree(root: Path) -> TREE:
    entries: TREE = {}
    for folder, folders, files in os.walk(root):
        inside = os.path.relpath(folder, root)
        if inside == ".":
            folders[:] = [name for name in folders if name not in (".windtunnel", "proc", "dev", "usr")]
        for name in (*folders, *files):
            path = os.path.join(folder, name)
            status = os.lstat(path)
            entry: list[object] = [status.st_mode, status.st_uid, status.st_gid, status.st_rdev]
            entry.append(
                {
                    key: os.getxattr(path, key, follow_symlinks=False)
                    for key in os.listxattr(path, follow_symlinks=False)
                }
            )
            if os.path.islink(path):
                entry.append(os.readlink(path))
            elif os.path.isfile(path):
                entry += [
                    status.st_size,
                    status.st_mtime_ns,
                    status.st_ino,
                    hashlib.sha1(Path(path).read_bytes()).hexdigest(),
                ]
            entries[os.path.join(inside, name)] = tuple(entry)
    return entries


def files_may_have_changed(effects: TurnEffects) -> bool:
    return bool(effects.files_total or effects.doubts)
