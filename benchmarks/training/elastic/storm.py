"""A job that faults strike at random times, from outside, as the failures of a cluster would.

Four hosts, each in a network of its own, whose steps wait mostly for that network: so a step takes about as
long whatever else runs on this computer. The gaps between two faults are exponential, their kinds and ranks
drawn by chance. The kinds are those that ``windtunnel plan resilience`` knows: processes of a host that end,
a host that is gone with its memory, all hosts of a leaf at once. What it has no word for (storage that is
away, links, the launcher) is not among them.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any, Literal

from benchmarks.harness import jobs
from benchmarks.harness.measure import median
from benchmarks.training.checkpoint import TRAINER
from windtunnel.training.elastic.events import Event, Recovery, recoveries
from windtunnel.training.launch import Launched

HOSTS = 4
RATE = 25e6 / 8
"""Bytes/s of each host's network: a step moves some 0.6 MB, which takes 0.2 s."""
REPLACE_AFTER = 4.0
"""Seconds until a host that was ordered comes."""
MTBF = 20.0
"""Mean seconds between two strikes of any kind."""
_SETTLED = 10  # steps after which a job runs as it will


@dataclass(frozen=True)
class Kind:
    """``share``: of all strikes. ``reach``: as the plan's model has it."""

    name: str
    strike: Callable[[Launched, int], None]
    share: float
    reach: Literal["processes", "host", "leaf"]


def _all_hosts(job: Launched, rank: int) -> None:
    for place in job.places():
        job.kill_host(place)


KINDS = (
    Kind("trainer killed", Launched.kill_worker, 0.35, "processes"),
    Kind("trainer stopped", Launched.stop_worker, 0.20, "processes"),
    Kind("host lost with its memory", Launched.kill_host, 0.25, "host"),
    Kind("agent killed", Launched.kill_agent, 0.15, "host"),
    Kind("all hosts lost at once", _all_hosts, 0.05, "leaf"),
)


@dataclass(frozen=True)
class Struck:
    """``t``: when, a time.time() value. Not ``found``: there was nobody to strike just then."""

    kind: Kind
    rank: int
    t: float
    found: bool = True


@dataclass(frozen=True)
class Interruption:
    """A recovery with what struck meanwhile. Seconds, from the first of it: ``known`` until a generation was
    decided (the wait for hosts is in it), ``back`` from then until the first step began; of that ``regroup``.
    """

    struck: tuple[Struck, ...]
    recovery: Recovery
    known: float
    back: float
    regroup: float

    @property
    def seconds(self) -> float:
        return self.known + self.back


def drawn(seconds: float, seed: int) -> list[tuple[float, Kind, int]]:
    """When, what, against which rank; for so many ``seconds``."""
    random = Random(seed)
    found: list[tuple[float, Kind, int]] = []
    t = random.expovariate(1.0 / MTBF)
    while t < seconds:
        kind = random.choices(KINDS, [kind.share for kind in KINDS])[0]
        found.append((t, kind, random.randrange(HOSTS)))
        t += random.expovariate(1.0 / MTBF)
    return found


@contextlib.contextmanager
def job(folder: Path, settings: dict[str, Any]) -> Iterator[Launched]:
    """The job, once it trains; ``settings`` of its checkpoints."""
    options: dict[str, Any] = {"hosts": HOSTS, "network": "netns", "rate": RATE, "timeout": 20.0}
    options |= {"replace_after": REPLACE_AFTER, "max_restarts": 10_000}
    with jobs.running(TRAINER, [], folder, **options, **settings) as launched:
        jobs.until(launched, lambda events: jobs.count(events, "step") >= _SETTLED, "steps", 120.0)
        yield launched


def struck(job: Launched, kind: Kind, rank: int) -> Struck:
    """Strike now."""
    now = time.time()
    try:
        kind.strike(job, rank)  # whom it stops is killed by his agent
    except (KeyError, ProcessLookupError):
        return Struck(kind, rank, now, found=False)
    return Struck(kind, rank, now)


def storm(
    job: Launched, plan: Sequence[tuple[float, Kind, int]], begin: float, seconds: float
) -> list[Struck]:
    """Strike as ``plan`` says, from ``begin`` on; returns when the ``seconds`` are over.

    Raises:
        jobs.Failed: the job ended before.
    """
    done = []
    for at, kind, rank in plan:
        _wait(job, begin + at)
        done.append(struck(job, kind, rank))
    _wait(job, begin + seconds)
    return done


def _wait(job: Launched, until: float) -> None:
    while (left := until - time.time()) > 0:
        if job.outcome is not None:
            raise jobs.Failed(f"the job ended: {job.outcome.reason[-300:]}")
        time.sleep(min(left, 0.1))


def steps(events: Sequence[Event], begin: float, end: float) -> list[Event]:
    """The steps that were finished in between, those too that were done again."""
    return [event for event in events if event["kind"] == "step" and begin < event["t"] <= end]


def interruptions(events: Sequence[Event], strikes: Sequence[Struck]) -> list[Interruption]:
    """All recoveries that were complete, each with the strikes since the one before it."""
    found, after = [], 0.0
    for recovery in recoveries(events):
        if recovery.first_step is None:
            continue
        mine = tuple(one for one in strikes if one.found and after < one.t < recovery.first_step)
        begin = min([recovery.detected, *(one.t for one in mine)])
        after = recovery.first_step
        decided = recovery.decided or recovery.detected
        pace = median(seconds for _, seconds in jobs.paces(steps(events, after, after + 5.0))) or 0.0
        grouped = recovery.grouped or decided
        found.append(
            Interruption(
                mine,
                replace(recovery, injected=begin),
                max(0.0, decided - begin),
                max(0.0, after - pace - decided),
                max(0.0, grouped - (recovery.arrived or decided)),
            )
        )
    return found
