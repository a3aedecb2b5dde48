"""How long is waited for what: every deadline of a job by name, as ``train --deadlines FILE`` takes them.

FILE is YAML: a name and seconds in each line. A name that is not there keeps its default: that of the part
that waits, where it has settings of its own, else the one here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

from windtunnel.base.errors import UserError
from windtunnel.training.checkpoint.settings import CheckpointSettings, MemoryLimits
from windtunnel.training.elastic.policy.state import Deadlines

Who = Literal["supervisor", "agent", "trainer", "memory", "checkpoint"]
LONGEST = 1e7


@dataclass(frozen=True)
class WaitBound:
    """One deadline: whose it is, its ``default`` in seconds, and for ``what`` is waited."""

    name: str
    who: Who
    default: float
    what: str


WAITS = (
    *(
        WaitBound(each.name, "supervisor", getattr(Deadlines, each.name), each.metadata["what"])
        for each in fields(Deadlines)
    ),
    WaitBound("stuck", "agent", 10.0, "a sign of life of a process that is not stopped"),
    WaitBound("leave", "agent", 5.0, "the trainers to end when the job is finished"),
    WaitBound("operation", "trainer", 60.0, "an operation of the group, an agreement (else `--timeout`)"),
    WaitBound("generation", "trainer", 3600.0, "the generation after a loss"),
    WaitBound("cut", "trainer", 2.0, "a program to move after its group was cut"),
    WaitBound("connect", "memory", MemoryLimits.connect, "a peer's memory service to answer"),
    WaitBound("silence", "memory", MemoryLimits.silence, "a byte on a connection between memory services"),
    WaitBound("membership", "memory", MemoryLimits.membership, "word of the generation that a request is of"),
    WaitBound("slot", "memory", MemoryLimits.slot, "a slot at the holder of a copy"),
    WaitBound(
        "commit", "checkpoint", CheckpointSettings.patience, "a commit, before a checkpoint is left out"
    ),
    WaitBound(
        "stored", "checkpoint", CheckpointSettings.stored, "what is being written to storage, at the end"
    ),
)
NAMES = {wait.name: wait for wait in WAITS}


def read(path: Path) -> dict[str, float]:
    """The deadlines that a file names, in seconds.

    Raises:
        UserError: a name that is not known, or a value that is no time.
    """
    from windtunnel.base.strict_yaml import read_yaml

    content: Any = read_yaml(path, "file of deadlines", f"one with seconds for any of {', '.join(NAMES)}")
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise UserError(f"{path}: accepted are lines of a name and seconds, such as 'store: 120'")
    for name, value in content.items():
        if name not in NAMES:
            raise UserError(f"{path}: there is no deadline {name!r}; known are {', '.join(NAMES)}")
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not number or not math.isfinite(value) or not 0 < value <= LONGEST:
            raise UserError(f"{path}: {name} is {value!r}; a number of seconds above 0 is accepted")
    return {name: float(value) for name, value in content.items()}


def seconds(who: Who, chosen: dict[str, float]) -> dict[str, float]:
    """All deadlines of one part, by name: what is ``given``, and the defaults."""
    return {wait.name: chosen.get(wait.name, wait.default) for wait in WAITS if wait.who == who}
