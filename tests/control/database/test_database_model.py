"""The same operations, drawn at random, on a database and on a model of dictionaries."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from support.control import Model, emulated, postgres, rows, slots_add_up
from windtunnel.control.database.policy import POLICIES
from windtunnel.control.database.twin import EmulatedDatabase

NAMES = st.sampled_from(["u", "v", "w"])
EPOCH = st.sampled_from([0, 0, 0, -1])
OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("submit"), st.integers(1, 12), st.integers(1, 4), st.integers(0, 2),
                  st.sampled_from(["", "", "", "g", "h"]), st.sampled_from([0.0, 0.0, 4.0])),
        st.tuples(st.just("join"), NAMES, st.integers(1, 4), st.sampled_from([2.0, 50.0])),
        st.tuples(st.just("schedule"), st.sampled_from(list(POLICIES)), st.sampled_from([2, 100])),
        st.tuples(st.just("claim"), NAMES, EPOCH),
        st.tuples(st.just("finish"), NAMES, EPOCH, st.booleans(), st.integers(1, 12)),
        st.tuples(st.just("renew"), NAMES, EPOCH, st.sampled_from([0.0, 3.0])),
        st.tuples(st.just("expire")),
        st.tuples(st.just("later"), st.sampled_from([0.5, 3.0])),
        st.tuples(st.just("send"), NAMES, st.integers(1, 3)),
        st.tuples(st.just("receive"), NAMES, st.integers(1, 3)),
    ),
    min_size=10, max_size=50,
)  # fmt: skip


def both(database: EmulatedDatabase, operations: list[tuple[Any, ...]]) -> None:
    for table in ("task", "worker", "decision", "message"):
        with database.engine.begin() as connection:
            connection.exec_driver_sql(f"DELETE FROM {table}")
    model, database.now = Model(now=1.0), 1.0
    ids: dict[int, int] = {}  # of the model, by the database's: those have gaps
    bodies = itertools.count()
    for name, *values in operations:
        epoch = 0
        if name in ("claim", "finish", "renew"):
            epoch = model.workers.get(values[0], {"epoch": 1})["epoch"] + values[1]
        if name == "submit":
            number, slots, priority, gang, due = values
            spec = {"key": f"k{number}", "command": ["true"], "slots": slots, "priority": priority,
                    "attempts": 2, "gang": gang, "members": 2 if gang else 1, "not_before": due}  # fmt: skip
            numbers = database.run("submit", tasks=[spec])
            expected = model.submit([spec])
            assert ids.setdefault(numbers[0], expected[0]) == expected[0]
        elif name == "join":
            worker, slots, lease = values
            arguments = {"workers": [[worker, slots, ""]], "lease": lease}
            assert database.run("join", **arguments) == model.join(**arguments)
        elif name == "schedule":
            placement = database.run("schedule", policy=values[0], most=values[1])
            assignments = (
                [(ids[number], worker) for number, worker in placement.assigned] if placement else []
            )
            assert assignments == model.schedule(*values)
        elif name == "claim":
            claimed = database.run("claim", workers=[(values[0], epoch)])
            assert [ids[row["task"]] for row in claimed] == model.claim([(values[0], epoch)])
        elif name == "finish":
            result = [values[0], epoch, 1 if values[2] else 0, "broken" if values[2] else "", ""]
            number = {model_id: database_id for database_id, model_id in ids.items()}.get(values[3], 0)
            finished = database.run("finish", results=[[number, *result]])
            assert [ids[task] for task in finished] == model.finish([[values[3], *result]])
        elif name == "renew":
            arguments = {"worker": values[0], "epoch": epoch, "lease": values[2]}
            assert database.run("renew", **arguments) == model.renew(**arguments)
        elif name == "expire":
            assert database.run("expire") == model.expire()
        elif name == "later":
            database.now += values[0]
            model.now += values[0]
        elif name == "send":
            messages = [[values[0], f"{next(bodies)}"] for _ in range(values[1])]
            database.run("send", messages=messages, sender="s")
            model.send(messages, "s")
        else:
            assert database.run("receive", receiver=values[0], most=values[1]) == model.receive(*values)
    slots_add_up(database.engine)
    states = rows(database.engine, "SELECT id, state, attempt FROM task ORDER BY id")
    expected = [(number, task["state"], task["attempt"]) for number, task in sorted(model.tasks.items())]
    assert [(ids[number], *more) for number, *more in states] == expected


DATABASES: dict[str, EmulatedDatabase] = {}


@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(operations=OPERATIONS)
def test_sqlite_does_as_the_model(operations: list[tuple[Any, ...]]) -> None:
    if not DATABASES:
        DATABASES["sqlite"] = emulated("sqlite://")
    both(DATABASES["sqlite"], operations)


@pytest.mark.conformance
def test_postgres_does_as_the_model(tmp_path_factory: pytest.TempPathFactory) -> None:
    with postgres(Path(tmp_path_factory.mktemp("postgres"))) as server:
        database = emulated(server.get_uri())

        @settings(max_examples=60, deadline=None)
        @given(operations=OPERATIONS)
        def same(operations: list[tuple[Any, ...]]) -> None:
            both(database, operations)

        same()
        database.engine.dispose()
