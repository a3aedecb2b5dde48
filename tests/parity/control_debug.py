"""The control plane: claims of real workers on a real database, agents on this host."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from parity import Event, Mutant, Parity, drawn
from windtunnel.control.debug import policy as debug
from windtunnel.store.eventlog import EventLog

FIXED = """
from sqlalchemy import update
from support.debug import accounts

def put(call, account, amount):
    add = accounts.c.amount + 1
    call.connection.execute(update(accounts).where(accounts.c.id == account).values(amount=add))

HANDLERS = {"put": put}
"""


def _debug(folder: Path) -> Sequence[Path]:
    """A busy service, replayed, and tried with changed code; and questions about random traces."""
    from support import debug as service
    from windtunnel.control.debug import read, replay, retro

    with service.recorder(folder) as recorder:
        service.overlap(recorder, 0)  # more than one order is possible
        service.busy(recorder, 3, requests=18)
    (folder / "fixed.py").write_text(FIXED)
    path = folder / "events.jsonl"
    with closing(EventLog(path)) as log:
        replay(read(folder / "trace"), log=log)
        retro(read(folder / "trace"), folder / "fixed.py", log=log, limit=6)
    return [path, drawn(folder, "control.debug", _traces(random.Random(4)))]


def _traces(draw: random.Random) -> Iterator[tuple[str, Any]]:
    """Of transactions that overlap as Postgres has them, of which each reads and writes some tables."""
    for number in range(40):
        count = draw.randrange(2, 9)
        transactions = []
        for k in range(count):
            active = tuple(sorted(draw.sample(range(1, k + 1), draw.randrange(k + 1))))
            tables = [tuple(sorted(draw.sample("abc", draw.randrange(3)))) for _ in range(2)]
            begun = k + draw.uniform(-3, 0)
            ended = k + draw.uniform(0, 2)
            transactions.append(
                debug.Transaction(
                    draw.randrange(5), draw.choice([0, k + 1]), k + 1, active, begun, ended, *tables
                )
            )
        yield (
            "snapshot",
            debug.Observation(tuple(transactions), draw.randrange(4), draw.choice([1, 5, 50]), 3000),
        )
        if number % 4 == 0:
            yield "serial", debug.Observation(tuple(transactions))


def debug_effects(events: Sequence[Event]) -> list[str]:
    """Transactions were made and committed in the decided orders; what no step waits for comes last."""
    wrong: list[str] = []
    due: list[Any] = []
    for event in events:
        if "drawn" in event:
            break
        match event["kind"]:
            case "decision":
                wrong += [f"{len(due)} orders were decided, and not tried"] * bool(due)
                due = list(event["decision"]["orders"])
            case "effect":
                if not due:
                    wrong.append("an order was tried that was not decided")
                    continue
                did, expected = event["did"], []
                for step in due.pop(0):
                    expected += [-1 - k for k in step["commit"] if -1 - k in did] + [step["run"]]
                if did[: len(expected)] != expected or any(k >= 0 for k in did[len(expected) :]):
                    wrong.append(f"{did} was done, decided {expected}")
    return wrong + [f"{len(due)} orders were decided, and not tried"] * bool(due)


PARITY: dict[str, Parity] = {"control.debug": Parity(_debug, debug_effects)}
DEBUG = "control/debug/"
MUTANTS: tuple[Mutant, ...] = (
    Mutant("control.debug", DEBUG + "policy.py", "(rows[k], transaction.id > 0)",
           "(rows[k], transaction.id == 0)"),
    Mutant("control.debug", DEBUG + "policy.py", "over[transaction.request] < two.begun",
           "transaction.ended < two.begun"),
    Mutant(
        "control.debug", DEBUG + "live/replay.py", "enumerate(decision.orders[:limit])",
        "enumerate(decision.orders[:1])", live=True,
    ),
)  # fmt: skip
