"""The database as it was when the recording began, and databases that are made from it.

SQLite copies itself by its backup interface. Of Postgres the definitions of tables (columns, keys, indexes,
sequences; no views, functions or triggers) and their rows are kept, from one snapshot; they are made again in
a schema of its own, which is dropped at the end.
"""

from __future__ import annotations

import json
import secrets
import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import blake2b
from pathlib import Path
from typing import Any

from sqlalchemy import Engine, MetaData, event, inspect
from sqlalchemy.engine import make_url
from sqlalchemy.schema import CreateIndex, CreateTable

from windtunnel.base.errors import UserError
from windtunnel.control.debug.live.capture import digest
from windtunnel.store.transactions import open_database, transact

OWN = "windtunnel_"
"""How the names of tables begin that are ours."""
Tables = dict[str, dict[str, Any]]
"""Rows by table and key."""


def take(engine: Engine, folder: Path) -> dict[str, str]:
    """Copy the database of ``engine`` into ``folder``; the file's name and digest.

    Raises:
        HostError: it cannot be copied.
    """
    if engine.dialect.name == "sqlite":
        path = folder / "checkpoint.db"
        with engine.connect() as connection, sqlite3.connect(path) as copy:
            connection.connection.dbapi_connection.backup(copy)  # type: ignore[union-attr]
        copy.close()
    else:
        path = folder / "checkpoint.json"
        path.write_text(json.dumps(transact(engine, _dumped, readonly=True)))
    return {"file": path.name, "digest": _digest(path)}


@contextmanager
def restored(folder: Path, header: dict[str, Any], database: str | None, scratch: Path) -> Iterator[Engine]:
    """A database as it was. ``database``: a server for a trace of Postgres; ``scratch``: a folder for one of
    SQLite.

    Raises:
        UserError: the checkpoint is gone or was changed, or `database` is missing.
    """
    kept = folder / header["checkpoint"]["file"]
    if not kept.is_file() or _digest(kept) != header["checkpoint"]["digest"]:
        raise UserError(f"{kept}: the checkpoint was changed or removed after the recording began")
    if header["engine"] == "sqlite":
        path = scratch / f"{secrets.token_hex(4)}.db"
        shutil.copyfile(kept, path)
        engine = open_database(f"sqlite:///{path}", "database", durable=False)
        event.listen(engine, "connect", lambda raw, _: raw.execute("PRAGMA synchronous=OFF"))
        engine.dispose()
        yield engine
        engine.dispose()
        for ending in ("", "-wal", "-shm"):
            Path(f"{path}{ending}").unlink(missing_ok=True)
        return
    if not database:
        raise UserError("debug: this trace is of Postgres; give `database`, a server to replay it on")
    schema = f"{OWN}replay_{secrets.token_hex(4)}"
    outer = open_database(database, "database")
    transact(outer, lambda c: c.exec_driver_sql(f"CREATE SCHEMA {schema}"))
    url = make_url(database).update_query_dict(
        {"options": f"-csearch_path={schema} -clock_timeout=1s"}, append=False
    )
    engine = open_database(url.render_as_string(hide_password=False), "database")
    try:
        transact(engine, lambda c: _fill(c, json.loads(kept.read_text())))
        yield engine
    finally:
        engine.dispose()
        transact(outer, lambda c: c.exec_driver_sql(f"DROP SCHEMA {schema} CASCADE"))
        outer.dispose()


def keys(engine: Engine) -> dict[str, list[str]]:
    """Tables of the service, and the columns of their keys; all columns where there is no key."""
    found = inspect(engine)
    return {
        name: found.get_pk_constraint(name)["constrained_columns"]
        or [column["name"] for column in found.get_columns(name)]
        for name in found.get_table_names()
        if not name.startswith(OWN)
    }


def rows(engine: Engine) -> Tables:
    """All rows of the service, by table and key."""
    found: Tables = {}
    for table, key in keys(engine).items():
        with engine.connect() as connection:
            every = connection.exec_driver_sql(f'SELECT * FROM "{table}"').mappings().all()
        found[table] = {repr([row[column] for column in key]): dict(row) for row in every}
    return found


def digest_of(tables: Tables) -> str:
    """The same for the same rows."""
    return digest(sorted((table, sorted(some.items())) for table, some in tables.items()))


