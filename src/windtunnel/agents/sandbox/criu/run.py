"""Dump and restore of one sandbox by CRIU: the options that such a sandbox needs, and nothing half done.

A dump leaves either a complete folder of images or none. A restore ends with the whole tree running or with
none of it; before any of it runs it stands in the freezer, so that it can be looked at and mended. Whatever
happens, the freezer of the sandbox's cgroup is as it was before the call.

Options: the network namespace belongs to the host and stays, so no packet has to be locked out, and CRIU
runs in it; cgroups are the host's too (``--manage-cgroups=ignore``). TCP connections are kept
(``--tcp-established``): both ends of one inside the sandbox come back together and go on. Of one to the
outside (the host's model proxy, another host) only the inner end comes back, which is then ended. A file that
was deleted under the name by which it is open while another name remains makes the dump fail: CRIU's stand-in
for it (``--link-remap``) exists only while it dumps, so no snapshot of files would hold it.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from windtunnel.agents.sandbox.criu import process, steps
from windtunnel.agents.sandbox.criu.failure import explain_dump, explain_restore, who
from windtunnel.agents.sandbox.errors import CriuError
from windtunnel.agents.sandbox.inventory.sockets import close_orphans, leave_repair
from windtunnel.agents.sandbox.place import Externals
from windtunnel.linux import cgroup
from windtunnel.linux.cgroup import pids_of

T = TypeVar("T")
COMMON = ("-o", "log", "-v1", "--no-default-config", "--manage-cgroups=ignore", "--file-locks")
NETWORK = ("--network-lock", "skip", "--skip-in-flight")
CONNECTION_FAILED = re.compile(r"soccr|criu/sk-tcp|tcp-stream|Cannot assign requested address")
COLLECT_SECONDS = 10
"""How long CRIU may try to stop all processes of a tree."""


def _nothing(_: int) -> None:
    """There is nothing to be done before the processes run."""


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

    def dump(
        self,
        pid: int,
        into: Path,
        externals: Externals,
        *,
        leave_running: bool = True,
        timeout: float = 60,
    ) -> None:
        """Write the images of the tree of ``pid`` into the folder ``into``, which must not hold any yet."""
        refuse_traced(pids_of(externals.freezer))
        arguments = ["--freeze-cgroup", str(externals.freezer), *NETWORK]
        for inside, key, _ in externals.mounts:
            arguments += ["--external", f"mnt[{inside}]:{key}"]

        def attempt(option: str) -> None:
            try:
                self.dump_tree(
                    pid,
                    into,
                    [*arguments, option],
                    netns=externals.netns,
                    leave_running=leave_running,
                    timeout=timeout,
                )
            except CriuError as failed:
                failed.interrupted = leave_repair(pids_of(externals.freezer)) > 0
                raise

        with _freezer_kept(externals.freezer):
            _with_connections(attempt)

    def dump_tree(
        self,
        pid: int,
        into: Path,
        options: list[str],
        *,
        netns: Path | None = None,
        leave_running: bool = True,
        timeout: float = 60,
        own_mounts: bool = True,
    ) -> None:
        """``dump`` with options given one by one, for a tree that is no sandbox."""
        made = not into.exists()
        into.mkdir(parents=True, exist_ok=True)
        if any(into.iterdir()):
            raise CriuError(f"process image: the folder {into} is not empty")
        collect = max(1, min(COLLECT_SECONDS, int(timeout)))
        arguments = ["dump", "-t", str(pid), "-D", str(into), *COMMON, *options]
        arguments += ["--ghost-limit", "64M", "--timeout", str(collect)]
        if leave_running:
            arguments.append("--leave-running")
        complete = False
        try:
            with _work(into) as work:
                arguments += ["-W", str(work)]
                ended = process.run(
                    self.path, arguments, work, netns=netns, timeout=timeout, own_mounts=own_mounts
                )
                if ended.code is None:
                    raise CriuError(
                        f"process image: not complete after {timeout:g} s; CRIU was stopped", ended.log
                    )
                if ended.code != 0:
                    raise CriuError(explain_dump(ended.log, pid), ended.log)
            complete = True
        finally:
            if not complete:
                _clear(into, remove=made)

    def restore(
        self,
        images: Path,
        externals: Externals,
        *,
        meanwhile: Callable[[int], None] = _nothing,
        wanted: Path | None = None,
        timeout: float = 60,
    ) -> int:
        """Bring the tree of ``images`` back under ``externals.root``; the host's pid of its first process.

        The tree stands in its freezer until ``meanwhile`` (given that pid) has returned; when that fails,
        nothing is left of the tree. ``wanted``: a file; where it is gone before the tree stands, as when this
        process has ended, the tree is killed.
        """
        # newer files under an older image may have other permissions: an open descriptor does not care
        options = ["--root", str(externals.root), "--skip-file-rwx-check", *NETWORK]
        for _, key, host in externals.mounts:
            options += ["--external", f"mnt[{key}]:{host}"]
        before = set(pids_of(externals.freezer))
        restored = False
        try:
            pid = _with_connections(
                lambda option: self._restore(images, externals, [*options, option], before, wanted, timeout)
            )
            _stand(externals.freezer)
            close_orphans(pids_of(externals.freezer), externals.netns)
            meanwhile(pid)
            restored = True
        finally:
            if not restored:
                process.kill_new(externals.freezer, before)
            cgroup.thaw(externals.freezer)
        return pid

    def _restore(
        self,
        images: Path,
        externals: Externals,
        options: list[str],
        before: set[int],
        wanted: Path | None,
        timeout: float,
    ) -> int:
        """One attempt, of which nothing is left when it fails."""
        # images of earlier checkpoints name the network, which CRIU then has to be given
        netns = os.open(externals.netns, os.O_RDONLY)
        restored = False
        try:
            pid = self.restore_tree(
                images,
                [*options, "--inherit-fd", f"fd[{netns}]:net"],
                within=externals,
                wanted=wanted,
                timeout=timeout,
                descriptors=(netns,),
            )
            restored = True
        finally:
            os.close(netns)
            if not restored:
                process.kill_new(externals.freezer, before)
                cgroup.thaw(externals.freezer)
        return pid

    def restore_tree(
        self,
        images: Path,
        options: list[str],
        *,
        within: Externals | None = None,
        wanted: Path | None = None,
        timeout: float = 60,
        descriptors: tuple[int, ...] = (),
        own_mounts: bool = True,
    ) -> int:
        """``restore`` with options given one by one, for a tree that is no sandbox. ``within``: the network
        and the control groups that it gets into; it stands in the freezer afterwards."""
        if not (images / "inventory.img").exists():
            raise CriuError(f"process restore: {images} holds no complete process image")
        arguments = ["restore", "-d", "-D", str(images), *COMMON, *options]
        with _work(images) as work:
            arguments += ["-W", str(work), "--pidfile", str(work / "pid")]
            given: dict[str, str] = {}
            if within is not None:
                script, given = steps.script(within.procs, within.freezer, wanted)
                arguments += ["--action-script", script]
            ended = process.run(
                self.path,
                arguments,
                work,
                netns=within.netns if within is not None else None,
                given=given,
                descriptors=descriptors,
                timeout=timeout,
                own_mounts=own_mounts,
            )
            if ended.code is None:
                raise CriuError(
                    f"process restore: not complete after {timeout:g} s; CRIU was stopped", ended.log
                )
            if ended.code != 0:
                raise CriuError(explain_restore(ended.log), ended.log)
            pid = int((work / "pid").read_text())
        return pid


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
        try:
            status = Path(f"/proc/{pid}/status").read_bytes()
        except OSError:
            continue
        tracer = status.partition(b"TracerPid:")[2].split(maxsplit=1)[0]
        if tracer != b"0":
            raise CriuError(
                f"process image: {who(pid)} is being traced by {who(int(tracer))}; end the debugger first"
            )


@contextlib.contextmanager
def _work(images: Path) -> Iterator[Path]:
    """A folder for messages, beside the images, so that whoever clears those away clears it too."""
    with tempfile.TemporaryDirectory(prefix="criu-", dir=images.absolute().parent) as folder:
        yield Path(folder)


@contextlib.contextmanager
def _freezer_kept(cgroup: Path) -> Iterator[None]:
    """A CRIU that was killed leaves the freezer as it happened to be: put it back."""
    file = cgroup / "cgroup.freeze"
    try:
        state = file.read_text()
    except OSError:
        state = ""
    try:
        yield
    finally:
        if state:
            with contextlib.suppress(OSError):
                if file.read_text() != state:
                    file.write_text(state)


def _clear(folder: Path, *, remove: bool) -> None:
    if remove:
        shutil.rmtree(folder, ignore_errors=True)
        return
    for entry in os.scandir(folder):
        with contextlib.suppress(OSError):
            os.unlink(entry.path)
