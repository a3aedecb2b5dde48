"""One persistent shell of a sandbox, led from the host: start it, run a command in it, cut a command off.

Waiting is a poll on the shell's ``ack`` FIFO and on init's pidfd: an answer, the death of the shell (init
reports it in the same FIFO) and the death of the sandbox all wake it. The clock ticks only while somebody
listens to output, may cancel, or to notice that the FIFO was taken away.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import select
import signal
import threading
import time
from collections.abc import Callable
from typing import IO, Literal

from windtunnel.agents.sandbox.errors import MachineError, disk_full
from windtunnel.agents.sandbox.machine.channel import (
    BALLAST,
    OUTPUT,
    ChannelFolder,
    CommandOutputs,
    Feed,
    Init,
    OnOutput,
)
from windtunnel.agents.sandbox.machine.state import (
    ShellSections,
    capture_script,
    differences,
    end_script,
    go_script,
    plain_stream,
    replay_script,
    stream,
)
from windtunnel.agents.sandbox.model import TurnResult
from windtunnel.linux import processes
from windtunnel.linux.snapshot import read_descriptors, read_file

STATE_LIMIT = 16 * 2**20
"""Bytes of its state that a shell may have."""
BIRTH = 20.0
"""Seconds for a shell to start, or to take a script of the host's own, on a loaded machine."""
DIRECT = 32 * 2**10
"""Bytes of a command that fit through the FIFO in one write."""
TICK = 0.05
IDLE_TICK = 1.0
Ended = Literal["exit", "timeout", "cancelled", "shell-died", "sandbox-died"]


