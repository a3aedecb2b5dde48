"""Oobleck's published simulation, replayed by its own rules with its own constants (GPT-3 6.7B, 30 hosts).

The headline of 13.9 times the throughput of a restart-based system is one cell of it: one host lost every
ten minutes. Its rules are those of the artifact (SymbioticLab/Oobleck, branch sosp23-artifact, commit
7966556), and the cell depends on them:

* A loss begins a restart; the step in flight still counts if it ends before the restart does. An earlier
restart
  that was not over still ends when it was to end, and resumes the job.
* The restart-based system saves after the first step that follows a loss, and after every tenth. A save that
  stands behind a loss in the list of events (a binary heap, so not quite the order of time) takes ten steps
  back.
* A loss takes back the throughput of all that was done since the last save.

The replay is a check of logic, and no statement about either system: with the rules of `goodput.twin` the
same constants give the restart-based system no kept step at all in that cell, since restart and one step
take longer than ten minutes.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field

HOSTS = 30
REMOVALS = 15
SAMPLES = 1024  # of a step
READY = 45.0  # seconds until a host that was added can be used
FEWEST = 12  # hosts with which a pipeline of the restart-based system can be built

# samples/s by the number of hosts
OOBLECK = dict(
    zip(
        range(30, 15, -1),
        (
            5.507784136, 5.324191332, 5.140598527, 4.957005722, 4.773412918, 4.808826127, 4.329925297,
            4.185194343, 3.947198754, 4.010855553, 4.15443025, 3.71233106, 3.593275995, 3.283996229,
            3.530908551,
        ),
        strict=True,
    )
)  # fmt: skip
VARUNA = {
    hosts: throughput
    for fewest, most, throughput in (
        (28, 30, 5.240635953), (24, 27, 5.096885803), (20, 23, 4.503390788), (16, 19, 3.953767179), (15, 15,
        3.016421755),
    )
    for hosts in range(fewest, most + 1)
}  # fmt: skip


@dataclass(frozen=True)
class System:
    """``restart``: seconds from a loss until steps begin. ``save``: seconds of a save, None without saves."""

    throughput: dict[int, float]
    restart: float
    save: float | None = None
    save_every: int = 10


OOBLECK_SYSTEM = System(OOBLECK, restart=10.0)
VARUNA_SYSTEM = System(VARUNA, restart=701.0 - 120.0, save=120.0)


@dataclass(order=True)
class _Event:
    at: float
    kind: str = field(compare=False)
    version: int = field(default=0, compare=False)


def published_throughput(system: System, every: float) -> float:
    """Samples/s of ``system`` when a host is lost every ``every`` seconds, by the artifact's rules."""
    events: list[_Event] = []
    for _ in range(HOSTS):
        heapq.heappush(events, _Event(0.0, "add"))
    for index in range(REMOVALS):
        heapq.heappush(events, _Event(every * (index + 1), "remove"))
    end = every * REMOVALS
    hosts = waiting = version = steps = 0
    running = False
    flagged = False
    step = 0.0
    started: float | None = None
    before = 0.0
    saved: float | None = None
    done: list[tuple[float, float, float]] = []  # begin, end, samples/s that count

    while events:
        event = heapq.heappop(events)
        now = event.at
        if now >= end:
            break
        if event.kind == "add":
            heapq.heappush(events, _Event(now + READY, "ready"))
        elif event.kind == "ready":
            hosts += 1
            waiting += 1
            if hosts == 1:
                heapq.heappush(events, _Event(now + system.restart, "restarted"))
        elif event.kind == "remove":
            hosts -= 1
            waiting = hosts
            flagged = True
            if system.save is not None:
                done = _fall_back(done, saved)
            heapq.heappush(events, _Event(now + system.restart, "restarted"))
        elif event.kind == "restarted":
            version += 1
            # an earlier restart has used the hosts up: this one finds none, and the job stands still
            running = waiting >= FEWEST
            waiting = 0
            if running:
                step = int(SAMPLES / system.throughput[hosts] * 1000) / 1000
                heapq.heappush(events, _Event(now + step, "step", version))
                if started is None:
                    started = before = now
        elif event.kind == "step" and event.version == version:
            steps += 1
            done.append((before, now, SAMPLES / (now - before)))
            if system.save is not None and (steps % system.save_every == 0 or flagged):
                flagged = False
                now += system.save
                heapq.heappush(events, _Event(now + system.save, "saved"))
                heapq.heapify(events)
                if _behind_a_loss(events):
                    steps = max(0, steps - system.save_every)
                    taken = len(done) - system.save_every
                    done = [(a, b, y if index < taken else 0.0) for index, (a, b, y) in enumerate(done)]
                else:
                    saved = now
            before = now
            heapq.heappush(events, _Event(now + step, "step", version))
    if not done or started is None:
        return 0.0
    return sum((stop - start) * rate for start, stop, rate in done) / (done[-1][1] - started)


def _behind_a_loss(events: Sequence[_Event]) -> bool:
    for event in events:
        if event.kind in ("remove", "saved"):
            return event.kind == "remove"
    return False


def _fall_back(
    done: list[tuple[float, float, float]], saved: float | None
) -> list[tuple[float, float, float]]:
    """What still counts when the job falls back to the save at ``saved``."""
    if saved is None:
        return [(start, stop, 0.0) for start, stop, _ in done]
    kept = bisect_left([start for start, _, _ in done], saved)
    return [(a, b, y if index < kept else 0.0) for index, (a, b, y) in enumerate(done)]
