"""Processes, threads, users, signals, and what the kernel keeps of each."""

from __future__ import annotations

import ctypes
import fcntl
import os
import resource
import shutil
import signal
import struct
import threading
import time
from collections.abc import Callable

from .ground import (
    Kind,
    Refused,
    Wrong,
    child,
    ended_well,
    expect,
    in_child,
    killed,
    libc,
    must,
    number,
    sleeper,
    until,
)


def other_user() -> Kind:
    """A process of another user, with groups and limits of its own, may what it could."""
    os.setgroups([5, 2002])
    resource.setrlimit(resource.RLIMIT_NOFILE, (123, 456))
    os.setresgid(1001, 1001, 1001)
    os.setresuid(1001, 1001, 1001)
    with open("mine", "w") as file:
        file.write("x")
    os.chmod("mine", 0o600)
    yield
    expect("user", os.getresuid(), (1001, 1001, 1001))
    expect("group", os.getresgid(), (1001, 1001, 1001))
    expect("groups", sorted(os.getgroups()), [5, 2002])
    expect("limit", resource.getrlimit(resource.RLIMIT_NOFILE), (123, 456))
    with open("mine") as file:
        expect("own file", file.read(), "x")
    try:
        os.setuid(0)
    except PermissionError:
        return
    raise Wrong("it could become root")


def mixed_user() -> Kind:
    """A process whose real, effective and saved users differ, as after a setuid program."""
    os.setresgid(5, 6, 7)
    os.setresuid(1005, 0, 1007)
    yield
    expect("users", os.getresuid(), (1005, 0, 1007))
    expect("groups", os.getresgid(), (5, 6, 7))
    os.seteuid(1007)
    expect("users after a change", os.getresuid(), (1005, 1007, 1007))


def capabilities() -> Kind:
    """Capabilities that a user keeps (as file capabilities give them), and that root has given up."""
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)
    os.setgroups([])
    must(libc.prctl(8, 1, 0, 0, 0), "keep capabilities")
    must(libc.prctl(24, 5, 0, 0, 0), "drop one for ever")
    os.setresuid(1001, 1001, 1001)
    kept = 1 << 10 | 1 << 7
    must(libc.capset(header, (ctypes.c_uint32 * 6)(kept, kept, 1 << 10, 0, 0, 0)), "capset")
    must(libc.prctl(47, 2, 10, 0, 0), "ambient")
    before = _rights()
    yield
    expect("rights", _rights(), before)
    os.setresuid(1002, 1002, 1002)


def _rights() -> list[str]:
    with open("/proc/self/status") as file:
        return [line.strip() for line in file if line.startswith(("Cap", "NoNewPrivs", "Seccomp:"))]


def limits() -> Kind:
    """Limits of resources, soft and hard."""
    wanted = {
        resource.RLIMIT_NOFILE: (200, 300),
        resource.RLIMIT_CORE: (0, 0),
        resource.RLIMIT_STACK: (4 << 20, 64 << 20),
        resource.RLIMIT_CPU: (1000, 2000),
        resource.RLIMIT_FSIZE: (1 << 30, 1 << 31),
        resource.RLIMIT_NPROC: (400, 500),
        resource.RLIMIT_MEMLOCK: (1 << 16, 1 << 20),
    }
    for limit, values in wanted.items():
        resource.setrlimit(limit, values)
    yield
    for limit, values in wanted.items():
        expect(f"limit {limit}", resource.getrlimit(limit), values)


def scheduling() -> Kind:
    """Niceness and batch scheduling."""
    os.setpriority(os.PRIO_PROCESS, 0, 7)
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    yield
    expect("niceness", os.nice(0), 7)
    expect("scheduling", os.sched_getscheduler(0), os.SCHED_BATCH)


def affinity() -> Kind:
    """The CPUs that a process may run on, and the priority of its disk access."""
    allowed = os.sched_getaffinity(0)
    cpu = {max(allowed)}
    os.sched_setaffinity(0, cpu)
    priority = 3 << 13
    must(
        libc.syscall(251 if os.uname().machine == "x86_64" else 30, 1, 0, priority),
        "ioprio_set",
    )
    yield
    expect("CPUs", os.sched_getaffinity(0), cpu)
    actual = libc.syscall(252 if os.uname().machine == "x86_64" else 31, 1, 0)
    expect("priority of disk access", actual, priority)


