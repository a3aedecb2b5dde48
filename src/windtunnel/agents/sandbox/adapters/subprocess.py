"""``subprocess``-like calls that run in a sandbox: ``run``, ``check_call``, ``check_output`` and a ``Popen``.

A command runs in a subshell of a persistent shell that is set aside for this, so that neither its directory
nor its variables reach the next one. Differences from the standard library: there is no standard input (it is
empty), no pid, ``env`` and ``cwd`` mean inside the sandbox, and an output that is not captured is dropped.

``box`` is a ``Box`` of this process or of the daemon's client.
"""

from __future__ import annotations

import io
import os
import shlex
import signal
import threading
from collections.abc import Mapping, Sequence
from subprocess import DEVNULL, PIPE, STDOUT, CompletedProcess, TimeoutExpired
from typing import Any

from windtunnel.agents.sandbox.model import TurnResult
from windtunnel.agents.sandbox.protocol import AnySandbox
from windtunnel.base.errors import UserError

SHELL = "subprocess"
Argv = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]

__all__ = [
    "DEVNULL", "PIPE", "STDOUT", "CompletedProcess", "Popen", "TimeoutExpired", "check_call", "check_output",
    "command_line", "run",
]  # fmt: skip


def run(
    box: AnySandbox,
    args: Argv,
    *,
    capture_output: bool = False,
    timeout: float | None = None,
    check: bool = False,
    **options: Any,
) -> CompletedProcess[Any]:
    """``subprocess.run`` in a sandbox. ``options``: of `Popen`.

    Raises CalledProcessError (with ``check``), TimeoutExpired, UserError for what a sandbox has not, and
    RuntimeError when the sandbox dies during the command.
    """
    if capture_output:
        options = {"stdout": PIPE, "stderr": PIPE, **options}
    process = Popen(box, args, **options)
    try:
        out, err = process.communicate(timeout)
    except TimeoutExpired as late:
        process.kill()
        late.output, late.stderr = process.communicate()
        raise
    assert process.returncode is not None
    completed = CompletedProcess(args, process.returncode, out, err)
    if check:
        completed.check_returncode()
    return completed


def check_call(box: AnySandbox, args: Argv, **options: Any) -> int:
    return run(box, args, check=True, **options).returncode


def check_output(box: AnySandbox, args: Argv, **options: Any) -> Any:
    return run(box, args, check=True, stdout=PIPE, **options).stdout


