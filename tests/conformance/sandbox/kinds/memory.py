"""Memory: private, shared, of files and of none, with its protection and advice."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import struct
from hashlib import sha256

from .ground import (
    ASKED_SECONDS,
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
    sleeper,
    until,
)

PAGE = mmap.PAGESIZE
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long)
libc.shmat.restype = ctypes.c_void_p
libc.sem_open.restype = ctypes.c_void_p


def private() -> Kind:
    """Memory that was written, copied on write, or never touched."""
    data, untouched = bytearray(os.urandom(8 << 20)), mmap.mmap(-1, 64 << 20, mmap.MAP_PRIVATE)
    mark = sha256(data).digest()
    other = child(lambda: expect("the child's copy", sha256(data).digest(), mark))
    ended_well(other, "the child")
    untouched[5 << 20] = 7
    yield
    expect("content", sha256(data).digest(), mark)
    expect("one byte in the middle of nothing", (untouched[5 << 20], sum(untouched[: 1 << 20])), (7, 0))


def shared_anonymous() -> Kind:
    """Memory that a parent and a child share."""
    common = mmap.mmap(-1, 1 << 20)
    common[:5] = b"hello"

    reader, writer = os.pipe()

    def echo() -> None:
        os.read(reader, 1)
        expect("what the child sees", (common[:5], common[10]), (b"again", 1))
        common[20] = 2

    other = child(echo)
    yield
    expect("content", common[:5], b"hello")
    common[:5] = b"again"
    common[10] = 1
    os.write(writer, b"x")
    ended_well(other, "the child that shares it")
    expect("the child's mark", common[20], 2)


def shared_file() -> Kind:
    """A writable mapping of a file: both sides see what is written."""
    file = os.open("data", os.O_RDWR | os.O_CREAT, 0o666)
    os.ftruncate(file, 1 << 20)
    mapped = mmap.mmap(file, 1 << 20)
    mapped[100:105] = b"first"
    own = mmap.mmap(file, 1 << 20, mmap.MAP_PRIVATE)
    own[200:207] = b"private"
    yield
    expect("content", mapped[100:105], b"first")
    expect("the private change", own[200:207], b"private")
    mapped[300:306] = b"second"
    with open("data", "rb") as again:
        content = again.read()
    expect(
        "in the file", (content[100:105], content[200:207], content[300:306]), (b"first", bytes(7), b"second")
    )


def deleted_mapping() -> Kind:
    """A mapping of a deleted file that two processes share."""
    file = os.open("gone", os.O_RDWR | os.O_CREAT, 0o666)
    os.ftruncate(file, 1 << 16)
    mapped = mmap.mmap(file, 1 << 16)
    mapped[:4] = b"kept"
    os.close(file)
    os.unlink("gone")
    other = child(lambda: until(lambda: mapped[8] == 1, "the parent's mark", ASKED_SECONDS))
    yield
    expect("content", mapped[:4], b"kept")
    mapped[8] = 1
    ended_well(other, "the child that shares it")


def posix_shared_memory() -> Kind:
    """A segment of /dev/shm, mapped by two processes, and a deleted one."""
    name = f"/dev/shm/windtunnel-{os.getpid()}"
    file = os.open(name, os.O_RDWR | os.O_CREAT, 0o600)
    os.ftruncate(file, 1 << 16)
    mapped = mmap.mmap(file, 1 << 16)
    mapped[:4] = b"here"
    lost = os.open(name + "-gone", os.O_RDWR | os.O_CREAT, 0o600)
    os.write(lost, b"gone")
    os.unlink(name + "-gone")
    other = child(lambda: until(lambda: mapped[8] == 1, "the parent's mark", ASKED_SECONDS))
    yield
    expect("content", mapped[:4], b"here")
    expect("the deleted one", os.pread(lost, 10, 0), b"gone")
    mapped[8] = 1
    ended_well(other, "the child that shares it")
    with open(name, "rb") as again:
        expect("by its name", again.read(4), b"here")
    os.unlink(name)


def posix_semaphore() -> Kind:
    """A named semaphore with a process that waits for it."""
    name = f"/windtunnel-{os.getpid()}".encode()
    semaphore = ctypes.c_void_p(libc.sem_open(name, os.O_CREAT, 0o600, 2))
    other = child(lambda: [libc.sem_wait(semaphore) for _ in range(4)])
    until(lambda: _value(semaphore) == 0, "the first two")
    yield
    for _ in range(2):
        libc.sem_post(semaphore)
    ended_well(other, "the process that waits")
    expect("its value", _value(semaphore), 0)
    libc.sem_unlink(name)


def _value(semaphore: ctypes.c_void_p) -> int:
    value = ctypes.c_int()
    libc.sem_getvalue(semaphore, ctypes.byref(value))
    return value.value


def system_v_memory() -> Kind:
    """System V shared memory: attached twice, attached by nobody, and marked for removal."""
    segments = [must(libc.shmget(0, 1 << 16, 0o600 | 0o1000), "shmget") for _ in range(3)]
    used, idle, doomed = segments
    at = libc.shmat(used, None, 0)
    ctypes.memmove(at, b"hello", 5)
    there = libc.shmat(idle, None, 0)
    ctypes.memmove(there, b"alone", 5)
    libc.shmdt(ctypes.c_void_p(there))
    last = libc.shmat(doomed, None, 0)
    ctypes.memmove(last, b"doomed", 6)
    libc.shmctl(doomed, 0, None)
    other = child(
        lambda: until(lambda: ctypes.string_at(at + 8, 1) == b"x", "the parent's mark", ASKED_SECONDS)
    )
    yield
    expect("content", ctypes.string_at(at, 5), b"hello")
    ctypes.memmove(at + 8, b"x", 1)
    ended_well(other, "the child that shares it")
    again = libc.shmat(idle, None, 0)
    expect("what nobody had attached", ctypes.string_at(again, 5), b"alone")
    expect("what is marked for removal", ctypes.string_at(last, 6), b"doomed")
    libc.shmdt(ctypes.c_void_p(last))
    expect("whether it is removed after all", libc.shmctl(doomed, 2, ctypes.create_string_buffer(256)), -1)
    for segment in (used, idle):
        libc.shmctl(segment, 0, None)


def system_v_semaphore() -> Kind:
    """System V semaphores with their values, and a process that waits."""
    semaphores = must(libc.semget(0, 2, 0o600 | 0o1000), "semget")
    must(libc.semctl(semaphores, 0, 16, 5), "semctl")
    less = ctypes.create_string_buffer(struct.pack("Hhh", 1, -1, 0))
    other = child(lambda: _taken(semaphores, less))
    yield
    expect("value", libc.semctl(semaphores, 0, 12), 5)
    more = ctypes.create_string_buffer(struct.pack("Hhh", 1, 1, 0))
    must(libc.semop(semaphores, more, 1), "semop")
    ended_well(other, "the process that waits")
    libc.semctl(semaphores, 0, 0)


def _taken(semaphores: int, less: ctypes.Array[ctypes.c_char]) -> None:
    """Linux may end this call by a stop of the process (signal(7)), so it is made until it succeeds."""
    while libc.semop(semaphores, less, 1) < 0:
        expect("semop", ctypes.get_errno(), errno.EINTR)


def system_v_semaphore_undo() -> Kind:
    """A System V semaphore that is given back when its process ends (SEM_UNDO)."""
    semaphore = must(libc.semget(0, 1, 0o600 | 0o1000), "semget")
    must(libc.semctl(semaphore, 0, 16, 1), "semctl")
    reader, writer = os.pipe()

    def take() -> None:
        must(
            libc.semop(semaphore, ctypes.create_string_buffer(struct.pack("Hhh", 0, -1, 0x1000)), 1), "semop"
        )
        os.write(writer, b"x")
        libc.pause()

    other = child(take)
    os.read(reader, 1)
    yield
    expect("value while it is taken", libc.semctl(semaphore, 0, 12), 0)
    killed(other)
    value = libc.semctl(semaphore, 0, 12)
    libc.semctl(semaphore, 0, 0)
    expect("value after its holder's end", value, 1)


def system_v_messages() -> Kind:
    """A System V message queue with messages of two types."""
    messages = must(libc.msgget(0, 0o600 | 0o1000), "msgget")
    for kind, text in ((2, b"second"), (1, b"first")):
        must(libc.msgsnd(messages, struct.pack("l", kind) + text, len(text), 0), "msgsnd")
    yield
    room = ctypes.create_string_buffer(108)
    for kind, text in ((1, b"first"), (2, b"second")):
        expect("length", libc.msgrcv(messages, room, 100, ctypes.c_long(kind), 0o4000), len(text))
        expect("message", room.raw[8 : 8 + len(text)], text)
    libc.msgctl(messages, 0, None)


def memfd() -> Kind:
    """Memory with a descriptor: open, mapped, and sealed."""
    file = os.memfd_create("plain")
    os.write(file, b"content")
    mapped = mmap.mmap(file, 7)
    sealed = os.memfd_create("sealed", os.MFD_ALLOW_SEALING)
    os.write(sealed, b"final")
    fcntl.fcntl(sealed, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK)
    seals = fcntl.fcntl(sealed, fcntl.F_GET_SEALS)
    other = sleeper()
    yield
    mapped[:1] = b"C"
    expect("content", os.pread(file, 10, 0), b"Content")
    with open(f"/proc/{other}/fd/{file}", "rb") as again:
        expect("content as a child sees it", again.read(), b"Content")
    expect("the sealed content", os.pread(sealed, 10, 0), b"final")
    expect("seals", fcntl.fcntl(sealed, fcntl.F_GET_SEALS), seals)
    expect("its name", os.readlink(f"/proc/self/fd/{file}"), "/memfd:plain (deleted)")
    killed(other)


def secret_memory() -> Kind:
    """Memory that nobody else may read (memfd_secret)."""
    file = must(libc.syscall(447, 0), "memfd_secret")
    os.ftruncate(file, PAGE)
    mapped = mmap.mmap(file, PAGE)
    mapped[:6] = b"secret"
    yield
    expect("content", mapped[:6], b"secret")


def huge_pages() -> Kind:
    """Memory of huge pages, where the host has some set aside."""
    at = libc.mmap(None, 2 << 20, 3, 0x40022, -1, 0)
    if at in (None, ctypes.c_void_p(-1).value):
        raise Refused(f"huge pages: {os.strerror(ctypes.get_errno())}")
    ctypes.memmove(at, b"huge", 4)
    yield
    expect("content", ctypes.string_at(at, 4), b"huge")


def transparent_huge_pages() -> Kind:
    """Memory that the kernel may make of huge pages, as it was advised."""
    room = mmap.mmap(-1, 8 << 20, mmap.MAP_PRIVATE)
    room.madvise(mmap.MADV_HUGEPAGE)
    room[:] = bytes(range(256)) * (8 << 12)
    yield
    expect("content", room[:] == bytes(range(256)) * (8 << 12), True)
    expect("advice", "hg" in _flags(room), True)


def advice_and_locks() -> Kind:
    """mlock, MADV_DONTFORK and MADV_DONTDUMP."""
    rooms = [mmap.mmap(-1, PAGE * 3, mmap.MAP_PRIVATE) for _ in range(3)]
    for number, room in enumerate(rooms):
        room[:] = bytes([number + 1]) * len(room)
    must(libc.mlock(_address(rooms[0]), ctypes.c_size_t(PAGE)), "mlock")
    rooms[1].madvise(mmap.MADV_DONTFORK)
    rooms[2].madvise(mmap.MADV_DONTDUMP)
    yield
    for number, (room, flag) in enumerate(zip(rooms, ("lo", "dc", "dd"), strict=True)):
        expect("content", room[:] == bytes([number + 1]) * len(room), True)
        expect(f"the flag {flag}", flag in _flags(room), True)


def wiped_on_fork() -> Kind:
    """Memory that a child finds empty (MADV_WIPEONFORK), as random number generators use it."""
    room = mmap.mmap(-1, PAGE, mmap.MAP_PRIVATE)
    room.madvise(18)
    room[:4] = b"seed"
    yield
    expect("content", room[:4], b"seed")
    in_child(lambda: expect("the child's", room[:4], bytes(4)), "the child that finds it empty")


def protection() -> Kind:
    """Pages that may not be touched, or not be written."""
    room = mmap.mmap(-1, PAGE * 4, mmap.MAP_PRIVATE)
    room[:] = b"x" * len(room)
    at = _address(room).value or 0
    for page, flags in ((1, 0), (2, 1)):
        must(libc.mprotect(ctypes.c_void_p(at + page * PAGE), ctypes.c_size_t(PAGE), flags), "mprotect")
    yield
    with open("/proc/self/maps") as file:
        modes = {line.split("-")[0].lstrip("0"): line.split()[1] for line in file}
    expect("no access", modes.get(f"{at + PAGE:x}"), "---p")
    expect("read only", modes.get(f"{at + 2 * PAGE:x}"), "r--p")
    expect("content", ctypes.string_at(at + 2 * PAGE, 3), b"xxx")


def guard_pages() -> Kind:
    """Guard pages that were put in by advice (MADV_GUARD_INSTALL)."""
    room = mmap.mmap(-1, PAGE * 4, mmap.MAP_PRIVATE)
    room[:] = b"x" * len(room)
    at = _address(room).value or 0
    if libc.madvise(ctypes.c_void_p(at + PAGE), ctypes.c_size_t(PAGE), 102):
        raise Refused(f"madvise: {os.strerror(ctypes.get_errno())}")
    yield

    def touch() -> None:
        ctypes.string_at(at + PAGE, 1)

    import resource

    def quietly() -> None:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        touch()

    _, status = os.waitpid(child(quietly), 0)
    if not os.WIFSIGNALED(status):
        raise Wrong("the guarded page can be read")
    expect("content beside it", ctypes.string_at(at, 1) + ctypes.string_at(at + 2 * PAGE, 1), b"xx")


def stack_and_heap() -> Kind:
    """A deep stack, and a heap that grows further."""
    got: list[int] = []

    def deep(level: int) -> Kind:
        if level:
            yield from deep(level - 1)
        else:
            yield
        got.append(level)

    yield from deep(300)
    expect("the way back", got, list(range(301)))
    bytearray(32 << 20)


def _address(room: mmap.mmap) -> ctypes.c_void_p:
    return ctypes.c_void_p(ctypes.addressof(ctypes.c_char.from_buffer(room)))


def _flags(room: mmap.mmap) -> list[str]:
    """VmFlags of the mapping that begins where ``room`` does."""
    start = f"{_address(room).value or 0:x}-"
    inside = False
    with open("/proc/self/smaps") as file:
        for line in file:
            inside = line.lstrip("0").startswith(start) if "-" in line.split()[0] else inside
            if inside and line.startswith("VmFlags:"):
                return line.split()[1:]
    raise Wrong("the mapping is gone")
