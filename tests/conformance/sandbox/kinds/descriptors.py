"""Descriptors that are no plain files: pipes, terminals, watches, and what the kernel counts in."""

from __future__ import annotations

import ctypes
import fcntl
import os
import platform
import select
import signal
import struct
import termios
import tty

from .ground import (
    Kind,
    Refused,
    Wrong,
    child,
    ended_well,
    expect,
    killed,
    libc,
    must,
    nothing_to_read,
    readable,
    sleeper,
    until,
)

CREATE, MODIFY = 0x100, 0x2
X86 = platform.machine() == "x86_64"


def pipe() -> Kind:
    """A pipe with data in it, of another size, and one that is full."""
    reader, writer = os.pipe()
    fcntl.fcntl(writer, 1031, 1 << 18)
    os.write(writer, b"unread " * 1000)
    _, full = os.pipe2(os.O_NONBLOCK)
    try:
        while True:
            os.write(full, bytes(4096))
    except BlockingIOError:
        pass
    yield
    expect("its size", fcntl.fcntl(reader, 1032), 1 << 18)
    expect("content", os.read(reader, 7001), b"unread " * 1000)
    nothing_to_read(reader, "the pipe")
    try:
        os.write(full, b"x")
    except BlockingIOError:
        return
    raise Wrong("the full pipe took more")


def pipe_without_reader() -> Kind:
    """A pipe whose other end is closed: its end, and SIGPIPE's error."""
    reader, gone = os.pipe()
    os.write(gone, b"last")
    os.close(gone)
    lost, writer = os.pipe()
    os.close(lost)
    yield
    expect("what is left", os.read(reader, 10), b"last")
    expect("the end", os.read(reader, 10), b"")
    try:
        os.write(writer, b"x")
    except BrokenPipeError:
        return
    raise Wrong("a pipe that nobody reads was written")


def packet_pipe() -> Kind:
    """A pipe of packets (O_DIRECT) keeps their borders."""
    reader, writer = os.pipe2(os.O_DIRECT)
    os.write(writer, b"one")
    os.write(writer, b"second")
    yield
    expect("packets", [os.read(reader, 100), os.read(reader, 100)], [b"one", b"second"])


def named_pipe() -> Kind:
    """A FIFO with data in it, and a child that waits for a writer of another."""
    os.mkfifo("line")
    line = os.open("line", os.O_RDWR)
    os.write(line, b"waiting")
    os.mkfifo("other")

    def wait() -> None:
        with open("other") as file:
            expect("what came", file.read(), "hello")

    waiter = child(wait)
    yield
    expect("content", os.read(line, 100), b"waiting")
    with open("other", "w") as file:
        file.write("hello")
    ended_well(waiter, "the child that waits for a writer")


def eventfd() -> Kind:
    """A counter of events."""
    plain = os.eventfd(7)
    yield
    expect("the counter", os.eventfd_read(plain), 7)


def eventfd_semaphore() -> Kind:
    """A counter of events that is a semaphore."""
    counted = os.eventfd(3, os.EFD_SEMAPHORE | os.EFD_NONBLOCK)
    yield
    expect("the semaphore", [os.eventfd_read(counted) for _ in range(3)], [1, 1, 1])
    nothing_to_read(counted, "the semaphore")


def signalfd() -> Kind:
    """A descriptor of signals, with one pending and one to come."""
    wanted = {signal.SIGUSR1, signal.SIGUSR2}
    signal.pthread_sigmask(signal.SIG_BLOCK, wanted)
    mask = (ctypes.c_ulong * 16)(sum(1 << number - 1 for number in wanted))
    file = must(libc.signalfd(-1, mask, 0), "signalfd")
    os.kill(os.getpid(), signal.SIGUSR1)
    yield
    readable(file, "the pending signal")
    expect("the pending signal", struct.unpack_from("I", os.read(file, 128))[0], signal.SIGUSR1)
    os.kill(os.getpid(), signal.SIGUSR2)
    readable(file, "the next signal")
    expect("the next signal", struct.unpack_from("I", os.read(file, 128))[0], signal.SIGUSR2)


def pidfd() -> Kind:
    """Handles of a living and of an ended process."""
    other, ended = sleeper(), child(lambda: None)
    alive, dead = os.pidfd_open(other), os.pidfd_open(ended)
    readable(dead, "the ended child's handle")
    yield
    nothing_to_read(alive, "the living child's handle")
    readable(dead, "the ended child's handle")
    signal.pidfd_send_signal(alive, signal.SIGKILL)
    readable(alive, "the killed child's handle")
    expect("how it ended", os.waitstatus_to_exitcode(os.waitpid(other, 0)[1]), -signal.SIGKILL)
    os.waitpid(ended, 0)


def pidfd_of_reaped() -> Kind:
    """A handle of a process that was waited for already."""
    ended = child(lambda: None)
    handle = os.pidfd_open(ended)
    os.waitpid(ended, 0)
    yield
    readable(handle, "the handle of a process that is gone")