def names() -> Kind:
    """Names and settings of a process: prctl, score for the killer of memory."""
    must(libc.prctl(15, b"renamed", 0, 0, 0), "name")
    must(libc.prctl(36, 1, 0, 0, 0), "subreaper")
    must(libc.prctl(1, signal.SIGUSR1, 0, 0, 0), "signal at the parent's end")
    must(libc.prctl(4, 0, 0, 0, 0), "not dumpable")
    must(libc.prctl(4, 1, 0, 0, 0), "dumpable")
    with open("/proc/self/oom_score_adj", "w") as file:
        file.write("321")
    yield
    room = ctypes.create_string_buffer(16)
    libc.prctl(16, room, 0, 0, 0)
    expect("name", room.value, b"renamed")
    value = ctypes.c_int()
    libc.prctl(37, ctypes.byref(value), 0, 0, 0)
    expect("subreaper", value.value, 1)
    libc.prctl(2, ctypes.byref(value), 0, 0, 0)
    expect("signal at the parent's end", value.value, signal.SIGUSR1)
    with open("/proc/self/oom_score_adj") as file:
        expect("score", int(file.read()), 321)


def timer_slack() -> Kind:
    """How late timers of a process may be."""
    must(libc.prctl(29, 123456, 0, 0, 0), "slack of timers")
    yield
    expect("slack of timers", libc.prctl(30, 0, 0, 0, 0), 123456)


def not_dumpable() -> Kind:
    """A process that forbade others to look into it."""
    must(libc.prctl(4, 0, 0, 0, 0), "not dumpable")
    yield
    expect("dumpable", libc.prctl(3, 0, 0, 0, 0), 0)


def system_call_filter() -> Kind:
    """A system call filter of the process's own stays in force."""
    # refuses getppid with error 77 and allows all else
    syscall = 110 if os.uname().machine == "x86_64" else 173
    program = b"".join(
        code.to_bytes(2, "little") + bytes((yes, no)) + value.to_bytes(4, "little")
        for code, yes, no, value in (
            (0x20, 0, 0, 0),
            (0x15, 0, 1, syscall),
            (0x06, 0, 0, 0x5004D),
            (0x06, 0, 0, 0x7FFF0000),
        )
    )
    room = ctypes.create_string_buffer(program)

    class Filter(ctypes.Structure):
        _fields_ = (("length", ctypes.c_ushort), ("program", ctypes.c_void_p))

    given = Filter(4, ctypes.addressof(room))
    must(libc.prctl(38, 1, 0, 0, 0), "no new privileges")
    must(libc.prctl(22, 2, ctypes.byref(given), 0, 0), "a filter")
    yield
    expect("the refused call", (libc.syscall(syscall), ctypes.get_errno()), (-1, 77))


def signals() -> Kind:
    """Handlers, blocked and pending signals, queued ones with their values, another stack for handlers."""
    got: list[int] = []
    signal.signal(signal.SIGUSR1, lambda number, _: got.append(number))
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    held = {signal.SIGUSR1, signal.SIGRTMIN + 3, signal.SIGTERM}
    signal.pthread_sigmask(signal.SIG_BLOCK, held)
    os.kill(os.getpid(), signal.SIGUSR1)
    for value in (11, 22):
        must(libc.sigqueue(os.getpid(), signal.SIGRTMIN + 3, ctypes.c_void_p(value)), "sigqueue")
    yield
    expect("blocked", held <= signal.pthread_sigmask(signal.SIG_BLOCK, ()), True)
    expect("pending", signal.sigpending(), {signal.SIGUSR1, signal.SIGRTMIN + 3})
    expect("ignored", signal.getsignal(signal.SIGHUP), signal.SIG_IGN)
    expect("handled too early", got, [])
    for value in (11, 22):
        info = ctypes.create_string_buffer(128)
        mask = (ctypes.c_ulong * 16)(1 << signal.SIGRTMIN + 2)
        must(libc.sigtimedwait(mask, info, ctypes.create_string_buffer(16)), "the queued signal")
        expect("its value", int.from_bytes(info.raw[24:32], "little"), value)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR1})
    until(lambda: got == [signal.SIGUSR1], "the pending signal")


