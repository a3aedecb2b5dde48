"""Sandboxes as processes: namespaces, control groups, network, persistent shells, files in and out.

A sandbox is started by a small static program that sets everything up and becomes pid 1; all commands run
in shells that live on between them. Everything is chosen such that CRIU can dump and restore the whole: no
controlling terminal, no descriptor of the host's, mounts that are either the sandbox's own or declared
external.

Source: Crab (arXiv 2604.28138), section 4; capabilities and refused system calls after Docker's defaults.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
import stat
import threading
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import IO, Literal

from windtunnel.agents.sandbox.errors import MachineError
from windtunnel.agents.sandbox.files.tree import make_folders
from windtunnel.agents.sandbox.machine import launch
from windtunnel.agents.sandbox.machine.channel import ChannelFolder, Init, OnOutput
from windtunnel.agents.sandbox.machine.shell import Shell
from windtunnel.agents.sandbox.machine.state import ShellSections
from windtunnel.agents.sandbox.model import FolderEntry, SandboxSpec, ShellState, TurnResult
from windtunnel.agents.sandbox.place import Externals, Home
from windtunnel.base.atomic import write_all
from windtunnel.base.errors import UserError
from windtunnel.linux import processes
from windtunnel.linux.namespaces import set_hostname
from windtunnel.linux.system import IN_ROOT, NO_XDEV, held, open_inside, opened, process_handle

Kind = Literal["file", "folder", "link", "other"]


def put_file(root: int, path: str, data: bytes | IO[bytes], mode: int) -> None:
    """Write a file in one step; missing folders above it are made. UserError names what is in the way."""
    folder_path, name = _split(path)
    with _naming_path(path), held(make_folders(root, folder_path)) as folder:
        with contextlib.suppress(FileNotFoundError):
            if stat.S_ISDIR(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode):
                raise UserError(f"sandbox path {path!r} is a folder; give the name of a file")
        part = f".windtunnel.{secrets.token_hex(8)}"
        file = open_inside(folder, part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        try:
            with os.fdopen(file, "wb", closefd=True) as out:
                if isinstance(data, bytes):
                    write_all(out.fileno(), data)
                else:
                    shutil.copyfileobj(data, out, 1 << 20)
                out.flush()
                os.fchmod(out.fileno(), mode)
            os.rename(part, name, src_dir_fd=folder, dst_dir_fd=folder)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(part, dir_fd=folder)
            raise


def read_file(root: int, path: str, out: IO[bytes], limit: int | None = None) -> None:
    """Copy a file's bytes to ``out``. Links are followed inside the sandbox."""
    _split(path)
    with (
        _naming_path(path),
        held(open_inside(root, path, os.O_RDONLY | os.O_NONBLOCK, resolve=IN_ROOT | NO_XDEV)) as file,
    ):
        status = os.fstat(file)
        if not stat.S_ISREG(status.st_mode):
            raise UserError(f"sandbox path {path!r} is no regular file")
        if limit is not None and status.st_size > limit:
            raise UserError(
                f"sandbox file {path!r} has {status.st_size} bytes, more than {limit}; "
                "copy it to a file instead"
            )
        # a file that grows while it is read ends where it ended when it was opened
        left = status.st_size
        while left and (piece := os.read(file, min(1 << 20, left))):
            out.write(piece)
            left -= len(piece)


def list_folder(root: int, path: str) -> list[FolderEntry]:
    """What a folder holds, by name."""
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NONBLOCK
    with _naming_path(path), held(open_inside(root, path, flags, resolve=IN_ROOT | NO_XDEV)) as folder:
        entries = []
        for name in sorted(os.listdir(folder)):
            with contextlib.suppress(FileNotFoundError):
                status = os.stat(name, dir_fd=folder, follow_symlinks=False)
                target = os.readlink(name, dir_fd=folder) if stat.S_ISLNK(status.st_mode) else ""
                entries.append(_entry(name, status, target))
        return entries


