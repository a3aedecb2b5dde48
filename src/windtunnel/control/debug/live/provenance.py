"""Who wrote this row, who read it, and a table as of a commit: SQL over a trace, by DuckDB.

A trace has digests of rows, not rows: these come from a replay, which sees the same ones, and reads all tables
before and after each writer. Of a transaction that did otherwise in the replay ``same`` is false.
"""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from windtunnel.base.errors import UserError
from windtunnel.control.debug.live.replay import replayed, tables_of
from windtunnel.control.debug.live.trace import Trace, encode
from windtunnel.control.debug.live.world import World

OF = "n BIGINT, request BIGINT, handler VARCHAR, same BOOLEAN"
VIEWS = {
    "requests": "request BIGINT, name VARCHAR, args JSON, t DOUBLE",
    "transactions": f"{OF}, args JSON, t DOUBLE, readonly BOOLEAN, xmax BIGINT, active JSON, id BIGINT, "
    "commit BIGINT, statements JSON, draws JSON, answer VARCHAR, error VARCHAR",
    "reads": f"{OF}, statement BIGINT, sql VARCHAR, parameters JSON, tables VARCHAR[], row JSON",
    "writes": f"{OF}, commit BIGINT, table_name VARCHAR, key VARCHAR, op VARCHAR, before JSON, after JSON",
}
"""``as_of(table, n)`` is the table after the commit n; 0 is the checkpoint, which is in ``writes``, too."""
AS_OF = """
CREATE MACRO as_of(name, n) AS TABLE SELECT key, arg_max(after, commit) AS row FROM writes
WHERE table_name = name AND commit <= n GROUP BY key HAVING arg_max(op, commit) <> 'delete' ORDER BY key
"""


def sql(trace: Trace, query: str, **options: Any) -> tuple[list[str], list[tuple[Any, ...]], dict[str, Any]]:
    """Columns and rows that ``query`` gives over `VIEWS`, and what `replay` says, of whose ``options`` these
    are.

    Raises:
        UserError: the query is wrong; and see `replayed`.
    """
    import duckdb

    said, world = replayed(trace, noting=True, **options)
    with TemporaryDirectory(prefix="windtunnel-debug-") as folder, duckdb.connect() as connection:
        for name, lines in _views(trace, world, {n for n, *_ in said["divergences"]}).items():
            path = Path(folder) / f"{name}.jsonl"
            path.write_text("".join(f"{encode(line)}\n" for line in lines))
            columns = dict(column.split(" ") for column in VIEWS[name].split(", "))
            connection.execute(
                f"CREATE TABLE {name} AS SELECT * FROM read_json('{path}', format='newline_delimited', "
                f"columns={columns}, maximum_object_size=1073741824)"
            )
        try:
            answer = connection.execute(AS_OF).execute(query)
            return [column[0] for column in answer.description or ()], answer.fetchall(), said
        except duckdb.Error as error:
            raise UserError(f"debug sql: {str(error).partition(chr(10))[0]}") from error


def _views(trace: Trace, world: World, other: set[int]) -> dict[str, list[dict[str, Any]]]:
    views: dict[str, list[dict[str, Any]]] = {name: [] for name in VIEWS}
    views["requests"] = [{**line, "request": line["id"]} for line in trace.functions.values()]
    for table, rows in world.start.items():
        for row in rows.values():
            views["writes"].append(
                _write(world, table, None, row) | {"op": "checkpoint", "commit": 0, "same": True}
            )
    for made in world.executions:
        if (one := made.recorded) is None:
            continue
        head = {"n": one.n, "request": one.request, "handler": made.handler, "same": one.n not in other}
        if one.request == one.n:
            views["requests"].append({"request": one.n, "name": one.handler, "args": one.args, "t": one.t})
        views["transactions"].append({
            **head, "args": one.args, "t": one.t, "readonly": bool(one.ro), "xmax": one.xmax, "active": one.active,
            "id": one.id, "commit": made.commit, "statements": one.did[0], "draws": one.did[1],
            "answer": made.answer, "error": one.did[3],
        })  # fmt: skip
        for place, (text, parameters, _, digest, *kept) in enumerate(made.did[0], 1):
            used = sorted(set.union(*tables_of([[text]], list(world.keys))))
            head_of = {**head, "statement": place, "sql": text, "parameters": parameters, "tables": used}
            for row in kept[1] if digest else ():
                views["reads"].append({**head_of, "row": dict(zip(kept[0], row, strict=True))})
        for table, _, before, after in made.changes if made.commit else ():
            views["writes"].append({**_write(world, table, before, after), **head, "commit": made.commit})
    return views


def _write(world: World, table: str, before: Any, after: Any) -> dict[str, Any]:
    key = [(after or before)[column] for column in world.keys[table]]
    op = "insert" if not before else "update" if after else "delete"
    text = str(key[0]) if len(key) == 1 else encode(key)
    return {"table_name": table, "key": text, "op": op, "before": before, "after": after}
