"""What holds "one policy, two worlds": for each capability that decides, a recorded log and three questions.

1. Does the policy that stands here decide as the recorded log says? (A changed rule does not.)
2. Did live do what it had decided? `Parity.effects` compares each decision with its effect in the same log.
3. Does the twin, given the inputs of the live run (arrivals, durations, failures), decide the same in the
   same order? `Parity.twin` drives it.

The logs lie in ``recorded/NAME.jsonl.xz``; ``make record NAME=…`` makes one anew from a live run, and ``make
mutants`` shows that changed rules, and a live that does not do what it decided, are found out.
"""

from __future__ import annotations

import lzma
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from windtunnel.capabilities import CAPABILITIES
from windtunnel.store import eventlog

Event = dict[str, Any]
RECORDED = Path(__file__).parent / "recorded"
AREAS = ("training", "serving", "network", "data", "agents")
DECIDING = [
    capability.name
    for capability in CAPABILITIES
    if "policy" in capability.rooms and ("live" in capability.rooms or capability.worlds_of)
]


@dataclass(frozen=True)
class Parity:
    """How one capability is held to its decisions.

    ``record``: makes a live run (and what else is needed to reach every rule) in an empty folder and returns
    its logs. ``effects``: of all events of a log, in a sentence each, what live did other than it had
    decided, and decisions without an effect. ``twin``: drives the twin by the inputs in these events; pairs
    of the decision that live logged and the twin's, in order. None: the capability has no twin that decides.
    ``root``: recording needs root.
    """

    record: Callable[[Path], Sequence[Path]]
    effects: Callable[[Sequence[Event]], list[str]]
    twin: Callable[[Sequence[Event]], list[tuple[Any, Any]]] | None = None
    root: bool = False


@dataclass(frozen=True)
class Mutant:
    """A changed rule: in ``file`` (below src/windtunnel) ``rule`` stands once and is made into ``other``.

    ``live``: the rule is one of live's, so a fresh run is recorded and held to its decisions; else the
    recorded log is decided anew.
    """

    capability: str
    file: str
    rule: str
    other: str
    live: bool = False


def parity(capability: str) -> Parity:
    """The entry of ``capability`` in the table ``PARITY`` of its area's module here."""
    table: dict[str, Parity] = import_module(f"parity.{capability.partition('.')[0]}").PARITY
    return table[capability]


def recorded(capability: str, folder: Path) -> Path:
    """The recorded log of ``capability``, unpacked into ``folder``."""
    path = folder / f"{capability}.jsonl"
    path.write_bytes(lzma.decompress((RECORDED / f"{capability}.jsonl.xz").read_bytes()))
    return path


def events(path: Path) -> list[Event]:
    """All events of a log."""
    return eventlog.read(path)
