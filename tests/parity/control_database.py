"""The control plane: claims of real workers on a real database, agents on this host."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np

from parity import Event, Mutant, Parity, drawn
from windtunnel.base.plain import from_plain
from windtunnel.control.database import policy as database

SPECS: tuple[dict[str, Any], ...] = (
    {}, {"slots": 2}, {"priority": 2}, {"data": "x"}, {"data": "y", "slots": 2}, {"slots": 4, "priority": 1},
)  # fmt: skip


def claims(folder: Path) -> list[Path]:
    """By each policy: tasks of all kinds and a gang, two workers with real commands, one that is lost."""
    from support.control import logged
    from windtunnel.control.database.live.serve import assign
    from windtunnel.control.database.live.worker import WorkerProcess

    logs = []
    for policy in database.POLICIES:
        with logged(folder, policy) as (control, log):
            workers = [
                WorkerProcess(control, name, 4, data, 1000.0) for name, data in (("u", "x"), ("v", ""))
            ]
            for worker in workers:
                worker.turn()
            for turn in range(6):
                specs = [{"command": ["true"], **SPECS[(turn + at) % len(SPECS)]} for at in range(4)]
                gang = {"gang": f"g{turn}", "members": 3, "slots": 2}
                control.run("submit", tasks=[*specs, *({"command": ["true"], **gang} for _ in range(3))])
                assign(control, policy, log)
                for worker in workers:
                    worker.turn()
                    for command in worker.commands.values():
                        command.process.wait()
                    worker.turn()
                if turn == 3:
                    control.run("renew", worker="v", epoch=workers[1].epoch, lease=0.0)
                    control.run("expire")
                    workers[1].renewed = -1e9
                    workers[1].turn()
            for worker in workers:
                worker.end()
            logs.append(log.path)
    return [*logs, drawn(folder, "control.database", _windows(np.random.default_rng(11)))]


def _windows(rng: np.random.Generator) -> Iterator[tuple[str, Any]]:
    for number in range(400):
        tasks = tuple(
            database.Task(
                at + 1, int(rng.integers(1, 4)), int(rng.integers(0, 3)), str(rng.choice(["", "x", "y"])),
                str(rng.choice(["", "", "", "g", "h"])),
            )
            for at in range(int(rng.integers(1, 8)))
        )  # fmt: skip
        workers = tuple(
            database.Worker(name, int(rng.integers(1, 6)), 6, str(rng.choice(["", "x"])))
            for name in "uvw"[: int(rng.integers(1, 4))]
        )
        yield list(database.POLICIES)[number % len(database.POLICIES)], database.Observation(tasks, workers)


def assigned(events: Sequence[Event]) -> list[str]:
    """What is in the table after a decision is what was decided."""
    faults, decision = list[str](), None
    for event in events:
        if event["kind"] == "decision" and "drawn" not in event:
            decision = [
                [assignment["task"], assignment["worker"]] for assignment in event["decision"]["assignments"]
            ]
        elif event["kind"] == "effect":
            if sorted(decision or []) != event["assigned"]:
                faults.append(f"{event['assigned']} was assigned, decided {decision}")
            decision = None
    return faults


def replayed(events: Sequence[Event]) -> list[tuple[Any, Any]]:
    """All calls of the live run made again on the twin's database, at the times that live saw."""
    from support.control import Replayed
    from windtunnel.control.database.handlers import HANDLERS
    from windtunnel.control.database.twin import EmulatedDatabase
    from windtunnel.store.transactions import transact

    live: list[Any] = []
    twin = EmulatedDatabase(np.random.default_rng(0))
    emulated: list[Any] = []
    for event in events:
        if event["kind"] == "call":
            if event["name"] == "join" and json.loads(event["arguments"])["workers"] == [["u", 4, "x"]]:
                twin = EmulatedDatabase(np.random.default_rng(0))  # the next log

            def body(connection: Any, event: Event = event, twin: EmulatedDatabase = twin) -> Any:
                call = Replayed(connection, 0.0, twin.rng, list(event["given"]))
                return HANDLERS[event["name"]](call, **json.loads(event["arguments"]))

            result = transact(twin.engine, body)
            if event["name"] == "schedule" and result is not None and result.assigned:
                emulated.append(result.decision)
        elif event["kind"] == "decision" and "drawn" not in event:
            live.append(from_plain(database.Decision, event["decision"]))
    return list(zip_longest(live, emulated))


PARITY: dict[str, Parity] = {"control.database": Parity(claims, assigned, replayed)}
DATABASE = "control/database/"
MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        "control.database", DATABASE + "policy.py", "(-task.priority, task.id)", "(task.priority, task.id)"
    ),
    Mutant("control.database", DATABASE + "policy.py", "lambda task: not task.gang", "lambda task: True"),
    Mutant(
        "control.database", DATABASE + "handlers.py", "for assignment in decision.assignments\n        ]",
        "for assignment in decision.assignments[:1]\n        ]", live=True,
    ),
)  # fmt: skip
