"""``exec`` and ``shell``: commands in a sandbox."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import sys
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from windtunnel.base.errors import ScriptError, UserError, WindtunnelError
from windtunnel.cli.sandbox.common import Name, box

if TYPE_CHECKING:
    from windtunnel.agents.sandbox.client import RemoteBox
    from windtunnel.agents.sandbox.model import TurnResult

Shell = Annotated[str, typer.Option(help="The persistent shell that runs it.")]
WHERE = '(status=$?; pwd; exit "$status")'
"""Prints the shell's directory, and leaves the status of the last command as it is."""


def execute(
    context: typer.Context,
    name: Name,
    argv: Annotated[
        list[str],
        typer.Argument(
            metavar="-- COMMAND...", help="One argument is a line for the shell; several are arguments."
        ),
    ],
    timeout: Annotated[float | None, typer.Option(min=0.001, help="Seconds until it is cut off.")] = None,
    shell: Shell = "main",
    no_turn: Annotated[
        bool, typer.Option("--no-turn", help="Leave the turn open, so that no checkpoint is made.")
    ] = False,
) -> None:
    """Run a command. Output, errors and exit status are the command's own.

    It runs in a persistent shell, so `cd` and variables stay. Afterwards the turn ends: what it changed is
    classified and kept by a checkpoint. Exit status 124: timeout; 130: cancelled by Ctrl-C; 3: the checkpoint
    lacks something that the sandbox holds (see `create --allow-less`).

    Example: windtunnel sandbox exec demo -- 'cd /workspace && make test'
    """
    command = argv[0] if len(argv) == 1 else shlex.join(argv)
    with _interruptible() as cancel:
        result, fault = _run(
            box(context, name), command, cancel, shell=shell, timeout=timeout, turn=not no_turn
        )
    status = _status(result, timeout)
    if fault is not None:
        if status:
            _say(f"the command ended with status {status}")
        raise fault
    raise typer.Exit(status)


def interact(context: typer.Context, name: Name, shell: Shell = "main") -> None:
    """Type commands; each line is a turn. Ctrl-C cancels a command, Ctrl-D leaves.

    Example: windtunnel sandbox shell demo
    """
    found = box(context, name)
    found.info()
    typing = sys.stdin.isatty()
    if typing:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  input() edits lines with it

    while (line := _line(found, shell, typing)) is not None:
        if line.strip() in ("exit", "logout"):
            return
        if not line.strip():
            continue
        with _interruptible() as cancel:
            result, fault = _run(found, line, cancel, shell=shell, timeout=None, turn=True)
        if result.ended != "exit":
            _say(result.ended + (f": {result.note}" if result.note else ""))
        if fault is not None:
            _say(str(fault))


def _line(found: RemoteBox, shell: str, typing: bool) -> str | None:
    """The next line, with those that it is continued on; None at the end of the input."""
    prompt = ""
    if typing:
        directory = found.run(WHERE, shell=shell).stdout.decode(errors="replace").strip()
        prompt = f"{found.name}:{directory}$ "
    lines: list[str] = []
    while not lines or lines[-1].endswith("\\"):
        try:
            lines.append(input("> " if lines and typing else prompt))
        except EOFError:
            if typing:
                typer.echo()
            return "\n".join(lines) if lines else None
        except KeyboardInterrupt:
            typer.echo()
            lines = []
    return "\n".join(lines)


def _run(
    found: RemoteBox,
    command: str,
    cancel: threading.Event,
    *,
    shell: str,
    timeout: float | None,
    turn: bool,
) -> tuple[TurnResult, WindtunnelError | None]:
    """Run a command with its output on this process's own, byte by byte; with what its turn's end or its
    checkpoint, which is waited for, failed with."""
    outputs: dict[str, Any] = {"stdout": sys.stdout.buffer, "stderr": sys.stderr.buffer}

    def on_output(stream: str, data: bytes) -> None:
        outputs[stream].write(data)
        outputs[stream].flush()

    try:
        result = found.run(command, shell=shell, timeout=timeout, cancel=cancel, on_output=on_output)
    except BrokenPipeError:
        # Whoever read the output has gone; the command was cancelled when its stream was closed.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(128 + signal.SIGPIPE) from None
    if not turn or result.ended == "sandbox-died":
        return result, None
    try:
        for lack in found.end_turn().wait().lacks:
            _say(f"not kept: {lack}")
    except WindtunnelError as fault:
        return result, fault
    return result, None


def _status(result: TurnResult, timeout: float | None) -> int:
    """The exit status for a command; ScriptError where it was not the command's own end."""
    if result.ended == "exit":
        return result.exit_code or 0
    note = f" ({result.note})" if result.note else ""
    if result.ended == "timeout":
        _say(f"cut off after {timeout:g} s{note}")
        return 124
    if result.ended == "cancelled":
        _say(f"cancelled{note}")
        return 130
    if result.ended == "shell-died":
        raise ScriptError(f"sandbox exec: the shell ended with the command{note}")
    raise ScriptError(f"sandbox exec: the sandbox died during the command{note}")


@contextlib.contextmanager
def _interruptible() -> Iterator[threading.Event]:
    """Ctrl-C sets the event; a second one is the usual interrupt."""
    cancel = threading.Event()

    def interrupted(number: int, frame: object) -> None:
        if cancel.is_set():
            raise KeyboardInterrupt
        cancel.set()

    try:
        before = signal.signal(signal.SIGINT, interrupted)
    except ValueError as error:  # not the main thread
        raise UserError("sandbox: commands must be run from the main thread") from error
    try:
        yield cancel
    finally:
        signal.signal(signal.SIGINT, before)


def _say(text: str) -> None:
    typer.echo(f"windtunnel: {text}", err=True)
