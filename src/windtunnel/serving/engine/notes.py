"""What an engine writes to its event log, of every so many steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from windtunnel.serving.engine.policy.scheduler import Log
from windtunnel.store.eventlog import EventLog

ALWAYS = ("engine", "time")
"""Events that are logged whatever the step."""
Note = Callable[..., object]
"""(kind, fields): an event of the log."""


def event_notes(log: EventLog, every: int, steps: Callable[[], int]) -> tuple[Log, Note]:
    """What takes decisions, and what takes other events, into ``log``; ``steps`` were taken until now."""

    def decided(capability: str, policy: str, observation: object, decision: object) -> None:
        if steps() % every == 0:
            log.decision(capability, policy, observation, decision)

    def note(kind: str, **values: Any) -> None:
        if kind in ALWAYS or steps() % every == 0:
            log.append(kind, **values)

    return decided, note
