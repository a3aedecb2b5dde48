"""The kernel side: programs, maps and ring, shared by all sandboxes that one process watches; and which
system calls change files, bring input or send output, and where their operands are.

A program at every system call taxes all processes of the host, so the programs are attached with the first
sandbox that is watched and detached with the last. Each sandbox has a slot; loss of events, doubts and counts
are kept by slot, so that a storm in one sandbox puts no other in doubt.

A system call that has no rule changes nothing that a sandbox keeps, or is denied in sandboxes.
"""

from __future__ import annotations

import contextlib
import os
import platform
import select
import struct
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from windtunnel.agents.sandbox.errors import InspectError
from windtunnel.agents.sandbox.model import EffectDoubt, SandboxPart
from windtunnel.linux import LinuxError, bpf, libbpf

IGNORED, WRITE, READ, COPY, OPEN, PATH, DESCRIPTOR, MMAP, IOCTL, BIND, DOUBT = range(11)
CREATED, MODIFIED, DELETED, RENAMED, METADATA = range(1, 6)
NONE = 255

# 0 to 3 and 10 are raised inside the program (see its ``enum doubt``)
DOUBTS = (
    EffectDoubt(SandboxPart.PROCESSES, "system calls of another machine (32-bit) were made"),
    EffectDoubt(SandboxPart.FILES, "a descriptor was closed while it was in use"),
    EffectDoubt(SandboxPart.FILES, "the arguments of an open could not be read"),
    EffectDoubt(SandboxPart.FILES, "a file system was told to change by ioctl"),
    EffectDoubt(SandboxPart.PROCESSES, "io_uring was set up"),
    EffectDoubt(SandboxPart.PROCESSES, "one process wrote the memory of another, or traced it"),
    EffectDoubt(SandboxPart.PROCESSES, "mounts were changed"),
    EffectDoubt(SandboxPart.PROCESSES, "System V or POSIX queues, semaphores or shared memory were used"),
    EffectDoubt(SandboxPart.FILES, "asynchronous input and output (AIO) was used"),
    EffectDoubt(SandboxPart.PROCESSES, "namespaces were changed"),
    EffectDoubt(SandboxPart.PROCESSES, "what some process received and wrote was not counted"),
)
URING, TRACE, MOUNT, IPC, AIO, NAMESPACE = range(4, 10)


class Rule(NamedTuple):
    """Operands are argument numbers; ``NONE``: the call has none."""

    kind: int
    op: int = 0
    dirfd1: int = NONE
    path1: int = NONE
    dirfd2: int = NONE
    path2: int = NONE
    descriptor: int = NONE
    doubt: int = 0

    def packed(self) -> bytes:
        return struct.pack("8B", *self)


