"""A running sandbox as the host holds it: its first process, its shells, its control group and its files."""

from __future__ import annotations

import contextlib
import io
import os
import re
import secrets
import threading
from pathlib import Path
from typing import IO

from windtunnel.agents.sandbox.errors import MachineError, PoolError
from windtunnel.agents.sandbox.machine import channel, files, launch, network, walls
from windtunnel.agents.sandbox.machine.channel import Folder, Init, OnOutput
from windtunnel.agents.sandbox.machine.shell import Shell
from windtunnel.agents.sandbox.machine.state import State
from windtunnel.agents.sandbox.model import Entry, SandboxSpec, ShellState, TurnResult
from windtunnel.agents.sandbox.place import Externals, Home
from windtunnel.base.errors import UserError
from windtunnel.linux import processes
from windtunnel.linux.namespaces import set_hostname

SHELL_NAME = re.compile(r"[A-Za-z0-9_-]{1,32}")
MOST_SHELLS = 64


class Machine:
    """One sandbox that runs. Made by `start` or `adopt`; `close` lets it run on, `stop` ends it."""

    def __init__(self, home: Home, spec: SandboxSpec, externals: Externals, pid: int) -> None:
        self.home, self.spec, self.externals, self.pid = home, spec, externals, pid
        self.cgroup = launch.group(home, spec.name)
        self.limits_missed: list[str] = []
        self._lock = threading.Lock()
        self._shells: dict[str, Shell] = {}
        self._root = os.open(externals.root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self._handle = self._requests = -1
        try:
            self._channel = Folder.at(externals.of("channel"))
        except BaseException:
            os.close(self._root)
            raise
        try:
            self._handle = os.pidfd_open(pid)
            if pid not in self.cgroup.pids():
                raise MachineError(f"process {pid} is none of sandbox {spec.name}")
            self._requests = self._channel.existing_fifo("requests")
        except OSError as error:
            self.close()
            raise MachineError(f"sandbox {spec.name} does not run: {error.strerror}") from error
        except BaseException:
            self.close()
            raise
        self._init = Init(pid, self._handle, self._requests, self.cgroup)

    # --- life ------------------------------------------------------------------------------------------

    @staticmethod
    def prepare(home: Home, spec: SandboxSpec, root: Path) -> Externals:
        """Control groups, network and /dev exist; for a restore of processes, before there are any. Raises
        MachineError."""
        if launch.rootless():
            raise MachineError("a sandbox with processes of its own needs root: run this as root")
        return launch.prepare(home, spec, root)[0]

    @staticmethod
    def lay_channel(externals: Externals, kept: Path) -> None:
        """The channel is what `kept_channel` gave, in a file, before a restore makes the processes. Raises
        MachineError."""
        try:
            channel.lay(kept, externals.of("channel"))
        except (OSError, PoolError) as error:
            raise MachineError(f"the sandbox's channel cannot be put back: {error}") from error

    @classmethod
    def start(cls, home: Home, spec: SandboxSpec, root: Path) -> Machine:
        """Start the sandbox on ``root``, with the shell ``main``. Raises MachineError, leaving nothing."""
        if launch.group(home, spec.name).pids():
            raise MachineError(f"sandbox {spec.name} runs already")
        machine: Machine | None = None
        try:
            externals, missed = launch.prepare(home, spec, root)
            with launch.group(home, spec.name).first():
                machine = cls(home, spec, externals, launch.start(spec, externals))
                machine.limits_missed = missed
                machine._shell("main")
            return machine
        except BaseException:
            if machine is not None:
                machine.close()
            with contextlib.suppress(MachineError):
                cls.clear(home, spec.name)
            raise

    @classmethod
    def adopt(cls, home: Home, spec: SandboxSpec, root: Path, pid: int) -> Machine:
        """Take over a sandbox that runs: after a restart of the daemon, or just restored. Raises
        MachineError."""
        externals, missed = launch.prepare(home, spec, root)
        machine = cls(home, spec, externals, pid)
        machine.limits_missed = missed
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

    @staticmethod
    def clear(home: Home, box: str) -> None:
        """Kill whatever runs of a sandbox and remove its control groups, its network and its /dev. Raises
        MachineError."""
        cgroup = launch.group(home, box)
        cgroup.kill()
        cgroup.remove()
        if not launch.rootless():
            network.remove(home, box)
            walls.release(home, box)

    def kept_channel(self) -> bytes:
        """What a restore of the processes needs beside their image, since they hold files of the channel
        open; they stand still. Raises MachineError."""
        return channel.kept(self.externals.of("channel"))

    def alive(self) -> bool:
        return self._handle >= 0 and self._init.alive()

    def close(self) -> None:
        """Let go of it; the sandbox runs on."""
        for shell in self._shells.values():
            shell.close()
        self._shells.clear()
        self._channel.close()
        for descriptor in (self._root, self._handle, self._requests):
            if descriptor >= 0:
                os.close(descriptor)
        self._root = self._handle = self._requests = -1

    def stop(self) -> None:
        """End every process, and remove control groups and network. Raises MachineError."""
        self.clear(self.home, self.spec.name)
        self.close()

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
            if shell is not None and shell.pid:
                return shell
            if shell is None:
                if len(self._shells) >= MOST_SHELLS:
                    raise UserError(f"sandbox {self.spec.name} has {MOST_SHELLS} shells, which is the most")
                shell = Shell(name, self._channel, self._init)
            try:
                shell.start()
            except BaseException:
                if name not in self._shells:
                    shell.close()
                raise
            self._shells[name] = shell
            return shell

    def shells(self) -> dict[str, int]:
        """Name → host pid of each persistent shell."""
        return {name: shell.pid for name, shell in self._shells.items() if shell.pid}

    def shell_states(self) -> tuple[ShellState, ...]:
        """The state of each shell as of the end of its last command."""
        states = []
        for name, shell in sorted(self._shells.items()):
            state = shell.state()
            if state.complete:
                states.append(state.shell_state(name))
        return tuple(states)

    def replay(self, state: ShellState) -> None:
        """Make the shell of that name, started if absent, equal to ``state``: what is not in it is removed.

        Raises MachineError when something stayed different; the rest has been replayed.
        """
        wanted = State.of(state)
        shell = self._shell(state.name)
        with shell.lock:
            shell.replay(wanted)

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
                set_hostname(self._handle, name)
            except OSError as error:
                raise MachineError(f"the sandbox's host name could not be set: {error.strerror}") from error
        try:
            files.put(self._root, "/etc/hostname", f"{name}\n".encode(), 0o644)
            files.put(self._root, "/etc/machine-id", f"{secrets.token_hex(16)}\n".encode(), 0o444)
        except UserError as error:
            raise MachineError(str(error)) from error
        for shell in self._shells.values():
            with shell.lock:
                shell.reseed()

    # --- files -----------------------------------------------------------------------------------------

    def put(self, path: str, data: bytes | IO[bytes], mode: int = 0o644) -> None:
        files.put(self._root, path, data, mode)

    def get(self, path: str) -> bytes:
        out = io.BytesIO()
        files.get_to(self._root, path, out, files.MOST)
        return out.getvalue()

    def get_to(self, path: str, out: IO[bytes]) -> int:
        return files.get_to(self._root, path, out)

    def listdir(self, path: str) -> list[Entry]:
        return files.listdir(self._root, path)
