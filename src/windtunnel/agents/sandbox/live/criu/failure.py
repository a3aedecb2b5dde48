"""Why CRIU refused, in one sentence: which process, what resource, and what to do.

CRIU says it in its log, in its own words and in the middle of lines that are harmless or only follow from
others. ``explain_dump`` and ``explain_restore`` take the first line that is known and name the process by its
command; a line that nothing knows is handed on as it is.

The patterns are those of CRIU 4.1 and 4.2 (criu/*.c). In a sentence ``{0}`` is the pattern's first group,
``{0:family}`` and the like its translation, and ``{line}`` the whole line; a sentence of ``DUMP`` follows the
name of the process. The first line of a log that is known decides, and the first pattern that fits it.
"""

from __future__ import annotations

import re

from windtunnel.linux import processes

FAMILIES = {
    "38": "a kernel crypto socket (AF_ALG)",
    "40": "a virtual machine socket (AF_VSOCK)",
    "44": "an express data path socket (AF_XDP)",
    "31": "a Bluetooth socket",
    "29": "a CAN bus socket",
}
ANONYMOUS = {
    "perf_event": "a performance counter (perf_event)",
    "userfaultfd": "a userfaultfd descriptor",
    "io_uring": "an io_uring ring",
    "landlock-ruleset": "a Landlock rule set",
    "bpf-prog": "a BPF program",
    "bpf-map": "a BPF map",
    "bpf_link": "a BPF link",
    "fscontext": "a half-made mount",
    "seccomp notify": "a seccomp listener",
    "sync_file": "a GPU fence",
    "dmabuf": "a GPU buffer",
    "kvm-vm": "a virtual machine (KVM)",
    "kvm-vcpu": "a virtual machine (KVM)",
}
DEVICES = {
    "195": "a GPU (/dev/nvidia*)",
    "226": "a GPU (/dev/dri)",
    "510": "a GPU (/dev/nvidia-uvm)",
    "10:200": "a network tunnel (/dev/net/tun)",
    "10:229": "a FUSE file system (/dev/fuse)",
    "10:232": "a virtual machine (/dev/kvm)",
}