_CALLS = (
    (Rule(WRITE, descriptor=0), """write 1 pwrite64 18 writev 20 pwritev 296 pwritev2 328 ftruncate 77
     fallocate 285 vmsplice 278"""),
    (Rule(WRITE), "sendto 44 sendmsg 46 sendmmsg 307"),
    (Rule(READ), """read 0 pread64 17 readv 19 preadv 295 preadv2 327 recvfrom 45 recvmsg 47 recvmmsg 299
     accept 43 accept4 288"""),
    (Rule(COPY, descriptor=0), "sendfile 40"),
    (Rule(COPY, descriptor=2), "copy_file_range 326 splice 275"),
    (Rule(COPY, descriptor=1), "tee 276"),
    # the descriptor of OPEN is the argument with the flags; op 1: the flags lie in memory
    (Rule(OPEN), "creat 85"),
    (Rule(OPEN, descriptor=1), "open 2"),
    (Rule(OPEN, descriptor=2), "openat 257 open_by_handle_at 304"),
    (Rule(OPEN, op=1, descriptor=2), "openat2 437"),
    (Rule(PATH, CREATED, path1=0), "mkdir 83 mknod 133"),
    (Rule(PATH, CREATED, dirfd1=0, path1=1), "mkdirat 258 mknodat 259"),
    (Rule(PATH, CREATED, path1=1), "symlink 88 link 86"),
    (Rule(PATH, CREATED, dirfd1=1, path1=2), "symlinkat 266"),
    (Rule(PATH, CREATED, dirfd1=2, path1=3), "linkat 265"),
    (Rule(PATH, DELETED, path1=0), "unlink 87 rmdir 84"),
    (Rule(PATH, DELETED, dirfd1=0, path1=1), "unlinkat 263"),
    (Rule(PATH, RENAMED, path1=0, path2=1), "rename 82"),
    (Rule(PATH, RENAMED, dirfd1=0, path1=1, dirfd2=2, path2=3), "renameat 264 renameat2 316"),
    (Rule(PATH, MODIFIED, path1=0), "truncate 76"),
    (Rule(PATH, METADATA, path1=0), """chmod 90 chown 92 lchown 94 utime 132 utimes 235
     setxattr 188 lsetxattr 189 removexattr 197 lremovexattr 198"""),
    (Rule(PATH, METADATA, dirfd1=0, path1=1), """fchmodat 268 fchmodat2 452 fchownat 260 utimensat 280
     futimesat 261 setxattrat 463 removexattrat 466 file_setattr 469"""),
    (Rule(DESCRIPTOR, METADATA, descriptor=0), "fchmod 91 fchown 93 fsetxattr 190 fremovexattr 199"),
    (Rule(MMAP), "mmap 9"),
    (Rule(IOCTL), "ioctl 16"),
    (Rule(BIND, CREATED, path1=1), "bind 49"),
    (Rule(DOUBT, doubt=URING), "io_uring_setup 425"),
    (Rule(DOUBT, doubt=TRACE), "process_vm_writev 311 ptrace 101"),
    (Rule(DOUBT, doubt=MOUNT), """mount 165 umount2 166 pivot_root 155 move_mount 429 fsmount 432
     open_tree 428 fsconfig 431 mount_setattr 442 swapon 167 swapoff 168 acct 163 quotactl 179
     quotactl_fd 443"""),
    (Rule(DOUBT, doubt=IPC), """shmat 30 shmdt 67 shmctl 31 semop 65 semtimedop 220 semctl 66 msgsnd 69
     msgrcv 70 msgctl 71 mq_open 240 mq_unlink 241 mq_timedsend 242 mq_timedreceive 243"""),
    (Rule(DOUBT, doubt=AIO), "io_submit 209"),
    (Rule(DOUBT, doubt=NAMESPACE), "setns 308 unshare 272"),
)  # fmt: skip
"""System calls of x86-64, by name and number, with what each does."""
MACHINE = "x86_64"
NUMBERS = {
    name: int(number)
    for _, calls in _CALLS
    for name, number in zip(calls.split()[::2], calls.split()[1::2], strict=True)
}
RULES = {NUMBERS[name]: rule for rule, calls in _CALLS for name in calls.split()[::2]}


OBJECT = bpf.Object(
    Path(__file__).parent / "bpf" / "turn.bpf.c", "windtunnel.agents.sandbox.inspect.kernel", typed=True
)
TRACEPOINTS = ("sys_exit", "sched_process_exec", "sched_process_exit", "signal_generate")
"""Of the kernel; each has the program of its name."""
SLOTS = 1024
DOUBTS_EACH = 16
CUT = 1
_FIRST_PID_NAMESPACE = 0xEFFFFFFC
_HEADER = struct.Struct("<IIHHBBxxIIIHHHH")


class FileEvent(NamedTuple):
    """One change of a file, as the kernel saw it. Names are those from the root of the file system that
    ``device`` tells (as in mountinfo: major, minor); ``path`` is what the process passed, relative to them.
    """

    pid: int
    number: int
    op: int
    cut: bool
    mode: int
    links: int
    device: int
    names: str
    path: str
    device2: int
    names2: str
    path2: str


@dataclass(frozen=True)
class Count:
    inputs: int = 0
    writes: int = 0
    execs: int = 0


def _names(pieces: bytes) -> str:
    """``b"a\\0tmp\\0"`` (leaf first) as ``"/tmp/a"``."""
    return os.fsdecode(b"/" + b"/".join(reversed(pieces[:-1].split(b"\0")))) if pieces else "/"


def decoded(record: bytes) -> tuple[int, FileEvent]:
    """Slot and event of one record of the ring."""
    slot, pid, number, mode, op, flags, links, device, device2, *ends = _HEADER.unpack_from(record)
    base1, path1, base2, path2 = (_HEADER.size + end for end in ends)
    return slot, FileEvent(
        pid,
        number,
        op,
        bool(flags & CUT),
        mode,
        links,
        device,
        _names(record[_HEADER.size : base1]),
        os.fsdecode(record[base1:path1].rstrip(b"\0")),
        device2,
        _names(record[path1:base2]) if base2 > path1 else "/",
        os.fsdecode(record[base2:path2].rstrip(b"\0")) if base2 > _HEADER.size else "",
    )


