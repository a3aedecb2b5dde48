"""Files, folders and locks."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import struct

from .ground import Kind, Wrong, child, ended_well, expect, in_child, killed, libc, must, sleeper

OFD_SETLK, OFD_GETLK = 37, 36


def _request(kind: int, start: int = 0, length: int = 0) -> bytes:
    """struct flock of 64 bits: type, whence, start, length, pid."""
    return struct.pack("hhqqi4x", kind, os.SEEK_SET, start, length, 0)


def _holder(descriptor: int, start: int, length: int, command: int = fcntl.F_GETLK) -> tuple[int, int]:
    """Kind and owner of the lock that keeps somebody from writing there."""
    answer = fcntl.fcntl(descriptor, command, _request(fcntl.F_WRLCK, start, length))
    kind, _, _, _, owner = struct.unpack("hhqqi4x", answer)
    return kind, owner


def posix_lock() -> Kind:
    """POSIX locks, read and write, on ranges of a file, are held by their process after forks too."""
    file = os.open("data", os.O_RDWR | os.O_CREAT, 0o666)
    os.write(file, bytes(1000))
    fcntl.lockf(file, fcntl.LOCK_EX, 10, 100)
    fcntl.lockf(file, fcntl.LOCK_SH, 1, 500)
    forked = sleeper()
    yield
    me = os.getpid()

    def look() -> None:
        other = os.open("data", os.O_RDWR)
        expect("the write lock", _holder(other, 100, 10), (fcntl.F_WRLCK, me))
        expect("the read lock", _holder(other, 500, 1), (fcntl.F_RDLCK, me))
        expect("what was not locked", _holder(other, 0, 100)[0], fcntl.F_UNLCK)
        try:
            fcntl.lockf(other, fcntl.LOCK_EX | fcntl.LOCK_NB, 10, 100)
        except OSError as busy:
            expect("the refusal", busy.errno in (errno.EAGAIN, errno.EACCES), True)
        else:
            raise Wrong("another process got the lock")

    in_child(look, "locks as another process sees them")
    killed(forked)


def posix_lock_of_child() -> Kind:
    """A POSIX lock of a child, on a file that the parent has open too, is the child's."""
    file = os.open("data", os.O_RDWR | os.O_CREAT, 0o666)
    reader, writer = os.pipe()

    def lock() -> None:
        fcntl.lockf(file, fcntl.LOCK_EX)
        os.write(writer, b"x")
        import signal

        signal.pause()

    owner = child(lock)
    os.read(reader, 1)
    yield
    expect("the owner of the lock", _holder(file, 0, 0), (fcntl.F_WRLCK, owner))
    killed(owner)
    expect("the lock after its owner's end", _holder(file, 0, 0)[0], fcntl.F_UNLCK)


def sqlite_like_locks() -> Kind:
    """Locks as SQLite's WAL has them: shared on one byte of a mapped file, several processes."""
    file = os.open("data-shm", os.O_RDWR | os.O_CREAT, 0o666)
    os.ftruncate(file, 32768)
    mapped = mmap.mmap(file, 32768)
    fcntl.lockf(file, fcntl.LOCK_SH, 1, 128)
    reader, writer = os.pipe()

    def second() -> None:
        own = os.open("data-shm", os.O_RDWR)
        fcntl.lockf(own, fcntl.LOCK_SH, 1, 128)
        mapped[0:5] = b"child"
        os.write(writer, b"x")
        import signal

        signal.pause()

    other = child(second)
    os.read(reader, 1)
    yield

    def look() -> None:
        own = os.open("data-shm", os.O_RDWR)
        expect("the shared lock", _holder(own, 128, 1)[0], fcntl.F_RDLCK)

    in_child(look, "locks while both live")
    killed(other)
    in_child(look, "locks while only the first lives")
    expect("the shared memory", mapped[0:5], b"child")


def lock_by_device() -> Kind:
    """A POSIX lock is on a file that is known by its device number, as SQLite knows files."""
    file = os.open("data", os.O_RDWR | os.O_CREAT, 0o666)
    fcntl.lockf(file, fcntl.LOCK_EX)
    device = os.fstat(file).st_dev
    yield
    expect("the device number", os.fstat(file).st_dev, device)


