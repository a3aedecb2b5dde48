"""Everything that can be seen of a sandbox at one moment, as plain data that can be compared."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from windtunnel.agents.sandbox.traces.replay import Output, Runs
from windtunnel.agents.sandbox.traces.tree import tree

LISTENING = "0A"


@dataclass(frozen=True)
class Observation:
    """``outputs``: of the turns so far. ``tree``: path to digest. ``processes``: command lines, sorted.
    ``probes``: what live services answer. ``ports``: TCP ports that are listened on.

    The last three are for the referee alone, because they differ between two runs: ``pids`` ("pid command"),
    ``shells`` (name to fingerprint of its state), ``descriptors`` (process to what it has open, and where in
    it).
    """

    outputs: tuple[Output, ...] = ()
    tree: Mapping[str, str] = field(default_factory=dict)
    processes: tuple[str, ...] = ()
    probes: Mapping[str, str] = field(default_factory=dict)
    ports: tuple[int, ...] = ()
    pids: frozenset[str] = frozenset()
    shells: Mapping[str, str] = field(default_factory=dict)
    descriptors: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


def observe(
    box: Any,
    root: Path,
    *,
    outputs: Iterable[Output] = (),
    probes: Mapping[str, str] | None = None,
    processes: Callable[[], Sequence[str]] | None = None,
    pids: Mapping[int, str] | None = None,
    shells: Mapping[str, str] | None = None,
    only: Iterable[str] = (),
    ports: bool = True,
) -> Observation:
    """Look at a sandbox that is between two turns.

    ``root``: where the host sees its root. ``processes``: tells the command lines; by default the sandbox's
    own ``info()`` does. ``pids``: host pids and their commands, for the referee; their descriptors are read
    from the host's /proc. ``ports``: also look at the ports inside. Files come first and probes last, because
    a probe runs a command.
    """
    files = tree(root, only)
    commands = sorted(processes() if processes is not None else box.info().processes)
    known = dict(pids or {})
    opened = {f"{pid} {command}": descriptors(pid) for pid, command in known.items()}
    listened = open_ports(box) if ports else ()
    answers = {name: answer(box, text) for name, text in (probes or {}).items()}
    return Observation(
        outputs=tuple(outputs),
        tree=files,
        processes=tuple(commands),
        probes=answers,
        ports=listened,
        pids=frozenset(opened),
        shells=dict(shells or {}),
        descriptors=opened,
    )


def answer(box: Runs, text: str) -> str:
    """What a probe prints, with how it ended."""
    result = box.run(text, timeout=30.0)
    return f"{result.exit_code} {result.stdout.decode(errors='replace')}"


def open_ports(box: Runs) -> tuple[int, ...]:
    """TCP ports that are listened on in the sandbox's network namespace."""
    result = box.run("cat /proc/net/tcp /proc/net/tcp6 2>/dev/null", timeout=30.0)
    return listening(result.stdout.decode(errors="replace"))


def listening(table: str) -> tuple[int, ...]:
    """Ports in state LISTEN of the kernel's table of TCP sockets."""
    ports = set()
    for line in table.splitlines():
        words = line.split()
        if len(words) > 3 and words[3] == LISTENING:
            ports.add(int(words[1].rsplit(":", 1)[1], 16))
    return tuple(sorted(ports))


def descriptors(pid: int) -> tuple[str, ...]:
    """What a process has open, with the position in regular files; empty when it is gone."""
    found = []
    try:
        for fd in sorted(os.listdir(f"/proc/{pid}/fd"), key=int):
            target = os.readlink(f"/proc/{pid}/fd/{fd}")
            place = ""
            if target.startswith("/") and not target.startswith(("/dev/", "/proc/")):
                with open(f"/proc/{pid}/fdinfo/{fd}") as info:
                    place = " at " + info.readline().split()[1]
            found.append(f"{fd} {target}{place}")
    except OSError:
        return tuple(found)
    return tuple(found)
