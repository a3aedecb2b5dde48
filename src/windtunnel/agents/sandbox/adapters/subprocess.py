"""``subprocess``-like calls that run in a sandbox: ``run`` and ``check_output``.

A command runs in a subshell of a persistent shell that is set aside for this, so that neither its directory
nor its variables reach the next one. Differences from the standard library: there is no standard input (it is
empty), ``env`` and ``cwd`` mean inside the sandbox, an output that is not captured is dropped, and there is
no ``Popen``: ``Box.run`` passes output on as it comes, and can be cancelled.

``box`` is a ``Box`` of this process or of the daemon's client.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence
from subprocess import DEVNULL, PIPE, STDOUT, CompletedProcess, TimeoutExpired
from typing import Any

from windtunnel.agents.sandbox.model import TurnResult
from windtunnel.agents.sandbox.protocol import AnySandbox
from windtunnel.base.errors import UserError

SHELL = "subprocess"
Argv = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]


def run(
    box: AnySandbox,
    args: Argv,
    *,
    capture_output: bool = False,
    timeout: float | None = None,
    check: bool = False,
    stdin: int | None = None,
    stdout: int | None = None,
    stderr: int | None = None,
    shell: bool = False,
    cwd: str | os.PathLike[str] | None = None,
    env: Mapping[str, str] | None = None,
    text: bool | None = None,
    encoding: str | None = None,
    errors: str | None = None,
) -> CompletedProcess[Any]:
    """``subprocess.run`` in a sandbox.

    Raises CalledProcessError (with ``check``), TimeoutExpired, UserError for what a sandbox has not, and
    RuntimeError when the sandbox dies during the command.
    """
    if capture_output:
        stdout = stderr = PIPE
    if stdin not in (None, DEVNULL):
        raise UserError("sandbox: stdin is not supported; a command's input is empty")
    if {stdout, stderr} - {None, PIPE, DEVNULL, STDOUT}:
        raise UserError("sandbox: an output can be PIPE, DEVNULL or (stderr) STDOUT, and no file")
    result = box.run(command_line(args, shell, cwd, env, stderr), shell=SHELL, timeout=timeout)
    outputs: list[Any] = [
        result.stdout if stdout == PIPE else None,
        result.stderr if stderr == PIPE else None,
    ]
    if result.ended == "timeout":
        raise TimeoutExpired(args, timeout or 0.0, *outputs)
    if text or encoding or errors:
        outputs = [out if out is None else out.decode(encoding or "utf-8", errors or "strict")
                   for out in outputs]  # fmt: skip
    completed = CompletedProcess(args, status_of(result), *outputs)
    if check:
        completed.check_returncode()
    return completed


def check_output(box: AnySandbox, args: Argv, **options: Any) -> Any:
    return run(box, args, check=True, stdout=PIPE, **options).stdout


def command_line(
    args: Argv,
    shell: bool = False,
    cwd: str | os.PathLike[str] | None = None,
    env: Mapping[str, str] | None = None,
    stderr: int | None = None,
) -> str:
    """The text for a shell of the sandbox that does what ``subprocess`` would do with these arguments."""
    parts = [args] if isinstance(args, str | os.PathLike) else args
    words = [*(["/bin/sh", "-c"] if shell else []), *(os.fspath(word) for word in parts)]
    if not parts:
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


def status_of(result: TurnResult) -> int:
    """A return code as ``subprocess`` tells it: negative for a signal."""
    if result.exit_code is None:
        what = "the sandbox died" if result.ended == "sandbox-died" else "its shell died"
        raise RuntimeError(
            f"sandbox: {what} during the command" + (f" ({result.note})" if result.note else "")
        )
    # A shell tells of a command that a signal ended by 128 and the signal's number.
    return 128 - result.exit_code if 128 < result.exit_code < 128 + 65 else result.exit_code