DUMP: tuple[tuple[str, str], ...] = (
    (
        r"Can't dump ghost file (\S+) of (\d+) size",
        "holds the deleted file {0} of {1:MB} open, more than the 64 MB that an image takes; let it "
        "close the file, or keep the file's name",
    ),
    (
        r"Can't create link remap for (\S+?)\.? ",
        "holds {0} open, which was deleted while another name of the same file remains; let it close "
        "the file",
    ),
    (
        r"Unknown socket collected \(family (\d+)\)",
        "uses {0:family}, which CRIU cannot keep; let it close that first",
    ),
    (
        r"Sockets \(family (\d+) proto \d+\) are not collected",
        "has a network socket (family {0}) that this CRIU cannot read from this kernel; CRIU 4.2 or "
        "newer is needed from kernel 6.16 on: windtunnel sandbox setup",
    ),
    (
        "Diag module missing|Unexpected inet family|inet: .*(?:[Mm]issing|not supported)",
        "has a network socket that this CRIU cannot read from this kernel; CRIU 4.2 or newer is "
        "needed from kernel 6.16 on: windtunnel sandbox setup",
    ),
    (
        r"of that type \[\d+\] \(anon anon_inode:\[?([^\])]+)\]?\)",
        "holds {0:anonymous}, which CRIU cannot keep; let it close that first",
    ),
    (
        r"of that type \[\d+\] \(chr (\d+:\d+)\)",
        "holds {0:device} open, which CRIU cannot keep; let it close that first",
    ),
    (
        r"Can't dump file \d+ of that type \[\d+\] \(([^)]*)\)",
        "holds a file of a kind that CRIU cannot keep ({0}); let it close that first",
    ),
    (
        r"send_fds failed \(-22\)",
        "holds a descriptor that cannot be handed over, as an io_uring ring is; let it close that first",
    ),
    ("io_uring", "uses io_uring, which CRIU cannot keep; stop it first"),
    (
        r"Unknown shit \d+ \(/secretmem",
        "uses secret memory (memfd_secret), which nobody else may read; stop it first",
    ),
    (
        "Can't handle non-regular mapping|handle_device_vma|Unknown shit",
        "has a device mapped into its memory; stop it first",
    ),
    (r"BPF map type (\d+)|bpfmap", "holds a BPF map, which CRIU cannot keep; let it close that first"),
    (
        r"Can't lookup mount=\d+ for fd=\d+ path=(\S+)",
        "holds {0} open on a file system that no mount inside shows (a message queue, or one "
        "unmounted); let it close that first",
    ),
    (
        r"Open files on overmounted mounts .*path=(\S+)",
        "holds {0} open under a newer mount; unmount that or let it close the file",
    ),
    (
        r"Can't dump nested (\w+) namespace",
        "runs in a {0} namespace of its own inside the sandbox; stop it first",
    ),
    (
        "packetized mode for pipes",
        "holds a pipe of packets (O_DIRECT), which CRIU cannot keep; let it close that first",
    ),
    (
        "ctty inheritance detected",
        "holds /dev/tty open while another process has the same terminal open, which CRIU cannot keep; "
        "let it close that first",
    ),
    (
        "Non-empty write queue on an in-flight socket",
        "has sent something on a unix socket that the other side has not accepted yet; try again when it has",
    ),
    (
        "External socket is used|Can't dump half of stream unix connection",
        "is connected by a unix socket to a process outside the sandbox; let it close that first",
    ),
    (
        "Dangling connection|Can't dump name-less external socket|with(?:out| unreachable) peer",
        "is connected by a unix socket to a process outside the sandbox; let it close that first",
    ),
    (
        "Connected TCP socket|tcp: .*(?:establish|repair)",
        "has an established TCP connection that cannot be kept; let it close that first",
    ),
    (
        r"zombie (?:\d+) \(comm|traced|ptrace.*(?:EPERM|not permitted)|Unable to seize",
        "is being debugged (gdb, strace); end the debugger first",
    ),
    (
        "Can't find suitable path for handle|Can't dump that handle",
        "watches a file by inotify or fanotify that was deleted; let it end the watch",
    ),
    ("fsnotify|fanotify", "watches files in a way that CRIU cannot keep (fanotify); let it end the watch"),
    (
        "Unsupported (?:packet|netlink)|netlink.*(?:callback|in progress|not supported|groups)",
        "has a kernel message socket (netlink) in a state that CRIU cannot keep; let it close that first",
    ),
    (
        r"Unsupported type \(\d+\) on socket|Unsupported (?:proto|socket)|unsupported L4|Unknown pair "
        "family",
        "has a network socket of a kind that CRIU cannot keep; let it close that first",
    ),
    (
        r"FS mnt (\S+) dev|Unable to dump a file system for "
        r"\d+:(\S+)|(?:unsupported|Unsupported).*mount",
        "has a file system mounted (at {0}) that CRIU cannot keep (FUSE, overlay and network ones); "
        "unmount it first",
    ),
    (
        r"doesn't have a proper root mount|Mount \d+ (\S+) \(master_id",
        "has a mount from outside the sandbox (at {0}); unmount it first",
    ),
    (
        r"session leader|A session leader|sid \d+ .*(?:outside|not found)|shell-job",
        "belongs to a session or terminal outside the sandbox; start it inside with setsid and "
        "without that terminal",
    ),
    (
        "SysV|sysv|Can't get .*shm|IPC",
        "uses System V memory or semaphores in a state that CRIU cannot keep; stop it first",
    ),
    ("aio|AIO", "has asynchronous file operations in flight (AIO); try again when they are done"),
    (
        "[Ss]eccomp",
        "has a system call filter that CRIU cannot read; run as root, with a kernel that has "
        "CONFIG_CHECKPOINT_RESTORE",
    ),
    (
        "Individually stopped threads|Zombie thread|Zombies with threads",
        "has a thread that is stopped or ended by itself; try again at the end of its work",
    ),
    (
        "Unable to freeze cgroup|Timeout reached",
        "could not be stopped in time: a process waits in the kernel (a dead disk or network file "
        "system, a debugger)",
    ),
    ("uprobes vma", "is being traced by uprobes; end the tracer first"),
    ("No space left on device", "could not be written: the disk that holds the images is full"),
)

