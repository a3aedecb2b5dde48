"""What this host has for sandboxes, what it lacks, what follows, and the command that would help.

``ladder`` puts it together: a host stands on the highest rung whose facilities are all there, and each rung
says what a restore brings back and what it does not.
"""

from __future__ import annotations

import platform
from collections.abc import Iterable
from dataclasses import dataclass

from windtunnel.agents.sandbox.live.criu import kernel
from windtunnel.agents.sandbox.live.criu.find import default_prefix, find_criu
from windtunnel.agents.sandbox.live.criu.trial import known_trial
from windtunnel.agents.sandbox.live.machine import rootless
from windtunnel.agents.sandbox.model import Capability, Facility

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
LADDER: tuple[Rung, ...] = (
    Rung(
        "whole sandboxes, cheapest checkpoints",
        ("root", "criu", "btrfs", "ebpf", "userfaultfd", "cgroup-freezer"),
        ("files", "processes with their memory", "state of shells", "connections inside the sandbox"),
        (OUTSIDE, "connections to the outside (they come back closed)", "GPU memory"),
    ),
    Rung(
        "whole sandboxes, turns judged without eBPF",
        ("root", "criu", "cgroup-freezer"),
        ("files", "processes with their memory", "state of shells", "connections inside the sandbox"),
        (
            OUTSIDE,
            "connections to the outside (they come back closed)",
            "GPU memory",
            "more turns count as full",
        ),
    ),
    Rung(
        "files and shells",
        ("root",),
        ("files", "state of shells", "declared services (started again)"),
        (OUTSIDE, "memory of processes", "processes that were not declared as services"),
    ),
    Rung(
        "files and shells without root",
        ("user-namespaces",),
        ("files", "state of shells", "declared services (started again)"),
        (
            OUTSIDE,
            "memory of processes",
            "processes that were not declared as services",
            "limits on memory and CPUs of a whole sandbox",
            "users other than the sandbox's root, and networks other than off and proxy",
        ),
    ),
    Rung("no sandboxes on this host", (), (), ("everything: only simulations run here",)),
)


def doctor() -> list[Facility]:
    """Every facility, probed by use. Takes a second at first; the answer for CRIU is kept until a reboot."""
    return [
        _facility("root", kernel.root(), "namespaces, mounts, cgroups, CRIU", "run it as root"),
        _criu(),
        _facility(
            "btrfs",
            kernel.btrfs(),
            "snapshots of files in milliseconds (else they are copied)",
            "apt-get install btrfs-progs" if kernel.file_system("btrfs")[0] else "",
        ),
        _facility("ebpf", kernel.ebpf(), "knowing what a turn changed as it happens", ""),
        _facility("userfaultfd", kernel.userfaultfd(), "knowing which memory a turn wrote", ""),
        _facility("fanotify", kernel.fanotify(), "knowing which files changed where eBPF is missing", ""),
        _facility(
            "cgroup-freezer",
            kernel.cgroup_freezer(),
            "stopping a sandbox at one instant, limits, killing it whole",
            "mkdir -p /sys/fs/cgroup/unified && mount -t cgroup2 none /sys/fs/cgroup/unified"
            if kernel.cgroup2() is None
            else "",
        ),
        _facility("overlay", kernel.file_system("overlay"), "sharing base files where btrfs is missing", ""),
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


def _facility(name: Capability, probe: kernel.Probe, gives: str, remedy: str) -> Facility:
    works, words = probe
    return Facility(name, works, words, gives, "" if works else remedy)


def _user_namespaces() -> Facility:
    why, remedy = rootless.refusal()
    gives = "sandboxes of files and shells without root"
    return Facility("user-namespaces", not why, why or "users may make them", gives, remedy)


def _criu() -> Facility:
    gives = "processes with their memory in a checkpoint"
    criu = find_criu()
    if criu is None:
        return Facility("criu", False, "not found", gives, SETUP)
    version = ".".join(str(part) for part in criu.version)
    where = f"{version} at {criu.path}"
    said = known_trial(criu, default_prefix() / "trial.json")
    if said:
        return Facility("criu", False, f"{where} does not work: {said}", gives, SETUP)
    if criu.version < RECOMMENDED:
        if kernel_version() >= SOCKETS_CHANGED:
            why = "cannot keep a process with a network socket on this kernel"
            return Facility("criu", False, f"{where} {why}; 4.2 can", gives, SETUP)
        return Facility("criu", True, f"{where} works; 4.2 or newer is recommended", gives, SETUP)
    return Facility("criu", True, f"{where}: a process was dumped and restored", gives)


def kernel_version() -> tuple[int, int]:
    parts = (platform.release().split("-")[0] + ".0.0").split(".")
    return int("".join(filter(str.isdigit, parts[0])) or 0), int("".join(filter(str.isdigit, parts[1])) or 0)