def ofd_lock() -> Kind:
    """A lock of an open file (OFD), shared with a child, stays until both have closed it."""
    file = os.open("data", os.O_RDWR | os.O_CREAT, 0o666)
    fcntl.fcntl(file, OFD_SETLK, _request(fcntl.F_WRLCK, 7, 3))
    other = sleeper()
    yield

    def look() -> None:
        own = os.open("data", os.O_RDWR)
        expect("the lock", _holder(own, 7, 3, OFD_GETLK)[0], fcntl.F_WRLCK)

    in_child(look, "the lock of the open file")
    os.close(file)
    in_child(look, "the lock while the child has the file open")
    killed(other)


def flock() -> Kind:
    """flock, exclusive and shared, is held, also through a descriptor that a child inherited."""
    exclusive = os.open("one", os.O_RDWR | os.O_CREAT, 0o666)
    fcntl.flock(exclusive, fcntl.LOCK_EX)
    shared = os.open("two", os.O_RDWR | os.O_CREAT, 0o666)
    fcntl.flock(shared, fcntl.LOCK_SH)
    other = sleeper()
    yield

    def refused(name: str, kind: int) -> None:
        own = os.open(name, os.O_RDWR)
        try:
            fcntl.flock(own, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            return
        raise Wrong(f"another process got the lock of {name}")

    refused("one", fcntl.LOCK_SH)
    refused("two", fcntl.LOCK_EX)
    fcntl.flock(os.open("two", os.O_RDWR), fcntl.LOCK_SH | fcntl.LOCK_NB)
    os.close(exclusive)
    refused("one", fcntl.LOCK_SH)
    killed(other)


def waits_for_lock() -> Kind:
    """A process that waits for a lock gets it when it becomes free."""
    file = os.open("data", os.O_RDWR | os.O_CREAT, 0o666)
    fcntl.flock(file, fcntl.LOCK_EX)

    def wait() -> None:
        own = os.open("data", os.O_RDWR)
        os.close(file)
        fcntl.flock(own, fcntl.LOCK_EX)
        with open("got", "w"):
            pass

    waiter = child(wait)
    yield
    expect("whether it has the lock already", os.path.exists("got"), False)
    fcntl.flock(file, fcntl.LOCK_UN)
    ended_well(waiter, "the process that waits")
    expect("whether it got the lock", os.path.exists("got"), True)


def lease() -> Kind:
    """A lease on a file is held."""
    with open("data", "w"):
        pass
    file = os.open("data", os.O_RDONLY)
    fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_RDLCK)
    yield
    expect("the lease", fcntl.fcntl(file, fcntl.F_GETLEASE), fcntl.F_RDLCK)


def open_file() -> Kind:
    """Position, mode and flags of open files, shared between copies and a child."""
    with open("data", "wb") as output:
        output.write(bytes(range(200)))
    file = os.open("data", os.O_RDWR)
    os.lseek(file, 50, os.SEEK_SET)
    copy, alone = os.dup(file), os.open("data", os.O_RDWR | os.O_APPEND | os.O_NONBLOCK)
    held = os.open("data", os.O_PATH)
    fcntl.fcntl(copy, fcntl.F_SETFD, fcntl.FD_CLOEXEC)
    yield
    expect("what is read next", os.read(copy, 2), b"\x32\x33")
    expect("the shared position", os.lseek(file, 0, os.SEEK_CUR), 52)
    flags = fcntl.fcntl(alone, fcntl.F_GETFL)
    expect("flags", flags & (os.O_APPEND | os.O_NONBLOCK), os.O_APPEND | os.O_NONBLOCK)
    expect("close-on-exec", fcntl.fcntl(copy, fcntl.F_GETFD), fcntl.FD_CLOEXEC)
    expect("O_PATH", fcntl.fcntl(held, fcntl.F_GETFL) & os.O_PATH, os.O_PATH)
    os.write(alone, b"end")
    expect("size", os.fstat(held).st_size, 203)


def folder_half_read() -> Kind:
    """A folder that was half read is read to its end."""
    for name in range(3000):
        with open(f"file-{name:05}", "w"):
            pass
    listing = os.scandir(".")
    names = {next(listing).name for _ in range(1000)}
    yield
    rest = [entry.name for entry in listing]
    expect("names seen twice", len(names & set(rest)), 0)
    expect("names in all", len(names) + len(rest), 3000)


