"""Runs the CRIU program: where it is born, how long it may take, and what it leaves when it is killed.

Three things make this more than ``subprocess.run``. CRIU runs in the sandbox's network, which is the host's
to keep: so it neither saves it nor brings it back (to save it, it would read the host's whole table of
tracked connections, 10 ms while the sandbox stands). It keeps what it learnt about the kernel in ``/run``,
but only where that is a tmpfs; elsewhere each start asks the kernel again (10 ms), so there it runs in a
mount namespace of its own with a private tmpfs folder on ``/run``. Both are done by a small program (see
``steps``). And waiting is by pidfd: waiting by polling would add up to 50 ms to a step that takes as long.

Source: CRIU, criu/kerndat.c (the cache and why it wants a tmpfs).
"""

from __future__ import annotations

import contextlib
import os
import resource
import select
import signal
import stat
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from windtunnel.agents.sandbox.criu import steps
from windtunnel.linux.cgroup import pids_of
from windtunnel.linux.system import TMPFS, file_system

LOG_BYTES = 20_000
GRACE_SECONDS = 5.0
"""How long a CRIU that ran out of time may take to put the processes back before it is killed."""
SHARED_MEMORY = Path("/dev/shm")


@dataclass(frozen=True)
class Ended:
    """How a run of CRIU ended. ``code`` is None when it was killed for taking too long."""

    code: int | None
    log: str


def run(
    program: Path,
    arguments: Sequence[str],
    work: Path,
    *,
    netns: Path | None = None,
    given: Mapping[str, str] | None = None,
    descriptors: Sequence[int] = (),
    timeout: float,
    own_mounts: bool = True,
) -> Ended:
    """Run ``program`` to its end in the network of ``netns``, with messages in the folder ``work``.
    ``given``: what it finds in its environment.

    ``own_mounts``: the tree has a mount namespace of its own, so CRIU itself may run in another one too.
    """
    child = start(
        program, arguments, work, netns=netns, given=given, descriptors=descriptors, own_mounts=own_mounts
    )
    try:
        code = wait(child, timeout)
        if code is None and arguments[0] == "dump" and let_fail(child):
            wait(child, GRACE_SECONDS)
    finally:
        if child.returncode is None:
            kill(child)
    return Ended(code, read_log(work))


def read_log(work: Path) -> str:
    """The end of CRIU's log in ``work``, or what it said before it had one."""
    for file in ("log", "stderr"):
        with contextlib.suppress(OSError):
            if said := (work / file).read_text(errors="replace"):
                return said[-LOG_BYTES:]
    return ""


def start(
    program: Path,
    arguments: Sequence[str],
    work: Path,
    *,
    netns: Path | None = None,
    given: Mapping[str, str] | None = None,
    descriptors: Sequence[int] = (),
    own_mounts: bool = True,
) -> subprocess.Popen[bytes]:
    """Start ``program`` in a session of its own; its standard error goes to ``work/stderr``."""
    command = steps.starting(
        [str(program), *arguments],
        netns=netns,
        cache=kernel_cache() if own_mounts else None,
        moves=bool(given),
    )
    with open(work / "stderr", "wb") as errors:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=errors,
            cwd=work,
            env={**steps.environment_in(work), **(given or {})},
            pass_fds=tuple(descriptors),
            start_new_session=True,
            # this leaves SIGXFSZ ignored, as Python has it: see let_fail
            restore_signals=False,
        )


def wait(child: subprocess.Popen[bytes], timeout: float) -> int | None:
    """The exit status, or None after ``timeout`` seconds; the child then still runs."""
    with contextlib.suppress(ProcessLookupError):
        handle = os.pidfd_open(child.pid)
        try:
            if not readable(handle, timeout):
                return None
        finally:
            os.close(handle)
    return child.wait()


def readable(descriptor: int, timeout: float) -> bool:
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(max(0.0, timeout) * 1000))


def let_fail(child: subprocess.Popen[bytes]) -> bool:
    """Make CRIU give up by itself: from now on it can write no file, so the next write of an image fails.

    A dump that is killed while it makes a process run its code leaves that process with wrong registers, and
    it dies (one kill in thirty at random instants did that). One that fails puts all processes back.
    """
    try:
        resource.prlimit(child.pid, resource.RLIMIT_FSIZE, (0, 0))
    except (OSError, ValueError):
        return False
    return True


def kill(child: subprocess.Popen[bytes]) -> None:
    """Kill CRIU with everything of its session's process group, and wait."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


def kill_new(cgroup: Path, before: set[int], timeout: float = 5.0) -> list[int]:
    """Kill what a failed restore left in ``cgroup``; the pids that are still there after ``timeout``."""
    deadline = time.monotonic() + timeout
    while left := set(pids_of(cgroup)) - before:
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if time.monotonic() > deadline:
            return sorted(left)
        time.sleep(0.002)
    return []


def kernel_cache() -> Path | None:
    """A private tmpfs folder to stand in for ``/run``; None where it is one or none can be had.

    All programs share it, as they share ``/run``: a CRIU discards what another build of it has written.
    """
    if os.geteuid() != 0 or is_tmpfs("/run") or not is_tmpfs(str(SHARED_MEMORY)):
        return None
    folder = SHARED_MEMORY / "windtunnel-criu"
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    state = folder.lstat()
    # /dev/shm is open to everybody: a folder or link that somebody else put there is not trusted
    if not stat.S_ISDIR(state.st_mode) or state.st_uid != os.geteuid() or state.st_mode & 0o077:
        return None
    return folder


def forget_half_written_cache() -> None:
    """A CRIU that was killed while it wrote its cache keeps all later ones from writing it."""
    folder = kernel_cache() or Path("/run")
    half = folder / "criu.kdat.tmp"
    with contextlib.suppress(OSError):
        if time.time() - half.stat().st_mtime > 5:
            half.unlink()


@cache
def is_tmpfs(path: str) -> bool:
    """Whether ``path`` lies on a tmpfs."""
    return file_system(path) == TMPFS
