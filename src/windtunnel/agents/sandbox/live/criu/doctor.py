"""What this host has for sandboxes, what it lacks, what follows, and the command that would help.

Every facility of the kernel is tried and not guessed from its version: a probe uses it once, returns
``(works, words)`` and leaves nothing behind. ``ladder`` puts it together: a host stands on the highest rung
whose facilities are all there, and each rung says what a restore brings back and what it does not.

Numbers of system calls and ioctls: Linux uapi headers (bpf.h, userfaultfd.h, fs.h, fanotify.h).
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import platform
import shutil
import struct
import subprocess
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from windtunnel.agents.sandbox.live.criu.find import default_prefix, find_criu, known_trial
from windtunnel.agents.sandbox.live.machine import rootless
from windtunnel.agents.sandbox.model import Capability, Facility
from windtunnel.linux.system import libc

X86 = platform.machine() == "x86_64"
SYS_BPF = 321 if X86 else 280
SYS_USERFAULTFD = 323 if X86 else 282
BPF_PROG_LOAD, BPF_RAW_TRACEPOINT_OPEN, BPF_PROG_TYPE_RAW_TRACEPOINT = 5, 17, 17
RETURN_ZERO = struct.pack("<BBhi", 0xB7, 0, 0, 0) + struct.pack("<BBhi", 0x95, 0, 0, 0)
UFFD_API, UFFD_REGISTER = 0xC018AA3F, 0xC020AA00
WP_ASYNC_UNPOPULATED = 1 << 15 | 1 << 13
REGISTER_WP = 2
PAGEMAP_SCAN = 0xC0606610
SCAN_ARM, SCAN_CHECK = 1, 2
PAGE_IS_WRITTEN = 1 << 1
FAN_REPORT_DFID_NAME = 0xC00
FAN_MARK_ADD_FILESYSTEM = 0x101
FAN_MODIFY = 0x2
AT_FDCWD = -100
CAP_SYS_ADMIN = 21

Probe = tuple[bool, str]


def _why() -> str:
    return os.strerror(ctypes.get_errno())


def root() -> Probe:
    status = Path("/proc/self/status").read_text()
    capabilities = int(status.partition("CapEff:")[2].split()[0], 16)
    if os.geteuid() != 0:
        return False, f"runs as user {os.geteuid()}"
    if not capabilities >> CAP_SYS_ADMIN & 1:
        return False, "is root without CAP_SYS_ADMIN (a container without privileges)"
    return True, "is root with CAP_SYS_ADMIN"


def file_system(name: str) -> Probe:
    """Whether the kernel has a file system, loading its module where that is allowed."""

    def known() -> bool:
        return name in Path("/proc/filesystems").read_text().split()

    if not known() and os.geteuid() == 0 and (modprobe := shutil.which("modprobe", path=_sbin())):
        subprocess.run([modprobe, "-q", name], capture_output=True, timeout=20)
    return (True, "in the kernel") if known() else (False, "not in this kernel")


def btrfs() -> Probe:
    works, words = file_system("btrfs")
    tool = shutil.which("mkfs.btrfs", path=_sbin())
    if not works:
        return False, words
    if tool is None:
        return False, "in the kernel, but mkfs.btrfs is missing"
    if not os.path.exists("/dev/loop-control"):
        return False, "in the kernel, but there are no loop devices to put it on"
    return True, f"in the kernel, with {tool}"


def ebpf() -> Probe:
    """Loads a program that returns 0 and attaches it to the entry of system calls for an instant."""
    code = ctypes.create_string_buffer(RETURN_ZERO, len(RETURN_ZERO))
    licence = ctypes.create_string_buffer(b"GPL")
    load = struct.pack(
        "<IIQQ", BPF_PROG_TYPE_RAW_TRACEPOINT, 2, ctypes.addressof(code), ctypes.addressof(licence)
    )
    program = libc.syscall(SYS_BPF, BPF_PROG_LOAD, ctypes.create_string_buffer(load, 128), 128)
    if program < 0:
        return False, f"a program cannot be loaded ({_why()})"
    try:
        name = ctypes.create_string_buffer(b"sys_enter")
        attach = struct.pack("<QI", ctypes.addressof(name), program)
        link = libc.syscall(SYS_BPF, BPF_RAW_TRACEPOINT_OPEN, ctypes.create_string_buffer(attach, 128), 128)
        if link < 0:
            return False, f"a program cannot be attached to raw tracepoints ({_why()})"
        os.close(link)
    finally:
        os.close(program)
    return True, "a program was loaded and attached to a raw tracepoint"


def userfaultfd() -> Probe:
    """Tracks writes to two pages of this process's own, as is later done for the sandbox's memory."""
    descriptor = libc.syscall(SYS_USERFAULTFD, os.O_CLOEXEC)
    if descriptor < 0:
        return False, f"userfaultfd is refused ({_why()})"
    page = mmap.PAGESIZE
    memory = mmap.mmap(-1, 2 * page, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    try:
        fcntl.ioctl(descriptor, UFFD_API, struct.pack("QQQ", 0xAA, WP_ASYNC_UNPOPULATED, 0))
        fcntl.ioctl(descriptor, UFFD_REGISTER, struct.pack("QQQQ", start, 2 * page, REGISTER_WP, 0))
        with open("/proc/self/pagemap", "rb") as pagemap:
            _scan(pagemap.fileno(), start, 2 * page, SCAN_ARM | SCAN_CHECK)
            memory[page] = 1
            found = _scan(pagemap.fileno(), start, 2 * page, SCAN_CHECK)
    except OSError as failed:
        return False, f"asynchronous write protection is refused ({failed.strerror})"
    finally:
        os.close(descriptor)
    if found != [(start + page, start + 2 * page)]:
        return False, "a write was not found by PAGEMAP_SCAN"
    return True, "a write was found by write protection and PAGEMAP_SCAN"


def _scan(pagemap: int, start: int, length: int, flags: int) -> list[tuple[int, int]]:
    regions = ctypes.create_string_buffer(24 * 4)
    written = PAGE_IS_WRITTEN
    question = struct.pack(
        "12Q", 96, flags, start, start + length, 0, ctypes.addressof(regions), 4, 0, 0, written, 0, written
    )
    count = fcntl.ioctl(pagemap, PAGEMAP_SCAN, bytearray(question))
    return [struct.unpack_from("QQ", regions, 24 * index) for index in range(count)]


def fanotify() -> Probe:
    descriptor = libc.fanotify_init(FAN_REPORT_DFID_NAME, os.O_RDONLY)
    if descriptor < 0:
        return False, f"refused ({_why()})"
    try:
        with tempfile.TemporaryDirectory() as folder:
            marked = libc.fanotify_mark(
                descriptor, FAN_MARK_ADD_FILESYSTEM, ctypes.c_uint64(FAN_MODIFY), AT_FDCWD, folder.encode()
            )
        if marked == 0:
            return True, "a file system was watched"
        if ctypes.get_errno() in (errno.EXDEV, errno.EOPNOTSUPP, errno.ENODEV):
            return True, "allowed (not for the file system of the temporary folder)"
        return False, f"a file system cannot be watched ({_why()})"
    finally:
        os.close(descriptor)


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
    for line in Path("/proc/mounts").read_text().splitlines():
        _, where, kind, *_ = line.split()
        if kind == "cgroup2":
            return Path(where)
    return None


def _sbin() -> str:
    return os.environ.get("PATH", "") + ":/usr/local/sbin:/usr/sbin:/sbin"


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
        _facility("root", root(), "namespaces, mounts, cgroups, CRIU", "run it as root"),
        _criu(),
        _facility(
            "btrfs",
            btrfs(),
            "snapshots of files in milliseconds (else they are copied)",
            "apt-get install btrfs-progs" if file_system("btrfs")[0] else "",
        ),
        _facility("ebpf", ebpf(), "knowing what a turn changed as it happens", ""),
        _facility("userfaultfd", userfaultfd(), "knowing which memory a turn wrote", ""),
        _facility("fanotify", fanotify(), "knowing which files changed where eBPF is missing", ""),
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
