"""Dump and restore of one sandbox by CRIU: the options that such a sandbox needs, and nothing half done.

A dump leaves either a complete folder of images or none. A restore ends with the whole tree running or with
none of it; before any of it runs it stands in the freezer, so that it can be looked at and mended. A sandbox
stands while it is dumped, and afterwards, whatever happens.

Options: the network namespace belongs to the host and stays, so no packet has to be locked out, and CRIU
runs in it (to save it, CRIU would read the host's whole table of tracked connections, 10 ms while the sandbox
stands); cgroups are the host's too (``--manage-cgroups=ignore``). TCP connections are kept
(``--tcp-established``): both ends of one inside the sandbox come back together and go on. Of one to the
outside (the host's model proxy, another host) only the inner end comes back, which is then ended. A file that
was deleted under the name by which it is open while another name remains makes the dump fail: CRIU's stand-in
for it (``--link-remap``) exists only while it dumps, so no snapshot of files would hold it.

CRIU keeps what it learnt about the kernel in ``/run``, but only where that is a tmpfs; elsewhere each start
asks the kernel again (10 ms), so there it runs in a mount namespace of its own with a private tmpfs folder on
``/run`` (CRIU, criu/kerndat.c).

A compiled program (source in ``program/``) starts CRIU where it has to run, is its action script in a
restore, and stands in for the ``tar`` with which CRIU keeps a tmpfs: a sandbox's /dev/shm is mostly empty,
and a tar that packs nothing takes ten milliseconds.
"""

from __future__ import annotations

import contextlib
import os
import re
import resource
import select
import shutil
import signal
import stat
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TypeVar

from windtunnel.agents.sandbox.criu.failure import explain_dump, explain_restore
from windtunnel.agents.sandbox.errors import CriuError
from windtunnel.agents.sandbox.inventory.sockets import close_orphans, leave_repair
from windtunnel.agents.sandbox.machine import walls
from windtunnel.agents.sandbox.place import Externals
from windtunnel.base.native import Freestanding
from windtunnel.linux import cgroup, processes
from windtunnel.linux.cgroup import pids_of
from windtunnel.linux.snapshot import read_status
from windtunnel.linux.system import TMPFS, file_system, process_handle

STEPS = Freestanding(
    Path(__file__).parent / "program" / "main.c",
    "steps",
    "",
    walls.COMPILED,
    "program beside CRIU",
    (walls.PROGRAM.folder / "system.h",),
)
T = TypeVar("T")
COMMON = ("-o", "log", "-v1", "--no-default-config", "--manage-cgroups=ignore", "--file-locks",
          "--network-lock", "skip")  # fmt: skip
CONNECTION_FAILED = re.compile(r"soccr|criu/sk-tcp|tcp-stream|Cannot assign requested address")
CRIU_SECONDS = 60.0
"""How long one run of CRIU may take."""
COLLECT_SECONDS = 10
"""How long CRIU may try to stop all processes of a tree."""
GRACE_SECONDS = 5.0
"""How long a CRIU that ran out of time may take to put the processes back before it is killed."""
LOG_BYTES = 20_000
SHARED_MEMORY = Path("/dev/shm")


