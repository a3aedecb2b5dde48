"""The least class of a turn that two full looks at its sandbox, before and after it, allow.

It is independent of the inspector: it re-reads every file and every descriptor, from the host. It sees less
than the truth in one place, the memory of processes. So a class that it calls too weak *is* too weak; that it
objects to none does not prove a class (the kills do that).
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from benchmarks.agents.sandbox.harness import Seat
from benchmarks.agents.sandbox.sessions import listening, tree
from windtunnel.agents.sandbox.model import TurnClass
from windtunnel.agents.sandbox.observe import quiesce
from windtunnel.linux import processes


@dataclass(frozen=True)
class Look:
    """All that can be seen from the host without running anything inside: processes ("pid command") with
    their descriptors, ports listened on, path to digest, and shell to fingerprint."""

    processes: Mapping[str, tuple[str, ...]]
    ports: tuple[int, ...]
    tree: Mapping[str, str]
    shells: Mapping[str, str]


def look(seat: Seat) -> Look:
    machine = seat.box.machine()
    quiesce(machine.shells())
    commands = {
        pid: processes.command_line(pid) for pid in machine.cgroup.pids() if processes.state(pid) != "Z"
    }
    tables = [Path(f"/proc/{machine.pid}/net/{name}") for name in ("tcp", "tcp6")]
    return Look(
        {f"{pid} {command}": _descriptors(pid) for pid, command in commands.items() if command},
        tuple(listening("\n".join(table.read_text() for table in tables if table.exists()))),
        tree(seat.root, seat.written()),
        {state.name: state.fingerprint for state in machine.shell_states()},
    )


def _descriptors(pid: int) -> tuple[str, ...]:
    """What a process has open, with the position in regular files; empty when it is gone."""
    rows = []
    for fd, target in sorted(processes.descriptors(pid).items()):
        place = ""
        if target.startswith("/") and not target.startswith(("/dev/", "/proc/")):
            with contextlib.suppress(OSError), open(f"/proc/{pid}/fdinfo/{fd}") as info:
                place = " at " + info.readline().split()[1]
        rows.append(f"{fd} {target}{place}")
    return tuple(rows)


def least(before: Look, after: Look) -> tuple[TurnClass, str]:
    """The weakest class that loses nothing of what differs, and what does, in words."""
    if words := _changed(before.processes, after.processes):
        return TurnClass.FULL, f"process {words}"
    if before.ports != after.ports:
        return TurnClass.FULL, f"open ports were {before.ports}, are {after.ports}"
    if words := _changed(before.tree, after.tree):
        return TurnClass.FILES, f"file {words}"
    if words := _changed(before.shells, after.shells):
        return TurnClass.SHELL, f"state of shell {words}"
    return TurnClass.NONE, ""


def _changed(before: Mapping[str, object], after: Mapping[str, object]) -> str:
    names = sorted(before.keys() | after.keys())
    return ", ".join(name for name in names if before.get(name) != after.get(name))


def weaker(decided: TurnClass, before: Look, after: Look) -> str:
    """Why ``decided`` is too weak, in words; empty when the two looks do not contradict it."""
    truth, words = least(before, after)
    if decided >= truth:
        return ""
    return f"class {decided.word} was decided, but at least {truth.word} is needed: {words} differs"
