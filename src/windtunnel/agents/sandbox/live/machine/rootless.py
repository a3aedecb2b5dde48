"""Sandboxes for a user without root, where the kernel lets users make namespaces.

The user is 0 inside, and nobody else exists there. Namespaces, refused system calls and capabilities are
those of every sandbox; what root would add is absent, and said: control groups (see ``group``), networks that
the host owns, process images. A root is not mounted on the host, so nothing is left of a
sandbox but its folder.

Source: user_namespaces(7), pid_namespaces(7).
"""

from __future__ import annotations

import os
import platform
import subprocess
from pathlib import Path

from windtunnel.agents.sandbox.live.machine import launch, network
from windtunnel.agents.sandbox.live.machine.group import INIT, Cgroup, Group
from windtunnel.agents.sandbox.live.machine.native import locate
from windtunnel.agents.sandbox.live.place import Externals, Home
from windtunnel.agents.sandbox.model import SandboxSpec
from windtunnel.base.errors import UserError
from windtunnel.base.processes import boot_id

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
    done = subprocess.run([str(locate()), "try"], capture_output=True, text=True)
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
    """What there is before the first process, which is nothing; and which limits cannot be held, in words."""
    held = Group(home, spec.name)
    missed = held.create(spec.limits)
    if spec.limits.pids is not None and not _counted_inside():
        missed.append("the limit on processes is not held: before Linux 5.14 that needs root")
    folder = home.box(spec.name)
    folder.mkdir(parents=True, exist_ok=True)
    return Externals(root, (), network.netns_file(home, spec.name), held.path, held.procs), missed


def start(spec: SandboxSpec, externals: Externals) -> int:
    """Start pid 1 in the root; returns its pid on the host. Raises MachineError, leaving no process."""
    launch.lay_channel(spec, externals.root)
    pids = spec.limits.pids if _counted_inside() else None
    command = [
        locate(),
        "rootless",
        externals.root,
        launch.hostname(spec),
        spec.workdir,
        externals.freezer / INIT,
        boot_id(),
        spec.limits.memory or 0,
        pids or 0,
    ]
    return launch.started(list(map(str, command)), spec)


def _counted_inside() -> bool:
    parts = platform.release().split(".")
    numbers = tuple(int("".join(filter(str.isdigit, part.split("-")[0])) or 0) for part in parts[:2])
    return numbers >= COUNTED_INSIDE


def _read(file: Path) -> str:
    try:
        return file.read_text().strip()
    except OSError:
        return ""