@dataclass(frozen=True)
class Criu:
    """One CRIU program. Its methods may be called from several threads, for different sandboxes."""

    path: Path
    version: tuple[int, ...]
    patched: bool = False
    """It has the patches of this package, so a dump interrupts no call of a process that goes on."""

    @property
    def words(self) -> str:
        return ".".join(map(str, self.version))

    def dump(self, pid: int, into: Path, externals: Externals) -> None:
        """Write the images of the tree of ``pid`` into the folder ``into``, which is made here."""
        refuse_traced(pids_of(externals.freezer))
        arguments = ["--skip-in-flight", "--ghost-limit", "64M", "--leave-running"]
        arguments += ["--freeze-cgroup", str(externals.freezer)]
        arguments += ["--timeout", str(COLLECT_SECONDS)]
        for inside, key, _ in externals.mounts:
            arguments += ["--external", f"mnt[{inside}]:{key}"]

        def attempt(option: str) -> None:
            into.mkdir(parents=True)
            try:
                with _work(into) as work:
                    command = ["dump", "-t", str(pid), "-D", str(into), *COMMON, *arguments, option]
                    code = run(self.path, command, work, netns=externals.netns)
                    _demand("process image", code, work, lambda log: explain_dump(log, pid))
            except BaseException as failed:
                shutil.rmtree(into, ignore_errors=True)
                if isinstance(failed, CriuError):
                    failed.interrupted = leave_repair(pids_of(externals.freezer)) > 0
                raise

        try:
            _with_connections(attempt)
        finally:
            # a CRIU that was killed leaves the freezer as it happened to be
            with contextlib.suppress(OSError):
                cgroup.freeze(externals.freezer)

    def restore(
        self,
        images: Path,
        externals: Externals,
        *,
        meanwhile: Callable[[int], None],
        permit: Path,
    ) -> int:
        """Bring the tree of ``images`` back under ``externals.root``; the host's pid of its first process.

        The tree stands in its freezer until ``meanwhile`` (given that pid) has returned; when that fails,
        nothing is left of the tree. ``permit``: a file; where it is gone before the tree stands, as when this
        process has ended, the tree is killed.
        """
        # newer files under an older image may have other permissions: an open descriptor does not care
        arguments = ["--root", str(externals.root), "--skip-file-rwx-check", "--skip-in-flight"]
        for _, key, host in externals.mounts:
            arguments += ["--external", f"mnt[{key}]:{host}"]

        def attempt(option: str) -> int:
            with _work(images) as work, _nothing_left(externals.freezer):
                action, variables = script(externals.procs, externals.freezer, permit)
                command = ["restore", "-d", "-D", str(images), *COMMON, *arguments, option]
                command += ["--pidfile", str(work / "pid"), "--action-script", action]
                code = run(self.path, command, work, netns=externals.netns, variables=variables)
                _demand("process restore", code, work, explain_restore)
                return int((work / "pid").read_text())

        with _nothing_left(externals.freezer):
            pid = _with_connections(attempt)
            _stand(externals.freezer)
            close_orphans(pids_of(externals.freezer))
            meanwhile(pid)
        cgroup.thaw(externals.freezer)
        return pid


def run(
    program: Path,
    arguments: Sequence[str],
    work: Path,
    *,
    netns: Path | None = None,
    variables: Mapping[str, str] | None = None,
) -> int | None:
    """Run ``program`` to its end in the network of ``netns``, with messages in the folder ``work``: its exit
    status, or None when it was killed for taking too long. ``variables``: of its environment."""
    # where the kernel serves sessions in turn, this one comes first: a sandbox stands still while it works
    urgency = processes.SESSION_FIRST if processes.SESSION_WEIGHT.exists() else None
    # an action script moves a process to other control groups
    warm = cgroup.own() / "cgroup.procs" if variables else None
    where = (str(value or "-") for value in (netns, kernel_cache(), urgency, warm))
    command = [str(STEPS.locate()), "start", *where, str(program), *arguments, "-W", str(work)]
    environment = {**os.environ, **(variables or {})}
    if (tar := _tar()) is not None:
        with contextlib.suppress(FileExistsError):  # of a run before
            (work / "tar").symlink_to(STEPS.locate())
        environment |= {"PATH": f"{work}:{os.environ.get('PATH', os.defpath)}", "WINDTUNNEL_TAR": tar}
    with open(work / "stderr", "wb") as errors:
        child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=errors,
            cwd=work,
            env=environment,
            start_new_session=True,
            # this leaves SIGXFSZ ignored, as Python has it: see _let_fail
            restore_signals=False,
        )
    try:
        if _ends(child, CRIU_SECONDS):
            return child.wait()
        if arguments[0] == "dump":
            _let_fail(child)
            _ends(child, GRACE_SECONDS)
        return None
    finally:
        if child.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()


