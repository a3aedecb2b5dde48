"""The state of a cluster as tables, what keeps them true, and what is asked of them.

``holder`` is the worker that has a task now; ``worker`` and ``epoch`` are of the last one that had it. A trigger
moves a worker's ``free`` slots with its tasks and writes the row of ``decision``, so that whatever statement
moves a task, free slots and held slots add up to ``slots``; a check refuses what would not.

Source: the tables of DBOS (VLDB 2022, section 4); leases with epochs are of Gray and Cheriton, Leases (SOSP
1989), and Chubby's sequencers (OSDI 2006, section 2.4).
"""

from __future__ import annotations

from pathlib import Path

from sqlalchemy import (
    DDL, BigInteger, CheckConstraint, Column, Engine, Float, Index, Integer, LargeBinary, MetaData, Table, Text,
    event, inspect,
)  # fmt: skip

from windtunnel.base.errors import UserError
from windtunnel.store.database import connected, hidden
from windtunnel.store.transactions import open_database, transact

metadata = MetaData()
Number = BigInteger().with_variant(Integer, "sqlite")


def _text(name: str, default: str | None = "") -> Column[str]:
    return Column(name, Text, nullable=default is None, server_default=default)


def _number(name: str, default: str | None = "0") -> Column[int]:
    return Column(name, Number, nullable=default is None, server_default=default)


def _seconds(name: str, default: str | None = None) -> Column[float]:
    return Column(name, Float(53), nullable=default is None, server_default=default)


def _key() -> Column[int]:
    """Never used twice, also when its row is deleted."""
    return Column("id", Number, primary_key=True, autoincrement=True)


worker = Table(
    "worker", metadata, Column("name", Text, primary_key=True), _number("slots"), _number("free"),
    _text("data"), _number("epoch", "1"), _seconds("lease_until", "0"),
    CheckConstraint("free BETWEEN 0 AND slots", name="slots_add_up"),
)  # fmt: skip
task = Table(
    "task", metadata, _key(), Column("key", Text, unique=True, nullable=False), _text("command"),
    _number("priority"), _number("slots", "1"), _text("data"), _text("gang"), _number("members", "1"),
    _seconds("not_before", "0"), _number("attempts", "3"), _text("state", "pending"), _number("attempt"),
    _text("holder", None), _text("worker", None), _number("epoch", None), _text("policy", None),
    _text("reason", None), _seconds("created", "0"), _seconds("assigned"), _seconds("started"),
    _seconds("ended"), _number("status", None), _text("error", None), _text("output", None),
    sqlite_autoincrement=True,
)  # fmt: skip
for _name, _columns, _where in (
    ("task_pending", (task.c.priority.desc(), task.c.id), task.c.state == "pending"),
    ("task_holder", (task.c.holder,), task.c.holder.is_not(None)),
    ("task_gang", (task.c.gang,), task.c.gang != ""),
):
    Index(_name, *_columns, sqlite_where=_where, postgresql_where=_where)
decision = Table(
    "decision", metadata, _key(), _seconds("at"), _text("policy"), _number("task"), _number("attempt"),
    _text("worker"), _text("reason"), sqlite_autoincrement=True,
)  # fmt: skip
message = Table(
    "message", metadata, _key(), _text("receiver"), _text("sender"), _text("body"), _seconds("sent"),
    Index("message_receiver", "receiver", "id"), sqlite_autoincrement=True,
)  # fmt: skip
file = Table(
    "file", metadata, Column("path", Text, primary_key=True), _text("id"), _number("size"), _seconds("modified"),
)  # fmt: skip
file_block = Table(
    "file_block", metadata, Column("file", Text, primary_key=True),
    Column("number", Number, primary_key=True, autoincrement=False), Column("data", LargeBinary, nullable=False),
)  # fmt: skip