RESTORE: tuple[tuple[str, str], ...] = (
    (
        r"File (\S+) has bad size (\d+) \(expect (\d+)\)",
        "{0} is mapped or open with a size of {2} bytes in the image, but has {1} now; restore the "
        "files of the same checkpoint",
    ),
    (
        r"File (\S+) has bad build-ID",
        "the program or library {0} is another one than at the checkpoint; restore the files of the "
        "same checkpoint",
    ),
    (
        r"File (\S+) has bad mode",
        "{0} has other permissions than at the checkpoint; restore the files of the same checkpoint",
    ),
    (
        r"Can't link (\S+) -> (\S+):",
        "{1} was open but deleted under one of its names at the checkpoint, and CRIU's stand-in {0} "
        "is not among the files",
    ),
    (
        r"Can't open file (\S+?)(?: on restore)?: No such file|Can't (?:open|stat) (\S+): No such",
        "{0} was open at the checkpoint and is missing now; restore the files of the same checkpoint",
    ),
    (
        "chdir|Can't open cwd|Can't change (?:cwd|dir)",
        "the working directory of a process is missing now; restore the files of the same checkpoint",
    ),
    (
        "Can't bind inet socket .*Address already in use|bind.*already in use",
        "a port that a process listens on is still taken in the sandbox's network namespace; end "
        "what uses it or use a fresh namespace",
    ),
    (
        "Can't bind.*Cannot assign requested address",
        "an address that a process uses does not exist in the sandbox's network namespace",
    ),
    ("Unable to mount|Can't mount at|mount-v2", "a mount of the checkpoint could not be made again ({line})"),
    (
        r"(?:Can't|Unable to) fork.*(?:File exists|pid)|Pid \d+ do not match|already exists",
        "a process number of the checkpoint is taken; restore into a pid namespace of its own",
    ),
    (
        "fork.*Resource temporarily unavailable|clone.*Resource temporarily",
        "the sandbox's limit of processes is too low for the tree of the checkpoint plus CRIU's own helpers",
    ),
    (
        "Cannot allocate memory|Can't mmap|exit(?:ed)?,? .*signal 9|killed by signal 9",
        "there was not enough memory, on the machine or within the sandbox's limit",
    ),
    ("No space left on device", "the disk is full"),
    (
        "cpu:|CPU (?:capabilit|feature)",
        "this machine's processor lacks something that the checkpoint's processes use ({line})",
    ),
    (
        "magic|Unknown image|unpack|Bad image|Failed to open (?:image|directory)|inventory",
        "the process image is damaged or incomplete ({line})",
    ),
)


LINE = re.compile(r"^(?:pie: )?(?: *\d+: )?Error \((?P<where>[^)]*)\): (?P<text>.*)$")
HARMLESS = re.compile(r"rlimit: Can't setup|cgroupd: recv req error|Dumping FAILED|Restoring FAILED")
PID = re.compile(
    r"\(pid: (\d+)\)|mapping of (\d+)|(?:zombie|task|detach from|namespace for|PID|ctty pid_real) (\d+)"
)
AFTERMATH = re.compile(
    r"Unable to detach|Unable to kill|failed with -\d|Unexpected (?:exit|child)|is trimmed"
)


def explain_dump(log: str, init: int) -> str:
    """Why a dump failed; ``init`` is the first process of the sandbox, named when the log names none."""
    lines = real_errors(log)
    for line in lines:
        for pattern, sentence in DUMP:
            if found := re.search(pattern, line):
                pid = next((pid for text in lines if (pid := pid_of(text))), 0)
                return f"process image: {who(pid or init)} {_fill(sentence, found, line)}"
    return f"process image: CRIU failed: {lines[0] if lines else _last(log)}"


def explain_restore(log: str) -> str:
    """Why a restore failed."""
    lines = real_errors(log)
    for line in lines:
        for pattern, sentence in RESTORE:
            if found := re.search(pattern, line):
                return f"process restore: {_fill(sentence, found, line)}"
    return f"process restore: CRIU failed: {lines[0] if lines else _last(log)}"


def real_errors(log: str) -> list[str]:
    """The texts of the error lines without repetition, those that only follow from others last."""
    texts: dict[str, None] = {}
    for line in log.splitlines():
        found = LINE.match(line)
        if found and not HARMLESS.search(found["text"]):
            texts[found["text"].strip()] = None
    return sorted(texts, key=lambda text: AFTERMATH.search(text) is not None)


def _last(log: str) -> str:
    """What a log without an error line ends with: CRIU may not even have started."""
    said = [line.strip() for line in log.splitlines() if line.strip() and not HARMLESS.search(line)]
    return said[-1] if said else "it says nothing in its log"


def pid_of(text: str) -> int:
    """The host's pid that a line speaks of; 0 for none."""
    found = PID.search(text)
    return int(next(group for group in found.groups() if group)) if found else 0


def who(pid: int) -> str:
    """``command (process 7)``: the command line and the number inside the sandbox."""
    command, inside = processes.command_line(pid).strip(), processes.inner_pid(pid)
    if not inside:
        return f"process {pid}"
    short = command if len(command) <= 60 else command[:57] + "..."
    return f"{short} (process {inside} inside)"


def _fill(sentence: str, found: re.Match[str], line: str) -> str:
    groups = [group for group in found.groups() if group] or ["?"]

    def value(place: re.Match[str]) -> str:
        if place["name"] == "line":
            return line
        text = groups[min(int(place["name"]), len(groups) - 1)]
        match place["form"]:
            case "MB":
                return f"{int(text) / 1e6:.0f} MB"
            case "family":
                return FAMILIES.get(text, f"a socket of family {text}")
            case "anonymous":
                return next(
                    (name for key, name in ANONYMOUS.items() if key in text), f"a kernel object ({text})"
                )
            case "device":
                return DEVICES.get(text) or DEVICES.get(text.split(":")[0]) or f"the device {text}"
        return text

    return re.sub(r"\{(?P<name>\d|line)(?::(?P<form>\w+))?\}", value, sentence)
