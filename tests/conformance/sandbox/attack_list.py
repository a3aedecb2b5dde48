"""What a hostile program inside a sandbox tries, as data: each attack tells what it reached, or is refused.

An attack is the body of a Python function, run inside by a process of its own, as root or as another user. It
returns, in words, what it reached, and nothing where it reached nothing. An ``OSError`` is a refusal if its
name is one of ``by``; with another one (a wrong argument, a missing file) the attack proves nothing, so it
counts as broken, and so does every other exception. ``check`` names what is looked at from outside (see
``attacks``).
"""

from __future__ import annotations

from dataclasses import dataclass

REFUSED = ("EPERM", "EACCES", "EROFS", "ENOSYS")
ROOT, USER = 0, 1000


@dataclass(frozen=True)
class Attack:
    """``users``: who tries it; ``by``: errors that are refusals; ``killed``: so is being killed, or standing
    still."""

    name: str
    code: str = ""
    users: tuple[int, ...] = (ROOT,)
    by: tuple[str, ...] = REFUSED
    killed: bool = False
    check: str = ""


GONE = ("ENOENT", *REFUSED)
BOTH = (ROOT, USER)

MOUNTS = (
    Attack("mount a new file system", "mount('none', '/mnt', 'tmpfs'); return 'mounted'", BOTH),
    Attack("mount another /proc", "mount('proc', '/mnt', 'proc'); return 'mounted'"),
    Attack("mount sysfs and set uevent_helper", "mount('sys', '/mnt', 'sysfs'); return 'mounted'"),
    Attack("mount a control group hierarchy", "mount('cg', '/mnt', 'cgroup2'); return 'mounted'"),
    Attack("bind over a mask", "mount('/tmp', '/proc/fs', None, 4096); return 'bound'"),
    Attack("make /proc/sys writable", "mount(None, '/proc/sys', None, 32 | 4096); return 'remounted'"),
    Attack("make /dev writable", "mount(None, '/dev', None, 32 | 4096); return 'remounted'"),
    Attack("make the root allow devices", "mount(None, '/', None, 32 | 4096); return 'remounted'"),
    Attack("take a mask off", "libcall('umount2', b'/proc/keys', 2); return 'unmounted'", BOTH),
    Attack("pivot_root", "call(number_of(155, 41), b'/', b'/'); return 'pivoted'"),
    Attack("open_tree of the root", "return f\"descriptor {call(428, -100, b'/', 1)}\""),
    Attack("move_mount", "call(429, -1, b'', -1, b'', 0); return 'moved'"),
    Attack("fsopen", "return f\"descriptor {call(430, b'tmpfs', 0)}\""),
    Attack("mount_setattr", "call(442, -100, b'/dev', 0, bytes(32), 32); return 'changed'"),
    Attack("open a file by its handle", "call(number_of(304, 265), -100, bytes(64), 0); return 'opened'"),
    Attack("overlay of the root", "mount('o', '/mnt', 'overlay', 0, 'lowerdir=/'); return 'mounted'"),
)
ROOTS = (
    Attack(
        "chroot and fchdir out",
        "held = os.open('/', os.O_RDONLY); os.makedirs('/tmp/jail', exist_ok=True)\n"
        "os.chroot('/tmp/jail'); os.fchdir(held)\n"
        "for _ in range(64): os.chdir('..')\n"
        "os.chroot('.'); return secret_of('')",
        by=GONE,
    ),
    Attack("/proc/1/root", "return secret_of('/proc/1/root')", BOTH, GONE),
    Attack("/proc/1/cwd and upwards", "return secret_of('/proc/1/cwd/../../../../..')", BOTH, GONE),
    Attack("/proc/self/root and upwards", "return secret_of('/proc/self/root/../../..')", by=GONE),
    Attack(
        "files of the host by descriptors of init",
        "for fd in os.listdir('/proc/1/fd'):\n"
        "    where = os.readlink(f'/proc/1/fd/{fd}')\n"
        "    if not where.startswith(('/dev/', '/.windtunnel/', 'pipe:', 'anon_inode:')): return where",
    ),
    Attack("path of the host in the table of mounts", "return told_home('/proc/self/mountinfo')", BOTH),
    Attack("path of the host in init's environment", "return told_home('/proc/1/environ')"),
    Attack(
        "the daemon's socket",
        "connect(socket.AF_UNIX, HOME + '/daemon.sock'); return 'connected'",
        BOTH,
        GONE,
    ),
    Attack(
        "hard link to a mask", "os.link('/proc/keys', '/tmp/linked'); return 'linked'", by=("EXDEV", *REFUSED)
    ),
)
DEVICES = (
    Attack("make a disk", "os.mknod('/tmp/disk', 0o60600, os.makedev(254, 0)); return 'made'", BOTH),
    Attack("make /dev/mem", "os.mknod('/tmp/mem', 0o20600, os.makedev(1, 1)); return 'made'"),
    Attack("make a node in /dev", "os.mknod('/dev/x', 0o20600, os.makedev(1, 1)); return 'made'"),
    Attack(
        "memory and log of the kernel",
        "return first_of('/dev/mem', '/dev/kmem', '/dev/kmsg', '/dev/port')",
        by=GONE,
    ),
    Attack("loop devices", "return first_of('/dev/loop-control', '/dev/loop0')", by=GONE),
    Attack("the kernel's memory in /proc/kcore", "return open('/proc/kcore', 'rb').read(64)", by=GONE),
    Attack("addresses in /proc/kallsyms", "return open('/proc/kallsyms').read(64)", by=GONE),
    Attack("keys of others", "return open('/proc/keys').read(64)", by=GONE),
    Attack("the kernel's log", "return open('/proc/kmsg').read(64)", by=GONE),
    Attack("syslog(2)", "call(number_of(103, 116), 3, bytes(64), 64); return 'read'"),
    Attack(
        "mode, owner or time of a device or mask as a message to others",
        "for path in ['/dev/' + name for name in os.listdir('/dev')] + MASKS:\n"
        "    if path in ('/dev/shm', '/dev/pts') or os.path.islink(path): continue\n"
        "    for change in (lambda: os.chmod(path, 0o640),\n"
        "                   lambda: os.chown(path, 5, 5, follow_symlinks=False),\n"
        "                   lambda: os.utime(path, (1, 1), follow_symlinks=False),\n"
        "                   lambda: os.setxattr(path, 'security.capability', CAPABLE)):\n"
        "        try: change()\n"
        "        except OSError as error:\n"
        "            if errno.errorcode[error.errno] not in ('EROFS', 'EPERM', 'EACCES', 'ENOTSUP'): raise\n"
        "        else: return path\n",
        BOTH,
        check="same nodes elsewhere",
    ),
    Attack("a lock on /dev/null as a message to others", check="lock seen elsewhere"),
    Attack(
        "type into a terminal",
        "master, slave = os.openpty(); fcntl.ioctl(slave, 0x5412, b'x'); return 'typed'",
        BOTH,
    ),
    Attack("take the console", "master, slave = os.openpty(); fcntl.ioctl(slave, 0x541D); return 'taken'"),
)
READ_ONLY = (
    "/proc/sys/kernel/core_pattern",
    "/proc/sys/kernel/modprobe",
    "/proc/sys/vm/drop_caches",
    "/proc/sys/net/ipv4/ip_forward",
    "/proc/sysrq-trigger",
    "/proc/irq/default_smp_affinity",
    "/sys/kernel/uevent_helper",
)
SETTINGS = (
    *(Attack(f"write {path}", f"rewrite('{path}'); return 'written'", BOTH, GONE) for path in READ_ONLY),
    Attack("set the host name", "libcall('sethostname', b'x', 1); return 'set'", BOTH),
    Attack("set the clock", "call(number_of(227, 112), 0, bytes(16)); return 'set'"),
    Attack(
        "turn the clock by adjtimex",
        "call(number_of(159, 171), (1).to_bytes(4, 'little') + bytes(204)); return 'set'",
    ),
    Attack("reboot", "call(number_of(169, 142), 0xFEE1DEAD - (1 << 32), 672274793, 0, 0); return 'done'"),
    Attack("swapon", "call(number_of(167, 224), b'/tmp', 0); return 'done'"),
    Attack("quotactl", "call(number_of(179, 60), 0, 0, 0, 0); return 'done'"),
    Attack("accounting of processes", "call(number_of(163, 89), b'/tmp/x'); return 'on'"),
    Attack("load a module", "call(number_of(313, 273), -1, b'', 0); return 'loaded'"),
    Attack("load a module from memory", "call(number_of(175, 105), bytes(64), 64, b''); return 'loaded'"),
    Attack("load another kernel", "call(number_of(246, 104), 0, 0, 0, 0); return 'loaded'"),
)
CALLS = (
    Attack("a key ring", "call(number_of(250, 219), 0, -3); return 'reached'", BOTH),
    Attack("add a key", "call(number_of(248, 217), b'user', b'x', b'y', 1, -3); return 'added'"),
    Attack("a BPF program", "call(number_of(321, 280), 0, bytes(72), 72); return 'loaded'", BOTH),
    Attack(
        "count events of the kernel",
        "call(number_of(298, 241), bytes(112), 0, -1, -1, 0); return 'counted'",
        BOTH,
    ),
    Attack("io_uring", "call(425, 1, bytes(120)); return 'made'", BOTH),
    Attack("userfaultfd", "call(number_of(323, 282), 0); return 'made'", BOTH),
    Attack("watch a file system", "call(number_of(300, 262), 0, 0); return 'made'"),
    Attack("a new user namespace", "call(number_of(272, 97), 0x10000000); return 'made'", BOTH),
    Attack("a new mount namespace", "call(number_of(272, 97), 0x20000); return 'made'", BOTH),
    Attack(
        "clone into namespaces",
        "pid = call(number_of(56, 220), 0x10020011, 0, 0, 0, 0)\nif pid == 0: os._exit(0)\nreturn 'made'",
        BOTH,
    ),
    Attack(
        "clone3 into namespaces",
        "call(435, (0x10000000).to_bytes(8, 'little') + bytes(80), 88); return 'made'",
        BOTH,
    ),
    Attack(
        "enter namespaces of init",
        "libcall('setns', os.open('/proc/1/ns/mnt', os.O_RDONLY), 0); return 'entered'",
        BOTH,
    ),
    Attack(
        "enter by a descriptor of init", "libcall('setns', os.pidfd_open(1), 0x20000000); return 'entered'"
    ),
    Attack("calls of x32", "return str(call(0x40000000 + 39))", BOTH),
    Attack("calls of 32 bits", "return machine_code('b814000000cd80c3')", BOTH),
    Attack(
        "mount under another personality",
        "libcall('personality', 0x0400000 | 0x0008); mount('none', '/mnt', 'tmpfs'); return 'mounted'",
    ),
    Attack("ports of the processor", "call(173, 0x80, 1, 1); return 'allowed'"),
)
PROCESSES = (
    Attack(
        "kill a process of the host",
        "os.kill(VICTIM, 9); return 'killed'",
        BOTH,
        ("ESRCH", *REFUSED),
        check="victim lives",
    ),
    Attack(
        "trace a process of the host",
        "libcall('ptrace', 16, VICTIM, 0, 0); return 'traced'",
        by=("ESRCH", *REFUSED),
    ),
    Attack(
        "a descriptor of a process of the host", "return str(os.pidfd_open(VICTIM))", by=("ESRCH", *REFUSED)
    ),
    Attack("memory of a process of the host", "return vm_read(VICTIM)", by=("ESRCH", *REFUSED)),
    Attack("trace init", "libcall('ptrace', 0x4206, 1, 0, 0); return 'traced'", (USER,)),
    Attack("memory of init", "return vm_read(1)", (USER,)),
    Attack("/proc/1/mem", "return os.open('/proc/1/mem', os.O_RDWR)", (USER,)),
    Attack("a descriptor of init", "return str(call(438, os.pidfd_open(1), 3, 0))", (USER,)),
    Attack("the channel", "return str(os.listdir('/.windtunnel/main'))", (USER,)),
    Attack(
        "send init a request",
        "os.write(os.open('/.windtunnel/requests', os.O_WRONLY), b'x'); return 'sent'",
        (USER,),
    ),
    Attack("be killed last", "overwrite('/proc/self/oom_score_adj', '-1000'); return 'set'", BOTH),
    Attack(
        "a real-time priority",
        "os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(10)); return 'set'",
        BOTH,
    ),
    Attack("a higher priority", "os.nice(-5); return 'set'", BOTH),
    Attack(
        "core files for the host's handler",
        "libcall('setrlimit', 4, struct.pack('QQ', 1 << 20, 1 << 20)); return 'set'",
        BOTH,
    ),
    Attack("other clocks", "overwrite('/proc/self/timens_offsets', 'monotonic 9 0'); return 'set'", by=GONE),
)
RIGHTS = (
    Attack("raise a capability", "return raised()", BOTH),
    Attack(
        "capabilities of a file",
        "program = copied('/usr/bin/cat', 0o755); os.setxattr(program, 'security.capability', CAPABLE)\n"
        "return admin(run_as(1000, program))",
    ),
    Attack(
        "a program that sets its user",
        "program = copied('/usr/bin/cat', 0o4755)\n"
        "status = run_as(1000, program); uid = status.split('Uid:')[1].split()[1]\n"
        "return 'became root' if uid == '0' else ''",
    ),
)
NETWORK = (
    Attack("a raw socket", "socket.socket(socket.AF_INET, socket.SOCK_RAW, 1); return 'made'", BOTH),
    Attack("a packet socket", "socket.socket(socket.AF_PACKET, socket.SOCK_RAW); return 'made'", BOTH),
    Attack("the hypervisor's socket", "socket.socket(40, socket.SOCK_STREAM); return 'made'", BOTH),
    Attack("the kernel's ciphers", "socket.socket(38, socket.SOCK_SEQPACKET); return 'made'", BOTH),
    Attack("take the loopback device down", "return interface_down()", BOTH),
    Attack(
        "forge a line of the audit log",
        "return audited()",
        BOTH,
        ("EPROTONOSUPPORT", "ECONNREFUSED", *REFUSED),
    ),
    Attack("events of the host's devices", "return uevents()", BOTH, ("EPROTONOSUPPORT", *REFUSED)),
    Attack(
        "an abstract socket of the host",
        "connect(socket.AF_UNIX, '\\0' + ABSTRACT); return 'connected'",
        BOTH,
        ("ECONNREFUSED", *REFUSED),
    ),
    Attack(
        "a port of the host",
        "connect(socket.AF_INET, ('127.0.0.1', PORT)); return 'connected'",
        BOTH,
        ("ECONNREFUSED", *REFUSED),
    ),
    Attack(
        "another machine",
        "connect(socket.AF_INET, ('192.0.2.1', 80)); return 'connected'",
        BOTH,
        ("ENETUNREACH", *REFUSED),
    ),
)
LIMITS = (
    Attack(
        "more processes than allowed",
        "started = 0\n"
        "try:\n"
        "    for _ in range(4 * PIDS):\n"
        "        if os.fork() == 0: signal.pause()\n"
        "        started += 1\n"
        "except OSError: pass\n"
        "return f'{started} processes' if started >= PIDS else ''",
    ),
    Attack(
        "more memory than allowed",
        "kind = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE\n"
        "held = mmap.mmap(-1, 2 * MEMORY, kind)\n"
        "for at in range(0, 2 * MEMORY, 1 << 20): held[at : at + (1 << 20)] = b'x' * (1 << 20)\n"
        "return 'held it all'",
        by=("ENOMEM", *REFUSED),
        killed=True,
        check="memory within its limit",
    ),
    Attack(
        "more shared memory than allowed",
        "held = os.open('/dev/shm/x', os.O_RDWR | os.O_CREAT); os.posix_fallocate(held, 0, 300 << 20)\n"
        "return 'held it all'",
        by=("ENOSPC", *REFUSED),
    ),
    Attack("a subvolume of its own", "return subvolume()", BOTH, ("ENOTTY", *REFUSED)),
    Attack("a snapshot of the root inside of it", "return nested_snapshot()", BOTH, ("ENOTTY", *REFUSED)),
    Attack("trees of other sandboxes", "return tree_search()", BOTH, ("ENOTTY", *REFUSED)),
)
OUTSIDE = (
    Attack("put through a link", "relink('/workspace/out', SECRET)", check="put stays inside"),
    Attack("get through a link", "relink('/workspace/in', SECRET)", check="get stays inside"),
    Attack(
        "get a FIFO",
        "os.path.exists('/workspace/fifo') or os.mkfifo('/workspace/fifo')",
        check="get of a FIFO ends",
    ),
    Attack("swap folder and link while the host puts", check="put under a race stays inside"),
    Attack(
        "a library that is loaded into every program",
        "Path('/etc/ld.so.preload').write_text('/tmp/evil.so')",
        check="host loads nothing",
    ),
    Attack("an image with paths that lead out", check="import stays inside"),
    Attack(
        "write files of the image",
        "Path('/usr/bin/tac').write_bytes(b'#!evil')",
        check="image is the same elsewhere",
    ),
    Attack(
        "write a shared page through /proc/self/mem",
        "held = mmap.mmap(os.open('/usr/bin/sum', os.O_RDONLY), 0, mmap.MAP_PRIVATE, mmap.PROT_READ)\n"
        "memory = os.open('/proc/self/mem', os.O_RDWR)\n"
        "os.pwrite(memory, b'#!evil', mapped_at('/usr/bin/sum'))\n"
        "return 'written' if Path('/usr/bin/sum').read_bytes()[:6] == b'#!evil' else ''",
        (USER,),
        check="image is the same elsewhere",
    ),
    Attack(
        "replace init's program",
        "os.unlink('/.windtunnel/init'); shutil.copy('/usr/bin/cat', '/.windtunnel/init')",
        check="init is the same elsewhere",
    ),
    Attack("answers that are forged", check="forged answers end"),
    Attack("files of the channel that are a terabyte long", check="huge files end"),
    Attack("files of the channel become links, FIFOs and folders", check="channel stays inside"),
)
ATTACKS = (
    *MOUNTS, *ROOTS, *DEVICES, *SETTINGS, *CALLS, *PROCESSES, *RIGHTS, *NETWORK, *LIMITS, *OUTSIDE
)  # fmt: skip
