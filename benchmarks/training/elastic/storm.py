"""A job that faults strike at random times, from outside, as the failures of a cluster would.

Four hosts, each in a network of its own, whose steps wait mostly for that network: so a step takes about as
long whatever else runs on this computer. The gaps between two faults are exponential, their kinds and ranks
drawn by chance. The kinds are those that ``windtunnel plan resilience`` knows: processes of a host that end,
a host that is gone with its memory, all hosts of a leaf at once; and the loss of the supervisor, which the
plan takes to cost nothing. What it has no word for (storage that is away, links) is not among them.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Literal

from benchmarks.harness.measure import median
from benchmarks.training.checkpoint import harness
from benchmarks.training.elastic import strikes
from benchmarks.training.elastic.commanded import Commanded, training
from benchmarks.training.elastic.strikes import Target, Undo
from windtunnel.training.elastic.events import Event, Recovery, recoveries

HOSTS = 4
RATE = "25Mbit"
"""Of each host's network: a step moves some 0.6 MB, which takes 0.2 s."""
REPLACE_AFTER = 4.0
"""Seconds until a host that was ordered comes."""
LEASE = 1.0
TIMEOUT = 20.0
MTBF = 20.0
"""Mean seconds between two strikes of any kind."""
WITHIN = 0.2  # seconds in which there is somebody to strike, or nobody
_SETTLED = 10  # steps after which a job runs as it will


@dataclass(frozen=True)
class Kind:
    """``share``: of all strikes. ``reach``: as the plan's model has it; "nobody": it takes nobody along."""

    name: str
    strike: Callable[[Target], Undo]
    share: float
    reach: Literal["processes", "host", "leaf", "nobody"]


KINDS = (
    Kind("trainer killed", strikes.trainer_killed, 0.30, "processes"),
    Kind("trainer stopped", strikes.trainer_stopped, 0.20, "processes"),
    Kind("host lost with its memory", strikes.host_lost, 0.20, "host"),
    Kind("agent killed", strikes.agent_killed, 0.15, "host"),
    Kind("all hosts lost at once", strikes.all_lost, 0.05, "leaf"),
    Kind("supervisor killed", strikes.supervisor_killed, 0.10, "nobody"),
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


Measure = Callable[[Interruption], float]


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
def job(folder: Path, options: Sequence[object], arguments: Sequence[object] = ()) -> Iterator[Commanded]:
    """The job, once it trains; ``options`` of ``windtunnel train``, ``arguments`` of the program."""
    words: list[object] = ["--network", "netns", "--rate", RATE, "--replace-after", REPLACE_AFTER]
    words += ["--lease", LEASE, "--timeout", TIMEOUT, "--max-restarts", 10_000, *options]
    with training(words, folder, HOSTS, "fsdp_trainer", arguments=arguments) as commanded:
        harness.until(commanded, lambda events: count(events, "step") >= _SETTLED, "steps", 120.0)
        yield commanded


def struck(target: Target, kind: Kind, rank: int) -> Struck:
    """Strike now."""
    target.rank, now = rank, time.time()
    try:
        kind.strike(target)  # whom it stops is killed by his agent
    except (strikes.Impossible, ProcessLookupError):
        return Struck(kind, rank, now, found=False)
    return Struck(kind, rank, now)


def storm(
    commanded: Commanded, stored: Path, plan: Sequence[tuple[float, Kind, int]], begin: float, seconds: float
) -> list[Struck]:
    """Strike as ``plan`` says, from ``begin`` on; returns when the ``seconds`` are over.

    Raises:
        harness.Failed: the job ended before.
    """
    target = Target(commanded, stored, Random(0), patience=WITHIN)
    done = []
    for at, kind, rank in plan:
        _wait(commanded, begin + at)
        done.append(struck(target, kind, rank))
    _wait(commanded, begin + seconds)
    return done


def _wait(commanded: Commanded, until: float) -> None:
    while (left := until - time.time()) > 0:
        if commanded.process.poll() is not None:
            told = commanded.outcome
            raise harness.Failed(f"the job ended: {told.reason[-300:] if told else 'without a word'}")
        time.sleep(min(left, 0.1))


def count(events: Sequence[Event], kind: str) -> int:
    return sum(event["kind"] == kind for event in events)


def steps(events: Sequence[Event], begin: float, end: float) -> list[Event]:
    """The steps that were finished in between, those too that were done again."""
    return [event for event in events if event["kind"] == "step" and begin < event["t"] <= end]


def paces(done: Sequence[Event]) -> list[float]:
    """Seconds of each step that followed another one in its generation."""
    return [b["t"] - a["t"] for a, b in pairwise(done) if a["generation"] == b["generation"]]


def interruptions(events: Sequence[Event], strikes_: Sequence[Struck]) -> list[Interruption]:
    """All recoveries that were complete, each with the strikes since the one before it."""
    found, after = [], 0.0
    for recovery in recoveries(events):
        if recovery.first_step is None:
            continue
        mine = tuple(one for one in strikes_ if one.found and after < one.t < recovery.first_step)
        # one that takes nobody along did not begin it
        causes = [one for one in mine if one.kind.reach != "nobody"] or mine
        begin = min([one.t for one in causes], default=recovery.detected)
        begin = min(begin, recovery.detected)
        after = recovery.first_step
        decided = recovery.decided or recovery.detected
        pace = median(paces(steps(events, after, after + 5.0))) or 0.0
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