class Popen:
    """A command that runs while the caller goes on. ``stdout`` and ``stderr`` are readable where PIPE."""

    def __init__(
        self,
        box: AnySandbox,
        args: Argv,
        *,
        stdin: int | None = None,
        stdout: int | None = None,
        stderr: int | None = None,
        shell: bool = False,
        cwd: str | os.PathLike[str] | None = None,
        env: Mapping[str, str] | None = None,
        text: bool | None = None,
        encoding: str | None = None,
        errors: str | None = None,
    ) -> None:
        if stdin not in (None, DEVNULL):
            raise UserError("sandbox: stdin is not supported; a command's input is empty")
        if {stdout, stderr} - {None, PIPE, DEVNULL, STDOUT}:
            raise UserError("sandbox: an output can be PIPE, DEVNULL or (stderr) STDOUT, and no file")
        self.args, self.stdin = args, None
        self.returncode: int | None = None
        self._pipes = {
            name: _Pipe() for name, kind in (("stdout", stdout), ("stderr", stderr)) if kind == PIPE
        }
        streams: dict[str, Any] = {name: io.BufferedReader(pipe) for name, pipe in self._pipes.items()}
        if text or encoding or errors:
            streams = {
                name: io.TextIOWrapper(stream, encoding=encoding or "utf-8", errors=errors)
                for name, stream in streams.items()
            }
        self.stdout, self.stderr = streams.get("stdout"), streams.get("stderr")
        self._cancel, self._over = threading.Event(), threading.Event()
        self._signal = signal.SIGKILL
        self._error: BaseException | None = None
        line = command_line(args, shell, cwd, env, stderr)
        threading.Thread(target=self._work, args=(box, line), name="sandbox-subprocess", daemon=True).start()

    def poll(self) -> int | None:
        """The return code, or None while it runs."""
        return self.wait() if self._over.is_set() else None

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end; TimeoutExpired leaves it running."""
        if not self._over.wait(timeout):
            raise TimeoutExpired(self.args, timeout or 0.0)
        if self._error is not None:
            raise self._error
        assert self.returncode is not None
        return self.returncode

    def communicate(self, timeout: float | None = None) -> tuple[Any, Any]:
        """Wait for the end and return what is left of both outputs."""
        self.wait(timeout)
        out, err = (None if stream is None else stream.read() for stream in (self.stdout, self.stderr))
        return out, err

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def send_signal(self, number: int) -> None:
        """End it. A sandbox knows one way to cut a command off; the number is what ``returncode`` tells."""
        if number not in (signal.SIGKILL, signal.SIGTERM, signal.SIGINT):
            raise UserError(f"sandbox: signal {number} is not supported; use SIGTERM, SIGINT or SIGKILL")
        if not self._over.is_set():
            self._signal = signal.Signals(number)
            self._cancel.set()

    def __enter__(self) -> Popen:
        return self

    def __exit__(self, *_: object) -> None:
        self.wait()

    def _work(self, box: AnySandbox, line: str) -> None:
        try:
            result = box.run(line, shell=SHELL, cancel=self._cancel, on_output=self._feed)
            self.returncode = status_of(result, self._signal)
        except BaseException as error:  # raised to whoever waits
            self._error = error
        finally:
            for pipe in self._pipes.values():
                pipe.feed(None)
            self._over.set()

    def _feed(self, stream: str, data: bytes) -> None:
        if stream in self._pipes:
            self._pipes[stream].feed(data)


class _Pipe(io.RawIOBase):
    """Bytes that one thread feeds (None: the end) and another reads; without a bound, as results are."""

    def __init__(self) -> None:
        self._bytes, self._ended, self._changed = bytearray(), False, threading.Condition()

    def feed(self, data: bytes | None) -> None:
        with self._changed:
            self._bytes += data or b""
            self._ended = data is None
            self._changed.notify_all()

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        with self._changed:
            self._changed.wait_for(lambda: self._bytes or self._ended)
            count = min(len(buffer), len(self._bytes))
            buffer[:count] = self._bytes[:count]
            del self._bytes[:count]
            return count


def command_line(
    args: Argv,
    shell: bool = False,
    cwd: str | os.PathLike[str] | None = None,
    env: Mapping[str, str] | None = None,
    stderr: int | None = None,
) -> str:
    """The text for a shell of the sandbox that does what ``subprocess`` would do with these arguments."""
    given = [args] if isinstance(args, str | os.PathLike) else args
    words = [*(["/bin/sh", "-c"] if shell else []), *(os.fspath(word) for word in given)]
    if not given:
        raise UserError("sandbox: the command is empty")
    if env is not None:
        wrong = [name for name in env if not name or "=" in name or "\0" in name]
        if wrong:
            raise UserError(f"sandbox: {wrong[0]!r} cannot be the name of a variable")
        words = ["env", "-i", *(f"{name}={value}" for name, value in env.items()), *words]
    inside = f"exec {shlex.join(words)} </dev/null"
    if cwd is not None:
        inside = f"cd -- {shlex.quote(os.fspath(cwd))} || exit 126; {inside}"
    # A shell says on its own standard error when a signal ended a command: that must not get into the output.
    if stderr == STDOUT:
        return f"{{ ({inside}) 2>&1; }} 2>/dev/null"
    return f"{{ ({inside}) 2>&3 3>&-; }} 3>&2 2>/dev/null"


def status_of(result: TurnResult, cut_off_by: int) -> int:
    """A return code as ``subprocess`` tells it: negative for a signal."""
    if result.ended in ("timeout", "cancelled"):
        return -int(cut_off_by)
    if result.exit_code is None:
        what = "the sandbox died" if result.ended == "sandbox-died" else "its shell died"
        raise RuntimeError(
            f"sandbox: {what} during the command" + (f" ({result.note})" if result.note else "")
        )
    # A shell tells of a command that a signal ended by 128 and the signal's number.
    return 128 - result.exit_code if 128 < result.exit_code < 128 + 65 else result.exit_code