class Shell:
    """A shell named ``name``, with a folder of that name in the channel."""

    def __init__(self, name: str, channel: ChannelFolder, init: Init) -> None:
        self.name = name
        self.lock = threading.Lock()
        self.program = "bash"
        self.inner = 0
        self.pid = 0
        self._channel = channel
        self._folder = ChannelFolder(-1)
        self._init = init
        self._mark = ""
        self._script = self._answers = -1
        """The host's ends of its two FIFOs, open for both directions."""
        self._received = b""

    def close(self) -> None:
        for descriptor in (self._script, self._answers):
            if descriptor >= 0:
                os.close(descriptor)
        self._script = self._answers = -1
        self._folder.close()

    # --- birth -----------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start it in a fresh folder and wait until it has described itself. Raises MachineError."""
        try:
            self.close()
            self._folder = self._channel.folder(self.name, create=True)
            for name in ("state", "traps", "arguments"):
                self._folder.remove(name)  # whatever was planted there would hold the new shell up
            self._open_fifos(self._folder.fifo)
            self._mark = f"windtunnel-{secrets.token_hex(12)}"
            os.write(self._init.requests, f"start {self.name}\n".encode())
            if (word := self._wait(b"born ", time.monotonic() + BIRTH)) is None:
                raise MachineError(f"shell {self.name} could not be started")
            inner, _, program = word.partition(b" ")
            self.inner, self.program = int(inner), program.decode(errors="replace")
            self._folder.write("born", f"{self.inner} {self.program} {self._mark}".encode())
            self._folder.write("end", end_script(self.name).encode())
            self._folder.write("capture", capture_script(self.name, self._mark).encode())
            self._keep_status(0)
        except OSError as error:
            raise MachineError(f"shell {self.name} cannot be started: {error.strerror}") from error
        self._find()
        if not self.plain:
            self._quiet(b"builtin shopt -s expand_aliases\n")

    @property
    def plain(self) -> bool:
        """Whether it is no bash: then it lives for one command, and keeps nothing."""
        return self.program != "bash"

    def rest(self) -> None:
        """There is nothing to run yet."""
        if self.plain:
            self._kill()

    def find_again(self) -> bool:
        """Take over a shell that runs already; False when it is not there."""
        self._folder = self._channel.folder(self.name, create=False)
        words = self._folder.read("born", 200).decode(errors="replace").split(" ")
        if len(words) != 3 or not words[0].isdigit():
            return False
        self.inner, self.program, self._mark = int(words[0]), words[1], words[2]
        try:
            self._open_fifos(self._folder.existing_fifo)
        except OSError:
            return False
        self._find()
        return self.pid != 0

    def _find(self) -> None:
        self.pid = processes.host_pid(self.inner, self._init.cgroup.pids())

    # --- state -----------------------------------------------------------------------------------------

    def state(self) -> ShellSections:
        """As of the end of the last command."""
        state = ShellSections.parse(self._text("state"), self._mark)
        state.sections["traps"] = self._text("traps")
        state.sections["arguments"] = self._text("arguments")
        # without what the shell keeps for itself
        opened = [
            f"{number}>{each.link}"
            for number, each in read_descriptors(self.pid).items()
            if number > 2 and not each.flags & os.O_CLOEXEC
        ]
        state.sections["descriptors"] = "\n".join(opened)
        state.sections["jobs"] = read_file(f"/proc/{self.pid}/task/{self.pid}/children").decode()
        return state

    def _text(self, file: str) -> str:
        return self._folder.read(file, STATE_LIMIT).decode(errors="surrogateescape")

    def replay(self, target: ShellSections) -> None:
        """Make this shell's state equal to ``target``; MachineError says, at the end, what stayed
        different."""
        if self.plain:
            raise MachineError(f"shell {self.name} is a plain sh, which keeps no state")
        # after a restore the files may be newer than the shell: what they say of it is not what it is
        self._quiet(b":")
        now = self.state()
        script, problems = replay_script(now, target)
        output = self._quiet(script.encode(errors="surrogateescape"))
        left = [part for part in differences(self.state(), target) if not any(part in p for p in problems)]
        if problems or left:
            words = [*problems, *([f"different: {', '.join(left[:8])}"] if left else [])]
            detail = output.decode(errors="replace").strip()[-300:] if left else ""
            raise MachineError(f"shell {self.name}: {'; '.join(words)}{f' ({detail})' if detail else ''}")

    def _quiet(self, script: bytes) -> bytes:
        """Run a script of the host's own; returns what it said on standard error. Raises MachineError."""
        token = secrets.token_hex(8)
        try:
            outputs = CommandOutputs(self._folder, token, None)
            try:
                self._folder.write("go", go_script(self.name, script, token))
                lines = stream(self.name, token, None, quiet=True)
                os.write(self._script, lines)
                if self._wait(f"done {token}".encode(), time.monotonic() + BIRTH) is None:
                    raise MachineError(f"shell {self.name} does not answer")
                return outputs.result()[1]
            finally:
                outputs.close()
                for name in outputs.names.values():
                    self._folder.remove(name)
        except OSError as error:
            raise MachineError(f"shell {self.name} cannot be reached: {error.strerror}") from error

    def reseed(self) -> None:
        """Give RANDOM a new seed from the kernel."""
        if self.pid and not self.plain:
            self._quiet(b"RANDOM=$SRANDOM")

    # --- turns -----------------------------------------------------------------------------------------

    def run(
        self,
        command: bytes,
        timeout: float | None,
        cancel: threading.Event | None,
        on_output: OnOutput | None,
        stdin: bytes | IO[bytes] | None = None,
    ) -> TurnResult:
        """Run one command to its end, or cut it off. The caller holds ``lock``. Raises MachineError."""
        begin = time.monotonic()
        since_boot = time.clock_gettime(time.CLOCK_BOOTTIME)
        before = self._init.cgroup.pids()
        token = secrets.token_hex(8)
        self.dry()
        try:
            outputs = CommandOutputs(self._folder, token, on_output)
        except OSError as error:
            self._kill()  # somebody inside took its folder away: the next command has a new shell
            raise MachineError(f"shell {self.name} cannot be reached: {error.strerror}") from error
        feed: Feed | None = None
        try:
            if stdin is not None:
                feed = Feed(self._folder, f"feed.{token}", stdin)
            go = go_script(self.name, command, token, fed=feed is not None, plain=self.plain)
            direct = len(go) < DIRECT and b" DEBUG\n" in self._folder.read("traps", STATE_LIMIT)
            self._folder.write("go", go)
            saved = self.state() if timeout is not None or cancel is not None else None
            lines = stream(self.name, token, go if direct else None, quiet=False)
            os.write(self._script, plain_stream(self.name, token) if self.plain else lines)
            deadline = None if timeout is None else begin + timeout
            ended, status, notes = self._await(token, deadline, cancel, outputs)
            if self.plain:
                self._kill()
            lives = self.pid != 0
            if ended in ("timeout", "cancelled"):
                notes += self._cut(before, since_boot, saved)
            elif ended in ("exit", "shell-died") and self.pid == 0:
                notes += self._again(saved or self.state())
            out, err, more, tails = outputs.result()
            if outputs.cut:
                self.dry()
            if lives and status is not None:
                self._keep_status(status)
                if outputs.cut:  # what the shell said of itself found no room either
                    self._quiet(b":")
            seconds = time.monotonic() - begin
            note = "; ".join((*notes, *more))
            return TurnResult(out, err, status, seconds, ended, note, tuple(tails))
        except OSError as error:
            raise MachineError(f"shell {self.name} cannot be reached: {error.strerror}") from error
        finally:
            if feed is not None:
                feed.end()
            outputs.close()
            self._tidy()

    def _await(
        self, token: str, deadline: float | None, cancel: threading.Event | None, outputs: CommandOutputs
    ) -> tuple[Ended, int | None, list[str]]:
        done, status = f"done {token}".encode(), None
        fast, pause = cancel is not None or outputs.listened, TICK
        while True:
            tick = time.monotonic() + pause
            pause = TICK if fast or outputs.large else min(2 * pause, IDLE_TICK)
            wake = tick if deadline is None else min(tick, deadline)
            line = self._line(wake)
            if line is not None and line.startswith(b"status ") and line[7:].isdigit():
                status = int(line[7:])
            if line == done:
                return "exit", status, []
            if line is not None and line.startswith(b"dead "):
                return self._died(line)
            if not self._init.alive():
                return "sandbox-died", None, ["the sandbox died while the command ran"]
            outputs.pass_on()
            self.dry(outputs)
            if cancel is not None and cancel.is_set():
                return "cancelled", None, []
            if deadline is not None and time.monotonic() >= deadline:
                return "timeout", None, []
            if line is None and self._replaced():
                self._kill()
                return "shell-died", None, ["the command removed the shell's channel, so the shell was ended"]

    def _died(self, line: bytes) -> tuple[Ended, int | None, list[str]]:
        self.pid = 0
        status = int(line.split()[1])
        if os.WIFEXITED(status):
            return "exit", os.WEXITSTATUS(status), ["the command ended the shell"]
        return "shell-died", None, [f"the shell was ended by {signal.Signals(os.WTERMSIG(status)).name}"]

    def _keep_status(self, status: int) -> None:
        """For ``$?`` in the next command."""
        self._folder.write("rc", f"return {status}\n".encode())

    def _cut(self, before: set[int], since: float, saved: ShellSections | None) -> list[str]:
        """End what the command started, and first the shell, which would go on with the rest of it."""
        shell, cgroup = self.pid, self._init.cgroup
        started = processes.started_by(shell, cgroup.pids(), before, since)
        self._kill()
        processes.end(started)
        # what was started while the first were being ended
        processes.end(processes.started_by(shell, cgroup.pids(), before, since), (0.0, 0.0))
        return self._again(saved or self.state())

    def _kill(self) -> None:
        """End the shell itself and wait until init has reaped it."""
        if self.pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
            self._wait(b"dead ", time.monotonic() + BIRTH)
            self.pid = 0

    def _again(self, saved: ShellSections) -> list[str]:
        """Start it anew with the state that it had before the command."""
        if self.plain or not self._init.alive():
            return []
        try:
            self.start()
        except MachineError as error:
            return [str(error)]
        if not saved.complete:
            return ["the shell was started anew, without its earlier state"]
        try:
            self.replay(saved)
        except MachineError as error:
            return [f"the shell was started anew with its state from before the command, except: {error}"]
        return ["the shell was started anew with its state from before the command"]

    # --- the FIFOs -------------------------------------------------------------------------------------

    def _open_fifos(self, hold: Callable[[str], int]) -> None:
        """New ones, or those that are there. Raises OSError."""
        self._received = b""
        self._script = hold("in")
        self._answers = hold("ack")

    def _replaced(self) -> bool:
        """Whether what has the name of the answers is another file now, so that no answer will come."""
        own = os.fstat(self._answers)
        return self._folder.identity("ack") != (own.st_dev, own.st_ino)

    def _line(self, wake: float) -> bytes | None:
        """The next answer, or None at ``wake`` or when the sandbox died."""
        while True:
            line, newline, rest = self._received.partition(b"\n")
            if newline:
                self._received = rest
                return line
            if self._answers < 0:
                raise MachineError(f"shell {self.name} does not run")
            left = wake - time.monotonic()
            poll = select.poll()
            poll.register(self._answers, select.POLLIN)
            poll.register(self._init.handle, select.POLLIN)
            ready = [descriptor for descriptor, _ in poll.poll(max(left, 0) * 1000)]
            if self._answers not in ready:
                return None
            with contextlib.suppress(BlockingIOError):
                self._received = (self._received + os.read(self._answers, 4096))[-8192:]

    def _wait(self, start: bytes, deadline: float) -> bytes | None:
        """What follows ``start`` in the first answer that begins so; None: it did not come, or the shell
        died."""
        while (left := deadline - time.monotonic()) > 0:
            line = self._line(time.monotonic() + min(left, IDLE_TICK))
            if line is None:
                if not self._init.alive():
                    return None
                continue
            if line.startswith(start):
                return line[len(start) :]
            if line.startswith(b"dead "):
                self.pid = 0
                return None
        return None

    def dry(self, outputs: CommandOutputs | None = None) -> None:
        """Give back the room of what earlier commands left running has written since: it is nobody's output,
        but for the size of its files. ``outputs``: those of the command that runs."""
        current = outputs.names.values() if outputs is not None else ()
        with contextlib.suppress(OSError):
            old = [name for name in self._folder.names() if OUTPUT.fullmatch(name) and name not in current]
            try:
                for name in old:
                    self._folder.dry(name)
            except OSError as error:
                if not disk_full(error):
                    raise
                # even to give room back takes some
                self._channel.remove(BALLAST)
                for name in old:
                    self._folder.dry(name)
                self._channel.ballast()

    def _tidy(self) -> None:
        """Remove the output files that no process holds any more."""
        with contextlib.suppress(OSError):
            names = {name for name in self._folder.names() if name.startswith(("out.", "err."))}
            if not names:
                return
            own = {self._init.pid, self.pid}
            in_use = set()
            for pid in self._init.cgroup.pids() - own:
                for target in processes.descriptors(pid).values():
                    in_use.add(os.path.basename(target))
            for name in names - in_use:
                self._folder.remove(name)