_TAKES = """UPDATE worker SET free = free - NEW.slots WHERE name = NEW.holder;
INSERT INTO decision (at, policy, task, attempt, worker, reason)
VALUES (NEW.assigned, NEW.policy, NEW.id, NEW.attempt + 1, NEW.holder, NEW.reason);"""
_GIVES = "UPDATE worker SET free = free + OLD.slots WHERE name = OLD.holder AND epoch = OLD.epoch;"
_ON = "AFTER UPDATE OF holder ON task FOR EACH ROW WHEN (OLD.holder IS {} AND NEW.holder IS {})"
_NOW = {
    "sqlite": "((julianday('now') - 2440587.5) * 86400.0)",
    "postgresql": "CAST(extract(epoch FROM now()) AS double precision)",
}
_LIVE = "(SELECT {} FROM worker WHERE lease_until >= {now})"
_VIEWS = {
    "waiting": """SELECT id, key, priority, slots, gang, {now} - created AS seconds, CASE
    WHEN holder IS NOT NULL THEN 'assigned to ' || holder || ', which has not begun it'
    WHEN not_before > {now} THEN 'not before a time that is to come'
    WHEN gang <> '' AND members > (SELECT count(*) FROM task AS other WHERE other.gang = task.gang)
        THEN 'gang incomplete: ' || (SELECT count(*) FROM task AS other WHERE other.gang = task.gang)
            || ' of ' || members || ' members'
    WHEN {live_count} = 0 THEN 'no worker'
    WHEN slots > {live_slots} THEN 'too large: no worker has ' || slots || ' slots'
    WHEN slots > {live_free} THEN 'no free slots: no worker has ' || slots || ' of them'
    WHEN gang <> '' AND {live_sum} < (SELECT sum(slots) FROM task AS other
        WHERE other.gang = task.gang AND other.state = 'pending') THEN 'no free slots for the whole gang'
    ELSE 'to be scheduled' END AS why
FROM task WHERE state IN ('pending', 'assigned') ORDER BY priority DESC, id""",
    "load": """SELECT name, slots, free, slots - free AS held,
    (SELECT count(*) FROM task WHERE task.holder = worker.name) AS tasks, epoch,
    CASE WHEN lease_until >= {now} THEN 'live' ELSE 'gone' END AS state, lease_until - {now} AS lease
FROM worker ORDER BY name""",
    "history": """SELECT decision.at, decision.task, task.key, decision.attempt, decision.policy, decision.worker,
    decision.reason, decision.at - task.created AS waited, task.state, task.status, task.error
FROM decision JOIN task ON task.id = decision.task ORDER BY decision.id""",
}


def _statements(dialect: str) -> list[str]:
    if dialect == "sqlite":
        made = [f"CREATE TRIGGER task_takes {_ON.format('NULL', 'NOT NULL')} BEGIN {_TAKES} END",
                f"CREATE TRIGGER task_gives {_ON.format('NOT NULL', 'NULL')} BEGIN {_GIVES} END"]  # fmt: skip
    else:
        body = "CREATE FUNCTION {0}() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN {1} RETURN NULL; END $$"
        made = [body.format("task_takes", _TAKES), body.format("task_gives", _GIVES)]
        made += [f"CREATE TRIGGER {name} {_ON.format(*states)} EXECUTE FUNCTION {name}()"
                 for name, states in (("task_takes", ("NULL", "NOT NULL")),
                                      ("task_gives", ("NOT NULL", "NULL")))]  # fmt: skip
    now = _NOW[dialect]
    live = {f"live_{name}": _LIVE.format(what, now=now) for name, what in (
        ("count", "count(*)"), ("slots", "max(slots)"), ("free", "max(free)"), ("sum", "sum(free)"))}  # fmt: skip
    return made + [f"CREATE VIEW {name} AS {body.format(now=now, **live)}" for name, body in _VIEWS.items()]


for _dialect in _NOW:
    for _statement in _statements(_dialect):
        _ddl = DDL(_statement.replace("%", "%%")).execute_if(dialect=_dialect)
        event.listen(metadata, "after_create", _ddl)


def open_tables(url: str, option: str, *, create: bool = False, durable: bool = True) -> Engine:
    """The database at ``url`` with the tables in it, made if ``create`` and there are none.

    Raises:
        UserError: there are none, or ``url``, given by ``option``, is no database.
        DatabaseError: it cannot be used.
    """
    parsed = connected(url, option).url
    lite = parsed.get_backend_name() == "sqlite" and parsed.database
    missing = f"{option}: {hidden(url)} has no control plane; windtunnel control init makes one"
    if lite and not create and not Path(lite).exists():
        raise UserError(missing)
    if lite:
        Path(lite).absolute().parent.mkdir(parents=True, exist_ok=True)
    engine = open_database(url, option, durable=durable)

    def make(connection: object) -> bool:
        there: bool = inspect(connection).has_table("task")  # type: ignore[call-overload]
        if create and not there:
            metadata.create_all(connection, checkfirst=False)  # type: ignore[arg-type]
        return there or create

    if not transact(engine, make):
        raise UserError(missing)
    return engine
