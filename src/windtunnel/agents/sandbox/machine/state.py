"""The scripts through which the host leads a persistent shell, bash, and the state that it prints of itself.
A plain POSIX sh, where an image has no bash, is a new process for each command, and has none.

The shell reads its own input, line by line, from the FIFO ``in``: bash keeps it on a descriptor that
commands never inherit. For a command the host writes the file ``go`` (the command in an ``eval`` with both
outputs appended to files of this turn and input from /dev/null) and sends a few lines: source ``go``;
source ``end``, which tells the exit status and has the shell describe itself; describe what only the top
level can see; and answer in the FIFO ``ack``. A shell with a DEBUG trap gets the command itself over the
FIFO, since bash takes that trap away from a sourced file.

Everything is written so that no option, trap, alias or IFS of the user's disturbs it: builtins by name,
``>|`` against noclobber, every expansion quoted, nothing whose failure would trip errexit.

What it prints (variables, functions, aliases, options, traps, directory, …) comes in sections.
``ShellSections`` is that, taken apart; its JSON is what a ShellState carries. A replay is a script for the
shell: undo what it has and the state has not, then run what the state printed. What a shell changes by
itself (RANDOM, SECONDS, …) counts neither as state nor as a change.
"""

from __future__ import annotations

import hashlib
import json
import re
import shlex
from dataclasses import dataclass

from windtunnel.agents.sandbox.errors import MachineError
from windtunnel.agents.sandbox.model import ShellEffect, ShellState
from windtunnel.agents.sandbox.place import CHANNEL


def end_script(shell: str) -> str:
    """Sourced after a command: tells its exit status, then `capture_script`."""
    folder = f"/{CHANNEL}/{shell}"
    return f"builtin printf 'status %s\\n' \"$?\" >{folder}/ack\n. {folder}/capture\n"


def capture_script(shell: str, mark: str) -> str:
    """Has the shell describe itself into the file ``state``."""
    parts = {
        "variables": "declare -p", "functions": "declare -f", "attributes": "declare -F",
        "aliases": "alias -p", "shopt": "shopt -p", "options": "set +o", "umask": "umask -p",
        "limits": "ulimit -Sa; builtin ulimit -Ha", "directory": "dirs -p -l",
    }  # fmt: skip
    lines = [f"builtin printf '{mark} {name}\\n'; builtin {command}" for name, command in parts.items()]
    body = "\n".join(lines)
    return f"{{ {body}\n}} >|/{CHANNEL}/{shell}/state 2>/dev/null </dev/null\nbuiltin :\n"


def stream(shell: str, token: str, command: bytes | None, *, quiet: bool) -> bytes:
    """The lines for the FIFO. ``command``: framed by `go_script`, to be run at the top level instead of from
    the file ``go``. ``quiet``: a command of the host's own, which leaves ``$?`` as it was.

    Traps and arguments are seen only at the top level. Each is one simple command, because what a DEBUG trap
    prints goes where the shell's output goes before the redirection of the command, which is nowhere.
    """
    folder = f"/{CHANNEL}/{shell}"
    after = (
        f". {folder}/{'capture' if quiet else 'end'}\n"
        f"builtin trap -p >|{folder}/traps 2>/dev/null\n"
        f"builtin printf ' %s' \"${{@@Q}}\" >|{folder}/arguments 2>/dev/null\n"
        f"builtin printf 'done %s\\n' {token} >{folder}/ack\n"
    )
    return (command if command is not None else f". {folder}/go\n".encode()) + after.encode()


def plain_stream(shell: str, token: str) -> bytes:
    """The lines for a plain sh, which ends after them."""
    folder = f"/{CHANNEL}/{shell}"
    return f". {folder}/go\nprintf 'status %s\\ndone {token}\\n' \"$?\" >{folder}/ack\n".encode()


