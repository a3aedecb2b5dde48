"""Who wrote this row, who read it, and a table as of a commit: SQL over a trace, by DuckDB.

A trace has digests of rows, not the rows: they come from a replay, which sees the same ones. So what is always
on stays cheap, and a transaction that does otherwise when it is replayed is marked (``same``).

    requests(request, name, arguments, t, transactions, error)
    transactions(n, request, handler, arguments, t, snapshot, id, commit, readonly, statements, draws, error, same)
    reads(n, request, handler, statement, sql, parameters, tables, row, same)
    writes(n, request, handler, commit, table_name, key, op, before, after, same)
    as_of(table, n): the rows of a table after the commit n, 0 for the checkpoint
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from windtunnel.base.errors import UserError
from windtunnel.control.debug.live import checkpoint
from windtunnel.control.debug.live.capture import table_patterns, tables_used
from windtunnel.control.debug.live.replay import Replayed, replay
from windtunnel.control.debug.live.trace import Trace, encode
from windtunnel.control.debug.live.world import Execution, World
from windtunnel.store.eventlog import EventLog

VIEWS = {
    "requests": {
        "request": "BIGINT", "name": "VARCHAR", "arguments": "JSON", "t": "DOUBLE", "transactions": "BIGINT",
        "error": "VARCHAR",
    },
    "transactions": {
        "n": "BIGINT", "request": "BIGINT", "handler": "VARCHAR", "arguments": "JSON", "t": "DOUBLE",
        "snapshot": "JSON", "id": "BIGINT", "commit": "BIGINT", "readonly": "BOOLEAN", "statements": "JSON",
        "draws": "JSON", "error": "VARCHAR", "same": "BOOLEAN",
    },
    "reads": {
        "n": "BIGINT", "request": "BIGINT", "handler": "VARCHAR", "statement": "BIGINT", "sql": "VARCHAR",
        "parameters": "JSON", "tables": "VARCHAR[]", "row": "JSON", "same": "BOOLEAN",
    },
    "writes": {
        "n": "BIGINT", "request": "BIGINT", "handler": "VARCHAR", "commit": "BIGINT", "table_name": "VARCHAR",
        "key": "VARCHAR", "op": "VARCHAR", "before": "JSON", "after": "JSON", "same": "BOOLEAN",
    },
}  # fmt: skip
AS_OF = """
CREATE MACRO as_of(name, n) AS TABLE
SELECT key, arg_max(after, place) AS row FROM (SELECT *, row_number() OVER () AS place FROM writes)
WHERE table_name = name AND commit <= n GROUP BY key HAVING arg_max(op, place) <> 'delete' ORDER BY key
"""


def sql(
    trace: Trace, query: str, *, log: EventLog | None = None, database: str | None = None
) -> tuple[list[str], list[tuple[Any, ...]], Replayed]:
    """Columns and rows that ``query`` gives over the views above, and the replay that the rows come from.

    Raises:
        UserError: the query is wrong; and see `replay`.
    """
    import duckdb

    replayed = replay(trace, log=log, database=database, changes=True)
    with TemporaryDirectory(prefix="windtunnel-debug-") as folder, duckdb.connect() as connection:
        for name, lines in _views(trace, replayed, database).items():
            path = Path(folder) / f"{name}.jsonl"
            path.write_text("".join(f"{encode(line)}\n" for line in lines))
            connection.execute(
                f"CREATE TABLE {name} AS SELECT * FROM read_json('{path}', format='newline_delimited', "
                f"columns={json.dumps(VIEWS[name])}, maximum_object_size=1073741824)"
            )
        connection.execute(AS_OF)
        try:
            found = connection.execute(query)
            return [column[0] for column in found.description or ()], found.fetchall(), replayed
        except duckdb.Error as error:
            raise UserError(f"debug sql: {str(error).partition(chr(10))[0]}") from error


def _views(trace: Trace, replayed: Replayed, database: str | None) -> dict[str, list[dict[str, Any]]]:
    other = {one.n for one in replayed.divergences}
    views: dict[str, list[dict[str, Any]]] = {name: [] for name in VIEWS}
    patterns = table_patterns(list(replayed.keys))
    with World(trace, {}, database) as world:
        start = checkpoint.rows(world.engine)
    for table, rows in start.items():
        for row in rows.values():
            views["writes"].append(
                {"commit": 0, **_change(replayed.keys[table], table, None, row, "checkpoint"), "same": True}
            )
    made = {one.recorded.n: one for one in replayed.executions if one.recorded}
    requests: dict[int, dict[str, Any]] = {}
    for one in trace.transactions:
        of = trace.requests.get(one.request)
        entry = requests.setdefault(one.request, {
            "request": one.request, "name": of.name if of else one.handler, "t": of.t if of else one.t,
            "arguments": of.arguments if of else one.arguments, "transactions": 0, "error": "",
        })  # fmt: skip
        entry["transactions"] += 1
        entry["error"] = one.error or entry["error"]
        again = made.get(one.n)
        views["transactions"].append({
            "n": one.n, "request": one.request, "handler": one.handler, "arguments": one.arguments, "t": one.t,
            "snapshot": {"xmax": one.xmax, "active": one.active}, "id": one.id or None,
            "commit": again.commit if again else None, "readonly": one.readonly, "statements": one.statements,
            "draws": one.draws, "error": one.error, "same": one.n not in other,
        })  # fmt: skip
    for again in sorted(made.values(), key=lambda one: (one.commit or 0)):
        head = {"n": again.recorded.n, "request": again.request, "handler": again.handler,
                "same": again.recorded.n not in other}  # type: ignore[union-attr]  # fmt: skip
        views["reads"] += [{**head, **row} for row in _read(again, patterns)]
        if again.commit:
            for table, before, after in again.changes:
                views["writes"] += [
                    {**head, "commit": again.commit, **change}
                    for change in _changes(replayed.keys[table], table, before, after)
                ]
    views["requests"] = list(requests.values())
    return views


def _read(again: Execution, patterns: Any) -> Iterator[dict[str, Any]]:
    for place, statement in enumerate(again.statements, 1):
        if statement[3] is not None:
            text, parameters, _, _, columns, rows = statement
            used = sorted(set.union(*tables_used([statement], patterns)))
            for row in rows:
                yield {
                    "statement": place, "sql": text, "parameters": parameters, "tables": used,
                    "row": dict(zip(columns, row, strict=True)),
                }  # fmt: skip


def _changes(key: list[str], table: str, before: Any, after: Any) -> list[dict[str, Any]]:
    """One change; two where a row's key has become another one."""
    if before and after and [before[one] for one in key] != [after[one] for one in key]:
        return [*_changes(key, table, before, None), *_changes(key, table, None, after)]
    op = "insert" if before is None else "update" if after is not None else "delete"
    return [_change(key, table, before, after, op)]


def _change(key: list[str], table: str, before: Any, after: Any, op: str) -> dict[str, Any]:
    row = after or before
    text = encode(row[key[0]] if len(key) == 1 else [row[one] for one in key]).strip('"')
    return {"table_name": table, "key": text, "op": op, "before": before, "after": after}