def _demand(what: str, code: int | None, work: Path, explain: Callable[[str], str]) -> None:
    """Raises CriuError unless `run` ended with success; ``explain`` finds words for its log."""
    if code != 0:
        log = read_log(work)
        late = f"{what}: not complete after {CRIU_SECONDS:g} s; CRIU was stopped"
        raise CriuError(late if code is None else explain(log), log)


def _ends(child: subprocess.Popen[bytes], timeout: float) -> bool:
    """Whether it does in that time; polling for it would add up to 50 ms to a step that takes as long."""
    with process_handle(child.pid) as handle:
        poll = select.poll()
        poll.register(handle, select.POLLIN)
        return bool(poll.poll(timeout * 1000))


def _let_fail(child: subprocess.Popen[bytes]) -> None:
    """Make CRIU give up by itself: from now on it can write no file, so the next write of an image fails.

    A dump that is killed while it makes a process run its code leaves that process with wrong registers, and
    it dies (one kill in thirty at random instants did that). One that fails puts all processes back.
    """
    with contextlib.suppress(OSError, ValueError):
        resource.prlimit(child.pid, resource.RLIMIT_FSIZE, (0, 0))


def read_log(work: Path) -> str:
    """The end of CRIU's log in ``work``, or what it said before it had one."""
    for file in ("log", "stderr"):
        with contextlib.suppress(OSError):
            if text := (work / file).read_text(errors="replace"):
                return text[-LOG_BYTES:]
    return ""


@contextlib.contextmanager
def _work(images: Path) -> Iterator[Path]:
    """A folder for messages, beside the images, so that whoever clears those away clears it too."""
    with tempfile.TemporaryDirectory(prefix="criu-", dir=images.absolute().parent) as folder:
        yield Path(folder)


@contextlib.contextmanager
def _nothing_left(freezer: Path) -> Iterator[None]:
    """A restore that fails within the block leaves no process in the cgroup."""
    try:
        yield
    except BaseException:
        deadline = time.monotonic() + 5.0
        while (left := pids_of(freezer)) and time.monotonic() < deadline:
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.002)
        cgroup.thaw(freezer)
        raise


def _stand(freezer: Path) -> None:
    """Wait until all that was restored stands. Raises CriuError when it was never held."""
    try:
        if (freezer / "cgroup.freeze").read_bytes() != b"1\n":
            raise CriuError("process restore: the processes could not be held still before they ran")
        cgroup.wait_for(freezer, b"frozen 1", COLLECT_SECONDS)
    except TimeoutError:
        raise CriuError("process restore: the processes do not stand still") from None


def _with_connections(attempt: Callable[[str], T]) -> T:
    """What ``attempt(option)`` returns: connections are kept, or, where CRIU cannot (an address that a new
    network namespace does not have), closed."""
    try:
        return attempt("--tcp-established")
    except CriuError as failed:
        if not CONNECTION_FAILED.search(failed.details):
            raise
    return attempt("--tcp-close")


def refuse_traced(pids: list[int]) -> None:
    """CRIU would try for ten seconds to seize a process that has a debugger, so ask first."""
    for pid in sorted(pids):
        if (tracer := read_status(pid).get("TracerPid", "0")) != "0":
            words = f"{processes.who(pid)} is being traced by {processes.who(int(tracer))}"
            raise CriuError(f"process image: {words}; end the debugger first")


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


@cache
def is_tmpfs(path: str) -> bool:
    """Whether ``path`` lies on a tmpfs."""
    return file_system(path) == TMPFS


def script(groups: Sequence[Path], hold: Path, permit: Path) -> tuple[str, dict[str, str]]:
    """The action script of a restore, and what it has to find in the environment: the lists of processes that
    the first process is to enter, the v2 group to freeze when all is made, and a file without which all of it
    is ended then."""
    variables = {"WINDTUNNEL_GROUPS": "".join(f"{group}\n" for group in groups), "WINDTUNNEL_HOLD": str(hold)}
    return str(STEPS.locate()), {**variables, "WINDTUNNEL_WANTED": str(permit)}


@cache
def _tar() -> str | None:
    return shutil.which("tar")