def go_script(shell: str, command: bytes, token: str, *, fed: bool = False, plain: bool = False) -> bytes:
    """``command``, framed. ``fed``: its standard input comes from the host. ``plain``: for a plain sh."""
    folder = f"/{CHANNEL}/{shell}"
    quoted = b"'" + command.replace(b"'", b"'\\''") + b"'"
    # on one line, so that lines count from 1
    run = b"command eval " if plain else f". {folder}/rc && builtin :; builtin eval ".encode()
    source = f"{folder}/feed.{token}" if fed else "/dev/null"
    outputs = f" >>{folder}/out.{token} 2>>{folder}/err.{token} <{source}\n".encode()
    # "--" would be no protection in every sh: a command that starts with a dash is led in by a blank
    return run + (b"' ' " if command.startswith(b"-") else b"") + quoted + outputs


SECTIONS = (
    "variables", "functions", "attributes", "aliases", "shopt", "options", "umask", "arguments", "limits",
    "descriptors", "jobs", "traps", "directory",
)  # fmt: skip
VOLATILE = re.compile(
    r"BASH|BASHPID|BASHOPTS|BASH_\w+|EPOCH\w+|SECONDS|RANDOM|SRANDOM|LINENO|_|PIPESTATUS|OPTERR|FUNCNAME"
    r"|HISTCMD|COMP_\w+|DIRSTACK|GROUPS|EUID|UID|PPID|SHELLOPTS|COLUMNS|LINES"
)
KEPT_AFTER_ALL = re.compile(r"BASH_(ENV|XTRACEFD|REMATCH)")
QUOTED = r'"(?:[^"\\]|\\.)*"|\$\'(?:[^\'\\]|\\.)*\'|\$"(?:[^"\\]|\\.)*"|\'[^\']*\''
STATEMENT = re.compile(rf"declare (-\S+) ([A-Za-z_]\w*)((?:=(?:\\.|{QUOTED}|[^\n\"'\\])*)?)\n", re.DOTALL)


@dataclass(frozen=True)
class ShellSections:
    """One shell's sections by name, as printed."""

    sections: dict[str, str]

    @classmethod
    def parse(cls, printed: str, mark: str) -> ShellSections:
        """From what the shell wrote: every section is led in by a line that holds the secret ``mark``."""
        # the variable _ holds the mark, too, but never at the beginning of a line
        pieces = re.split(rf"^{re.escape(mark)} (\w+)\n", printed, flags=re.MULTILINE)
        return cls(dict(zip(pieces[1::2], pieces[2::2], strict=True)))

    @classmethod
    def of(cls, shell: ShellState) -> ShellSections:
        """Raises MachineError when the script is none of ours."""
        try:
            sections = json.loads(shell.script)
            assert isinstance(sections, dict)
        except (ValueError, AssertionError) as error:
            raise MachineError(f"the kept state of shell {shell.name} cannot be read") from error
        return cls({str(key): str(value) for key, value in sections.items()})

    @property
    def complete(self) -> bool:
        return "directory" in self.sections

    def text(self, name: str) -> str:
        return self.sections.get(name, "")

    def variables(self) -> dict[str, tuple[str, str]]:
        """Name → (flags, value part with its ``=``, or empty), without what changes by itself."""
        return {
            name: (flags, value)
            for flags, name, value in STATEMENT.findall(self.text("variables"))
            if not VOLATILE.fullmatch(name) or (KEPT_AFTER_ALL.fullmatch(name) and value not in ("", '=""'))
        }

    def functions(self) -> list[str]:
        """Names of the functions."""
        lines = self.text("attributes").splitlines()
        return [line.split(" ", 2)[2] for line in lines if line.startswith("declare -")]

    def fingerprint(self) -> str:
        """A hash of all that counts."""
        digest = hashlib.blake2s()
        for name in SECTIONS:
            if name == "jobs":  # pids of the host, which are others after a restore
                continue
            text = self.text(name)
            if name == "variables":
                text = repr(sorted(self.variables().items()))
            digest.update(f"{name}\0{text}\0".encode(errors="surrogateescape"))
        return digest.hexdigest()

    def shell_state(self, name: str) -> ShellState:
        sections = dict(self.sections)
        sections["variables"] = "".join(
            f"declare {flags} {variable}{value}\n" for variable, (flags, value) in self.variables().items()
        )
        return ShellState(name, json.dumps(sections), self.fingerprint())


