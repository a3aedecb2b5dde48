"""The database as it was when the recording began, and databases that are made from it.

SQLite copies itself; of Postgres ``pg_dump`` makes the copy, and ``pg_restore`` a database of its own.
"""

from __future__ import annotations

import os
import secrets
import shutil
import sqlite3
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import blake2b
from pathlib import Path
from typing import Any

from sqlalchemy import URL, Connection, Engine, event, inspect
from sqlalchemy.engine import make_url

from windtunnel.base.errors import HostError, UserError
from windtunnel.store.database import connected
from windtunnel.store.transactions import open_database

Tables = dict[str, dict[str, dict[str, Any]]]
"""Rows by table and key."""


def take(engine: Engine, folder: Path) -> dict[str, str]:
    """Copy the database of ``engine`` into ``folder``: the file's name and digest.

    Raises:
        OSError, HostError: it cannot be copied.
    """
    path = folder / "checkpoint"
    if engine.dialect.name == "sqlite":
        with engine.connect() as connection, sqlite3.connect(path) as copy:
            connection.connection.dbapi_connection.backup(copy)  # type: ignore[union-attr]
        copy.close()
    else:
        _tool("pg_dump", engine.url, "--format=custom", "--no-owner", f"--file={path}")
    return {"file": path.name, "digest": _digest(path)}


@contextmanager
def restored(folder: Path, header: dict[str, Any], database: str | None, scratch: Path) -> Iterator[Engine]:
    """A database as it was, in ``scratch``, or on the server ``database``, where it is dropped at the end.

    Raises:
        UserError: the checkpoint is gone or was changed, or `database` is missing.
        HostError: it cannot be restored.
    """
    checkpoint_file = folder / header["checkpoint"]["file"]
    if not checkpoint_file.is_file() or _digest(checkpoint_file) != header["checkpoint"]["digest"]:
        raise UserError(f"{checkpoint_file}: the checkpoint was changed or removed after the recording began")
    if header["engine"] == "sqlite":
        shutil.copyfile(checkpoint_file, scratch / checkpoint_file.name)
        engine = open_database(f"sqlite:///{scratch / checkpoint_file.name}", "database", durable=False)
        event.listen(engine, "connect", lambda raw, _: raw.execute("PRAGMA synchronous=OFF"))
        yield engine
        engine.dispose()
        return
    if not database:
        raise UserError("debug: this trace is of Postgres; give `database`, a server to replay it on")
    name = f"windtunnel_replay_{secrets.token_hex(4)}"
    server = connected(database, "database", isolation_level="AUTOCOMMIT")
    url = server.url.set(database=name)
    with server.connect() as connection:
        connection.exec_driver_sql(f"CREATE DATABASE {name}")
        try:
            _tool("pg_restore", url, "--no-owner", str(checkpoint_file))
            # one that waits for a lock waits for a transaction that is open here, in vain
            url = url.update_query_dict({"options": "-clock_timeout=1s"})
            text = url.render_as_string(hide_password=False)
            engine = connected(text, "database", max_overflow=-1)
            yield engine.execution_options(isolation_level="REPEATABLE READ")
            engine.dispose()
        finally:
            connection.exec_driver_sql(f"DROP DATABASE {name} WITH (FORCE)")
    server.dispose()


def keys(engine: Engine) -> dict[str, list[str]]:
    """Tables of the service, and the columns of their keys; all columns where there is no key."""
    inspector = inspect(engine)
    names = sorted(inspector.get_table_names())
    columns = {name: [column["name"] for column in inspector.get_columns(name)] for name in names}
    return {name: inspector.get_pk_constraint(name)["constrained_columns"] or columns[name] for name in names}


def rows(connection: Connection, keys: dict[str, list[str]]) -> Tables:
    """All rows of the service, in the order of their keys."""
    tables: Tables = {}
    for table, key in keys.items():
        every = connection.exec_driver_sql(f'SELECT * FROM "{table}"').mappings()
        tables[table] = dict(sorted((repr([row[column] for column in key]), dict(row)) for row in every))
    return tables


def changes(before: Tables, after: Tables) -> list[list[Any]]:
    """[table, key, row before, row after] of rows that differ, None where there is none."""
    return [
        [table, key, rows.get(key), after[table].get(key)]
        for table, rows in before.items()
        for key in sorted({*rows, *after[table]})
        if rows.get(key) != after[table].get(key)
    ]


def _digest(path: Path) -> str:
    return blake2b(path.read_bytes(), digest_size=16).hexdigest()


def _tool(name: str, url: URL, *words: str) -> None:
    """One of Postgres' programs, on the database at ``url``."""
    secret = {"PGPASSWORD": str(url.password)} if url.password else {}
    plain = make_url(url).set(drivername="postgresql")._replace(password=None)
    command = [name, f"--dbname={plain.render_as_string()}", *words]
    try:
        subprocess.run(command, env={**os.environ, **secret}, check=True, capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError) as error:
        why = getattr(error, "stderr", "") or str(error)
        raise HostError(f"debug: {name} of Postgres failed ({why.strip().partition(chr(10))[0]})") from error
