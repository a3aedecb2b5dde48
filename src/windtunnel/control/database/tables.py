"""The state of a cluster as tables, what keeps them true, and what is asked of them.

``holder`` is the worker that has a task now; ``worker`` and ``epoch`` are of the last one that had it.
Triggers move a worker's ``free`` slots with its tasks and write the rows of ``decision``, so that whatever
statement moves a task, free and held slots add up to ``slots``; a check refuses what would not.

Source: the tables of DBOS (Skiadopoulos et al., VLDB 2022, section 4); leases are of Gray and Cheriton (SOSP
1989), epochs that fence are Chubby's sequencers (OSDI 2006, section 2.4).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import sqlalchemy as sql
from sqlalchemy import Column, Engine, Index, MetaData, Table, Text

from windtunnel.base.errors import UserError
from windtunnel.store.database import connected, hidden
from windtunnel.store.transactions import open_database, transact

metadata = MetaData()
Number = sql.BigInteger().with_variant(sql.Integer, "sqlite")
KINDS: dict[str, Any] = {"text": Text, "int": Number, "real": sql.Float(53), "bytes": sql.LargeBinary}


def _columns(text: str) -> list[Column[Any]]:
    """Of "name kind default" each; without a default a column may be null."""
    words = [column.split() for column in text.split(",")]
    return [
        Column(name, KINDS[kind], nullable=not more, server_default=more[0].strip("'") if more else None)
        for name, kind, *more in words
    ]


def _table(name: str, key: str, columns: str, *more: Any) -> Table:
    """``key``: "id", a number (never used twice, also when its row is deleted, where rows are), or text."""
    first = Column(key, Number if key == "id" else Text, primary_key=True)
    return Table(
        name, metadata, first, *_columns(columns), *more, sqlite_autoincrement=name in ("task", "message")
    )


worker = _table("worker", "name", "slots int 0, free int 0, data text '', epoch int 1, lease_until real 0",
                sql.CheckConstraint("free BETWEEN 0 AND slots", name="slots_add_up"))  # fmt: skip
task = _table("task", "id", "key text '', command text '', priority int 0, slots int 1, data text '',"
              "gang text '', members int 1, not_before real 0, attempts int 3, state text pending,"
              "attempt int 0, holder text, worker text, epoch int, policy text, reason text, created real 0,"
              "assigned real, started real, ended real, status int, error text, output text",
              sql.UniqueConstraint("key"))  # fmt: skip
for _name, _of, _where in (
    ("task_pending", (task.c.priority.desc(), task.c.id), task.c.state == "pending"),
    ("task_holder", (task.c.holder,), task.c.holder.is_not(None)),
    ("task_gang", (task.c.gang,), task.c.gang != ""),
):
    Index(_name, *_of, sqlite_where=_where, postgresql_where=_where)
_table("decision", "id", "at real, policy text, task int, attempt int, worker text, reason text")
_table("message", "id", "receiver text, sender text, body text, sent real",
       Index("message_receiver", "receiver", "id"))  # fmt: skip
_table("file", "path", "id text, size int, modified real")
Table("file_block", metadata, Column("file", Text, primary_key=True),
      Column("number", Number, primary_key=True, autoincrement=False), *_columns("data bytes"))  # fmt: skip

_NOW = {"sqlite": "((julianday('now') - 2440587.5) * 86400.0)",
        "postgresql": "CAST(extract(epoch FROM now()) AS double precision)"}  # fmt: skip
_TRIGGERS = {
    "task_takes": ("OLD.holder IS NULL AND NEW.holder IS NOT NULL", """
        UPDATE worker SET free = free - NEW.slots WHERE name = NEW.holder;
        INSERT INTO decision (at, policy, task, attempt, worker, reason)
        VALUES (NEW.assigned, NEW.policy, NEW.id, NEW.attempt + 1, NEW.holder, NEW.reason);"""),
    "task_gives": ("OLD.holder IS NOT NULL AND NEW.holder IS NULL", """
        UPDATE worker SET free = free + OLD.slots WHERE name = OLD.holder AND epoch = OLD.epoch;"""),
}  # fmt: skip
_GANG = "FROM task AS other WHERE other.gang = task.gang"
_LIVE = "FROM worker WHERE lease_until >= {now})"
_VIEWS = {
    "waiting": f"""SELECT id, key, priority, slots, gang, {{now}} - created AS seconds, CASE
    WHEN holder IS NOT NULL THEN 'assigned to ' || holder || ', which has not begun it'
    WHEN not_before > {{now}} THEN 'not before a time that is to come'
    WHEN gang <> '' AND members > (SELECT count(*) {_GANG})
        THEN 'gang incomplete: ' || (SELECT count(*) {_GANG}) || ' of ' || members || ' members'
    WHEN NOT EXISTS (SELECT 1 {_LIVE} THEN 'no worker'
    WHEN slots > (SELECT max(slots) {_LIVE} THEN 'too large: no worker has ' || slots || ' slots'
    WHEN slots > (SELECT max(free) {_LIVE} THEN 'no free slots: no worker has ' || slots || ' of them'
    WHEN gang <> '' AND (SELECT sum(free) {_LIVE} < (SELECT sum(slots) {_GANG} AND state = 'pending')
        THEN 'no free slots for the whole gang'
    ELSE 'to be scheduled' END AS why
    FROM task WHERE state IN ('pending', 'assigned') ORDER BY priority DESC, id""",
    "load": """SELECT name, slots, free,
    (SELECT count(*) FROM task WHERE task.holder = worker.name) AS tasks, epoch,
    CASE WHEN lease_until >= {now} THEN 'live' ELSE 'gone' END AS state,
    CASE WHEN lease_until >= {now} THEN lease_until - {now} END AS lease FROM worker ORDER BY name""",
    "history": """SELECT decision.at, task, key, decision.attempt, decision.policy, decision.worker,
    decision.reason, decision.at - created AS waited, state, status, error
    FROM decision JOIN task ON task.id = decision.task ORDER BY decision.id""",
}
for _dialect, _now in _NOW.items():
    _statements = [f"CREATE VIEW {name} AS {body.format(now=_now)}" for name, body in _VIEWS.items()]
    for _name, (_when, _body) in _TRIGGERS.items():
        _does = f"BEGIN {_body} END"
        if _dialect != "sqlite":
            _statements.append(f"CREATE FUNCTION {_name}() RETURNS trigger LANGUAGE plpgsql AS"
                         f" $$ BEGIN {_body} RETURN NULL; END $$")  # fmt: skip
            _does = f"EXECUTE FUNCTION {_name}()"
        _statements.append(
            f"CREATE TRIGGER {_name} AFTER UPDATE OF holder ON task FOR EACH ROW WHEN ({_when}) {_does}"
        )
    for _statement in _statements:
        sql.event.listen(metadata, "after_create", sql.DDL(_statement).execute_if(dialect=_dialect))


def open_tables(url: str, option: str, *, create: bool = False, durable: bool = True) -> Engine:
    """The database at ``url`` with the tables in it, made if ``create`` and there are none.

    Raises:
        UserError: there are none, or ``url``, given by ``option``, is no database.
        DatabaseError: it cannot be used.
    """
    parsed = connected(url, option).url
    file = Path(parsed.database) if parsed.get_backend_name() == "sqlite" and parsed.database else None
    missing = f"{option}: {hidden(url)} has no control plane; windtunnel control init makes one"
    if file and create:
        file.absolute().parent.mkdir(parents=True, exist_ok=True)
    elif file and not file.exists():  # it would be made
        raise UserError(missing)
    engine = open_database(url, option, durable=durable)

    def prepare(connection: sql.Connection) -> bool:
        there = sql.inspect(connection).has_table("task")
        if create and not there:
            metadata.create_all(connection, checkfirst=False)
        return there or create

    if not transact(engine, prepare):
        raise UserError(missing)
    return engine
