"""What exists on the host before a sandbox has a process, how its first one is started, who may, and
what a crash leaves.

A user without root has sandboxes where the kernel lets users make namespaces. He is 0 inside, and nobody else
exists there. Namespaces, refused system calls and capabilities are those of every sandbox; what root would
add is absent, and said: control groups (see ``group``) and process images. A root is not mounted on the host,
so nothing is left of a sandbox but its folder.

A crash of the host leaves parts that no sandbox owns any more, and sandboxes that stand still.

A sandbox must not stay frozen because its host's process was killed in the middle of a checkpoint. A shell
waits for the end of its input, which comes when the process that holds the other end dies, however it dies;
then it thaws every sandbox of the home, but ends those that a restore had made and not looked at yet: they
may be less than they were, and nobody was told that they run. One shell serves a whole host and ends with it.

A CRIU that was at work goes on without its host, and at its end it puts the freezer back as it found it:
frozen. So the shell thaws until there is none any more, and the next host waits for the shell.

Source: user_namespaces(7), pid_namespaces(7).
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from functools import partial
from pathlib import Path

import psutil

from windtunnel.agents.sandbox.errors import MachineError
from windtunnel.agents.sandbox.files.tree import make_folders
from windtunnel.agents.sandbox.machine import walls
from windtunnel.agents.sandbox.machine.channel import ChannelFolder
from windtunnel.agents.sandbox.machine.group import INIT, Cgroup, UserProcesses, counts_inside
from windtunnel.agents.sandbox.machine.walls import PROGRAM
from windtunnel.agents.sandbox.model import SandboxSpec
from windtunnel.agents.sandbox.place import CHANNEL, UNVERIFIED, Externals, Home, Unclaimed
from windtunnel.base.errors import UserError
from windtunnel.base.processes import boot_id
from windtunnel.linux import LinuxError, cgroup, mounts
from windtunnel.linux.namespaces import holds_namespace
from windtunnel.linux.snapshot import read_file
from windtunnel.linux.system import opened

BASE_ENVIRONMENT = {
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "HOME": "/root",
    "USER": "root",
    "LOGNAME": "root",
    "SHELL": "/bin/bash",
    "LANG": "C.UTF-8",
    "TERM": "dumb",
}
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
        (f"{name} is {value}", remedy)
        for name, value, remedy in SWITCHES
        if read_file(f"{settings}/{name.replace('.', '/')}").decode().strip() == value
    ]
    why, remedy = closed[0] if closed else ("", "")
    if not rootless():
        return why, remedy
    done = subprocess.run([str(PROGRAM.locate()), "try"], capture_output=True, text=True)
    if done.returncode == 0:
        return "", ""
    words = walls.launcher_words(done.stdout)
    return (f"{why} ({words})" if why else f"{words} (a container or a security module forbids it)"), remedy


def demand() -> None:
    """Raises UserError where this user cannot have sandboxes, with the setting that is in the way."""
    why, remedy = refusal()
    if why:
        helps = f"; as root: {remedy}" if remedy else ""
        raise UserError(f"sandbox: without root, sandboxes need user namespaces, and {why}{helps}")


def group(home: Home, box: str) -> Cgroup | UserProcesses:
    """What holds the sandbox's processes together: control groups, or without root its pid namespace."""
    return UserProcesses(home, box) if rootless() else Cgroup(home.tag, box)


def prepare(home: Home, spec: SandboxSpec, root: Path) -> tuple[Externals, list[str]]:
    """What there is before the first process, as it should be: control groups, network and /dev (without root
    nothing); and which limits cannot be held, in words.

    What exists stays, so it can be called before every start and every restore. Raises MachineError and
    LinuxError.
    """
    processes = group(home, spec.name)
    missed = processes.create(spec.limits)
    netns = walls.netns_file(home, spec.name)
    inside = [(f"/{CHANNEL}", "channel", home.channel(spec.name))]
    if isinstance(processes, UserProcesses):
        home.box(spec.name).mkdir(parents=True, exist_ok=True)
    else:
        walls.make_network(netns)
        folder = walls.devices(home, spec.name)
        covered = [name for name in walls.MASKED if Path("/proc", name).exists()]
        inside += [("/dev", "dev", folder)]
        inside += [(f"/proc/{name}", f"proc-{name}", folder / "masked") for name in covered]
    return Externals(root, tuple(inside), netns, processes.path, processes.procs), missed


def hostname(spec: SandboxSpec) -> str:
    return (spec.hostname or spec.name)[:63]


def start(spec: SandboxSpec, externals: Externals) -> int:
    """Start pid 1 in the root; returns its pid on the host. Raises MachineError, leaving no process."""
    channel = externals.of("channel")
    _lay_channel(spec, externals.root, channel)
    own = [hostname(spec), spec.workdir]
    if rootless():
        pids = spec.limits.pids if counts_inside() else None
        noted = [externals.freezer / INIT, boot_id(), spec.limits.memory or 0, pids or 0]
        return _started(["rootless", externals.root, channel, *own, *noted], spec)
    outside = [externals.root, externals.of("dev"), channel, externals.netns]
    return _started(["launch", *outside, *own, *externals.procs], spec)


def _lay_channel(spec: SandboxSpec, where: Path, folder: Path) -> None:
    """The working folder is in the root ``where``, and what a first process needs in the channel ``folder``.
    Raises MachineError."""
    try:
        with opened(where) as root:
            os.close(make_folders(root, spec.workdir))
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise MachineError(f"the sandbox's folder {spec.workdir} cannot be made: {error.strerror}") from error
    try:
        with contextlib.closing(ChannelFolder.at(folder)) as channel:
            channel.write("init", PROGRAM.locate().read_bytes(), 0o500)
            os.close(channel.fifo("requests"))
            channel.ballast()
    except OSError as error:
        raise MachineError(f"the sandbox's channel could not be made: {error.strerror}") from error


