"""The same handlers and policies on a database in memory: workers are rows, and time is the tasks' own.

Time goes in periods, as for a scheduler that looks once a period: what has ended is finished, what has
arrived is submitted, and the policy places groups until nothing fits. A service is called for all workers
together."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sqlalchemy import Connection, Engine

from windtunnel.control.database.handlers import GROUP, HANDLERS
from windtunnel.control.database.policy import Decision, Observation
from windtunnel.control.database.tables import open_tables
from windtunnel.store.transactions import Call, transact


@dataclass
class EmulatedCall(Call):
    """A call at ``time``, in seconds, with what is random from a generator."""

    time: float
    rng: np.random.Generator

    def now(self) -> float:
        return self.time

    def random(self) -> float:
        return float(self.rng.random())

    def uuid(self) -> str:
        return str(uuid.UUID(bytes=self.rng.bytes(16), version=4))


@dataclass
class EmulatedDatabase:
    """A `Runner` on a database in memory, at the time ``now``, in seconds."""

    rng: np.random.Generator
    now: float = 0.0
    engine: Engine = field(default_factory=lambda: open_tables("sqlite://", "twin", create=True))

    def run(self, name: str, **arguments: Any) -> Any:
        def body(connection: Connection) -> Any:
            return HANDLERS[name](EmulatedCall(connection, self.now, self.rng), **arguments)

        return transact(self.engine, body)


@dataclass(frozen=True)
class DatabaseOutcome:
    """``waits``: seconds from arrival to begin of each task, nan where it never began; ``makespan``: when the
    last ended; ``used``: share of the slots that were held until then; ``decisions``, and ``done`` tasks."""

    waits: NDArray[np.float64]
    makespan: float
    used: float
    decisions: int
    done: int


def emulate(
    workers: Sequence[tuple[str, int, str]], arrivals: NDArray[np.float64], durations: NDArray[np.float64],
    seed: int, *, policy: str = "least", period: float = 1.0,
    tasks: Mapping[int, Mapping[str, Any]] | None = None,
) -> DatabaseOutcome:  # fmt: skip
    """``workers``: name, slots, data. ``arrivals`` (sorted) and ``durations``: seconds, shape (tasks,);
    ``tasks``: by its place what differs from a task of one slot, as `submit` takes it.

    Raises:
        UserError: a task cannot be.
    """
    database, special = EmulatedDatabase(np.random.default_rng(seed)), tasks or {}
    epochs = database.run("join", workers=workers, lease=1e18)
    waits, places = np.full(len(arrivals), np.nan), dict[int, int]()
    ends: dict[int, list[list[Any]]] = {}
    submitted = done = decisions = turn = 0
    slot_seconds = 0.0
    while submitted < len(arrivals) or ends:
        if not ends:  # nothing happens until the next one arrives
            turn = max(turn, ceil(arrivals[submitted] / period))
        database.now = turn * period
        if results := ends.pop(turn, []):
            done += len(database.run("finish", results=results))
        until = int(np.searchsorted(arrivals, database.now, side="right"))
        for at in range(submitted, until, 1000):
            new = range(at, min(until, at + 1000))
            specs = [{"command": ["emulated"], **special.get(place, {})} for place in new]
            places.update(zip(database.run("submit", tasks=specs), new, strict=True))
        submitted = until
        begun = set[str]()
        while placement := database.run("schedule", policy=policy):
            decisions += len(placement.assigned)
            begun.update(name for _, name in placement.assigned)
            if not placement.assigned or len(placement.observation.tasks) < GROUP:
                break  # all that waits was seen
        for task in database.run("claim", workers=[(name, epochs[name]) for name in sorted(begun)]):
            place = places.pop(task["task"])
            waits[place] = database.now - arrivals[place]
            slot_seconds += durations[place] * special.get(place, {}).get("slots", 1)
            row = [task["task"], task["worker"], task["epoch"], 0, "", ""]
            ends.setdefault(turn + max(1, ceil(durations[place] / period)), []).append(row)
        turn += 1
    database.engine.dispose()
    room = database.now * sum(slots for _, slots, _ in workers)
    return DatabaseOutcome(waits, database.now, slot_seconds / room if room else 0.0, decisions, done)


def cost(observation: Observation, decision: Decision) -> dict[str, float]:
    """What a decision leaves: tasks that wait, and tasks away from their data."""
    tasks = {task.id: task.data for task in observation.tasks}
    holds = {worker.name: worker.data for worker in observation.workers}
    away = sum(
        tasks[assignment.task] not in ("", holds[assignment.worker]) for assignment in decision.assignments
    )
    return {
        "tasks waiting": float(len(tasks) - len(decision.assignments)),
        "tasks away from data": float(away),
    }
