"""The channel between host and sandbox, a folder of the host that is mounted in the sandbox beside its root,
and what comes out of it.

It is no part of the root: a root that is full leaves the sandbox its voice, and what is said is no change of
files. It goes with the processes that hold its files open: what `pack_channel` gives goes beside their image,
and `lay_channel` brings it back before they do.

What lies in a channel or a root belongs to whoever runs inside: any component may become a symbolic link to a
file of the host, a FIFO that never answers, a device or a huge file, also between a check and its use. So
every path is resolved by the kernel with openat2 relative to its folder (in a root ``RESOLVE_IN_ROOT``:
absolute links and ``..`` stay inside; magic links of /proc are refused), opened without blocking, and only
then is what was opened looked at.

A sandbox answers by lines in a shell's ``ack`` FIFO, and by the death of init. The two outputs of a command
are files that the host makes and holds open itself, so whatever happens to their names inside, it reads what
it made and nothing else. A background process may go on writing after the command's end; that is not its
output any more.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import re
import select
import stat
import tarfile
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from windtunnel.agents.sandbox.errors import MachineError, disk_full
from windtunnel.agents.sandbox.files.archive import HOLLOW, receive
from windtunnel.agents.sandbox.files.tree import remove
from windtunnel.agents.sandbox.machine.group import Cgroup, UserProcesses
from windtunnel.agents.sandbox.place import CHANNEL
from windtunnel.base.atomic import write_all
from windtunnel.linux.system import BENEATH, NO_SYMLINKS, NO_XDEV, held, open_inside, punch_hole

FEED_TICK, IDLE = 0.002, 0.1
"""Seconds between two looks: whether a command has opened its input, and whether it has ended."""
BALLAST, BALLAST_BYTES = "ballast", 4 << 20
"""What a channel holds from its beginning, so that commands go on where it is full."""


class ChannelFolder:
    """A folder of the channel, held open. Names in it are single components and never followed."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor

    @classmethod
    def at(cls, path: Path) -> ChannelFolder:
        """A folder of the host. Raises MachineError."""
        try:
            return cls(os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC))
        except OSError as error:
            raise MachineError(f"the sandbox's channel {path} is not usable: {error.strerror}") from error

    def close(self) -> None:
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1

    def folder(self, name: str, *, create: bool) -> ChannelFolder:
        """The folder ``name`` of this one, which must be a true folder. Raises MachineError."""
        if create:
            with contextlib.suppress(FileExistsError):
                os.mkdir(name, 0o700, dir_fd=self.descriptor)
        try:
            return ChannelFolder(self.open(name, os.O_RDONLY | os.O_DIRECTORY))
        except OSError as error:
            raise MachineError(f"the channel's folder {name} is not usable: {error.strerror}") from error

    def open(self, name: str, flags: int, mode: int = 0) -> int:
        safe = os.O_NOFOLLOW | os.O_NONBLOCK
        return open_inside(self.descriptor, name, flags | safe, mode, resolve=BENEATH | NO_SYMLINKS | NO_XDEV)

    def fresh(self, name: str, mode: int = 0o600) -> int:
        """A new, empty file for reading and writing; what had the name is gone."""
        self.remove(name)
        return self.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL, mode)

    def write(self, name: str, data: bytes, mode: int = 0o600) -> None:
        """Put ``data`` under ``name`` in one step."""
        part = f".{name}.part"
        with held(self.fresh(part, mode)) as descriptor:
            write_all(descriptor, data)
        if self.is_folder(name):
            self.remove(name)
        os.rename(part, name, src_dir_fd=self.descriptor, dst_dir_fd=self.descriptor)

    def read(self, name: str, limit: int) -> bytes:
        """At most ``limit`` bytes of the regular file ``name``; nothing when it is none or is absent."""
        try:
            descriptor = self.open(name, os.O_RDONLY)
        except OSError:
            return b""
        with held(descriptor):
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                return b""
            return read_up_to(descriptor, limit)

    def ballast(self) -> None:
        """Room that is taken, so that it can be given back where there is none: to remove a file always
        works. Raises OSError."""
        with held(self.fresh(BALLAST)) as descriptor:
            os.posix_fallocate(descriptor, 0, BALLAST_BYTES)

    def dry(self, name: str) -> None:
        """Give back the room of the regular file ``name``, which keeps its size. Raises OSError."""
        with held(self.open(name, os.O_WRONLY)) as descriptor:
            about = os.fstat(descriptor)
            if stat.S_ISREG(about.st_mode) and about.st_blocks:
                punch_hole(descriptor, 0, about.st_size)

    def fifo(self, name: str) -> int:
        """Make the FIFO ``name`` anew and open it for both directions."""
        self.remove(name)
        os.mkfifo(name, 0o600, dir_fd=self.descriptor)
        return self.existing_fifo(name)

    def existing_fifo(self, name: str) -> int:
        """The FIFO ``name``, open for both directions; OSError when it is anything else."""
        descriptor = self.open(name, os.O_RDWR)
        if not stat.S_ISFIFO(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise OSError(errno.EINVAL, "not a FIFO", name)
        return descriptor

    def remove(self, name: str) -> None:
        """Remove a file, or an empty or planted folder by moving it aside under a name that nobody uses."""
        try:
            os.unlink(name, dir_fd=self.descriptor)
        except FileNotFoundError:
            return
        except IsADirectoryError:
            aside = f".aside.{os.urandom(6).hex()}"
            os.rename(name, aside, src_dir_fd=self.descriptor, dst_dir_fd=self.descriptor)

    def is_folder(self, name: str) -> bool:
        try:
            return stat.S_ISDIR(os.stat(name, dir_fd=self.descriptor, follow_symlinks=False).st_mode)
        except OSError:
            return False

    def identity(self, name: str) -> tuple[int, int] | None:
        """Device and inode of what has the name now."""
        try:
            status = os.stat(name, dir_fd=self.descriptor, follow_symlinks=False)
        except OSError:
            return None
        return status.st_dev, status.st_ino

    def names(self) -> list[str]:
        return os.listdir(self.descriptor)


CHANNEL_TAR = "channel.tar"
"""The channel's name among the files of a process image."""
OUTPUT = re.compile(r"(?:.*/)?(?:out|err)\.[0-9a-f]+")


MOST = 64 * 2**20
"""Bytes that are kept of a channel; its own files are some kilobytes, what a shell says of itself apart."""


def pack_channel(channel: Path) -> bytes:
    """A channel that stands still. What commands said is the host's already: of their outputs only the size
    is kept, on which a restore of who holds them open insists. Raises OSError; MachineError where somebody
    put so much into it that it would not be kept."""
    paths = (os.path.join(folder, name) for folder, _, names in os.walk(channel) for name in names)
    size = sum(os.lstat(path).st_blocks * 512 for path in paths if not OUTPUT.fullmatch(path))
    if size > MOST:
        raise MachineError(
            f"/{CHANNEL} holds {size >> 20} MiB that a command put there; only the host should: remove them"
        )
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as tar:
        tar.add(channel, ".", filter=_emptied)
    return out.getvalue()


def _emptied(member: tarfile.TarInfo) -> tarfile.TarInfo:
    if member.isreg() and (member.name == f"./{BALLAST}" or OUTPUT.fullmatch(member.name)):
        member.pax_headers, member.size = {HOLLOW: str(member.size)}, 0
    return member


def lay_channel(file: Path, channel: Path) -> None:
    """Make ``channel`` what `pack_channel` found, before a restore makes the processes that hold its files.
    Raises OSError, PoolError, MachineError."""
    channel.mkdir(mode=0o700, parents=True, exist_ok=True)
    for entry in channel.iterdir():
        remove(entry)
    with file.open("rb") as source:
        receive(channel, source)
    with contextlib.closing(ChannelFolder.at(channel)) as folder:
        folder.ballast()


def read_up_to(descriptor: int, limit: int) -> bytes:
    """The first ``limit`` bytes of a file, wherever its own position is."""
    pieces: list[bytes] = []
    at = 0
    while at < limit and (piece := os.pread(descriptor, min(limit - at, PIECE), at)):
        pieces.append(piece)
        at += len(piece)
    return b"".join(pieces)


@dataclass(frozen=True)
class Init:
    """Pid 1 of the sandbox as the host holds it."""

    pid: int
    handle: int
    requests: int
    cgroup: Cgroup | UserProcesses

    def alive(self) -> bool:
        poll = select.poll()
        poll.register(self.handle, select.POLLIN)
        return not poll.poll(0)


class Feed:
    """The standard input of one command: a FIFO of the channel, filled by a thread from ``source``.

    It is opened when the command has opened it, and closed where the source ends, which the command sees.
    """

    def __init__(self, folder: ChannelFolder, name: str, source: bytes | IO[bytes]) -> None:
        self._folder, self._name = folder, name
        self._source: Any = io.BytesIO(source) if isinstance(source, bytes) else source
        self._over = threading.Event()
        folder.remove(name)
        os.mkfifo(name, 0o600, dir_fd=folder.descriptor)
        threading.Thread(target=self._fill, name="sandbox-feed", daemon=True).start()

    def end(self) -> None:
        """The command has ended."""
        self._over.set()
        with contextlib.suppress(OSError):
            self._folder.remove(self._name)

    def _fill(self) -> None:
        read = getattr(self._source, "read1", self._source.read)
        with contextlib.suppress(OSError):  # the command or the caller has gone
            while not self._over.wait(FEED_TICK):
                try:
                    descriptor = self._folder.open(self._name, os.O_WRONLY)
                except OSError as error:
                    if error.errno != errno.ENXIO:  # nobody reads yet
                        raise
                    continue
                with held(descriptor):
                    if stat.S_ISFIFO(os.fstat(descriptor).st_mode):
                        while not self._over.is_set() and (piece := read(1 << 16)):
                            self._write(descriptor, memoryview(piece))
                return

    def _write(self, descriptor: int, piece: memoryview) -> None:
        """As long as the command runs: one that it left behind may hold the input and never read it."""
        poll = select.poll()
        poll.register(descriptor, select.POLLOUT)
        while piece and not self._over.is_set():
            if poll.poll(1000 * IDLE):
                with contextlib.suppress(BlockingIOError):
                    piece = piece[os.write(descriptor, piece) :]


WHOLE = 256 * 2**20
"""Bytes of each output that a result holds at most; what comes after them is given back while it runs."""
TAIL = 64 * 2**10
"""Bytes of each output that a result holds of a command whose output was passed on while it ran."""
PIECE = 2**20

OnOutput = Callable[[str, bytes], None]


class CommandOutputs:
    """Standard output and standard error of the command ``token`` of one shell."""

    def __init__(self, folder: ChannelFolder, token: str, on_output: OnOutput | None) -> None:
        self._folder = folder
        self.cut = False
        """Whether what the command wrote last is not here; known with the result."""
        self.names = {"stdout": f"out.{token}", "stderr": f"err.{token}"}
        self._files: dict[str, int] = {}
        self._read = {"stdout": 0, "stderr": 0}
        self._tails = {"stdout": b"", "stderr": b""}
        self._on_output = on_output
        try:
            for stream, name in self.names.items():
                self._files[stream] = folder.fresh(name)
        except BaseException:
            self.close()
            raise

    @property
    def listened(self) -> bool:
        return self._on_output is not None

    @property
    def large(self) -> bool:
        """Whether it grows so fast that it has to be looked at more often."""
        return any(os.fstat(file).st_blocks * 512 > WHOLE // 4 for file in self._files.values())

    def pass_on(self) -> bool:
        """Give what is new to the listener, in pieces; memory and the room in the channel stay bounded.
        False: the listener is slow, and gets the rest later."""
        for stream, file in self._files.items():
            end, begin = os.fstat(file).st_size, self._read[stream]
            if self._on_output is None:
                self._read[stream] = max(end, WHOLE)
                punch_hole(file, max(begin, WHOLE), end)
                continue
            while self._read[stream] < end:
                piece = os.pread(file, min(PIECE, end - self._read[stream]), self._read[stream])
                if not piece:
                    break
                try:
                    self._on_output(stream, piece)
                except BlockingIOError:
                    punch_hole(file, begin, self._read[stream])
                    return False
                self._read[stream] += len(piece)
                self._tails[stream] = (self._tails[stream] + piece)[-TAIL:]
            punch_hole(file, begin, self._read[stream])
        return True

    def _filled(self) -> bool:
        """Whether there is no room for more in the channel."""
        if sum(os.fstat(file).st_blocks for file in self._files.values()) * 512 < PIECE:
            return False
        try:
            with held(self._folder.fresh("probe")) as probe:
                self._folder.remove("probe")
                os.posix_fallocate(probe, 0, PIECE)
        except OSError as error:
            return disk_full(error)
        return False

    def result(self) -> tuple[bytes, bytes, list[str], list[str]]:
        """Both outputs as they are now, notes on what is not in them, and `TurnResult.tails`."""
        while not self.pass_on():
            pass  # the listener has waited a moment each time
        notes: list[str] = []
        tails: list[str] = []
        texts: list[bytes] = []
        for stream, file in self._files.items():
            size = os.fstat(file).st_size
            if self._on_output is not None:
                texts.append(self._tails[stream])
                if self._read[stream] > TAIL:
                    tails.append(stream)
                continue
            texts.append(read_up_to(file, min(size, WHOLE)))
            if size > WHOLE:
                notes.append(f"{stream} has {size} bytes, of which the first {WHOLE} are here")
        self.cut = self._filled()
        if self.cut:
            notes.append("the output is cut: it filled all the room that there is for outputs")
        return texts[0], texts[1], notes, tails

    def close(self) -> None:
        for file in self._files.values():
            os.close(file)
        self._files.clear()
