"""The same handlers and policies on a database in memory: workers are rows, and time is the tasks' own.

Time goes in periods, as a scheduler that looks once a period: what ended is finished, what arrived is submitted,
and the policy places groups until nothing fits. Each service is called for all workers together, so that what is
paid is what the statements cost.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sqlalchemy import Connection, Engine

from windtunnel.control.database.handlers import GROUP, HANDLERS
from windtunnel.control.database.policy import Decision, Observation
from windtunnel.control.database.tables import open_tables
from windtunnel.store.transactions import Call, is_readonly, transact

FOREVER = 1e18


class EmulatedCall(Call):
    """A call at ``time``, with what is random from a generator."""

    def __init__(self, connection: Connection, time: float, rng: np.random.Generator) -> None:
        super().__init__(connection)
        self._time, self._rng = time, rng

    def now(self) -> float:
        return self._time

    def random(self) -> float:
        return float(self._rng.random())

    def uuid(self) -> str:
        return str(uuid.UUID(bytes=self._rng.bytes(16), version=4))


@dataclass
class EmulatedDatabase:
    """A `Runner` on a database in memory, at the time ``now`` (seconds)."""

    rng: np.random.Generator
    now: float = 0.0
    engine: Engine = field(default_factory=lambda: open_tables("sqlite://", "twin", create=True))

    def run(self, name: str, **arguments: Any) -> Any:
        def body(connection: Connection) -> Any:
            return HANDLERS[name](EmulatedCall(connection, self.now, self.rng), **arguments)

        return transact(self.engine, body, readonly=is_readonly(HANDLERS[name]))


@dataclass(frozen=True)
class Outcome:
    """``waits``: seconds from arrival to begin of each task that began, in their order; ``makespan``: when the last
    ended; ``used``: share of slots that were held until then; ``decisions``, and ``done`` tasks."""

    waits: NDArray[np.float64]
    makespan: float
    used: float
    decisions: int
    done: int


def emulate(
    workers: Sequence[tuple[str, int, str]], arrivals: NDArray[np.float64], durations: NDArray[np.float64],
    seed: int, *, policy: str = "least", period: float = 1.0, group: int = GROUP,
    tasks: Mapping[int, Mapping[str, Any]] | None = None,
) -> Outcome:  # fmt: skip
    """``workers``: name, slots, data. ``arrivals`` (sorted) and ``durations``: seconds, shape (tasks,); ``tasks``: by
    their place what differs from a task of one slot, as `submit` takes it.

    Raises:
        UserError: a task cannot be.
    """
    database, count = EmulatedDatabase(np.random.default_rng(seed)), len(arrivals)
    database.run("join", workers=workers, lease=FOREVER)
    special, holders = tasks or {}, [(name, 1) for name, _, _ in workers]
    ends: dict[int, list[list[Any]]] = {}
    waits, order = np.full(count, np.nan), dict[int, int]()
    came = turn = done = decisions = 0
    held = 0.0
    while came < count or ends:
        if not ends and came < count:
            turn = max(turn, int(np.ceil(arrivals[came] / period)))  # nothing happens until then
        database.now = turn * period
        if results := ends.pop(turn, []):
            done += len(database.run("finish", results=results))
        until = int(np.searchsorted(arrivals, database.now, side="right"))
        for first in range(came, until, 1000):
            places = range(first, min(until, first + 1000))
            numbers = database.run(
                "submit", tasks=[{"command": ["emulated"], **special.get(place, {})} for place in places]
            )
            order.update(zip(numbers, places, strict=True))
        came = until
        begun = set[str]()
        while placement := database.run("schedule", policy=policy, most=group):
            decisions += len(placement.assigned)
            begun.update(name for _, name in placement.assigned)
            if not placement.assigned:
                break
        for task in database.run("claim", workers=[one for one in holders if one[0] in begun]) if begun else ():
            place = order.pop(task["task"])
            waits[place] = database.now - arrivals[place]
            held += durations[place] * special.get(place, {}).get("slots", 1)
            last = turn + max(1, int(np.ceil(durations[place] / period)))
            ends.setdefault(last, []).append([task["task"], task["worker"], task["epoch"], 0, "", ""])
        if came == count and not ends:
            break  # what is left fits nowhere
        turn += 1
    makespan = database.now
    slots = sum(slots for _, slots, _ in workers)
    database.engine.dispose()
    return Outcome(waits, makespan, held / (slots * makespan) if makespan else 0.0, decisions, done)


def cost(observation: Observation, decision: Decision) -> dict[str, float]:
    """What a decision leaves: tasks that still wait, tasks away from their data, and the slots that are held at the
    worker that is fullest."""
    tasks = {task.id: task for task in observation.tasks}
    workers = {worker.name: worker for worker in observation.workers}
    held = {name: worker.slots - worker.free for name, worker in workers.items()}
    away = 0
    for one in decision.assignments:
        task = tasks[one.task]
        held[one.worker] += task.slots
        away += bool(task.data) and task.data != workers[one.worker].data
    return {
        "tasks waiting": float(len(tasks) - len(decision.assignments)), "tasks away from their data": float(away),
        "slots held at the fullest": float(max(held.values(), default=0)),
    }  # fmt: skip