def shell_effect(shell: ShellState) -> ShellEffect:
    """A shell in this state, with what of it a replay cannot carry."""
    try:
        state = ShellSections.of(shell)
    except MachineError as error:
        return ShellEffect(shell.name, not_replayable=(str(error),))
    resources = []
    if descriptors := " ".join(state.text("descriptors").split()):
        resources.append(f"it holds open descriptors ({descriptors})")
    if state.text("jobs").strip():
        resources.append("it has background jobs")
    if "COPROC" in state.variables():
        resources.append("it has a coprocess")
    return ShellEffect(shell.name, resources=tuple(resources))


def replay_script(now: ShellSections, target: ShellSections) -> tuple[str, list[str]]:
    """A script that makes a shell in state ``now`` one in state ``target``, and what it cannot do, in words.

    Options that decide how functions are read (extglob) come first; those that would disturb the script
    itself (errexit, nounset, traps, aliases) come last.
    """
    problems: list[str] = []
    lines = ["builtin set +euvxnTEC +o posix", "builtin trap - DEBUG ERR RETURN", *_no_traps(now)]
    lines += ["builtin unalias -a", *(f"builtin unset -f -- {shlex.quote(name)}" for name in now.functions())]
    lines.append(_options(target.text("shopt")))
    have, want = now.variables(), target.variables()
    for name, (flags, value) in have.items():
        if want.get(name) == (flags, value):
            continue
        if "r" in flags:
            problems.append(f"{name} is read-only in the shell and cannot be changed back")
        else:
            lines.append(f"builtin unset {'-n' if 'n' in flags else '-v'} {name}")
    for name, (flags, value) in want.items():
        before = have.get(name)
        if before != (flags, value) and not (before and "r" in before[0]):
            # no "builtin" before it: the shell reads lists only after the bare word
            lines.append(f"declare {flags} {name}{value}")
    lines += [target.text("functions"), *_function_attributes(target)]
    lines += [target.text("umask"), f"builtin set -- {target.text('arguments')}"]
    stack = [line for line in target.text("directory").split("\n") if line]
    if stack:
        lines.append("builtin dirs -c")
        lines += [f"builtin cd -- {shlex.quote(stack[-1])}"]
        lines += [f"builtin pushd -- {shlex.quote(path)} >/dev/null" for path in reversed(stack[:-1])]
    flags, value = want.get("OLDPWD", ("", ""))
    lines.append("builtin unset -v OLDPWD")
    if flags:
        lines.append(f"declare {flags} OLDPWD{value}")
    lines += [target.text("aliases"), target.text("traps"), target.text("options")]
    return "\n".join(lines) + "\n", problems


def differences(now: ShellSections, target: ShellSections) -> list[str]:
    """Names of the parts in which two states differ."""
    sections = [name for name in SECTIONS if name not in ("variables", "jobs")]
    sections = [name for name in sections if now.text(name).strip() != target.text(name).strip()]
    have, want = now.variables(), target.variables()
    changed = sorted(name for name in have.keys() | want.keys() if have.get(name) != want.get(name))
    return sections + [f"variable {name}" for name in changed]


def _options(text: str) -> str:
    """Without those that only an invocation can set."""
    lines = text.splitlines()
    return "\n".join(line for line in lines if not line.endswith(("login_shell", "restricted_shell")))


def _no_traps(state: ShellSections) -> list[str]:
    names = re.findall(r" (EXIT|SIG\w+)$", state.text("traps"), re.MULTILINE)
    return [f"builtin trap - {name}" for name in dict.fromkeys(names)]


def _function_attributes(state: ShellSections) -> list[str]:
    lines = []
    for line in state.text("attributes").splitlines():
        _, flags, name = line.split(" ", 2)
        if flags.strip("-f"):
            lines.append(f"builtin declare {flags} -- {shlex.quote(name)}")
    return lines
