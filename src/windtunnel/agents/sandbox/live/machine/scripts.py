"""The scripts through which the host leads a persistent shell, for bash and for a plain POSIX sh.

The shell reads its own input, line by line, from the FIFO ``in``: bash keeps it on a descriptor that
commands never inherit. For a command the host writes the file ``go`` (the command in an ``eval`` with both
outputs appended to files of this turn and input from /dev/null) and sends a few lines: source ``go``;
source ``end``, which keeps the exit status and has the shell describe itself; describe what only the top
level can see; and answer in the FIFO ``ack``. A shell with a DEBUG trap gets the command itself over the
FIFO, since bash takes that trap away from a sourced file.

Everything is written so that no option, trap, alias or IFS of the user's disturbs it: builtins by name,
``>|`` against noclobber, every expansion quoted, nothing whose failure would trip errexit.
"""

from __future__ import annotations

import shlex

from windtunnel.agents.sandbox.live.place import CHANNEL


def end_script(program: str, shell: str) -> str:
    """Sourced after a command: exit status, then `capture_script`."""
    folder = f"/{CHANNEL}/{shell}"
    return (
        f"{_builtin(program)}printf '{_builtin(program)}return %s\\n' \"$?\" >|{folder}/rc\n"
        f". {folder}/capture\n"
    )


def capture_script(program: str, shell: str, mark: str) -> str:
    """Has the shell describe itself into the file ``state``."""
    if program == "bash":
        parts = {
            "variables": "builtin declare -p",
            "functions": "builtin declare -f",
            "attributes": "builtin declare -F",
            "aliases": "builtin alias -p",
            "shopt": "builtin shopt -p",
            "options": "builtin set +o",
            "umask": "builtin umask -p",
            "limits": "builtin ulimit -Sa; builtin ulimit -Ha",
            "directory": "builtin dirs -p -l",
        }
    else:
        parts = {
            "variables": "set",
            "attributes": "export -p",
            "aliases": "alias",
            "options": "set +o",
            "umask": 'printf "umask %s\\n" "$(umask)"',
            "limits": "ulimit -a",
            "directory": "pwd",
        }
    say = f"{_builtin(program)}printf"
    lines = [f"{say} '{mark} {name}\\n'; {command}" for name, command in parts.items()]
    body = "\n".join(lines)
    return f"{{ {body}\n}} >|/{CHANNEL}/{shell}/state 2>/dev/null </dev/null\n{_builtin(program)}:\n"


def stream(program: str, shell: str, token: str, command: bytes | None, *, quiet: bool) -> bytes:
    """The lines for the FIFO. ``command``: framed by `go_script`, to be run at the top level instead of from
    the file ``go``. ``quiet``: a command of the host's own, which leaves ``$?`` as it was.

    Traps and arguments are seen only at the top level. Each is one simple command, because what a DEBUG trap
    prints goes where the shell's output goes before the redirection of the command, which is nowhere.
    """
    folder = f"/{CHANNEL}/{shell}"
    builtin = _builtin(program)
    traps = "builtin trap -p" if program == "bash" else "trap"
    arguments = "builtin printf ' %s' \"${@@Q}\"" if program == "bash" else ":"
    after = (
        f". {folder}/{'capture' if quiet else 'end'}\n"
        f"{traps} >|{folder}/traps 2>/dev/null\n"
        f"{arguments} >|{folder}/arguments 2>/dev/null\n"
        f"{builtin}printf 'done %s\\n' {token} >{folder}/ack\n"
    )
    return (command if command is not None else f". {folder}/go\n".encode()) + after.encode()


def go_script(program: str, shell: str, command: bytes, token: str) -> bytes:
    """``command``, framed."""
    folder = f"/{CHANNEL}/{shell}"
    quoted = b"'" + command.replace(b"'", b"'\\''") + b"'"
    status = f". {folder}/rc && {_builtin(program)}:; ".encode()  # on one line, so that lines count from 1
    run = b"builtin eval " if program == "bash" else b"command eval "
    outputs = f" >>{folder}/out.{token} 2>>{folder}/err.{token} </dev/null\n".encode()
    # "--" would be no protection in every sh: a command that starts with a dash is led in by a blank
    return status + run + (b"' ' " if command.startswith(b"-") else b"") + quoted + outputs


def quiet_script(shell: str, script: bytes, token: str) -> bytes:
    folder = f"/{CHANNEL}/{shell}"
    wrapped = f"eval {shlex.quote(script.decode(errors='surrogateescape'))}"
    text = f"{wrapped} >>{folder}/out.{token} 2>>{folder}/err.{token} </dev/null\n:\n"
    return text.encode(errors="surrogateescape")


def _builtin(program: str) -> str:
    return "builtin " if program == "bash" else ""