def inotify() -> Kind:
    """Watches of a folder and of a file tell of what happens next."""
    watch = must(libc.inotify_init1(os.O_NONBLOCK), "inotify_init1")
    with open("file", "w"):
        pass
    os.mkdir("sub")
    marks = [
        must(libc.inotify_add_watch(watch, name, mask), "inotify_add_watch")
        for name, mask in ((b".", CREATE), (b"file", MODIFY), (b"sub", CREATE))
    ]
    yield
    nothing_to_read(watch, "the watch")
    for name in ("made", "file"):
        with open(name, "w") as file:
            file.write("x")
    os.mkdir("sub/x")
    watches: list[int] = []

    def all_reported() -> bool:
        try:
            events = os.read(watch, 4096)
        except BlockingIOError:
            return False
        while events:
            mark, _, _, length = struct.unpack_from("iIII", events)
            watches.append(mark)
            events = events[16 + length :]
        return set(watches) == set(marks)

    until(all_reported, f"the events of all watches ({watches} of {marks})")


def inotify_unread() -> Kind:
    """Events of a watch that were not read yet."""
    watch = must(libc.inotify_init1(os.O_NONBLOCK), "inotify_init1")
    must(libc.inotify_add_watch(watch, b".", CREATE), "inotify_add_watch")
    with open("made", "w"):
        pass
    readable(watch, "the watch")
    yield
    readable(watch, "the watch with an event", 1)
    expect("the event's file", os.read(watch, 4096)[16:20], b"made")


def inotify_of_deleted() -> Kind:
    """A watch of a file that was deleted but is open."""
    file = os.open("gone", os.O_RDWR | os.O_CREAT)
    watch = must(libc.inotify_init1(os.O_NONBLOCK), "inotify_init1")
    must(libc.inotify_add_watch(watch, b"gone", MODIFY), "inotify_add_watch")
    os.unlink("gone")
    while select.select([watch], [], [], 0)[0]:
        os.read(watch, 4096)
    yield
    os.write(file, b"x")
    readable(watch, "the watch of the deleted file", 1)
    expect("the event", struct.unpack_from("iI", os.read(watch, 4096))[1], MODIFY)


def terminal() -> Kind:
    """A pseudo-terminal whose session is led by a child: settings, size, foreground, text under way."""
    yield from _terminal(by_name=False)


def terminal_by_name() -> Kind:
    """A terminal that its session has open as /dev/tty."""
    yield from _terminal(by_name=True)


def _terminal(by_name: bool) -> Kind:
    master, slave = os.openpty()

    def session() -> None:
        os.setsid()
        fcntl.ioctl(slave, termios.TIOCSCTTY, 0)
        os.close(master)
        os.tcsetpgrp(slave, os.getpgrp())
        own = os.open("/dev/tty", os.O_RDWR) if by_name else slave
        os.write(own, b"ready\n")
        text = b""
        while b"end\n" not in text:
            text += os.read(own, 100)
        os.write(own, b"<" + text.replace(b"\n", b"> <") + b">\n")

    leader = child(session)
    os.close(slave)
    until(lambda: select.select([master], [], [], 0)[0], "the session")
    text = b""
    while not text.endswith(b"ready\r\n"):
        text += os.read(master, 100)
    fcntl.ioctl(master, termios.TIOCSWINSZ, struct.pack("HHHH", 33, 99, 0, 0))
    settings = termios.tcgetattr(master)
    settings[3] &= ~termios.ECHO
    termios.tcsetattr(master, termios.TCSANOW, settings)
    yield
    expect("size", struct.unpack("HHHH", fcntl.ioctl(master, termios.TIOCGWINSZ, bytes(8)))[:2], (33, 99))
    expect("settings", termios.tcgetattr(master), settings)
    expect("foreground", os.tcgetpgrp(master), leader)
    os.write(master, b"go on\nend\n")
    text = b""
    while not text.endswith(b"\r\n"):
        readable(master, "the terminal")
        text += os.read(master, 100)
    expect("what the session wrote", text.split(), [b"<go", b"on>", b"<end>", b"<>"])
    ended_well(leader, "the session's leader")


def terminal_raw() -> Kind:
    """A raw pseudo-terminal without a session, with unread text both ways."""
    master, slave = os.openpty()
    tty.setraw(slave)
    os.write(master, b"typed")
    os.write(slave, b"shown")
    readable(slave, "the typed text")
    yield
    readable(slave, "the typed text", 1)
    expect("typed text", os.read(slave, 100), b"typed")
    readable(master, "the shown text", 1)
    expect("shown text", os.read(master, 100), b"shown")


def epoll_nested() -> Kind:
    """An epoll in an epoll, with its users' data, over descriptors of several kinds."""
    inner, outer = select.epoll(), select.epoll()
    event, (reader, writer) = os.eventfd(0), os.pipe()
    inner.register(event, select.EPOLLIN)
    inner.register(reader, select.EPOLLIN)
    outer.register(inner.fileno(), select.EPOLLIN)
    yield
    expect("events", outer.poll(0), [])
    os.eventfd_write(event, 1)
    os.write(writer, b"x")
    expect("the outer one's", outer.poll(5), [(inner.fileno(), select.EPOLLIN)])
    expect("the inner one's", sorted(descriptor for descriptor, _ in inner.poll(0)), sorted((event, reader)))