def _digest(path: Path) -> str:
    return blake2b(path.read_bytes(), digest_size=16).hexdigest()


def _dumped(connection: Any) -> dict[str, Any]:
    metadata = MetaData()
    metadata.reflect(connection)
    tables = [table for table in metadata.sorted_tables if not table.name.startswith(OWN)]
    raw, copies = connection.connection.dbapi_connection, {}
    for table in tables:
        with raw.cursor().copy(f'COPY "{table.name}" TO STDOUT') as copy:
            copies[table.name] = b"".join(copy).decode()
    sequences = connection.exec_driver_sql(
        "SELECT sequencename, start_value, increment_by, last_value FROM pg_sequences "
        "WHERE schemaname = current_schema() AND sequencename NOT LIKE 'windtunnel%%'"
    )
    return {
        "sequences": [list(row) for row in sequences],
        "definitions": [
            str(create.compile(dialect=connection.dialect))
            for table in tables
            for create in (CreateTable(table), *map(CreateIndex, table.indexes))
        ],
        "tables": copies,
    }


def _fill(connection: Any, dumped: dict[str, Any]) -> None:
    for name, start, step, last in dumped["sequences"]:
        connection.exec_driver_sql(f'CREATE SEQUENCE "{name}" START {start} INCREMENT {step}')
        if last is not None:
            connection.exec_driver_sql(f"SELECT setval('\"{name}\"', {last})")
    for definition in dumped["definitions"]:
        connection.exec_driver_sql(definition)
    raw = connection.connection.dbapi_connection
    for name, text in dumped["tables"].items():
        with raw.cursor().copy(f'COPY "{name}" FROM STDIN') as copy:
            copy.write(text)


def note_changes(engine: Engine) -> None:
    """From now on each changed row is kept before and after, by triggers, for `noted`."""
    found = inspect(engine)
    lite = engine.dialect.name == "sqlite"
    place = "INTEGER PRIMARY KEY AUTOINCREMENT" if lite else "BIGINT GENERATED ALWAYS AS IDENTITY"
    kind = "TEXT" if lite else "JSONB"
    lines = [f"CREATE TABLE {OWN}change (i {place}, name TEXT, before {kind}, after {kind})"]
    if not lite:
        lines.append(
            f"CREATE FUNCTION {OWN}note() RETURNS trigger AS $$ BEGIN INSERT INTO {OWN}change (name, before, "
            "after) VALUES (TG_TABLE_NAME, to_jsonb(OLD), to_jsonb(NEW)); RETURN NULL; END $$ LANGUAGE plpgsql"
        )
    for table in keys(engine):
        columns = [column["name"] for column in found.get_columns(table)]
        for event_, old, new in (("INSERT", 0, 1), ("UPDATE", 1, 1), ("DELETE", 1, 0)):
            if lite:
                sides = (_object("OLD", columns) if old else "NULL", _object("NEW", columns) if new else "NULL")
                lines.append(
                    f'CREATE TRIGGER "{OWN}{event_}_{table}" AFTER {event_} ON "{table}" BEGIN INSERT INTO '
                    f"{OWN}change (name, before, after) VALUES ('{table}', {sides[0]}, {sides[1]}); END"
                )
            else:
                lines.append(
                    f'CREATE TRIGGER "{OWN}{event_}" AFTER {event_} ON "{table}" FOR EACH ROW '
                    f"EXECUTE FUNCTION {OWN}note()"
                )
    transact(engine, lambda connection: [connection.exec_driver_sql(line) for line in lines])


def noted(connection: Any) -> list[list[Any]]:
    """What the transaction has changed so far: tables, and rows before and after (None: there was none)."""
    changes = connection.exec_driver_sql(f"SELECT name, before, after FROM {OWN}change ORDER BY i").all()
    connection.exec_driver_sql(f"DELETE FROM {OWN}change")
    return [[name, *(json.loads(one) if isinstance(one, str) else one for one in both)] for name, *both in changes]


def _object(side: str, columns: list[str]) -> str:
    """SQLite's JSON of a row; it has no bytes."""
    values = (f"'{c}', CASE typeof({side}.\"{c}\") WHEN 'blob' THEN hex({side}.\"{c}\") ELSE {side}.\"{c}\" END"
              for c in columns)  # fmt: skip
    return f"json_object({', '.join(values)})"
