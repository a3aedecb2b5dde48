"""``subprocess``-like calls that run in a sandbox: ``run``, ``check_output`` and a ``Popen``.

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
from subprocess import DEVNULL, PIPE, STDOUT, CalledProcessError, CompletedProcess, TimeoutExpired
from typing import Any

from windtunnel.agents.sandbox.model import TurnResult
from windtunnel.agents.sandbox.protocol import AnySandbox
from windtunnel.base.errors import UserError

SHELL = "subprocess"
Argv = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]

__all__ = [
    "DEVNULL",
    "PIPE",
    "STDOUT",
    "CalledProcessError",
    "CompletedProcess",
    "Popen",
    "TimeoutExpired",
    "check_call",
    "check_output",
    "command_line",
    "run",
]


def run(
    box: AnySandbox,
    args: Argv,
    *,
    input: bytes | str | None = None,
    stdin: int | None = None,
    stdout: int | None = None,
    stderr: int | None = None,
    capture_output: bool = False,
    shell: bool = False,
    cwd: str | os.PathLike[str] | None = None,
    timeout: float | None = None,
    check: bool = False,
    text: bool | None = None,
    encoding: str | None = None,
    errors: str | None = None,
    env: Mapping[str, str] | None = None,
) -> CompletedProcess[Any]:
    """``subprocess.run`` in a sandbox.

    Raises CalledProcessError (with ``check``), TimeoutExpired, UserError for what a sandbox has not, and
    RuntimeError when the sandbox dies during the command.
    """
    if input is not None:
        raise UserError("sandbox: input= is not supported; put a file and redirect it in the command")
    _no_input(stdin)
    if capture_output:
        if stdout is not None or stderr is not None:
            raise UserError("sandbox: stdout and stderr must not be given with capture_output")
        stdout = stderr = PIPE
    result = box.run(command_line(args, shell, cwd, env, stderr), shell=SHELL, timeout=timeout)
    out, err = (
        decoded(_kept(stream, data), text, encoding, errors)
        for stream, data in ((stdout, result.stdout), (stderr, result.stderr))
    )
    if result.ended == "timeout":
        assert timeout is not None
        raise TimeoutExpired(args, timeout, output=out, stderr=err)
    completed = CompletedProcess(args, status_of(result), out, err)
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
        _no_input(stdin)
        self.args = args
        self.returncode: int | None = None
        self.stdin = None
        self._text = (text, encoding, errors)
        self._pipes = {
            name: _Pipe() for name, kind in (("stdout", stdout), ("stderr", stderr)) if kind == PIPE
        }
        self.stdout = self._readable("stdout")
        self.stderr = self._readable("stderr")
        self._cancel = threading.Event()
        self._signal = signal.SIGKILL
        self._over = threading.Event()
        self._error: BaseException | None = None
        line = command_line(args, shell, cwd, env, stderr)
        self._thread = threading.Thread(
            target=self._work, args=(box, line), name="sandbox-subprocess", daemon=True
        )
        self._thread.start()

    def poll(self) -> int | None:
        """The return code, or None while it runs."""
        if self._over.is_set():
            self._raise()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end; TimeoutExpired leaves it running."""
        if not self._over.wait(timeout):
            assert timeout is not None
            raise TimeoutExpired(self.args, timeout)
        self._raise()
        assert self.returncode is not None
        return self.returncode

    def communicate(self, input: None = None, timeout: float | None = None) -> tuple[Any, Any]:
        """Wait for the end and return what is left of both outputs."""
        if input is not None:
            raise UserError("sandbox: communicate(input) is not supported; a command's input is empty")
        self.wait(timeout)
        return tuple(None if stream is None else stream.read() for stream in (self.stdout, self.stderr))  # type: ignore[return-value]

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
        def on_output(stream: str, data: bytes) -> None:
            if stream in self._pipes:
                self._pipes[stream].feed(data)

        try:
            result = box.run(line, shell=SHELL, cancel=self._cancel, on_output=on_output)
            self.returncode = status_of(result, self._signal)
        except BaseException as error:  # raised to whoever waits
            self._error = error
        finally:
            for pipe in self._pipes.values():
                pipe.end()
            self._over.set()

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error

    def _readable(self, name: str) -> Any:
        pipe = self._pipes.get(name)
        if pipe is None:
            return None
        buffered = io.BufferedReader(pipe)
        text, encoding, errors = self._text
        if not (text or encoding or errors):
            return buffered
        return io.TextIOWrapper(buffered, encoding=encoding or "utf-8", errors=errors)


class _Pipe(io.RawIOBase):
    """Bytes that one thread feeds and another reads; without a bound, since the result holds them anyway."""

    def __init__(self) -> None:
        self._bytes = bytearray()
        self._ended = False
        self._changed = threading.Condition()

    def feed(self, data: bytes) -> None:
        with self._changed:
            self._bytes += data
            self._changed.notify_all()

    def end(self) -> None:
        with self._changed:
            self._ended = True
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
    if isinstance(args, str | os.PathLike):
        words = ["/bin/sh", "-c", os.fspath(args)] if shell else [os.fspath(args)]
    else:
        words = [os.fspath(word) for word in args]
        words = ["/bin/sh", "-c", *words] if shell else words
    if not words:
        raise UserError("sandbox: the command is empty")
    if env is not None:
        wrong = [name for name in env if not name or "=" in name or "\0" in name]
        if wrong:
            raise UserError(f"sandbox: {wrong[0]!r} cannot be the name of a variable")
        words = ["env", "-i", *(f"{name}={value}" for name, value in env.items()), *words]
    parts = [f"exec {shlex.join(words)} </dev/null"]
    if cwd is not None:
        parts.insert(0, f"cd -- {shlex.quote(os.fspath(cwd))} || exit 126")
    inside = f"({'; '.join(parts)})"
    # A shell says on its own standard error when a signal ended a command: that must not get into the output.
    if stderr == STDOUT:
        return f"{{ {inside} 2>&1; }} 2>/dev/null"
    return f"{{ {inside} 2>&3 3>&-; }} 3>&2 2>/dev/null"


def status_of(result: TurnResult, cut_off_by: int = signal.SIGKILL) -> int:
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


def decoded(data: bytes | None, text: bool | None, encoding: str | None, errors: str | None) -> Any:
    if data is None or not (text or encoding or errors):
        return data
    read = data.decode(encoding or "utf-8", errors or "strict")
    return read.replace("\r\n", "\n").replace("\r", "\n")


def _kept(stream: int | None, data: bytes) -> bytes | None:
    if stream not in (None, PIPE, DEVNULL, STDOUT):
        raise UserError("sandbox: an output can be PIPE, DEVNULL or (stderr) STDOUT; a file is not supported")
    return data if stream == PIPE else None


def _no_input(stdin: int | None) -> None:
    if stdin not in (None, DEVNULL):
        raise UserError("sandbox: stdin is not supported; a command's input is empty")
