"""What this host has for sandboxes, what it lacks, what follows, and the command that would help.

Every facility of the kernel is tried and not guessed from its version. ``ladder`` puts it together: a host
stands on the highest rung whose facilities are all there.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from windtunnel.agents.sandbox.criu.program import find_criu, trial
from windtunnel.agents.sandbox.files import btrfs
from windtunnel.agents.sandbox.inspect import kernel, memory
from windtunnel.agents.sandbox.machine import launch
from windtunnel.agents.sandbox.machine.group import kernel_version
from windtunnel.agents.sandbox.model import Capability, Facility
from windtunnel.linux import LinuxError, cgroup
from windtunnel.linux.processes import capable
from windtunnel.linux.system import has_file_system

CAP_SYS_ADMIN = 21
SETUP = "windtunnel sandbox setup"
RECOMMENDED = (4, 2)
SOCKETS_CHANGED = (6, 16)
"""From this kernel on, only CRIU 4.2 and newer can read network sockets."""


Rung = tuple[str, tuple[Capability, ...]]
"""What a host can offer, and the facilities that it needs."""
LADDER: tuple[Rung, ...] = (
    ("whole sandboxes, cheapest checkpoints",
     ("root", "criu", "btrfs", "ebpf", "userfaultfd", "cgroup-freezer")),
    ("whole sandboxes, more turns count as full", ("root", "criu", "cgroup-freezer")),
    ("files and shells, declared services started again", ("root",)),
    ("the same without root; limits of each process alone", ("user-namespaces",)),
    ("no sandboxes on this host, only emulations", ()),
)  # fmt: skip
"""The best first."""


def doctor() -> list[Facility]:
    """Every facility, probed by use. Takes about a second."""
    root, freezer = _root(), _freezer()
    files, events, written = btrfs.lacking(), kernel.missing(), memory.missing()
    users, remedy = launch.refusal()
    progs = "apt-get install btrfs-progs" if files and has_file_system("btrfs") else ""
    return [
        Facility("root", not root, root or "is root with CAP_SYS_ADMIN", "namespaces, mounts, cgroups, CRIU",
                 "run it as root" if root else ""),
        _criu(),
        Facility("btrfs", not files, files or "in the kernel, with mkfs.btrfs",
                 "snapshots of files in milliseconds (else they are copied)", progs),
        Facility("ebpf", not events, events or "its programs were attached to system calls",
                 "knowing what a turn changed as it happens (else it is compared)",
                 "apt-get install libbpf1" if "libbpf" in events else ""),
        Facility("userfaultfd", not written, written or "a write was found by write protection",
                 "knowing which memory a turn wrote"),
        Facility("cgroup-freezer", not freezer, freezer or "at each cgroup of version 2",
                 "stopping a sandbox at one instant, limits, killing it whole",
                 "mkdir -p /sys/fs/cgroup/unified && mount -t cgroup2 none /sys/fs/cgroup/unified"
                 if freezer else ""),
        Facility("user-namespaces", not users, users or "users may make them",
                 "sandboxes of files and shells without root", remedy),
    ]  # fmt: skip


def rung(facilities: Iterable[Facility]) -> Rung:
    """The highest rung of the ladder on which a host with ``facilities`` stands."""
    present = {facility.name for facility in facilities if facility.present}
    return next(step for step in LADDER if present.issuperset(step[1]))


def ladder(facilities: Iterable[Facility]) -> str:
    """All rungs in words, the host's marked, with what is missing for the higher ones."""
    rows, lines = list(facilities), []
    present, (mine, _) = {facility.name for facility in rows if facility.present}, rung(rows)
    for name, needs in LADDER:
        missing = ", ".join(need for need in needs if need not in present)
        lines.append(f"{'->' if name == mine else '  '} {name}{f' (missing: {missing})' if missing else ''}")
    return "\n".join(lines)


def _root() -> str:
    """Why this process is not what namespaces and CRIU need; empty when it is."""
    if os.geteuid() != 0:
        return f"runs as user {os.geteuid()}"
    return "" if capable(CAP_SYS_ADMIN) else "is root without CAP_SYS_ADMIN (a container without privileges)"


def _freezer() -> str:
    """Why no group of processes can be frozen here; empty when one was made and frozen."""
    try:
        probe = cgroup.HostCgroup(Path("windtunnel-probe") / str(os.getpid()))
        try:
            probe.make(None, None, None)
            probe.freeze()
            probe.thaw()
        finally:
            probe.remove()
    except LinuxError as error:
        return str(error)
    return ""


def _criu() -> Facility:
    gives = "processes with their memory in a checkpoint"
    criu = find_criu()
    if criu is None:
        return Facility("criu", False, "not found", gives, SETUP)
    where = f"{criu.words} at {criu.path}"
    if reason := trial(criu):
        return Facility("criu", False, f"{where} does not work: {reason}", gives, SETUP)
    if criu.version < RECOMMENDED and kernel_version() >= SOCKETS_CHANGED:
        why = "cannot keep a process with a network socket on this kernel"
        return Facility("criu", False, f"{where} {why}; 4.2 can", gives, SETUP)
    if not criu.patched:
        why = "ends calls that wait (poll, nanosleep) at each full checkpoint; that of setup does not"
        return Facility("criu", True, f"{where} works, but {why}", gives, SETUP)
    return Facility("criu", True, f"{where}: a process was dumped and restored", gives)
