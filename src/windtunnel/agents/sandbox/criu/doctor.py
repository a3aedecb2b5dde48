"""What this host has for sandboxes, what it lacks, what follows, and the command that would help.

Every facility of the kernel is tried and not guessed from its version: a probe uses it once, returns
``(works, words)`` and leaves nothing behind. ``ladder`` puts it together: a host stands on the highest rung
whose facilities are all there, and each rung says what a restore brings back and what it does not.
"""

from __future__ import annotations

import os
import platform
import re
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from windtunnel.agents.sandbox.criu.find import default_prefix, find_criu, known_trial
from windtunnel.agents.sandbox.files import btrfs as pools
from windtunnel.agents.sandbox.inspect import memory
from windtunnel.agents.sandbox.machine import launch
from windtunnel.agents.sandbox.model import Capability, Facility
from windtunnel.linux import LinuxError, bpf, cgroup
from windtunnel.linux.processes import capable
from windtunnel.linux.system import has_file_system, in_sbin

RETURN_ZERO = struct.pack("<BBhi", 0xB7, 0, 0, 0) + struct.pack("<BBhi", 0x95, 0, 0, 0)
CAP_SYS_ADMIN = 21

Probe = tuple[bool, str]


def root() -> Probe:
    if os.geteuid() != 0:
        return False, f"runs as user {os.geteuid()}"
    if not capable(CAP_SYS_ADMIN):
        return False, "is root without CAP_SYS_ADMIN (a container without privileges)"
    return True, "is root with CAP_SYS_ADMIN"


def file_system(name: str) -> Probe:
    return (True, "in the kernel") if has_file_system(name) else (False, "not in this kernel")


def btrfs() -> Probe:
    lacking = pools.lacking()
    return not lacking, lacking or f"in the kernel, with {in_sbin('mkfs.btrfs')}"


def ebpf() -> Probe:
    """Loads a program that returns 0 and attaches it to the entry of system calls for an instant."""
    try:
        program = bpf.loaded(bpf.Program("sys_enter", RETURN_ZERO, ()), {})
        try:
            os.close(bpf.attached(program, "sys_enter"))
        finally:
            os.close(program)
    except LinuxError as failed:
        return False, str(failed)
    return True, "a program was loaded and attached to a raw tracepoint"


def userfaultfd() -> Probe:
    reason = memory.missing()
    return not reason, reason or "a write was found by write protection and PAGEMAP_SCAN"


def cgroup_freezer() -> Probe:
    where = cgroup2()
    if where is None:
        return False, "no cgroup2 is mounted"
    folder = where / f"windtunnel-probe-{os.getpid()}"
    try:
        folder.mkdir()
    except OSError as failed:
        return False, f"no group can be made in {where} ({failed.strerror})"
    try:
        for value in ("1", "0"):
            (folder / "cgroup.freeze").write_text(value)
    except OSError as failed:
        return False, f"{where} has no freezer ({failed.strerror})"
    finally:
        folder.rmdir()
    return True, f"at {where}"


def cgroup2() -> Path | None:
    """Where cgroup version 2 is mounted."""
    try:
        return cgroup.mounts().unified
    except LinuxError:
        return None


SETUP = "windtunnel sandbox setup"
RECOMMENDED = (4, 2)
SOCKETS_CHANGED = (6, 16)
"""From this kernel on, only CRIU 4.2 and newer can read network sockets."""


@dataclass(frozen=True)
class Rung:
    """One step of the ladder of what a host can offer."""

    name: str
    needs: tuple[Capability, ...]
    covers: tuple[str, ...]
    misses: tuple[str, ...]