def stopped() -> Kind:
    """A stopped process stays stopped, and goes on when it is told to."""
    other = child(lambda: time.sleep(0.2))
    os.kill(other, signal.SIGSTOP)
    os.waitpid(other, os.WUNTRACED)
    yield
    with open(f"/proc/{other}/stat") as file:
        expect("its state", file.read().rpartition(")")[2].split()[0], "T")
    os.kill(other, signal.SIGCONT)
    ended_well(other, "the stopped child")


def zombie() -> Kind:
    """Children that have ended and were not waited for, by exit and by a signal."""
    first, second = child(lambda: os._exit(42)), sleeper()
    os.kill(second, signal.SIGKILL)
    os.waitid(os.P_PID, second, os.WEXITED | os.WNOWAIT)
    os.waitid(os.P_PID, first, os.WEXITED | os.WNOWAIT)
    yield
    expect("exit status", os.waitstatus_to_exitcode(os.waitpid(first, 0)[1]), 42)
    expect("signal", os.waitstatus_to_exitcode(os.waitpid(second, 0)[1]), -signal.SIGKILL)


def tree() -> Kind:
    """Parents, groups and sessions of a family; an orphan; a session whose leader is gone."""
    reader, writer = os.pipe()

    def job() -> None:
        os.setpgid(0, 0)
        grandchild = sleeper()

        def lead() -> None:
            os.setsid()
            orphan = sleeper()
            os.write(writer, f"{orphan} ".encode())

        in_child(lead, "a leader that ends")
        os.write(writer, f"{grandchild} ".encode())
        signal.pause()

    first = child(job)
    text = b""
    while text.count(b" ") < 2:
        text += os.read(reader, 100)
    orphan, grandchild = map(int, text.split())

    def look() -> list[tuple[int, ...]]:
        rows = []
        for pid in (first, grandchild, orphan):
            with open(f"/proc/{pid}/stat") as file:
                rows.append(tuple(map(int, file.read().rpartition(")")[2].split()[1:4])))
        return rows

    before = look()
    yield
    expect("parents, groups and sessions", look(), before)
    expect("the job's group", os.getpgid(grandchild), first)
    os.killpg(first, signal.SIGKILL)
    os.kill(orphan, signal.SIGKILL)
    os.waitpid(first, 0)


def threads() -> Kind:
    """Threads with names, masks and affinities of their own, working and waiting for a lock."""
    lock, counts = threading.Lock(), [0, 0]
    lock.acquire()
    facts: dict[int, tuple[object, ...]] = {}
    go = threading.Event()

    def work(place: int) -> None:
        libc.prctl(15, f"worker-{place}".encode(), 0, 0, 0)
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1 if place else signal.SIGUSR2})
        facts[place] = mine()
        while not go.is_set():
            counts[place] += 1
            time.sleep(0.001)
        expect("what the thread knows of itself", mine(), facts[place])
        counts[place] = -1

    def mine() -> tuple[object, ...]:
        room = ctypes.create_string_buffer(16)
        libc.prctl(16, room, 0, 0, 0)
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, ())
        return room.value, frozenset(mask), threading.get_native_id()

    waited: list[int] = []
    several = [threading.Thread(target=work, args=(place,), daemon=True) for place in (0, 1)]

    def wait() -> None:
        lock.acquire()
        waited.append(1)

    several.append(threading.Thread(target=wait, daemon=True))
    for thread in several:
        thread.start()
    until(lambda: min(counts) > 3, "work of both threads")
    yield
    before = list(counts)
    until(
        lambda: all(now > then + 3 for now, then in zip(counts, before, strict=True)),
        "further work of both threads",
    )
    expect("whether the lock was got", waited, [])
    lock.release()
    until(lambda: waited, "the lock")
    go.set()
    until(lambda: counts == [-1, -1], "the end of both threads")


def shared_mutex() -> Kind:
    """A robust mutex in shared memory: its holder dies, and who waits is told."""
    import mmap

    room = mmap.mmap(-1, 4096)
    mutex = ctypes.c_void_p(ctypes.addressof(ctypes.c_char.from_buffer(room)))
    how = ctypes.create_string_buffer(64)
    libc.pthread_mutexattr_init(how)
    libc.pthread_mutexattr_setpshared(how, 1)
    libc.pthread_mutexattr_setrobust(how, 1)
    libc.pthread_mutex_init(mutex, how)

    def hold() -> None:
        libc.pthread_mutex_lock(mutex)
        room[200] = 1
        signal.pause()

    def wait() -> None:
        expect("what who waits is told", libc.pthread_mutex_lock(mutex), 130)

    holder = child(hold)
    until(lambda: room[200], "the holder")
    waiter = child(wait)
    yield
    expect("whether it is held", libc.pthread_mutex_trylock(mutex), 16)
    killed(holder)
    ended_well(waiter, "the process that waits for the mutex")