def _entry(name: str, status: os.stat_result, target: str) -> FolderEntry:
    kinds: dict[int, Kind] = {stat.S_IFREG: "file", stat.S_IFDIR: "folder", stat.S_IFLNK: "link"}
    kind = kinds.get(stat.S_IFMT(status.st_mode), "other")
    return FolderEntry(name, kind, status.st_size, stat.S_IMODE(status.st_mode), status.st_mtime, target)


def _split(path: str) -> tuple[str, str]:
    pure = PurePosixPath(path)
    if not pure.is_absolute() or "\0" in path or pure.name in ("", "..") or path.endswith("/"):
        raise UserError(f"sandbox path {path!r} is not accepted; give an absolute path of a file")
    return str(pure.parent), pure.name


@contextlib.contextmanager
def _naming_path(path: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UserError(f"sandbox path {path!r}: {error.strerror}") from error


SHELL_NAME = re.compile(r"[A-Za-z0-9_-]{1,32}")
MOST_SHELLS = 64


class Machine:
    """One sandbox that runs. Made by `start` or `adopt`; `close` lets it run on, `launch.clear` ends it.
    ``root``: a descriptor of its root, for `put_file` and the like."""

    def __init__(
        self, home: Home, spec: SandboxSpec, prepared: tuple[Externals, list[str]], pid: int
    ) -> None:
        self.home, self.spec, self.pid = home, spec, pid
        self.externals, self.limits_missed = prepared
        self.cgroup = launch.group(home, spec.name)
        self._lock = threading.Lock()
        self._shells: dict[str, Shell] = {}
        self._closed = False
        with contextlib.ExitStack() as stack:
            try:
                self.root = stack.enter_context(opened(self.externals.root, os.O_RDONLY | os.O_DIRECTORY))
                self._channel = ChannelFolder.at(self.externals.of("channel"))
                stack.callback(self._channel.close)
                handle = stack.enter_context(process_handle(pid))
                if pid not in self.cgroup.pids():
                    raise MachineError(f"process {pid} is none of sandbox {spec.name}")
                requests = stack.enter_context(held(self._channel.existing_fifo("requests")))
            except OSError as error:
                raise MachineError(f"sandbox {spec.name} does not run: {error.strerror}") from error
            self._held = stack.pop_all()
        self._init = Init(pid, handle, requests, self.cgroup)

    # --- life ------------------------------------------------------------------------------------------

    @classmethod
    def start(cls, home: Home, spec: SandboxSpec, root: Path) -> Machine:
        """Start the sandbox on ``root``, with the shell ``main``. Raises MachineError and LinuxError,
        leaving nothing."""
        if launch.group(home, spec.name).pids():
            raise MachineError(f"sandbox {spec.name} runs already")
        machine: Machine | None = None
        try:
            prepared = launch.prepare(home, spec, root)
            with launch.group(home, spec.name).first():
                machine = cls(home, spec, prepared, launch.start(spec, prepared[0]))
                machine._shell("main").rest()
            return machine
        except BaseException:
            if machine is not None:
                machine.close()
            with contextlib.suppress(MachineError, OSError):
                launch.clear(home, spec.name)
            raise

    @classmethod
    def adopt(cls, home: Home, spec: SandboxSpec, root: Path, pid: int) -> Machine:
        """Take over a sandbox that runs: after a restart of the daemon, or just restored. Raises MachineError
        and LinuxError."""
        machine = cls(home, spec, launch.prepare(home, spec, root), pid)
        try:
            for name in sorted(machine._channel.names()):
                if SHELL_NAME.fullmatch(name) and machine._channel.is_folder(name):
                    shell = Shell(name, machine._channel, machine._init)
                    if len(machine._shells) < MOST_SHELLS and shell.find_again():
                        machine._shells[name] = shell
                    else:
                        shell.close()
        except BaseException:
            machine.close()
            raise
        return machine

    def alive(self) -> bool:
        return not self._closed and self._init.alive()

    def close(self) -> None:
        """Let go of it; the sandbox runs on."""
        for shell in self._shells.values():
            shell.close()
        self._shells.clear()
        self._closed, self.root = True, -1
        self._held.close()

    # --- commands --------------------------------------------------------------------------------------

    def run(
        self,
        command: str,
        *,
        shell: str = "main",
        timeout: float | None = None,
        cancel: threading.Event | None = None,
        on_output: OnOutput | None = None,
        stdin: bytes | IO[bytes] | None = None,
    ) -> TurnResult:
        """Run ``command`` in a persistent shell, which is started when it is not there.

        Output is exact and separate; input is ``stdin``, or /dev/null. With ``on_output`` the output is
        passed on in pieces while the command runs, and the result holds only the end of it. A command that is
        cut off (``timeout`` in seconds, or ``cancel``) loses what it started, not what ran before.

        Raises:
            UserError: the command holds a NUL, or the shell's name is not accepted.
            MachineError: the sandbox is dead, or its channel is damaged.
        """
        if "\0" in command:
            raise UserError("sandbox command holds a NUL byte; a shell's command is text")
        named = self._shell(shell)
        with named.lock:
            return named.run(command.encode(errors="surrogateescape"), timeout, cancel, on_output, stdin)

    def _shell(self, name: str) -> Shell:
        if not SHELL_NAME.fullmatch(name):
            raise UserError(
                f"sandbox shell {name!r} is not accepted; use up to 32 letters, digits, '_' or '-'"
            )
        with self._lock:
            if not self.alive():
                raise MachineError(f"sandbox {self.spec.name} is dead")
            shell = self._shells.get(name)
            if shell is None:
                if len(self._shells) >= MOST_SHELLS:
                    raise UserError(f"sandbox {self.spec.name} has {MOST_SHELLS} shells, which is the most")
                shell = Shell(name, self._channel, self._init)
            if not shell.pid:
                try:
                    shell.start()
                except BaseException:
                    shell.close()
                    raise
            self._shells[name] = shell  # only now: a checkpoint of that moment would miss its state
            return shell

    def shells(self) -> dict[str, int]:
        """Name → host pid of each persistent shell."""
        return {name: shell.pid for name, shell in self._shells.items() if shell.pid}

    def shell_states(self) -> tuple[ShellState, ...]:
        """The state of each shell as of the end of its last command."""
        states = ((name, shell.state()) for name, shell in sorted(self._shells.items()))
        return tuple(state.shell_state(name) for name, state in states if state.complete)

    def replay(self, state: ShellState) -> None:
        """Make the shell of that name, started if absent, equal to ``state``: what is not in it is removed.

        Raises MachineError when something stayed different; the rest has been replayed.
        """
        target = ShellSections.of(state)
        shell = self._shell(state.name)
        with shell.lock:
            shell.replay(target)

    def commands(self) -> tuple[str, ...]:
        """Command lines of all processes, in the order of their pids inside."""
        pairs = sorted((processes.inner_pid(pid), pid) for pid in self.cgroup.pids())
        lines = (processes.command_line(pid) for _, pid in pairs)
        return tuple(line for line in lines if line)

    def freshen(self, hostname: str) -> None:
        """After a fork: an own host name and machine id, and other random numbers in the shells.

        What programs hold in their own generators (Python's ``random``, an SSL library's pool that was
        filled before the checkpoint) is part of their memory and cannot be stirred from outside; whatever
        asks the kernel gets fresh numbers. Raises MachineError.
        """
        name = hostname[:63]
        if not launch.rootless():  # there, no process outlives a fork: init was given the name
            try:
                set_hostname(self._init.handle, name)
            except OSError as error:
                raise MachineError(f"the sandbox's host name could not be set: {error.strerror}") from error
        try:
            put_file(self.root, "/etc/hostname", f"{name}\n".encode(), 0o644)
            put_file(self.root, "/etc/machine-id", f"{secrets.token_hex(16)}\n".encode(), 0o444)
        except UserError as error:
            raise MachineError(str(error)) from error
        for shell in self._shells.values():
            with shell.lock:
                shell.reseed()