def deleted_file() -> Kind:
    """A deleted file stays readable and writable through its descriptor, and through a second one."""
    file = os.open("gone", os.O_RDWR | os.O_CREAT, 0o600)
    os.write(file, b"kept" * 1000)
    again = os.open("gone", os.O_RDONLY)
    os.unlink("gone")
    yield
    expect("content", os.pread(file, 4000, 0), b"kept" * 1000)
    os.pwrite(file, b"more", 0)
    expect("content through the second descriptor", os.pread(again, 4, 0), b"more")
    expect("whether the name is back", os.path.exists("gone"), False)
    expect("its links", os.fstat(file).st_nlink, 0)


def unnamed_file() -> Kind:
    """A file that never had a name (O_TMPFILE)."""
    file = os.open(".", os.O_RDWR | os.O_TMPFILE, 0o600)
    os.write(file, b"content")
    yield
    expect("content", os.pread(file, 20, 0), b"content")


def deleted_name_of_two() -> Kind:
    """An open file whose name was deleted while another name of it remains."""
    file = os.open("first", os.O_RDWR | os.O_CREAT, 0o666)
    os.write(file, b"both")
    os.link("first", "second")
    os.unlink("first")
    yield
    os.pwrite(file, b"same", 0)
    with open("second") as other:
        expect("the other name's content", other.read(), "same")


def replaced_file() -> Kind:
    """A file that was replaced by another of its name is still the old one to who has it open."""
    file = os.open("name", os.O_RDWR | os.O_CREAT, 0o666)
    os.write(file, b"old")
    with open("new", "w") as output:
        output.write("new")
    os.rename("new", "name")
    yield
    expect("the old one", os.pread(file, 10, 0), b"old")
    with open("name") as other:
        expect("the new one", other.read(), "new")


def renamed_folder() -> Kind:
    """Open files and the working folder of a folder that was renamed."""
    os.mkdir("before")
    file = os.open("before/data", os.O_RDWR | os.O_CREAT, 0o666)
    os.chdir("before")
    os.rename("../before", "../after")
    yield
    expect("the working folder", os.path.basename(os.getcwd()), "after")
    os.write(file, b"x")
    expect("size by name", os.path.getsize("../after/data"), 1)


def deleted_folder() -> Kind:
    """A working folder that was deleted."""
    os.mkdir("gone")
    os.chdir("gone")
    os.rmdir("../gone")
    yield
    expect("entries of the deleted folder", os.listdir("."), [])
    try:
        os.getcwd()
    except FileNotFoundError:
        return
    raise Wrong("the deleted working folder has a name again")


def folder_made_anew() -> Kind:
    """A deleted folder is the working folder, and another one has its name."""
    os.mkdir("folder")
    os.chdir("folder")
    os.rmdir("../folder")
    os.mkdir("../folder")
    yield
    expect("names in the deleted folder", os.listdir("."), [])
    expect("the folder of that name", os.path.isdir(os.readlink("/proc/self/cwd").partition(" (")[0]), True)


def chroot() -> Kind:
    """A child with a root folder of its own (chroot)."""
    os.mkdir("root")
    with open("root/inside", "w") as output:
        output.write("yes")
    ready, go = os.pipe(), os.pipe()

    def rooted() -> None:
        must(libc.chroot(b"root"), "chroot")
        os.chdir("/")
        os.write(ready[1], b"x")
        os.read(go[0], 1)
        expect("what lies in its root", os.listdir("/"), ["inside"])

    other = child(rooted)
    os.read(ready[0], 1)
    yield
    os.write(go[1], b"x")
    ended_well(other, "the child with a root of its own")


def umask() -> Kind:
    """The mask of new files."""
    os.umask(0o137)
    yield
    with open("made", "w"):
        pass
    expect("mode of a new file", os.stat("made").st_mode & 0o777, 0o640)


def sparse_and_attributes() -> Kind:
    """Holes, extended attributes and times of files."""
    file = os.open("sparse", os.O_RDWR | os.O_CREAT, 0o666)
    os.pwrite(file, b"end", 100 << 20)
    os.setxattr("sparse", "user.note", b"kept")
    os.utime("sparse", ns=(123456789, 987654321))
    yield
    expect("attribute", os.getxattr("sparse", "user.note"), b"kept")
    expect("time", os.stat("sparse").st_mtime_ns, 987654321)
    expect("size", os.fstat(file).st_size, (100 << 20) + 3)
    if os.fstat(file).st_blocks * 512 > 1 << 20:
        raise Wrong(f"the holes were filled: {os.fstat(file).st_blocks * 512} bytes")