def missing() -> str:
    """Why the programs cannot be used here, in words; empty when they can."""
    if os.geteuid() != 0:
        return "needs root"
    if platform.machine() != MACHINE:
        return f"no program for machines of the kind {platform.machine()}"
    if os.stat("/proc/self/ns/pid").st_ino != _FIRST_PID_NAMESPACE:
        return "this process is not in the machine's first pid namespace"
    try:
        with contextlib.closing(KernelTracker(lambda slot, event: None)) as kernel:
            kernel.open()
    except (InspectError, LinuxError) as error:
        return str(error)
    except OSError as error:
        return f"BPF maps or programs cannot be made: {error.strerror}"
    return ""


class KernelTracker:
    """Programs, maps, ring and its reader. ``sink`` gets every event, in the ring's order, under a lock."""

    def __init__(self, sink: Callable[[int, FileEvent], None]) -> None:
        self._sink = sink
        self._lock = threading.Lock()
        self._attached: contextlib.ExitStack | None = None
        """All that is in the kernel; None while nothing is."""
        self._maps: dict[str, bpf.Map] = {}
        self._ring: bpf.RingReader | None = None
        self._stop = -1
        self._reader: threading.Thread | None = None
        self.broken = ""
        """Why events may not have been handed on yet, in words; empty after a whole ``drain``."""

    def open(self) -> None:
        """Load and attach (idempotent). Raises InspectError or OSError; then nothing is attached."""
        if self._attached is not None:
            return
        with contextlib.ExitStack() as stack:
            loaded = libbpf.LoadedObject(OBJECT.locate().read_bytes(), {})
            stack.callback(loaded.close)
            for number, rule in RULES.items():
                loaded.maps["rules"][struct.pack("<I", number)] = rule.packed()
            ring = bpf.RingReader(loaded.maps["ring"].fd, loaded.maps["ring"].entries)
            stack.callback(ring.close)
            for name in TRACEPOINTS:
                stack.callback(os.close, bpf.attached(loaded.program(name), name))
            stop = os.eventfd(0, os.EFD_CLOEXEC)
            stack.callback(os.close, stop)
            self._attached = stack.pop_all()
        self._maps, self._ring, self._stop = loaded.maps, ring, stop
        self._reader = threading.Thread(target=self._read, name="windtunnel-inspect", daemon=True)
        self._reader.start()

    def close(self) -> None:
        """Detach and forget (idempotent)."""
        if self._attached is None:
            return
        os.eventfd_write(self._stop, 1)
        if self._reader is not None:
            self._reader.join()
        with self._lock:
            self._attached.close()
            self._attached, self._ring, self._maps = None, None, {}

    def _read(self) -> None:
        assert self._ring is not None
        poll = select.poll()
        poll.register(self._ring.fd, select.POLLIN)
        poll.register(self._stop, select.POLLIN)
        while True:
            # events do not wake the reader before the ring is an eighth full
            ready = poll.poll()
            if any(fd == self._stop for fd, _ in ready):
                return
            self.drain()

    def drain(self) -> None:
        """Hand on everything that happened before this call."""
        with self._lock:
            if self._ring is None:
                return
            try:
                for record in self._ring.drain():
                    self._sink(*decoded(record))
                self.broken = ""
            except LinuxError as error:
                self.broken = f"files: {error}"

    def set_epoch(self, identity: int, slot: int, epoch: int) -> None:
        """Watch the processes of the cgroup (v2) with that inode, from now on or anew."""
        self._maps["slots"][struct.pack("<Q", identity)] = struct.pack("<II", slot, epoch & 0xFFFFFFFF)

    def remove(self, identity: int, slot: int) -> None:
        self._maps["slots"].remove(struct.pack("<Q", identity))
        for key in list(self._maps["counts"]):
            if struct.unpack_from("<I", key)[0] == slot:
                self._maps["counts"].remove(key)

    def count(self, slot: int, pid: int) -> Count:
        value = self._maps["counts"].get(struct.pack("<II", slot, pid))
        return Count(*struct.unpack("<QQQ", value)) if value else Count()

    def lost(self, slot: int) -> int:
        return self._counted("lost", slot)

    def doubts(self, slot: int) -> tuple[int, ...]:
        """How often each of ``DOUBTS`` was raised, ever."""
        return tuple(self._counted("doubts", slot * DOUBTS_EACH + number) for number in range(len(DOUBTS)))

    def _counted(self, table: str, number: int) -> int:
        value = self._maps[table].get(struct.pack("<I", number))
        return int(struct.unpack("<Q", value)[0]) if value else 0


if __name__ == "__main__":
    OBJECT.rebuild()
