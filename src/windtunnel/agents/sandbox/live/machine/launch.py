"""What exists on the host before a sandbox has a process, and how its first one is started."""

from __future__ import annotations

import contextlib
import os
import stat
import subprocess
import threading
from pathlib import Path

from windtunnel.agents.sandbox.errors import MachineError
from windtunnel.agents.sandbox.live.machine import network
from windtunnel.agents.sandbox.live.machine.channel import Folder
from windtunnel.agents.sandbox.live.machine.files import make_folders
from windtunnel.agents.sandbox.live.machine.group import Cgroup
from windtunnel.agents.sandbox.live.machine.native import locate
from windtunnel.agents.sandbox.live.place import CHANNEL, Externals, Home
from windtunnel.agents.sandbox.model import SandboxSpec

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
MASKED = (
    "kcore", "keys", "timer_list", "sched_debug", "kmsg", "kallsyms", "kpagecount", "kpageflags",
    "kpagecgroup", "slabinfo", "vmallocinfo", "config.gz", "latency_stats", "mtrr",
)  # fmt: skip
"""Files of /proc that the launcher covers with /dev/masked (init/launch.h has the same list). It is a node
of its own beside /dev/null: a restore makes these mounts writable, so a sandbox can change its mode."""
BASE_ENVIRONMENT = {
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "HOME": "/root",
    "USER": "root",
    "LOGNAME": "root",
    "SHELL": "/bin/bash",
    "LANG": "C.UTF-8",
    "TERM": "dumb",
}


def devices(home: Home) -> Path:
    """The one folder that is /dev in every sandbox; made when it is not there. Raises MachineError."""
    folder = home.path / "dev"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, (major, minor) in NODES.items():
            node = folder / name
            if not node.exists():
                # made under another name first: another process or thread may be just here, too
                part = folder / f".{name}.{threading.get_native_id()}"
                os.mknod(part, 0o666 | stat.S_IFCHR, os.makedev(major, minor))
                part.chmod(0o666)
                part.replace(node)
        for name, target in LINKS.items():
            with contextlib.suppress(FileExistsError):
                (folder / name).symlink_to(target)
        for name in ("shm", "pts"):
            (folder / name).mkdir(exist_ok=True)
    except OSError as error:
        raise MachineError(f"the sandboxes' /dev could not be made: {error.strerror} ({folder})") from error
    return folder


def prepare(home: Home, spec: SandboxSpec, root: Path) -> tuple[Externals, list[str]]:
    """Control groups, network and /dev of the sandbox, as they should be, and which limits could not be set.

    What exists stays, so it can be called before every start and every restore. Raises MachineError.
    """
    if os.geteuid() != 0:
        raise MachineError("a sandbox with processes of its own needs root: run this as root")
    folder = devices(home)
    cgroup = Cgroup(home.tag, spec.name)
    missed = cgroup.create(spec.limits)
    netns = network.make(home, spec.name, spec.network)
    mounts = [("/dev", "dev", folder)]
    mounts += [
        (f"/proc/{name}", f"proc-{name}", folder / "masked")
        for name in MASKED
        if Path("/proc", name).exists()
    ]
    return Externals(root, tuple(mounts), netns, cgroup.path, cgroup.procs), missed


def environment(spec: SandboxSpec) -> dict[str, str]:
    return {**BASE_ENVIRONMENT, "HOSTNAME": hostname(spec), **spec.environment}


def hostname(spec: SandboxSpec) -> str:
    return (spec.hostname or spec.name)[:63]


def launch(spec: SandboxSpec, externals: Externals) -> int:
    """Start pid 1 in the root; returns its pid on the host. Raises MachineError, leaving no process."""
    lay_channel(spec, externals.root)
    device_folder = next(path for _, key, path in externals.mounts if key == "dev")
    command = [
        locate(),
        "launch",
        externals.root,
        device_folder,
        externals.netns,
        hostname(spec),
        spec.workdir,
    ]
    return started([*map(str, command), *map(str, externals.procs)], spec)


def lay_channel(spec: SandboxSpec, where: Path) -> None:
    """The working folder and the channel are in the root ``where``. Raises MachineError."""
    root = os.open(where, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.close(make_folders(root, spec.workdir))
        channel = Folder.of_root(root, CHANNEL, create=True)
    except OSError as error:
        raise MachineError(f"the sandbox's folder {spec.workdir} cannot be made: {error.strerror}") from error
    finally:
        os.close(root)
    try:
        channel.write("init", locate().read_bytes(), 0o500)
        os.close(channel.fifo("requests"))
    except OSError as error:
        raise MachineError(f"the sandbox's channel could not be made: {error.strerror}") from error
    finally:
        channel.close()


def started(command: list[str], spec: SandboxSpec) -> int:
    """Run the launcher; the pid on the host that it answers with. Raises MachineError."""
    done = subprocess.run(
        command, env=environment(spec), stdin=subprocess.DEVNULL, capture_output=True, text=True
    )
    kind, _, value = done.stdout.strip().partition(" ")
    if done.returncode != 0 or kind != "pid":
        raise MachineError(f"the sandbox could not be started: {network.launcher_words(done.stdout)}")
    return int(value)
