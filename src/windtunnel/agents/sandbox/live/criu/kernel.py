"""What the kernel allows, tried and not guessed from its version: each probe uses the facility once.

A probe returns ``(works, words)`` and leaves nothing behind. Numbers of system calls and ioctls: Linux
uapi headers (bpf.h, userfaultfd.h, fs.h, fanotify.h).
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
from pathlib import Path

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


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


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
    libc = _libc()
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
    descriptor = _libc().syscall(SYS_USERFAULTFD, os.O_CLOEXEC)
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
    libc = _libc()
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