OUTSIDE = "what was done outside the sandbox (pushed, paid, sent)"
WHOLE = ("files", "processes with their memory", "state of shells", "connections inside the sandbox")
NOT_WHOLE = (OUTSIDE, "connections to the outside (they come back closed)", "GPU memory")
FILES = ("files", "state of shells", "declared services (started again)")
NOT_FILES = (OUTSIDE, "memory of processes", "processes that were not declared as services")
LADDER: tuple[Rung, ...] = (
    Rung(
        "whole sandboxes, cheapest checkpoints",
        ("root", "criu", "btrfs", "ebpf", "userfaultfd", "cgroup-freezer"),
        WHOLE,
        NOT_WHOLE,
    ),
    Rung(
        "whole sandboxes, turns judged without eBPF",
        ("root", "criu", "cgroup-freezer"),
        WHOLE,
        (*NOT_WHOLE, "more turns count as full"),
    ),
    Rung("files and shells", ("root",), FILES, NOT_FILES),
    Rung(
        "files and shells without root",
        ("user-namespaces",),
        FILES,
        (
            *NOT_FILES,
            "limits on memory and CPUs of a whole sandbox",
            "users other than the sandbox's root, and networks other than off and proxy",
        ),
    ),
    Rung("no sandboxes on this host", (), (), ("everything: only simulations run here",)),
)


def doctor() -> list[Facility]:
    """Every facility, probed by use. Takes a second at first; the answer for CRIU is kept until a reboot."""
    return [
        _facility("root", root(), "namespaces, mounts, cgroups, CRIU", "run it as root"),
        _criu(),
        _facility(
            "btrfs",
            btrfs(),
            "snapshots of files in milliseconds (else they are copied)",
            "apt-get install btrfs-progs" if file_system("btrfs")[0] else "",
        ),
        _facility("ebpf", ebpf(), "knowing what a turn changed as it happens (else it is compared)", ""),
        _facility("userfaultfd", userfaultfd(), "knowing which memory a turn wrote", ""),
        _facility(
            "cgroup-freezer",
            cgroup_freezer(),
            "stopping a sandbox at one instant, limits, killing it whole",
            "mkdir -p /sys/fs/cgroup/unified && mount -t cgroup2 none /sys/fs/cgroup/unified"
            if cgroup2() is None
            else "",
        ),
        _facility("overlay", file_system("overlay"), "sharing base files where btrfs is missing", ""),
        _user_namespaces(),
    ]  # fmt: skip


def rung(facilities: Iterable[Facility]) -> Rung:
    """The highest rung of the ladder on which a host with ``facilities`` stands."""
    present = {facility.name for facility in facilities if facility.present}
    return next(step for step in LADDER if present.issuperset(step.needs))


def ladder(facilities: Iterable[Facility]) -> str:
    """All rungs in words, the host's marked, with what is missing for the higher ones."""
    known = list(facilities)
    present = {facility.name for facility in known if facility.present}
    mine = rung(known)
    lines = []
    for step in LADDER:
        missing = [name for name in step.needs if name not in present]
        lacks = f" (missing: {', '.join(missing)})" if missing else ""
        lines.append(f"{'->' if step is mine else '  '} {step.name}{lacks}")
        lines.append(f"     brings back: {'; '.join(step.covers) or 'nothing'}")
        lines.append(f"     does not: {'; '.join(step.misses)}")
    return "\n".join(lines)


def _facility(name: Capability, probe: Probe, gives: str, remedy: str) -> Facility:
    works, words = probe
    return Facility(name, works, words, gives, "" if works else remedy)


def _user_namespaces() -> Facility:
    why, remedy = launch.refusal()
    gives = "sandboxes of files and shells without root"
    return Facility("user-namespaces", not why, why or "users may make them", gives, remedy)


def _criu() -> Facility:
    gives = "processes with their memory in a checkpoint"
    criu = find_criu()
    if criu is None:
        return Facility("criu", False, "not found", gives, SETUP)
    where = f"{criu.words} at {criu.path}"
    said = known_trial(criu, default_prefix() / "trial.json")
    if said:
        return Facility("criu", False, f"{where} does not work: {said}", gives, SETUP)
    if criu.version < RECOMMENDED and kernel_version() >= SOCKETS_CHANGED:
        why = "cannot keep a process with a network socket on this kernel"
        return Facility("criu", False, f"{where} {why}; 4.2 can", gives, SETUP)
    if not criu.patched:
        why = "ends calls that wait (poll, nanosleep) at each full checkpoint; that of setup does not"
        return Facility("criu", True, f"{where} works, but {why}", gives, SETUP)
    return Facility("criu", True, f"{where}: a process was dumped and restored", gives)


def kernel_version() -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", platform.release())[:2]))
