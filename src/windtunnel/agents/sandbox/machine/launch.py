"""What exists on the host before a sandbox has a process, how its first one is started, and who may.

A user without root has sandboxes where the kernel lets users make namespaces. He is 0 inside, and nobody else
exists there. Namespaces, refused system calls and capabilities are those of every sandbox; what root would
add is absent, and said: control groups (see ``group``), networks that the host owns, process images. A root
is not mounted on the host, so nothing is left of a sandbox but its folder.

Source: user_namespaces(7), pid_namespaces(7).
"""

from __future__ import annotations

import os
import platform
import subprocess
from pathlib import Path

from windtunnel.agents.sandbox.errors import MachineError
from windtunnel.agents.sandbox.machine import network, walls
from windtunnel.agents.sandbox.machine.channel import Folder
from windtunnel.agents.sandbox.machine.files import make_folders
from windtunnel.agents.sandbox.machine.group import INIT, Cgroup, Group
from windtunnel.agents.sandbox.machine.native import PROGRAM
from windtunnel.agents.sandbox.model import SandboxSpec
from windtunnel.agents.sandbox.place import CHANNEL, Externals, Home
from windtunnel.base.errors import UserError
from windtunnel.base.processes import boot_id

BASE_ENVIRONMENT = {
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "HOME": "/root",
    "USER": "root",
    "LOGNAME": "root",
    "SHELL": "/bin/bash",
    "LANG": "C.UTF-8",
    "TERM": "dumb",
}
COUNTED_INSIDE = (5, 14)
"""From this kernel on, a limit on processes counts those of the user namespace and no others of the user."""
SWITCHES = (
    ("user.max_user_namespaces", "0", "sysctl -w user.max_user_namespaces=10000"),
    ("kernel.unprivileged_userns_clone", "0", "sysctl -w kernel.unprivileged_userns_clone=1"),
    (
        "kernel.apparmor_restrict_unprivileged_userns",
        "1",
        "sysctl -w kernel.apparmor_restrict_unprivileged_userns=0",
    ),
)
"""What an administrator may have set: name, the value that refuses, the command that allows."""


def rootless() -> bool:
    """Whether this process makes sandboxes without root."""
    return os.geteuid() != 0


def refusal(settings: Path = Path("/proc/sys")) -> tuple[str, str]:
    """Why this user cannot have sandboxes, and the command that would help; both empty when he can.

    Root is told of what is set for others, since it can do everything itself.
    """
    closed = [
        (name, value, remedy)
        for name, value, remedy in SWITCHES
        if _read(settings / name.replace(".", "/")) == value
    ]
    if not rootless():
        return (f"{closed[0][0]} is {closed[0][1]}", closed[0][2]) if closed else ("", "")
    done = subprocess.run([str(PROGRAM.locate()), "try"], capture_output=True, text=True)
    if done.returncode == 0:
        return "", ""
    words = network.launcher_words(done.stdout)
    if closed:
        name, value, remedy = closed[0]
        return f"{name} is {value} ({words})", remedy
    return f"{words} (a container or a security module forbids it)", ""


def demand() -> None:
    """Raises UserError where this user cannot have sandboxes, with the setting that is in the way."""
    why, remedy = refusal()
    if why:
        helps = f"; as root: {remedy}" if remedy else ""
        raise UserError(f"sandbox: without root, sandboxes need user namespaces, and {why}{helps}")


def check(spec: SandboxSpec) -> None:
    """Raises UserError for what a sandbox without root cannot have."""
    if spec.network == "host":
        raise UserError(
            "sandbox: network 'host' is not accepted without root, because its devices need root; use 'off' "
            "or 'proxy', or run it as root"
        )


def group(home: Home, box: str) -> Cgroup | Group:
    """What holds the sandbox's processes together: control groups, or without root its pid namespace."""
    return Group(home, box) if rootless() else Cgroup(home.tag, box)


def prepare(home: Home, spec: SandboxSpec, root: Path) -> tuple[Externals, list[str]]:
    """What there is before the first process, as it should be: control groups, network and /dev (without root
    nothing); and which limits cannot be held, in words.

    What exists stays, so it can be called before every start and every restore. Raises MachineError.
    """
    held = group(home, spec.name)
    missed = held.create(spec.limits)
    channel = ((f"/{CHANNEL}", "channel", home.channel(spec.name)),)
    if isinstance(held, Group):
        if spec.limits.pids is not None and not _counted_inside():
            missed.append("the limit on processes is not held: before Linux 5.14 that needs root")
        home.box(spec.name).mkdir(parents=True, exist_ok=True)
        return Externals(root, channel, network.netns_file(home, spec.name), held.path, held.procs), missed
    folder = walls.devices(home, spec.name)
    netns = network.make(home, spec.name, spec.network)
    mounts = [*channel, ("/dev", "dev", folder)]
    mounts += [
        (f"/proc/{name}", f"proc-{name}", folder / "masked")
        for name in walls.MASKED
        if Path("/proc", name).exists()
    ]
    return Externals(root, tuple(mounts), netns, held.path, held.procs), missed


def environment(spec: SandboxSpec) -> dict[str, str]:
    return {**BASE_ENVIRONMENT, "HOSTNAME": hostname(spec), **spec.environment}


def hostname(spec: SandboxSpec) -> str:
    return (spec.hostname or spec.name)[:63]


def start(spec: SandboxSpec, externals: Externals) -> int:
    """Start pid 1 in the root; returns its pid on the host. Raises MachineError, leaving no process."""
    channel = externals.of("channel")
    _lay_channel(spec, externals.root, channel)
    own = [hostname(spec), spec.workdir]
    if rootless():
        pids = spec.limits.pids if _counted_inside() else None
        noted = [externals.freezer / INIT, boot_id(), spec.limits.memory or 0, pids or 0]
        return _started(["rootless", externals.root, channel, *own, *noted], spec)
    outside = [externals.root, externals.of("dev"), channel, externals.netns]
    return _started(["launch", *outside, *own, *externals.procs], spec)


def _lay_channel(spec: SandboxSpec, where: Path, folder: Path) -> None:
    """The working folder is in the root ``where``, and what a first process needs in the channel ``folder``.
    Raises MachineError."""
    root = os.open(where, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.close(make_folders(root, spec.workdir))
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise MachineError(f"the sandbox's folder {spec.workdir} cannot be made: {error.strerror}") from error
    finally:
        os.close(root)
    channel = Folder.at(folder)
    try:
        channel.write("init", PROGRAM.locate().read_bytes(), 0o500)
        os.close(channel.fifo("requests"))
        channel.ballast()
    except OSError as error:
        raise MachineError(f"the sandbox's channel could not be made: {error.strerror}") from error
    finally:
        channel.close()


def _started(arguments: list[object], spec: SandboxSpec) -> int:
    """Run the launcher; the pid on the host that it answers with. Raises MachineError."""
    done = subprocess.run(
        [str(PROGRAM.locate()), *map(str, arguments)],
        env=environment(spec), stdin=subprocess.DEVNULL, capture_output=True, text=True,
    )  # fmt: skip
    kind, _, value = done.stdout.strip().partition(" ")
    if done.returncode != 0 or kind != "pid":
        raise MachineError(f"the sandbox could not be started: {network.launcher_words(done.stdout)}")
    return int(value)


def _counted_inside() -> bool:
    parts = platform.release().split(".")
    numbers = tuple(int("".join(filter(str.isdigit, part.split("-")[0])) or 0) for part in parts[:2])
    return numbers >= COUNTED_INSIDE


def _read(file: Path) -> str:
    try:
        return file.read_text().strip()
    except OSError:
        return ""
