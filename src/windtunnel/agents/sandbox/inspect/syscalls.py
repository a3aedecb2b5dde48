"""Which system calls change files, bring input or send output, and where their operands are.

Every line of ``RULES`` is a system call by name with the kind of its effect; ``NUMBERS`` has the numbers of
both machines. A call that is in neither changes nothing that a sandbox keeps, or is denied in sandboxes.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

from windtunnel.agents.sandbox.model import Doubt, Part

IGNORED, WRITE, READ, COPY, OPEN, PATH, DESCRIPTOR, MMAP, IOCTL, BIND, DOUBT = range(11)
CREATED, MODIFIED, DELETED, RENAMED, METADATA = range(1, 6)
NONE = 255

# 0 to 3 and 10 are raised inside the program (see its ``enum doubt``)
DOUBTS = (
    Doubt(Part.PROCESSES, "system calls of another machine (32-bit) were made"),
    Doubt(Part.FILES, "a descriptor was closed while it was in use"),
    Doubt(Part.FILES, "the arguments of an open could not be read"),
    Doubt(Part.FILES, "a file system was told to change by ioctl"),
    Doubt(Part.PROCESSES, "io_uring was set up"),
    Doubt(Part.PROCESSES, "one process wrote the memory of another, or traced it"),
    Doubt(Part.PROCESSES, "mounts were changed"),
    Doubt(Part.PROCESSES, "System V or POSIX queues, semaphores or shared memory were used"),
    Doubt(Part.FILES, "asynchronous input and output (AIO) was used"),
    Doubt(Part.PROCESSES, "namespaces were changed"),
    Doubt(Part.PROCESSES, "what some process received and wrote was not counted"),
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


def _rules() -> dict[str, Rule]:
    rules: dict[str, Rule] = {}

    def add(names: str, rule: Rule) -> None:
        for name in names.split():
            rules[name] = rule

    add("write pwrite64 writev pwritev pwritev2 ftruncate fallocate vmsplice", Rule(WRITE, descriptor=0))
    add("sendto sendmsg sendmmsg", Rule(WRITE))
    add("read pread64 readv preadv preadv2 recvfrom recvmsg recvmmsg accept accept4", Rule(READ))
    add("sendfile", Rule(COPY, descriptor=0))
    add("copy_file_range splice", Rule(COPY, descriptor=2))
    add("tee", Rule(COPY, descriptor=1))
    # the descriptor of OPEN is the argument with the flags; op 1: the flags lie in memory
    add("creat", Rule(OPEN))
    add("open", Rule(OPEN, descriptor=1))
    add("openat open_by_handle_at", Rule(OPEN, descriptor=2))
    add("openat2", Rule(OPEN, op=1, descriptor=2))
    add("mkdir mknod", Rule(PATH, CREATED, path1=0))
    add("mkdirat mknodat", Rule(PATH, CREATED, dirfd1=0, path1=1))
    add("symlink link", Rule(PATH, CREATED, path1=1))
    add("symlinkat", Rule(PATH, CREATED, dirfd1=1, path1=2))
    add("linkat", Rule(PATH, CREATED, dirfd1=2, path1=3))
    add("unlink rmdir", Rule(PATH, DELETED, path1=0))
    add("unlinkat", Rule(PATH, DELETED, dirfd1=0, path1=1))
    add("rename", Rule(PATH, RENAMED, path1=0, path2=1))
    add("renameat renameat2", Rule(PATH, RENAMED, dirfd1=0, path1=1, dirfd2=2, path2=3))
    add("truncate", Rule(PATH, MODIFIED, path1=0))
    add("chmod chown lchown utime utimes", Rule(PATH, METADATA, path1=0))
    add("setxattr lsetxattr removexattr lremovexattr", Rule(PATH, METADATA, path1=0))
    add(
        "fchmodat fchmodat2 fchownat utimensat futimesat setxattrat removexattrat file_setattr",
        Rule(PATH, METADATA, dirfd1=0, path1=1),
    )
    add("fchmod fchown fsetxattr fremovexattr", Rule(DESCRIPTOR, METADATA, descriptor=0))
    add("mmap", Rule(MMAP))
    add("ioctl", Rule(IOCTL))
    add("bind", Rule(BIND, CREATED, path1=1))
    add("io_uring_setup", Rule(DOUBT, doubt=URING))
    add("process_vm_writev ptrace", Rule(DOUBT, doubt=TRACE))
    add(
        "mount umount2 pivot_root move_mount fsmount open_tree fsconfig mount_setattr swapon swapoff acct"
        " quotactl quotactl_fd",
        Rule(DOUBT, doubt=MOUNT),
    )
    add("shmat shmdt shmctl semop semtimedop semctl msgsnd msgrcv msgctl", Rule(DOUBT, doubt=IPC))
    add("mq_open mq_unlink mq_timedsend mq_timedreceive", Rule(DOUBT, doubt=IPC))
    add("io_submit", Rule(DOUBT, doubt=AIO))
    add("setns unshare", Rule(DOUBT, doubt=NAMESPACE))
    return rules


RULES = _rules()

_LATER = {"fchmodat2": 452, "setxattrat": 463, "removexattrat": 466, "file_setattr": 469}
"""Calls newer than the list below; since 5.1 every machine gives a call the same number."""

# fmt: off
NUMBERS: dict[str, dict[str, int]] = {
    "x86_64": {
        **_LATER,
        "write": 1, "pwrite64": 18, "writev": 20, "pwritev": 296, "pwritev2": 328, "ftruncate": 77,
        "fallocate": 285, "vmsplice": 278, "sendto": 44, "sendmsg": 46, "sendmmsg": 307, "read": 0,
        "pread64": 17, "readv": 19, "preadv": 295, "preadv2": 327, "recvfrom": 45, "recvmsg": 47,
        "recvmmsg": 299, "accept": 43, "accept4": 288, "sendfile": 40, "copy_file_range": 326,
        "splice": 275, "tee": 276, "creat": 85, "open": 2, "openat": 257, "open_by_handle_at": 304,
        "openat2": 437, "mkdir": 83, "mknod": 133, "mkdirat": 258, "mknodat": 259, "symlink": 88,
        "link": 86, "symlinkat": 266, "linkat": 265, "unlink": 87, "rmdir": 84, "unlinkat": 263,
        "rename": 82, "renameat": 264, "renameat2": 316, "truncate": 76, "chmod": 90, "chown": 92,
        "lchown": 94, "utime": 132, "utimes": 235, "setxattr": 188, "lsetxattr": 189, "removexattr": 197,
        "lremovexattr": 198, "fchmodat": 268, "fchownat": 260, "utimensat": 280, "futimesat": 261,
        "fchmod": 91, "fchown": 93, "fsetxattr": 190, "fremovexattr": 199, "mmap": 9, "ioctl": 16,
        "bind": 49, "io_uring_setup": 425, "process_vm_writev": 311, "ptrace": 101, "mount": 165,
        "umount2": 166, "pivot_root": 155, "move_mount": 429, "fsmount": 432, "open_tree": 428,
        "fsconfig": 431, "mount_setattr": 442, "swapon": 167, "swapoff": 168, "acct": 163,
        "quotactl": 179, "quotactl_fd": 443, "shmat": 30, "shmdt": 67, "shmctl": 31, "semop": 65,
        "semtimedop": 220, "semctl": 66, "msgsnd": 69, "msgrcv": 70, "msgctl": 71, "mq_open": 240,
        "mq_unlink": 241, "mq_timedsend": 242, "mq_timedreceive": 243, "io_submit": 209, "setns": 308,
        "unshare": 272,
    },
    "aarch64": {
        **_LATER,
        "write": 64, "pwrite64": 68, "writev": 66, "pwritev": 70, "pwritev2": 287, "ftruncate": 46,
        "fallocate": 47, "vmsplice": 75, "sendto": 206, "sendmsg": 211, "sendmmsg": 269, "read": 63,
        "pread64": 67, "readv": 65, "preadv": 69, "preadv2": 286, "recvfrom": 207, "recvmsg": 212,
        "accept": 202, "accept4": 242, "sendfile": 71, "copy_file_range": 285, "splice": 76, "tee": 77,
        "openat": 56, "open_by_handle_at": 265, "openat2": 437, "mkdirat": 34, "mknodat": 33,
        "symlinkat": 36, "linkat": 37, "unlinkat": 35, "renameat": 38, "renameat2": 276, "truncate": 45,
        "setxattr": 5, "lsetxattr": 6, "removexattr": 14, "lremovexattr": 15, "fchmodat": 53,
        "fchownat": 54, "fchmod": 52, "fchown": 55, "fsetxattr": 7, "fremovexattr": 16, "mmap": 222,
        "ioctl": 29, "bind": 200, "io_uring_setup": 425, "process_vm_writev": 271, "ptrace": 117,
        "mount": 40, "umount2": 39, "pivot_root": 41, "move_mount": 429, "fsmount": 432, "open_tree": 428,
        "fsconfig": 431, "mount_setattr": 442, "swapon": 224, "swapoff": 225, "acct": 89, "quotactl": 60,
        "quotactl_fd": 443, "shmat": 196, "shmdt": 197, "shmctl": 195, "semop": 193, "semctl": 191,
        "msgsnd": 189, "msgrcv": 188, "msgctl": 187, "mq_open": 180, "mq_unlink": 181, "io_submit": 2,
        "setns": 268, "unshare": 97, "utimensat": 88, "semtimedop": 192, "mq_timedsend": 182,
        "mq_timedreceive": 183, "recvmmsg": 243,
    },
}
# fmt: on


def rules_of(machine: str) -> dict[int, Rule]:
    """The rules by number, for ``platform.machine()``."""
    return {number: RULES[name] for name, number in NUMBERS[machine].items()}