def _started(arguments: list[object], spec: SandboxSpec) -> int:
    """Run the launcher; the pid on the host that it answers with. Raises MachineError."""
    done = subprocess.run(
        [str(PROGRAM.locate()), *map(str, arguments)],
        env={**BASE_ENVIRONMENT, "HOSTNAME": hostname(spec), **spec.environment},
        stdin=subprocess.DEVNULL, capture_output=True, text=True,
    )  # fmt: skip
    kind, _, value = done.stdout.strip().partition(" ")
    if done.returncode != 0 or kind != "pid":
        raise MachineError(f"the sandbox could not be started: {walls.launcher_words(done.stdout)}")
    return int(value)


def clear(home: Home, box: str) -> None:
    """Kill whatever runs of a sandbox and remove its control groups, its network and its /dev. Raises
    MachineError and LinuxError."""
    processes = group(home, box)
    processes.kill()
    processes.remove()
    if not rootless():
        walls.remove_network(home, box)
        walls.release(home, box)


def unclaimed(home: Home, owned: set[str]) -> Unclaimed:
    """Sandboxes of this home that are none of ``owned``, and of which something is left that `clear` removes:
    processes, control groups, a network namespace or a /dev."""
    if rootless():
        left = {path.parent.name for path in home.boxes.glob(f"*/{INIT}")}
        left = {name for name in left if UserProcesses(home, name).init()}
    else:
        left = {path.parent.name for path in home.boxes.glob("*/netns") if holds_namespace(path)}
        left |= {path.parent.name for path in home.boxes.glob("*/dev") if mounts.is_point(path)}
        left |= _groups(home)
    return [(f"what is left of sandbox {name}", partial(clear, home, name)) for name in sorted(left - owned)]


def _groups(home: Home) -> set[str]:
    try:
        hierarchies = cgroup.mounts()
    except LinuxError:
        return set()
    points = (hierarchies.unified, *hierarchies.v1.values())
    folders = [point / f"windtunnel-{home.tag}" for point in points]
    there = [folder for folder in folders if folder.is_dir()]
    return {entry.name for folder in there for entry in folder.iterdir() if entry.is_dir()}


CONTINUE = (
    'read -r _; for note in "$1"/*/stopped; do '
    'if [ -f "$note" ]; then kill -CONT $(cat "$note"); rm -f "$note"; fi; done 2>/dev/null'
)
"""What the shell does where processes are stopped one by one (``group``)."""
THAW = """exec 2>/dev/null
thaw() { for file in "$1"/*/cgroup.freeze; do echo 0 > "$file"; done; }
at_work() {
  for file in /proc/[0-9]*/cmdline; do
    line=; IFS= read -r line < "$file"
    case "$line" in *"$1"/*) file=${file#/proc/}; echo "${file%/*}"; esac
  done
}
read -r _
for note in "$2"/*UNVERIFIED; do
  [ -e "$note" ] || continue
  name=${note##*/}
  group=$1/${name%UNVERIFIED}
  rm "$note"
  # its first process may just have been born and be in no group yet
  for _ in $(seq 100); do
    left=$(at_work "restore-d-D$2")
    [ -n "$left" ] || break
    kill -9 $left
    sleep 0.01
  done
  END
done
for _ in $(seq 600); do
  thaw "$1"
  [ -n "$(at_work "--freeze-cgroup$1")" ] || break
  sleep 0.1
done
thaw "$1"
""".replace("UNVERIFIED", UNVERIFIED).replace("END", cgroup.END.format('"$group"'))
"""The same where control groups are frozen. What a restore had not looked at yet is ended: first the note
goes (a CRIU that is about to work ends what it made where there is none), then CRIU, then what stands."""
PATIENCE = 70.0
"""Seconds; longer than the shell goes on."""


class Guard:
    """Lets the sandboxes of ``home`` go on once this process is gone, as this user can."""

    def __init__(self, home: Home) -> None:
        rootless = os.geteuid() != 0
        groups = home.boxes if rootless else Cgroup(home.tag, "any").path.parent
        dumps = home.unverified("any").parent
        self._groups = groups
        self._shell = subprocess.Popen(
            ["/bin/sh", "-c", CONTINUE if rootless else THAW, "windtunnel-guard", str(groups), str(dumps)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        # for the next host of the home
        (home.path / "guard").write_text(str(self._shell.pid))

    def close(self) -> None:
        """End it; what it does then is harmless, since nothing is frozen. No checkpoint of this host is under
        way any more, so a CRIU that still runs is one of a host before, for which the shell would wait."""
        assert self._shell.stdin is not None
        for process in psutil.process_iter(["cmdline"]):
            words = process.info["cmdline"] or []
            if "--freeze-cgroup" in words and any(word.startswith(f"{self._groups}/") for word in words):
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
        self._shell.stdin.close()
        self._shell.wait()


def wait_for_guard(home: Home) -> None:
    """Until the guard of the host before, which may have been killed just now, has done its work."""
    deadline = time.monotonic() + PATIENCE
    with contextlib.suppress(OSError):
        command = Path("/proc", (home.path / "guard").read_text(), "cmdline")
        while b"windtunnel-guard" in command.read_bytes() and time.monotonic() < deadline:
            time.sleep(0.01)