def epoll_of_closed() -> Kind:
    """An epoll entry whose number was closed while a copy of the file is open."""
    loop, (reader, writer) = select.epoll(), os.pipe()
    loop.register(reader, select.EPOLLIN)
    copy = os.dup(reader)
    os.close(reader)
    yield
    os.write(writer, b"x")
    expect("events", [descriptor for descriptor, _ in loop.poll(1)], [reader])
    os.close(copy)


def proc_files() -> Kind:
    """Open files of /proc and devices."""
    stat, random = os.open("/proc/self/stat", os.O_RDONLY), os.open("/dev/urandom", os.O_RDONLY)
    other = sleeper()
    comm = os.open(f"/proc/{other}/comm", os.O_RDONLY)
    yield
    expect("own pid", int(os.read(stat, 200).split()[0]), os.getpid())
    expect("random bytes", len(os.read(random, 16)), 16)
    expect("another's name", os.read(comm, 10)[:6], b"python")
    killed(other)


def signals_of_io() -> Kind:
    """A pipe that sends a signal when it can be read (O_ASYNC)."""
    got = []
    signal.signal(signal.SIGIO, lambda *_: got.append(1))
    reader, writer = os.pipe()
    fcntl.fcntl(reader, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(reader, fcntl.F_SETFL, os.O_ASYNC | os.O_NONBLOCK)
    yield
    os.write(writer, b"x")
    until(lambda: got, "the signal")


def message_queue() -> Kind:
    """A POSIX message queue with a message."""
    name = f"/windtunnel-{os.getpid()}".encode()
    queue = must(libc.mq_open(name, os.O_CREAT | os.O_RDWR, 0o600, None), "mq_open")
    must(libc.mq_send(queue, b"hello", 5, 3), "mq_send")
    yield
    room = ctypes.create_string_buffer(8192)
    expect("length", libc.mq_receive(queue, room, 8192, None), 5)
    expect("message", room.value, b"hello")


def fanotify() -> Kind:
    """A fanotify group."""
    must(libc.fanotify_init(0x200, os.O_RDONLY), "fanotify_init")
    yield
    raise Wrong("it was not refused, and nothing says how to ask it")


def _made_by(name: str, number: int, *arguments: object) -> Kind:
    """What a system call makes is held, and only that it is still there can be seen from here."""
    descriptor = must(libc.syscall(number, *arguments), name)
    target = os.readlink(f"/proc/self/fd/{descriptor}")
    yield
    expect("the descriptor", os.readlink(f"/proc/self/fd/{descriptor}"), target)


def io_uring() -> Kind:
    """A ring of io_uring."""
    yield from _made_by("io_uring_setup", 425, 8, ctypes.create_string_buffer(120))


def userfaultfd() -> Kind:
    """A userfaultfd of the program's own."""
    yield from _made_by("userfaultfd", 323 if X86 else 282, 1)


def perf_event() -> Kind:
    """A performance counter."""
    what = ctypes.create_string_buffer(struct.pack("IIQ", 1, 112, 0) + bytes(112))
    yield from _made_by("perf_event_open", 298 if X86 else 241, what, 0, -1, -1, 0)


def bpf_map() -> Kind:
    """A BPF map."""
    what = ctypes.create_string_buffer(struct.pack("IIIII", 2, 4, 8, 1, 0) + bytes(108))
    yield from _made_by("bpf", 321 if X86 else 280, 0, what, 128)


def landlock() -> Kind:
    """Access that a process gave up by Landlock stays given up."""
    rules = ctypes.create_string_buffer(struct.pack("Q", 1 << 7))
    ruleset = must(libc.syscall(444, rules, 8, 0), "landlock_create_ruleset")
    must(libc.prctl(38, 1, 0, 0, 0), "no new privileges")
    must(libc.syscall(446, ruleset, 0), "landlock_restrict_self")
    os.close(ruleset)
    yield
    try:
        os.mkdir("made")
    except PermissionError:
        return
    raise Wrong("the process may make folders again")


def asynchronous_io() -> Kind:
    """A context of kernel AIO."""
    context = ctypes.c_ulong(0)
    must(libc.syscall(206 if X86 else 0, 64, ctypes.byref(context)), "io_setup")
    yield
    room = ctypes.create_string_buffer(64)
    wait = ctypes.create_string_buffer(16)
    got = libc.syscall(208 if X86 else 4, context, 0, 1, room, wait)
    expect("events", got, 0)


def namespaces_inside() -> Kind:
    """Namespaces of a process's own inside the sandbox."""
    for flag in (0x10000000, 0x20000, 0x40000000):
        if libc.unshare(flag) == 0:
            break
    else:
        raise Refused(f"unshare: {os.strerror(ctypes.get_errno())}")
    with open("/proc/sys/kernel/hostname") as file:
        before = file.read()
    yield
    with open("/proc/sys/kernel/hostname") as file:
        expect("the host's name", file.read(), before)
