"""Sessions played on sandboxes, what is seen of these at their end, and what of that differs.

What a run shows of a turn is its standard output and how it ended. Standard error is not compared: shells
write notices of ended jobs into it whenever they happen to notice. A file tree is read without trusting it:
no symbolic link is followed, no FIFO or device is opened, and other file systems are left alone.

Source: Crab (arXiv 2604.28138), evaluation of recovery correctness.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from windtunnel.agents.sandbox.model import TurnResult
from windtunnel.agents.sandbox.traces import Trace, TraceTurn, load

LISTENING = "0A"
CHANNEL = ".windtunnel"


def shipped() -> list[Trace]:
    """The sessions beside this file, by name. They were written by hand: real work on small stand-in
    projects, with every turn's true class judged by hand; they are no recordings of an agent."""
    return [load(path) for path in sorted((Path(__file__).parent / "data").glob("*.jsonl"))]


class Runs(Protocol):
    """What a sandbox needs so that a trace can be played on it."""

    def run(self, command: str, *, shell: str = "main", timeout: float | None = None) -> TurnResult: ...


class TraceRejected(Exception):
    """A trace that does not run here, or not twice the same. One sentence."""


@dataclass(frozen=True)
class Output:
    """What one turn showed; two runs of it have all of that in common."""

    turn: int
    stdout: bytes
    exit_code: int | None
    ended: str


def begin(trace: Trace, box: Runs) -> None:
    """Run the opening: environment, working directory, prelude."""
    result = box.run(trace.opening(), timeout=120.0)
    if result.exit_code != 0:
        words = (result.stderr or result.stdout).decode(errors="replace").strip()[-300:]
        raise TraceRejected(
            f"trace {trace.name}: its prelude ended with {result.exit_code} ({result.ended}): {words}"
        )


def replay(
    trace: Trace, box: Runs, *, on_open: Callable[[], None] = lambda: None,
    on_turn: Callable[[TraceTurn, Output], None] = lambda turn, output: None,
) -> list[Output]:  # fmt: skip
    """Play the opening and all turns, without think times. Take a checkpoint in ``on_open``, or turn 1 is
    charged with the opening."""
    begin(trace, box)
    on_open()
    outputs = []
    for turn in trace.turns:
        result = box.run(turn.command, shell=turn.shell, timeout=turn.timeout)
        outputs.append(Output(turn.turn, result.stdout, result.exit_code, result.ended))
        on_turn(turn, outputs[-1])
    return outputs


@dataclass(frozen=True)
class Observation:
    """``outputs``: of the turns so far. ``tree``: path to digest. ``processes``: command lines, sorted.
    ``probes``: what live services answer, and under "ports" the TCP ports that are listened on."""

    outputs: tuple[Output, ...] = ()
    tree: Mapping[str, str] = field(default_factory=dict)
    processes: tuple[str, ...] = ()
    probes: Mapping[str, str] = field(default_factory=dict)


def observe(
    box: Runs, root: Path, commands: Iterable[str], probes: Mapping[str, str],
    outputs: Iterable[Output] = (), only: Iterable[str] = (),
) -> Observation:  # fmt: skip
    """Look at a sandbox that is between two turns. ``root``: where the host sees its root. ``commands``: the
    command lines of what runs. Files come first and probes last, because a probe runs a command."""
    files, sorted_commands = tree(root, only), tuple(sorted(commands))
    answers = {}
    for name, text in {**probes, "ports": "cat /proc/net/tcp /proc/net/tcp6 2>/dev/null"}.items():
        result = box.run(text, timeout=30.0)
        answers[name] = f"{result.exit_code} {result.stdout.decode(errors='replace')}"
    answers["ports"] = str(listening(answers["ports"]))
    return Observation(tuple(outputs), files, sorted_commands, answers)


def listening(table: str) -> list[int]:
    """Ports in state LISTEN of the kernel's table of TCP sockets."""
    rows = [line.split() for line in table.splitlines()]
    return sorted({int(row[1].rsplit(":", 1)[1], 16) for row in rows if len(row) > 3 and row[3] == LISTENING})


def tree(root: Path, only: Iterable[str] = ()) -> dict[str, str]:
    """Path inside (absolute) to a digest of its kind, mode, owner, link target or bytes, and attributes.

    Left out: the sandbox's own channel, and ``.git/index`` (it caches times). ``only``: top-level names to
    read; empty for all. Times of files do not count.
    """
    entries: dict[str, str] = {}
    folders, device = set(only), root.stat().st_dev
    for folder, names, files, fd in os.fwalk(root):
        inside = folder.removeprefix(str(root))
        if os.fstat(fd).st_dev != device:
            names.clear()
            continue
        if not inside:
            names[:] = [name for name in names if name != CHANNEL and (not folders or name in folders)]
            files = [name for name in files if not folders or name in folders]
        for name in [*names, *files]:
            if not f"{inside}/{name}".endswith("/.git/index"):
                with contextlib.suppress(FileNotFoundError):
                    entries[f"{inside}/{name}"] = _entry(fd, name)
    return entries


def _entry(folder: int, name: str) -> str:
    info = os.stat(name, dir_fd=folder, follow_symlinks=False)
    words = f"{info.st_mode:o} {info.st_uid}:{info.st_gid} {info.st_rdev}"
    if stat.S_ISLNK(info.st_mode):
        return f"{words} -> {os.readlink(name, dir_fd=folder)}"
    if not stat.S_ISREG(info.st_mode):
        return words
    fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
    with os.fdopen(fd, "rb") as file:
        attributes = [(key, os.getxattr(fd, key).hex()) for key in sorted(os.listxattr(fd))]
        return f"{words} {info.st_nlink} {hashlib.file_digest(file, 'blake2b').hexdigest()[:32]} {attributes}"


def compare(reference: Observation, observed: Observation, after: int = 0) -> tuple[str, ...]:
    """What differs from a fault-free run, in words; outputs count from the turn after ``after`` on."""
    return (
        *_differences("turn", _numbered(reference.outputs[after:]), _numbered(observed.outputs[after:])),
        *_differences("file", reference.tree, observed.tree),
        *_differences("process", _counted(reference.processes), _counted(observed.processes)),
        *_differences("probe", reference.probes, observed.probes),
    )


def _numbered(outputs: Sequence[Output]) -> dict[str, str]:
    return {str(output.turn): f"{output.stdout!r} ({output.ended} {output.exit_code})" for output in outputs}


def _counted(commands: Sequence[str]) -> dict[str, str]:
    return {command: f"{commands.count(command)} times" for command in commands}


def _differences(part: str, reference: Mapping[str, str], observed: Mapping[str, str]) -> list[str]:
    return [
        f"{part} {name}: {observed.get(name, 'absent')}, without a fault {reference.get(name, 'absent')}"
        for name in sorted(reference.keys() | observed.keys())
        if reference.get(name) != observed.get(name)
    ]


def agreed(trace: Trace, first: Observation, second: Observation) -> Observation:
    """The reference of a trace: what two fault-free runs both showed. TraceRejected when they differ."""
    if differences := compare(first, second):
        raise TraceRejected(
            f"trace {trace.name}: two fault-free runs differ, so no recovery can be judged by it: "
            f"{differences[0]}"
        )
    return first
