"""The event log of a run: JSON lines, only ever appended to, readable while they are written.

Every line is one write under a lock, so a writer that is killed leaves at most one line in part, at the end;
nobody reads such a tail, and the next writer cuts it off. What a line says has happened when it is written.
A writer that has no time for a write at each event gathers its lines; if it is killed, those are lost.

A line of kind ``decision`` holds what a policy saw beside what it answered:

    {"t": 1763.2, "kind": "decision", "capability": "agents.sandbox", "policy": "semantic",
     "observation": {"is": "TurnEnd", ...}, "decision": {"is": "Keep", ...}}

``capability`` names a package below ``windtunnel`` whose ``policy`` has ``Observation``, ``Decision`` (one
dataclass, or a union of them), ``decide(observation) -> decision`` and ``POLICIES``, the named alternatives.
An observation holds all that the decision depends on, the settings too: so the log alone is enough to decide
anew, by the same policy or by another one (`windtunnel.replay`).

A line of kind ``effect`` says what live then did, so that the two can be held against each other.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from windtunnel.base.atomic import append_line
from windtunnel.base.errors import HostError, UserError
from windtunnel.base.plain import to_plain

Event = dict[str, Any]
NAME = "events.jsonl"
"""The log of a run lies under this name in the run's folder."""


class LogFailed(HostError):
    """The log cannot be written (a full disk, a folder that is gone)."""


class EventLog:
    """The log at ``path``, opened for writing. Several processes may write the same log.

    ``head``: fields of every line. ``sync``: a line is on the disk when `append` returns. ``gather``: seconds
    that lines may wait for further ones, to be written in one write with them, or by `flush`.
    """

    def __init__(self, path: Path, *, sync: bool = False, gather: float = 0.0, **head: Any) -> None:
        self.path = path
        self._head = head
        self._sync = sync
        self._gather = gather
        self._lines: list[bytes] = []
        self._due = 0.0
        self._turn = threading.Lock()  # the file's own lock is between processes
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
            self._file = os.open(path, flags, 0o644)
        except OSError as error:
            raise LogFailed(f"{path}: {error.strerror}") from error

    def append(self, kind: str, *, t: float | None = None, **fields: Any) -> Event:
        """One event, and the line that says it. ``t``: time.time() of it, now unless given.

        Raises:
            LogFailed: the line is not in the file, nor are those that waited for it.
        """
        event = {**fields, **self._head, "t": time.time() if t is None else t, "kind": kind}
        line = json.dumps(event, separators=(",", ":")).encode() + b"\n"
        with self._turn:
            now = time.monotonic()
            if not self._lines:
                self._due = now + self._gather
            self._lines.append(line)
            if now >= self._due:
                self._write()
        return event

    def flush(self) -> None:
        """Write what waits. Raises LogFailed, as `append` does."""
        with self._turn:
            self._write()

    def _write(self) -> None:
        lines, self._lines = self._lines, []
        if not lines:
            return
        try:
            append_line(self._file, b"".join(lines), durable=self._sync)
        except OSError as error:
            raise LogFailed(f"{self.path}: {error.strerror}") from error

    def decision(
        self, capability: str, policy: str, observation: object, decision: object, **fields: Any
    ) -> None:
        """What a policy saw and what it answered, beside each other."""
        self.append("decision", **decided(capability, policy, observation, decision), **fields)

    def close(self) -> None:
        if self._file >= 0:
            try:
                self.flush()
            finally:
                os.close(self._file)
                self._file = -1


def decided(capability: str, policy: str, observation: object, decision: object) -> dict[str, Any]:
    """The fields of a decision, for who hands his events to another process that writes the log."""
    inputs, answer = to_plain(observation, tag=True), to_plain(decision, tag=True)
    return {"capability": capability, "policy": policy, "observation": inputs, "decision": answer}


def read(path: Path, *, damaged: Callable[[str], object] | None = None) -> list[Event]:
    """All events at ``path``, without a last line that was not finished; [] if there is no log.

    ``damaged`` is told of each line that is no event, which is then left out.

    Raises:
        UserError: a line before the last is no event, and nobody is to be told.
    """
    return list(_events(path, damaged))


def decisions(path: Path) -> list[Event]:
    """The events of kind ``decision`` at ``path``, in their order."""
    return [event for event in _events(path) if event["kind"] == "decision"]


def _events(path: Path, damaged: Callable[[str], object] | None = None) -> Iterator[Event]:
    try:
        lines = path.read_bytes().split(b"\n")
    except FileNotFoundError:
        return
    for number, line in enumerate(lines[:-1], 1):
        try:
            event = json.loads(line)
            event["kind"], event["t"]
        except (ValueError, KeyError, TypeError):
            why = f"{path}: line {number} is not an event: {line[:60]!r}"
            if damaged is None:
                raise UserError(why) from None
            damaged(why)
        else:
            yield event
