"""Faults that are injected on purpose: what strikes, whom, and when, written as one short text.

    kill:host=2,step=7                          the host at place 2 goes, with its memory, after step 7
    kill:rank=3,step=5                          a process gets SIGKILL
    kill:rank=2,point=after_local_write,step=5  at a named point instead of at a step's end
    kill:rank=1,during=recovery                 as soon as it has regrouped after another failure
    stop:rank=1,step=4                          SIGSTOP: it hangs, its connections stay open
    raise:rank=0,step=2                         an exception in the program
    down:host=1,step=4                          its network link goes down
    slow:host=1,step=4,rate=10Mbit              its network link gets slow
    kill-launcher:step=7                        the launcher gets SIGKILL when rank 0 is there

``host`` is a place, so that it names the same position before and after a replacement. A fault strikes
``times`` (1) times in a job, however often processes start anew (`live.job`). This file only reads the texts
and says when one applies.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from windtunnel.base.units import parse_quantity
from windtunnel.linux import faults
from windtunnel.linux.faults import refused

POINTS = {
    "step": "a step is finished (its optimizer has run and `Job.step` was called)",
    "regrouped": "the process group of a new generation works, nothing is restored yet",
    "restoring": "a rank is about to load its state",
    "before_local_write": "a checkpoint of the step is due, its slot is not begun",
    "during_local_write": "some bytes of the step are in the slot, which is marked dirty",
    "after_local_write": "the step is complete in this host's memory, no replica is",
    "after_replicated": "all copies of this rank's shard are complete",
    "before_commit": "a rank is about to say that it is ready for the commit of the step",
    "after_ack": "a rank has said so, the commit is in doubt",
    "before_apply": "the step is committed, this rank's optimizer has not applied it",
    "before_persist": "a checkpoint is about to be written to storage",
}
WITHOUT_STEP = ("regrouped",)
RECOVERY = ("regrouped", "restoring")

LAUNCHER = "kill-launcher"  # strikes what no rank or host has, at the moment of rank 0
PROCESS = ("stop", "raise")  # done by the process itself, also where a host is named
_OF_HOSTS = ("down", "slow")
_NUMBERS = ("host", "rank", "step", "generation", "times")
_WHEN = ("step", "point", "during", "generation", "times")
_WHOM = ("host", "rank")
_FIELDS: dict[str, tuple[str, ...]] = dict.fromkeys(("kill", *PROCESS, "down"), (*_WHOM, *_WHEN))
_FIELDS |= {"slow": (*_WHOM, *_WHEN, "rate"), LAUNCHER: _WHEN}


@dataclass(frozen=True)
class Fault:
    """One fault. ``rate``: bytes/s. ``text``: as it was written."""

    text: str
    action: str
    host: int | None = None
    rank: int | None = None
    step: int | None = None
    point: str = "step"
    during: str = ""
    generation: int | None = None
    times: int = 1
    rate: float = 0.0


def parse(text: str) -> Fault:
    """The fault that ``text`` describes.

    Raises:
        UserError: it is not understood; names the text, the field and what is accepted.
    """
    action, values = faults.fields(text, _FIELDS)
    fields: dict[str, Any] = {name: _value(text, name, value) for name, value in values.items()}
    _check_whom_and_when(text, action, fields)
    return Fault(text.strip(), action, **fields)


def matches(
    fault: Fault, point: str, step: int | None, rank: int, place: int, generation: int, fired: int
) -> bool:
    """Whether ``fault`` strikes now: ``rank`` on the host at ``place`` is at ``point`` of ``step`` (None
    where there is none) in ``generation``, and the fault struck ``fired`` times before. Generations count
    from 1: a later one is a recovery."""
    if fired >= fault.times:
        return False
    if fault.rank not in (None, rank) or fault.host not in (None, place):
        return False
    if fault.generation not in (None, generation):
        return False
    if fault.during:
        return generation > 1 and point in RECOVERY
    return point == fault.point and fault.step in (None, step)


def _value(text: str, name: str, value: str) -> int | float | str:
    if name in _NUMBERS:
        if not re.fullmatch(r"[0-9]{1,9}", value) or (name == "times" and int(value) == 0):
            least = 1 if name == "times" else 0
            raise refused(text, f"{name}={value}", f"a whole number from {least}")
        return int(value)
    if name == "point" and value not in POINTS:
        raise refused(text, f"point={value}", "one of " + ", ".join(POINTS))
    if name == "during" and value != "recovery":
        raise refused(text, f"during={value}", "recovery")
    if name == "rate":
        try:
            if not value.endswith(("bit", "B")):
                raise ValueError
            return parse_quantity(f"{value}/s" if value.endswith("B") else value, "bytes/s")
        except ValueError:
            accepted = "a rate such as 10Mbit, 1Gbit or 5MB (a second)"
            raise refused(text, f"rate={value}", accepted) from None
    return value


def _check_whom_and_when(text: str, action: str, fields: dict[str, Any]) -> None:
    if action == LAUNCHER:
        fields["rank"] = 0
    elif ("host" in fields) == ("rank" in fields):
        raise refused(text, "it does not say whom it strikes", "either host=PLACE or rank=RANK")
    if action in _OF_HOSTS and "host" not in fields:
        raise refused(text, f"rank={fields['rank']}", f"host=PLACE, since {action} strikes a host")
    if not fields.keys() & {"step", "point", "during", "generation"}:
        raise refused(text, "it does not say when", "step=, point=, during=recovery or generation=")
    if "during" in fields and fields.keys() & {"step", "point"}:
        raise refused(text, "during=recovery has no step and no point", "during= alone")
    if fields.get("point") in WITHOUT_STEP and "step" in fields:
        raise refused(text, f"step={fields['step']}", f"no step, since point={fields['point']} has none")
    if action == "slow" and "rate" not in fields:
        raise refused(text, "it does not say how slow", "rate=, such as rate=10Mbit")