def parent_waits() -> Kind:
    """A parent that waits for its child, and a thread that waits for a process of its own."""
    reader, writer = os.pipe()

    def wait() -> None:
        inner = child(lambda: os.read(reader, 1))
        ended_well(inner, "the inner child")

    outer = child(wait)
    yield
    os.write(writer, b"x")
    ended_well(outer, "the parent that waits")


def debugged() -> Kind:
    """A process that another one debugs (ptrace)."""
    other = sleeper()
    must(libc.ptrace(0x4206, other, None, None), "ptrace")
    yield
    expect("who debugs it", _tracer(other), os.getpid())
    killed(other)


def _tracer(pid: int) -> int:
    with open(f"/proc/{pid}/status") as file:
        return int(next(line.split()[1] for line in file if line.startswith("TracerPid")))


def environment() -> Kind:
    """Arguments and environment as others see them."""
    with open("/proc/self/cmdline", "rb") as file:
        before = file.read()
    os.environ["CHANGED"] = "yes"
    yield
    with open("/proc/self/cmdline", "rb") as file:
        expect("arguments", file.read(), before)
    expect("a variable", os.environ.get("CHANGED"), "yes")
    in_child(lambda: os.execvp("sh", ["sh", "-c", '[ "$CHANGED" = yes ]']), "a program that inherits it")


def close_on_exec() -> Kind:
    """What a new program inherits after the restore."""
    shut = os.open("/dev/null", os.O_RDONLY)
    stays = os.dup(shut)
    os.set_inheritable(stays, True)
    yield
    expect("flags", (fcntl.fcntl(shut, fcntl.F_GETFD), fcntl.fcntl(stays, fcntl.F_GETFD)), (1, 0))
    expect("threads", number("Threads"), 1)
    script = f"[ -e /proc/self/fd/{stays} ] && ! [ -e /proc/self/fd/{shut} ]"
    in_child(lambda: os.execvp("sh", ["sh", "-c", script]), "a program that inherits descriptors")


def setuid_program() -> Kind:
    """A program that runs as its owner (setuid), started by another user."""
    _gained(lambda program: os.chmod(program, 0o4755), b"uid=0")
    yield


def file_capabilities() -> Kind:
    """A program that has capabilities of its own, started by another user."""
    # version 2, effective; cap_net_bind_service
    rights = struct.pack("<5I", 0x02000001, 1 << 10, 0, 0, 0)
    _gained(lambda program: os.setxattr(program, "security.capability", rights), b"caps=0000000000000400")
    yield


def _gained(give: Callable[[str], None], wanted: bytes) -> None:
    """Refused where a program that was given more than its user has does not get it."""
    program = os.path.realpath("shell")
    shutil.copy(os.path.realpath("/bin/sh"), program)
    os.chmod(program, 0o755)
    give(program)
    reader, writer = os.pipe()

    def run() -> None:
        os.setgroups([])
        os.setresgid(1001, 1001, 1001)
        os.setresuid(1001, 1001, 1001)
        os.dup2(writer, 1)
        os.execv(program, ["sh", "-p", "-c", ASKS])

    ended_well(child(run), "the program")
    if wanted not in os.read(reader, 1000):
        raise Refused("programs get no more than their user has (no new privileges)")


ASKS = """while read -r name first second rest; do
  case $name in Uid:) echo "uid=$second" ;; CapEff:) echo "caps=$first" ;; esac
done < /proc/$$/status"""


def program_in_memory() -> Kind:
    """A program runs from a file in memory."""
    memory = os.memfd_create("program")
    with open("/bin/sleep", "rb") as program:
        os.write(memory, program.read())
    started = child(lambda: os.execv(f"/proc/self/fd/{memory}", ["program-in-memory", "1000"]))
    until(lambda: os.readlink(f"/proc/{started}/exe").startswith("/memfd:"), "the program")
    yield
    expect("the program's end", os.waitpid(started, os.WNOHANG), (0, 0))
    killed(started)
