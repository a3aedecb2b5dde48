"""What a run's events say about its failures: the phases of every recovery, and the goodput of the whole.

A recovery begins when something is lost (or is injected, where that is known) and ends with the first step of
the generation that stands. Losses before that first step belong to the same recovery, since the newest
generation supersedes the others. Phases, each in seconds:

- detect: from the injection to the first evidence (unknown for a failure that nobody injected);
- decide: until the last generation was decided (waiting for hosts is in it);
- regroup: until all ranks said that their new group works (in it is the wait for processes that start anew
  and for survivors to come out of the old group);
- load: until all ranks have their state;
- first step: until a step of the new generation is finished.

Phases are of one clock only as far as the hosts' clocks agree. GEMINI's wasted time (Wang et al., SOSP
2023, section 2) is the sum of the phases and of the steps that were done again.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median_low
from typing import Any

from windtunnel.training.elastic.policy.checkpoints import FAILED, WANTED

Event = dict[str, Any]
PHASES = ("detect", "decide", "regroup", "load", "first_step")
OF_SUPERVISOR = frozenset(
    {"started", "host.joined", "lost", "ordered", "decided", "finished", "agreed", "suspected", "done"}
    | {"committed"}
)
"""Events that nobody else may write: a later supervisor believes them."""
_FIELDS: dict[str, dict[str, type]] = {
    "grouped": {"rank": int},
    "step": {"step": int},
    WANTED: {"step": int},
    FAILED: {"step": int, "error": str},
    "restored": {"rank": int, "step": int, "tier": str},
    "injected": {"fault": str},
    "guarantee": {"doubts": list, "any_world": bool},
    "note": {"text": str},
}
"""Fields without which an event of that kind says nothing; whole numbers are counts."""
LONGEST = 2.0
"""Times the median: what a step takes longer is time in which nothing was trained."""


@dataclass(frozen=True)
class Recovery:
    """One recovery. Times are time.time() values, None where no event tells.

    ``generation``: the one that stood. ``cause``: why it was formed. ``lost``: the losses' events. ``fault``:
    what was injected. ``newest``: the newest step that was reported before, ``resumed``: the step whose
    state was gone on from (-1: from the beginning), ``steps_lost``: how many were done again. ``tiers``:
    where each rank read its state. ``complete``: a first step came.
    """

    generation: int
    cause: str
    lost: tuple[Event, ...]
    fault: str | None
    injected: float | None
    detected: float
    decided: float | None
    grouped: float | None
    loaded: float | None
    first_step: float | None
    newest: int | None
    resumed: int | None
    steps_lost: int | None
    tiers: dict[int, str] = field(default_factory=dict)
    complete: bool = False

    @property
    def phases(self) -> dict[str, float | None]:
        """Seconds of each of `PHASES`; a phase whose end or beginning is unknown is None, and the time up to
        the next known moment counts for that one's phase.
        """
        moments = [self.injected, self.detected, self.decided, self.grouped, self.loaded, self.first_step]
        durations: dict[str, float | None] = {}
        before = moments[0]
        for name, moment in zip(PHASES, moments[1:], strict=True):
            durations[name] = max(0.0, moment - before) if moment is not None and before is not None else None
            before = moment if moment is not None else before
        return durations

    @property
    def seconds(self) -> float | None:
        """From the failure (or its detection) to the first new step."""
        begin = self.detected if self.injected is None else self.injected
        return None if self.first_step is None else self.first_step - begin


@dataclass(frozen=True)
class Goodput:
    """How a run's time was spent (seconds, from its first event to its last).

    ``training``: in steps that stand at the end; a step is the time since the one before, up to `LONGEST`
    times the median, ``step_seconds``. All else is lost, whatever its cause: ``starting`` before the first
    step, ``recovering`` from the last step of a generation to the first of the next, ``redone`` in steps that
    were done again, and ``waiting``, the rest. ``steps``: of different numbers. ``fraction``: training /
    seconds.
    """

    seconds: float
    steps: int
    steps_redone: int
    step_seconds: float | None
    recoveries: int
    training: float
    starting: float
    recovering: float
    redone: float
    waiting: float
    fraction: float


def unsound(kind: str, fields: Event) -> str:
    """Why a program's event of that kind would be misread, in words; "" where it is sound. Kinds that only
    the program knows always are."""
    if kind in OF_SUPERVISOR:
        return "it is written by the supervisor alone"
    for name, accepted in _FIELDS.get(kind, {}).items():
        value = fields.get(name)
        if type(value) is not accepted or (isinstance(value, int) and value < 0):
            return f"{name} is {value!r}, {'a count' if accepted is int else accepted.__name__} is needed"
    return ""


def recoveries(events: Iterable[Event]) -> list[Recovery]:
    """All recoveries of a run, in order, from its events in the order of the log."""
    log = list(events)
    result: list[Recovery] = []
    begun: int | None = None  # index of the first event of the recovery under way
    after = 0  # index behind the last recovery
    standing: int | None = None  # the generation that works
    newest: int | None = None
    forming = 0
    for index, event in enumerate(log):
        kind = event["kind"]
        if kind == "decided":
            forming = event["generation"]
            if standing is None and begun is None:
                standing = forming  # the run begins
            elif begun is None:
                begun = index
        elif begun is None and (kind == "suspected" or (kind == "lost" and _matters(event))):
            begun = index if standing is not None else None
        elif kind == "step":
            if begun is not None and standing is not None and event["generation"] > standing:
                result.append(_recovery(log, after, begun, index, forming, newest))
                begun, after, standing = None, index + 1, event["generation"]
                newest = event["step"]
            else:
                newest = event["step"]
    if begun is not None and any(event["kind"] in ("lost", "decided") for event in log[begun:]):
        result.append(_recovery(log, after, begun, len(log), forming, newest, complete=False))
    return result


def goodput(events: Iterable[Event]) -> Goodput:
    """How the time of a run was spent: what no step covers is lost, so that no cause can hide."""
    log = list(events)
    steps = [event for event in log if event["kind"] == "step"]
    times = [b["t"] - a["t"] for a, b in pairwise(steps) if a["generation"] == b["generation"]]
    usual = median_low(times) if times else 0.0
    standing: list[tuple[Event, float]] = []  # with the seconds that each covers
    lost = dict.fromkeys(("starting", "recovering", "redone", "waiting"), 0.0)
    begin = at = log[0]["t"] if log else 0.0
    generation = None
    for event in log:
        if event["kind"] not in ("step", "restored"):
            continue
        first = event["step"] if event["kind"] == "step" else event["step"] + 1
        while standing and _undone(standing[-1][0], event["generation"], first):
            lost["redone"] += standing.pop()[1]
        if event["kind"] == "step":
            passed = max(0.0, event["t"] - at)
            if event["generation"] == generation:
                where, most = "waiting", LONGEST * usual
            else:  # how long its first step took is not known
                where, most = "starting" if generation is None else "recovering", usual
            standing.append((event, min(passed, most)))
            lost[where] += passed - standing[-1][1]
            at, generation = max(at, event["t"]), event["generation"]
    seconds = max((event["t"] for event in log), default=0.0) - begin
    lost["waiting" if steps else "starting"] += begin + seconds - at
    different = len({event["step"] for event in steps})
    training = sum(covered for _, covered in standing)
    return Goodput(
        seconds,
        different,
        len(steps) - different,
        usual or None,
        len(recoveries(log)),
        training,
        **lost,
        fraction=training / seconds if seconds else 0.0,
    )


def _undone(step: Event, generation: int, first: int) -> bool:
    """Whether a later generation that begins with the step ``first`` has left ``step`` behind."""
    return bool(step["generation"] < generation and step["step"] >= first)


def _matters(lost: Event) -> bool:
    """A spare that is lost interrupts nobody."""
    return lost.get("place") is not None


def _recovery(
    log: Sequence[Event],
    after: int,
    begun: int,
    end: int,
    generation: int,
    newest: int | None,
    complete: bool = True,
) -> Recovery:
    """The recovery of ``log[begun:end]``, which ends with the step ``log[end]`` if it is ``complete``. What
    was injected since ``after`` may be its cause.
    """
    part = log[begun:end]
    step = log[end] if complete else None
    lost = tuple(event for event in part if event["kind"] == "lost" and _matters(event))
    decisions = [event for event in part if event["kind"] == "decided"]
    fault = next(
        (event for event in log[after:end] if event["kind"] == "injected" and _fits(event, lost)), None
    )
    mine = [event for event in part if event["generation"] == generation]
    grouped = [event["t"] for event in mine if event["kind"] == "grouped"]
    restored = [event for event in mine if event["kind"] == "restored"]
    resumed = step["step"] - 1 if step is not None else min((e["step"] for e in restored), default=None)
    again = None
    if resumed is not None:
        again = max(0, newest - resumed) if newest is not None else 0
    return Recovery(
        generation=generation,
        cause=decisions[-1].get("reason", "") if decisions else "",
        lost=lost,
        fault=fault["fault"] if fault is not None else None,
        injected=fault["t"] if fault is not None else None,
        detected=log[begun]["t"],
        decided=decisions[-1]["t"] if decisions else None,
        grouped=max(grouped, default=None),
        loaded=max((event["t"] for event in restored), default=None),
        first_step=step["t"] if step is not None else None,
        newest=newest,
        resumed=resumed,
        steps_lost=again,
        tiers={event["rank"]: event["tier"] for event in restored},
        complete=step is not None,
    )


def _fits(injected: Event, lost: Sequence[Event]) -> bool:
    """Whether an injected fault can be what was lost: same rank, or same place where a host was meant.
    One that names neither fits anything, but for one that struck the control plane, which loses nobody.
    """
    if injected.get("control"):
        return False
    place, rank = injected.get("place"), injected.get("rank")
    for event in lost:
        if event["what"] == "worker" and rank is not None:
            if rank == event["rank"]:
                return True
        elif place is None or place == event["place"]:
            return True
    return False
