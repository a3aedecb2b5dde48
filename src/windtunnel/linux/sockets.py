"""The sockets that a library opened in this process, found from outside, and cut while it is blocked on them.

gloo connects all its pairs in its constructor and keeps the file descriptors to itself. They are found by
comparing the process's stream sockets before and after, as (descriptor, inode): a descriptor alone may mean
another socket later. `shutdown(2)` on such a socket wakes whoever is blocked on it, on both ends, within
milliseconds, and leaves closing it to its owner. A listening socket is never shut down: gloo ends the process
when its listener fails.
"""

from __future__ import annotations

import os
import socket
import stat
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress

# Held while sockets are opened: by a recorder, so that it sees only what it records, and by whoever opens
# sockets of our own that must never be taken for the library's (the link to the agent).
opening = threading.RLock()

_RECUT = 0.002  # seconds between two cuts of a library that goes on connecting


def sockets_now() -> dict[int, int]:
    """All sockets of this process: descriptor to inode."""
    inodes = {}
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            status = os.fstat(int(name))
            if stat.S_ISSOCK(status.st_mode):
                inodes[int(name)] = status.st_ino
    return inodes


def shut(fd: int, inode: int) -> bool:
    """Shut down the socket ``fd`` in both directions if it still is the one with ``inode``, a stream and
    connected; whether that was so."""
    try:
        copy = os.dup(fd)  # the owner may close its descriptor at any moment; ours stays what it is
    except OSError:
        return False
    if os.fstat(copy).st_ino != inode:
        os.close(copy)
        return False
    with socket.socket(fileno=copy) as sock:
        if sock.type != socket.SOCK_STREAM or sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            return False
        try:
            sock.shutdown(socket.SHUT_RDWR)
        except OSError:  # not connected (any more)
            return False
    return True


def ports(fd: int) -> tuple[bool, int, int]:
    """Whether ``fd`` listens, its own port and its peer's (0 where it has none, or is closed by now)."""
    try:
        copy = os.dup(fd)
    except OSError:
        return False, 0, 0
    try:
        sock = socket.socket(fileno=copy)
    except OSError:
        os.close(copy)
        return False, 0, 0
    with sock:
        if sock.family not in (socket.AF_INET, socket.AF_INET6):
            return False, 0, 0
        listens = bool(sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
        own = sock.getsockname()[1]
        try:
            return listens, own, sock.getpeername()[1]
        except OSError:
            return listens, own, 0


class SocketRecorder:
    """What was opened within `recording`, and the means to cut it from any thread at any moment.

    A cut also holds for what is opened afterwards: a constructor that is at work while the cut comes is cut
    again and again until it gives up, and none begins any more.
    """

    def __init__(self) -> None:
        self.sockets: dict[int, int] = {}
        self.is_cut = False
        self._before: dict[int, int] | None = None
        self._lock = threading.Lock()
        _recorders.add(self)

    @contextmanager
    def recording(self) -> Iterator[None]:
        """What the block opens belongs to this recorder. One block at a time in a process; it nests.

        Raises:
            ConnectionAbortedError: it has been cut.
        """
        with opening:
            nested = self._before is not None
            with self._lock:
                if self.is_cut:
                    raise ConnectionAbortedError("the process group was cut")
                if not nested:
                    self._before = sockets_now()
            try:
                yield
            finally:
                if not nested:
                    with self._lock:
                        # Descriptors of groups that were destroyed since are dropped here, so that nothing
                        # grows when groups come and go.
                        now = sockets_now()
                        same = {fd: inode for fd, inode in self.sockets.items() if now.get(fd) == inode}
                        self.sockets = {**same, **appeared(now, self._before or {})}
                        self._before = None
                        late = self.is_cut
                    if late:
                        self._shut_all()

    def keep(self, chosen: dict[int, int]) -> None:
        """Forget what is not in ``chosen``: it was opened at the same time by somebody else."""
        with self._lock:
            self.sockets = {fd: inode for fd, inode in self.sockets.items() if chosen.get(fd) == inode}

    def cut(self) -> int:
        """Shut down all that is connected; how many sockets that were. May be called again, from any
        thread, and never waits for a constructor that is at work."""
        with self._lock:
            first, self.is_cut = not self.is_cut, True
            at_work = self._before is not None
        count = self._shut_all()
        if at_work and first:
            threading.Thread(target=self._follow, name="windtunnel-cut", daemon=True).start()
        return count

    def _shut_all(self) -> int:
        with self._lock:
            targets = dict(self.sockets)
            if self._before is not None:
                targets.update(appeared(sockets_now(), self._before))
        return sum(shut(fd, inode) for fd, inode in targets.items())

    def _follow(self) -> None:
        pause = threading.Event()
        while self._before is not None:
            self._shut_all()
            pause.wait(_RECUT)


def appeared(now: dict[int, int], before: dict[int, int]) -> dict[int, int]:
    """Those of ``now`` that were not there ``before``; a descriptor may mean another socket by now."""
    return {fd: inode for fd, inode in now.items() if before.get(fd) != inode}


_recorders: weakref.WeakSet[SocketRecorder] = weakref.WeakSet()


def _close_in_child() -> None:
    """A forked child (a data loader's worker) must not hold the group's connections open when its parent
    dies: the neighbours would not notice."""
    now = sockets_now()
    for recorder in list(_recorders):
        for fd, inode in recorder.sockets.items():
            if now.get(fd) == inode:
                os.close(fd)


os.register_at_fork(after_in_child=_close_in_child)
