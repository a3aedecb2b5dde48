"""``exec`` and ``shell``: commands in a sandbox."""

from __future__ import annotations

import contextlib
import io
import os
import shlex
import signal
import sys
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from windtunnel.base.errors import ScriptError, UserError, WindtunnelError
from windtunnel.cli.sandbox import Name, box

if TYPE_CHECKING:
    from windtunnel.agents.sandbox.client import RemoteBox
    from windtunnel.agents.sandbox.model import TurnResult

Shell = Annotated[str, typer.Option(help="Name of the persistent shell.")]


def execute(
    context: typer.Context,
    name: Name,
    argv: Annotated[
        list[str],
        typer.Argument(
            metavar="-- COMMAND...", help="One argument is a line for the shell; several are arguments."
        ),
    ],
    timeout: Annotated[float | None, typer.Option(min=0.001, help="Time limit in seconds.")] = None,
    shell: Shell = "main",
    interactive: Annotated[
        bool, typer.Option("--interactive", "-i", help="Forward standard input to the command.")
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
        stdin = io.FileIO(0, closefd=False) if interactive else None
        result, fault = _run(
            box(context, name), command, cancel=cancel, shell=shell, timeout=timeout, stdin=stdin
        )
    status = _status(result, timeout)
    if fault is not None:
        if status:
            _say(f"the command ended with status {status}")
        raise fault
    raise typer.Exit(status)


def interact(context: typer.Context, name: Name, shell: Shell = "main") -> None:
    """A terminal in a sandbox; its end is the end of a turn. From a pipe, each line is a command and a turn.

    The image needs `script` or `python3`, which make the terminal.

    Example: windtunnel sandbox shell demo
    """
    sandbox = box(context, name)
    sandbox.info()
    if sys.stdin.isatty() and sys.stdout.isatty():
        return _terminal(sandbox)
    pending = ""
    for line in sys.stdin:
        pending += line
        if pending.endswith("\\\n") or not pending.strip():
            continue
        command, pending = pending.rstrip("\n"), ""
        if command.strip() in ("exit", "logout"):
            return None
        with _interruptible() as cancel:
            result, fault = _run(sandbox, command, cancel=cancel, shell=shell)
        if result.ended != "exit":
            _say(result.ended + (f": {result.note}" if result.note else ""))
        if fault is not None:
            _say(str(fault))
    return None


def _terminal(sandbox: RemoteBox) -> None:
    """Lead this terminal, in raw mode, through to one in the sandbox, which has its size."""
    import termios
    import tty

    place = f"/tmp/.windtunnel-terminal-{os.getpid()}"
    set_term = f"TERM={shlex.quote(os.environ.get('TERM', 'xterm'))}"
    inner = f"{_size()}; tty >{place}; exec ${{SHELL:-/bin/sh}} -i"

    def resize(*_: object) -> None:
        line = f'{_size()} <"$(cat {place})" >/dev/null'
        threading.Thread(target=sandbox.run, args=(line,), kwargs={"timeout": 10.0}, daemon=True).start()

    before = termios.tcgetattr(0)
    handler = signal.signal(signal.SIGWINCH, resize)
    try:
        tty.setraw(0, termios.TCSADRAIN)  # what was typed already is not lost
        result, fault = _run(
            sandbox, f"{set_term} {terminal_of(inner)}; s=$?; rm -f {place}; (exit $s)",
            shell="terminal", stdin=io.FileIO(0, closefd=False),
        )  # fmt: skip
    finally:
        signal.signal(signal.SIGWINCH, handler)
        termios.tcsetattr(0, termios.TCSADRAIN, before)
    if fault is not None:
        raise fault
    if result.exit_code == 127:
        raise UserError(
            f"sandbox shell: the image of {sandbox.name} has neither 'script' nor 'python3', one of which "
            "makes the terminal"
        )
    raise typer.Exit(_status(result, None))


def terminal_of(line: str) -> str:
    """The command that runs a line of a shell in a terminal of its own, led by standard input and output."""
    python = (
        "import os, pty, sys; sys.exit(os.waitstatus_to_exitcode(pty.spawn(['/bin/sh', '-c', sys.argv[1]])))"
    )
    words = f"{shlex.quote(python)} {shlex.quote(line)}"
    script = f"script -qec {shlex.quote(line)} /dev/null"
    return (
        f"sh -c {shlex.quote(f'if command -v script >/dev/null; then {script}; else python3 -c {words}; fi')}"
    )


def _size() -> str:
    """The command that gives a terminal the size of this one."""
    size = os.get_terminal_size(1)
    return f"stty rows {size.lines} cols {size.columns}"


def _run(sandbox: RemoteBox, command: str, **options: Any) -> tuple[TurnResult, WindtunnelError | None]:
    """Run a command with its output on this process's own, byte by byte; with what its turn's end or its
    checkpoint, which is waited for, failed with. ``options``: those of `RemoteBox.run`."""
    outputs: dict[str, Any] = {"stdout": sys.stdout.buffer, "stderr": sys.stderr.buffer}

    def on_output(stream: str, data: bytes) -> None:
        outputs[stream].write(data)
        outputs[stream].flush()

    try:
        result = sandbox.run(command, on_output=on_output, **options)
    except BrokenPipeError:
        # Whoever read the output has gone; the command was cancelled when its stream was closed.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(128 + signal.SIGPIPE) from None
    if result.ended == "sandbox-died":
        return result, None
    try:
        for lack in sandbox.end_turn().wait().lacks:
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

    before = signal.signal(signal.SIGINT, interrupted)
    try:
        yield cancel
    finally:
        signal.signal(signal.SIGINT, before)


def _say(text: str) -> None:
    typer.echo(f"windtunnel: {text}", err=True)
