"""Lazy restore: a CRIU daemon that hands out memory when it is touched, watched until it has handed out all.

While it works, untouched memory of the sandbox exists only in the images. When the daemon dies, the kernel
would fill what is missing with zeros, and the sandbox would compute on with wrong data. So this process keeps
copies of the daemon's userfaultfd descriptors: a touch of missing memory then waits instead, and the tree is
killed, which is what a restore that failed should look like.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from windtunnel.agents.sandbox.errors import CriuError
from windtunnel.agents.sandbox.live.criu import process
from windtunnel.agents.sandbox.live.criu.failure import real_errors
from windtunnel.linux.system import copied_descriptor

PIDFD_GETFD = 438
READY_SECONDS = 20.0
DAEMON_LOG = "daemon"


@dataclass
class Pages:
    """One daemon. ``error`` is a sentence once it has died before its end."""

    images: Path
    work: Path
    child: subprocess.Popen[bytes]
    pid: int = 0
    error: str = ""
    finished: threading.Event = field(default_factory=threading.Event)

    def serve(self, pid: int, procs: tuple[Path, ...]) -> None:
        """The tree runs: from here on a thread watches the daemon."""
        self.pid = pid
        with LOCK:
            RUNNING[pid] = self
        held = _userfaults(self.child.pid)
        threading.Thread(
            target=self._watch, args=(held, procs), name=f"lazy-pages-{pid}", daemon=True
        ).start()

    def _watch(self, held: list[int], procs: tuple[Path, ...]) -> None:
        code = self.child.wait()
        if code != 0:
            log = process.read_log(self.work, DAEMON_LOG)
            said = next(iter(real_errors(log)), f"it ended with status {code}")
            self.error = f"process restore: the daemon that brings memory died before its end ({said})"
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, 9)
            for file in procs:
                process.kill_new(file.parent, set())
        for descriptor in held:
            os.close(descriptor)
        shutil.rmtree(self.work, ignore_errors=True)
        self.finished.set()


LOCK = threading.Lock()
RUNNING: dict[int, Pages] = {}
"""Daemons by the pid of the tree's first process; those that ended stay until they are asked for."""


def wait_lazy(pid: int, timeout: float | None = None) -> bool:
    """Wait until all memory of the tree of ``pid`` is there; False after ``timeout`` seconds.

    True at once for a tree that was not restored lazily. CriuError when the daemon died: the tree was killed.
    """
    with LOCK:
        pages = RUNNING.get(pid)
    if pages is None:
        return True
    if not pages.finished.wait(timeout):
        return False
    with LOCK:
        RUNNING.pop(pid, None)
    if pages.error:
        raise CriuError(pages.error)
    return True


def images_in_use() -> set[Path]:
    """Folders of images that some lazy daemon of this machine still reads: they must not be removed."""
    found = set()
    for entry in os.scandir("/proc"):
        if not entry.name.isdigit():
            continue
        try:
            words = Path(entry.path, "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if b"lazy-pages" in words and b"-D" in words:
            found.add(Path(os.fsdecode(words[words.index(b"-D") + 1])))
    return found


@contextlib.contextmanager
def start_pages(program: Path, images: Path) -> Iterator[Pages]:
    """A daemon that is ready to serve; it is killed when the body fails or does not call ``serve``."""
    work = Path(tempfile.mkdtemp(prefix="windtunnel-lazy-"))
    reader, writer = os.pipe()
    try:
        arguments = ["lazy-pages", "-D", str(images), "-W", str(work), "-o", DAEMON_LOG, "-v1"]
        arguments += ["--no-default-config", "--status-fd", str(writer)]
        child = process.start(program, arguments, work, descriptors=(writer,))
        os.close(writer)
        writer = -1
        pages = Pages(images, work, child)
        try:
            if not process.readable(reader, READY_SECONDS) or not os.read(reader, 1):
                said = next(iter(real_errors(process.read_log(work, DAEMON_LOG))), "no reason given")
                raise CriuError(f"process restore: the daemon for lazy memory did not start ({said})")
            yield pages
        finally:
            if pages.pid == 0:
                process.kill(child)
                shutil.rmtree(work, ignore_errors=True)
    finally:
        os.close(reader)
        if writer >= 0:
            os.close(writer)


def _userfaults(daemon: int) -> list[int]:
    """Copies of the userfaultfd descriptors of ``daemon``; it may end meanwhile, being done."""
    copies: list[int] = []
    with contextlib.suppress(OSError):
        handle = os.pidfd_open(daemon)
        try:
            for entry in os.scandir(f"/proc/{daemon}/fd"):
                if "userfaultfd" in os.readlink(entry.path):
                    copies.append(copied_descriptor(handle, int(entry.name)))
        finally:
            os.close(handle)
    return copies
