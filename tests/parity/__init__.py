"""What holds "one policy, two worlds": for each capability that decides, a recorded log and three questions.

1. Does the policy that stands here decide as the recorded log says? (A changed rule does not.)
2. Did live do what it had decided? `Parity.effects` compares each decision with its effect in the same log.
3. Does the twin, given the inputs of the live run (arrivals, durations, failures), decide the same in the
   same order? `Parity.twin` drives it.

The logs lie in ``recorded/NAME.jsonl.xz``; ``make record NAME=…`` makes one anew from a live run, and ``make
mutants`` shows that changed rules, and a live that does not do what it decided, are found out.
"""

from __future__ import annotations

import ast
import lzma
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from windtunnel.base.plain import TAG, from_plain
from windtunnel.capabilities import CAPABILITIES, find
from windtunnel.replay import replay, short
from windtunnel.store import eventlog

Event = dict[str, Any]
RECORDED = Path(__file__).parent / "recorded"
LARGEST = 100_000
"""Bytes of a recorded log, packed."""
AREAS = ("training", "serving", "network", "data", "agents", "control", "trust", "edge")
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
    ``root``: recording needs root. ``beyond``: lines of the policy that `decide` never reaches, in functions
    that others call, too.
    """

    record: Callable[[Path], Sequence[Path]]
    effects: Callable[[Sequence[Event]], list[str]]
    twin: Callable[[Sequence[Event]], list[tuple[Any, Any]]] | None = None
    root: bool = False
    beyond: tuple[str, ...] = ()


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


def drawn(folder: Path, capability: str, observations: Iterable[tuple[str, Any]]) -> Path:
    """A log of what the policies of ``capability``, by name, decide on observations that were drawn."""
    policies, path = find(capability, who="parity").room("policy").POLICIES, folder / "drawn.jsonl"
    with closing(eventlog.EventLog(path, drawn=True)) as log:
        for policy, observation in observations:
            log.decision(capability, policy, observation, policies[policy](observation), t=0.0)
    return path


def events(path: Path) -> list[Event]:
    """All events of a log."""
    return eventlog.read(path)


def decided_otherwise(capability: str, path: Path) -> list[str]:
    """In a sentence each: what the policy that stands here decides otherwise than the log at ``path``."""
    parts = [part for part in replay(path).parts if part.capability == capability]
    if not parts:
        return [f"{capability}: the log has no decision"]
    return [
        f"{capability}: decision {change.number} ({change.observation.get(TAG, 'Observation')}) is made "
        f"otherwise in {', '.join(change.fields)}: recorded {short(change.recorded)}, "
        f"now {short(change.replayed)}"
        for part in parts
        for change in part.differences
    ]


def done_otherwise(capability: str, path: Path) -> list[str]:
    """In a sentence each: what live did other than it had decided."""
    return [f"{capability}: {fault}" for fault in parity(capability).effects(events(path))]


def twin_otherwise(capability: str, path: Path) -> list[str]:
    """In a sentence each: where the twin, with the inputs of the log, decided otherwise than live."""
    twin = parity(capability).twin
    if twin is None:
        return []
    pairs = twin(events(path))
    if not pairs:
        return [f"{capability}: the twin decided nothing"]
    return [
        f"{capability}: decision {number} of the twin is another: live {live!r:.400}, twin {other!r:.400}"
        for number, (live, other) in enumerate(pairs, 1)
        if live != other
    ]


def unreached(capability: str, path: Path) -> list[str]:
    """Lines of the policy that the decisions of the log at ``path`` do not reach, in functions that they
    enter (so calls of others stand there, too). A line that refuses what nobody may ask is left out."""
    room = find(capability, who="parity").room("policy")
    folder = str(Path(room.__file__ or "").parent)
    left: dict[CodeType, set[int]] = {}

    def line(frame: FrameType, kind: str, _: Any) -> Any:
        if kind == "line":
            left[frame.f_code].discard(frame.f_lineno)
        return line

    def enter(frame: FrameType, *_: Any) -> Any:
        code = frame.f_code
        if not code.co_filename.startswith(folder):
            return None
        if code not in left:
            beyond = _refusals(code.co_filename, parity(capability).beyond)
            left[code] = lines(code) - {code.co_firstlineno} - beyond
        return line if left[code] else None  # line by line is many times slower

    before = sys.gettrace()
    for event in events(path):
        if event["kind"] == "decision" and event["capability"] == capability:
            observation = from_plain(room.Observation, event["observation"])
            sys.settrace(enter)
            try:
                room.POLICIES[event["policy"]](observation)
            finally:
                sys.settrace(before)
    by_file: dict[str, set[int]] = {}
    for code, unmet in left.items():
        by_file.setdefault(code.co_filename, set()).update(unmet)
    for code, unmet in left.items():  # of a lambda, or a function in another one
        by_file[code.co_filename] -= lines(code) - unmet
    return [f"{Path(file).name}:{number}" for file in sorted(by_file) for number in sorted(by_file[file])]


def lines(code: CodeType) -> set[int]:
    return {number for *_, number in code.co_lines() if number}


@cache
def _refusals(file: str, beyond: tuple[str, ...]) -> set[int]:
    """The lines of statements that raise, of the branches that do nothing else, and those ``beyond``."""
    text = Path(file).read_text()
    lines = {number for number, line in enumerate(text.splitlines(), 1) if line.strip() in beyond}
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Raise):
            lines.update(range(node.lineno, (node.end_lineno or 0) + 1))
        if isinstance(node, ast.If | ast.match_case) and isinstance(node.body[-1], ast.Raise):
            first = node.pattern if isinstance(node, ast.match_case) else node.body[0]
            lines.update(range(first.lineno, (node.body[-1].end_lineno or 0) + 1))
    return lines


def otherwise(capability: str, path: Path) -> list[str]:
    """The answers to all three questions: [] where the log at ``path`` holds."""
    return [
        fault
        for question in (decided_otherwise, done_otherwise, twin_otherwise)
        for fault in question(capability, path)
    ]
