"""Past requests replayed, every read compared; asked about by SQL; tried with changed code, and orders."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from windtunnel.base.errors import UserError
from windtunnel.control.debug.live.checkpoint import changes
from windtunnel.control.debug.live.recorder import code_digest, digest
from windtunnel.control.debug.live.trace import DebugTrace, Recorded, decode, encode
from windtunnel.control.debug.live.world import Execution, Handlers, ReplayedWorld, load, make_again
from windtunnel.control.debug.policy import POLICIES, Decision, Observation, Transaction
from windtunnel.store.eventlog import EventLog

PREEMPTIONS, ORDERS = 2, 200
OF = "n BIGINT, request BIGINT, handler VARCHAR, same BOOLEAN"
VIEWS = {
    "requests": "request BIGINT, name VARCHAR, args JSON, t DOUBLE",
    "transactions": f"{OF}, args JSON, t DOUBLE, readonly BOOLEAN, xmax BIGINT, active JSON, id BIGINT, "
    "commit BIGINT, statements JSON, draws JSON, answer VARCHAR, error VARCHAR",
    "reads": f"{OF}, statement BIGINT, sql VARCHAR, parameters JSON, tables VARCHAR[], row JSON",
    "writes": f"{OF}, commit BIGINT, table_name VARCHAR, key VARCHAR, op VARCHAR, before JSON, after JSON",
}
"""Of `sql`. ``as_of(table, n)``: a table after the commit n; 0 is the checkpoint, which is in ``writes``."""
AS_OF = """
CREATE MACRO as_of(name, n) AS TABLE SELECT key, arg_max(after, commit) AS row FROM writes
WHERE table_name = name AND commit <= n GROUP BY key HAVING arg_max(op, commit) <> 'delete' ORDER BY key
"""


def replay(trace: DebugTrace, **options: Any) -> dict[str, Any]:
    """What `replayed` says, for JSON, and nothing of its world."""
    return replayed(trace, **options)[0]


def replayed(
    trace: DebugTrace, *, log: EventLog | None = None, database: str | None = None, check: str | None = None,
    noting: bool = False, stop: int | None = None,
) -> tuple[dict[str, Any], ReplayedWorld]:  # fmt: skip
    """Make all requests again, in the order of their snapshots, and compare what each transaction reads,
    writes and answers: counts of ``transactions`` and ``reads``; ``divergences``, [n (0 for a new one),
    request, handler, in words]; ``state``, a digest of all rows afterwards; ``notes`` and ``damaged`` of the
    trace; ``violations`` of the check. ``log``: for the decision and what was done. Others: see
    `ReplayedWorld`.

    Raises:
        UserError: handlers or checkpoint are gone, or ``stop`` is no request.
    """
    if stop is not None and stop not in {transaction.request for transaction in trace.transactions}:
        raise UserError(f"`request`: {stop} was not recorded; `debug sql` shows them in its view requests")
    handlers = load(trace.header["handlers"], trace.header["path"])
    order = _decided(Observation(_transactions(trace)), log).orders[0]
    world = _did(log, make_again(trace, handlers, order, database, check, noting, stop))
    again = {execution.recorded.n: execution for execution in world.executions if execution.recorded}
    results = [
        (
            transaction.n,
            transaction.request,
            transaction.handler,
            _otherwise(transaction, again.get(transaction.n)),
        )
        for transaction in trace.transactions
    ]
    more = [
        (0, execution.request, execution.handler, "was not recorded")
        for execution in world.executions
        if not execution.recorded
    ]
    other = [name for name, code in trace.header["codes"].items() if code_digest(handlers.get(name)) != code]
    return {
        "transactions": len(results), "divergences": [row for row in (*results, *more) if row[3]],
        "reads": sum(bool(st[3]) for transaction in trace.transactions for st in transaction.did[0]),
        "state": digest(world.rows),
        "notes": [*trace.notes, *(f"the code of {name} is not the recorded one" for name in other)],
        "damaged": trace.damaged, "violations": world.violations,
    }, world  # fmt: skip


def retro(
    trace: DebugTrace, code: Path, *, log: EventLog | None = None, database: str | None = None,
    check: str | None = None, limit: int = ORDERS,
) -> dict[str, Any]:  # fmt: skip
    """Make the requests with the handlers in the file ``code``, in the recorded order and in others that
    could have been, ``limit`` at most. ``check``: SQL that finds what must not be, at the end of each.

    Gives what `replay` says as ``recorded``, ``changed`` handlers, ``explored`` of ``possible`` orders (or
    more, where not ``counted``) within `PREEMPTIONS`, and ``outcomes``: of each its ``orders`` (0 is the
    recorded one), ``violations``, and what differs from the recorded run: ``rows``, [table, key, before,
    after], and ``answers``, [request, handler, before, after].

    Raises:
        UserError, ScriptError: see `replayed`; and of ``code``.
    """
    place, path = trace.header["handlers"], trace.header["path"]
    changed = load(f"{code}:{place.rpartition(':')[2]}", path)
    if unknown := sorted(set(changed) - set(trace.header["codes"])):
        raise UserError(f"{code}: no {unknown[0]!r} was recorded, but {', '.join(trace.header['codes'])}")
    recorded, before = replayed(trace, log=log, database=database, check=check)
    handlers: Handlers = {**load(place, path), **changed}
    order = _decided(Observation(_transactions(trace)), log).orders[0]
    first = _did(log, make_again(trace, handlers, order, database, check))
    tables: dict[int, Any] = {transaction.n: (set(), set()) for transaction in trace.transactions}
    for execution in (*before.executions, *first.executions):
        for side, names in enumerate(
            tables_of(execution.did[0], list(first.keys)) if execution.recorded else ()
        ):
            tables[execution.recorded.n][side].update(names)  # type: ignore[union-attr]
    decision = _decided(Observation(_transactions(trace, tables), PREEMPTIONS, max(2, limit)), log)
    outcomes: dict[str, dict[str, Any]] = {}
    for number, order in enumerate(decision.orders[:limit]):
        after = _did(log, make_again(trace, handlers, order, database, check) if number else first)
        outcome = {"violations": after.violations, "rows": changes(before.rows, after.rows),
                   "answers": _answers(before, after)}  # fmt: skip
        outcomes.setdefault(encode(outcome), {**outcome, "orders": []})["orders"].append(number)
    return {
        "recorded": recorded, "changed": sorted(changed), "explored": min(limit, len(decision.orders)),
        "possible": decision.possible, "counted": decision.counted, "outcomes": list(outcomes.values()),
    }  # fmt: skip


def sql(
    trace: DebugTrace, query: str, **options: Any
) -> tuple[list[str], list[tuple[Any, ...]], dict[str, Any]]:
    """Columns and rows that ``query`` gives over `VIEWS`, and what `replay` says with these ``options``. A
    trace has digests of rows; the rows are those of a replay, which reads all tables around each writer.

    Raises:
        UserError: the query is wrong; and see `replayed`.
    """
    import duckdb

    report, world = replayed(trace, noting=True, **options)
    with TemporaryDirectory(prefix="windtunnel-debug-") as folder, duckdb.connect() as connection:
        for name, lines in _views(trace, world, {n for n, *_ in report["divergences"]}).items():
            path = Path(folder) / f"{name}.jsonl"
            path.write_text("".join(f"{encode(line)}\n" for line in lines))
            columns = dict(column.split(" ") for column in VIEWS[name].split(", "))
            connection.execute(
                f"CREATE TABLE {name} AS SELECT * FROM read_json('{path}', format='newline_delimited', "
                f"columns={columns}, maximum_object_size=1073741824)"
            )
        try:
            answer = connection.execute(AS_OF).execute(query)
            return [column[0] for column in answer.description or ()], answer.fetchall(), report
        except duckdb.Error as error:
            raise UserError(f"debug sql: {str(error).partition(chr(10))[0]}") from error


def _views(trace: DebugTrace, world: ReplayedWorld, other: set[int]) -> dict[str, list[dict[str, Any]]]:
    """``same`` is false for transactions in ``other``, which did otherwise in the replay."""
    requests = [{**line, "request": line["id"]} for line in trace.functions.values()]
    transactions, reads = list[dict[str, Any]](), list[dict[str, Any]]()
    first = {"commit": 0, "op": "checkpoint", "same": True}
    writes = [
        _write(world, table, None, row) | first
        for table in world.start
        for row in world.start[table].values()
    ]
    for execution in world.executions:
        if (recorded := execution.recorded) is None:
            continue
        head = {
            "n": recorded.n,
            "request": recorded.request,
            "handler": execution.handler,
            "same": recorded.n not in other,
        }
        both = {"args": recorded.args, "t": recorded.t}
        requests += [{"request": recorded.n, "name": recorded.handler, **both}] * (
            recorded.request == recorded.n
        )
        transactions.append(
            {
                **head,
                **both,
                "readonly": bool(recorded.ro),
                "xmax": recorded.xmax,
                "active": recorded.active,
                "id": recorded.id,
                "commit": execution.commit,
                "statements": recorded.did[0],
                "draws": recorded.did[1],
                "answer": execution.answer,
                "error": recorded.did[3],
            }
        )
        for place, (text, parameters, _, read, *columns_and_rows) in enumerate(execution.did[0], 1):
            tables = sorted(set.union(*tables_of([[text]], list(world.keys))))
            line = {**head, "statement": place, "sql": text, "parameters": parameters, "tables": tables}
            reads += [
                {**line, "row": dict(zip(columns_and_rows[0], row, strict=True))}
                for row in (columns_and_rows[1] if read else ())
            ]
        for table, _, before, after in execution.changes if execution.commit else ():
            writes.append({**_write(world, table, before, after), **head, "commit": execution.commit})
    return {"requests": requests, "transactions": transactions, "reads": reads, "writes": writes}


def _write(world: ReplayedWorld, table: str, before: Any, after: Any) -> dict[str, Any]:
    key = [(after or before)[column] for column in world.keys[table]]
    op = "insert" if not before else "update" if after else "delete"
    text = str(key[0]) if len(key) == 1 else encode(key)
    return {"table_name": table, "key": text, "op": op, "before": before, "after": after}


def _decided(observation: Observation, log: EventLog | None) -> Decision:
    decision = POLICIES["snapshot"](observation)
    if log:
        log.decision("control.debug", "snapshot", observation, decision)
    return decision


def _did(log: EventLog | None, world: ReplayedWorld) -> ReplayedWorld:
    if log:
        log.append("effect", did=world.done)
    return world


def _transactions(trace: DebugTrace, tables: Mapping[int, Any] | None = None) -> tuple[Transaction, ...]:
    """For the policy; ``tables``: that transactions read and write, by their number."""
    last = max((transaction.ended or transaction.t for transaction in trace.transactions), default=0.0)
    return tuple(
        Transaction(
            transaction.request,
            0 if transaction.did[3] else transaction.id,
            transaction.xmax,
            tuple(transaction.active),
            trace.functions.get(transaction.request, {"t": transaction.t})["t"],
            transaction.ended or last,
            *(tuple(sorted(names)) for names in (tables or {}).get(transaction.n, ())),
        )
        for transaction in trace.transactions
    )


def tables_of(statements: Sequence[Any], names: list[str]) -> tuple[set[str], set[str]]:
    """Tables among ``names`` that statements read, and write, by the words of their SQL: rather too many."""
    tables: tuple[set[str], set[str]] = set(), set()
    verbs = r"(insert\s+(?:or\s+\w+\s+)?into\s+|replace\s+into\s+|update\s+|delete\s+from\s+)?"
    pattern = rf'{verbs}(?<!\w)"?({"|".join(map(re.escape, names)) or "(?!)"})(?!\w)'
    for sql, *_ in statements:
        for verb, name in re.findall(pattern, sql, re.IGNORECASE):
            tables[bool(verb)].add(name.lower())
    return tables


def _answers(before: ReplayedWorld, after: ReplayedWorld) -> list[list[Any]]:
    """Transactions that answer otherwise, or are made in only one of both."""
    then, now = (
        {
            (execution.request, execution.recorded.n if execution.recorded else -k): execution
            for k, execution in enumerate(world.executions)
        }
        for world in (before, after)
    )
    answers = [
        [
            execution.request,
            execution.handler,
            *(each.get(key) and f"{each[key].answer:.200}" for each in (then, now)),
        ]
        for key, execution in {**now, **then}.items()
    ]
    return sorted((answer for answer in answers if answer[2] != answer[3]), key=lambda row: row[0])


def _otherwise(then: Recorded, now: Execution | None) -> str:
    """In words, the first difference; "" where there is none."""
    if now is None:
        return "is not made any more"
    if (now.handler, encode(now.args)) != (then.handler, encode(then.args)):
        return f"is called as {now.handler}({now.args}), recorded is {then.handler}({then.args})"
    statements, draws, result, error = then.did
    for place, (old, redone) in enumerate(zip(statements, now.did[0], strict=False), 1):
        where = f"statement {place} ({' '.join(old[0].split()):.80})"
        new = decode(encode(redone[:4]))  # as a trace gives it back
        if old[0] != new[0]:
            return f"{where} is now {' '.join(new[0].split()):.80}"
        if old[1] != new[1]:
            return f"{where} {_parameter(then, old[1], new[1])}"
        if old[2:] != new[2:]:
            return f"{where} {'reads' if old[3] else 'changes'} other rows: {new[2:]}, recorded are {old[2:]}"
    if len(statements) != len(now.did[0]):
        return f"makes {len(now.did[0])} statements, recorded are {len(statements)}"
    if [kind for kind, _ in draws] != [kind for kind, _ in now.did[1]]:
        return f"asks its call {len(now.did[1])} times for time or chance, recorded is {len(draws)}"
    return "" if (result, error) == now.did[2:] else f"reads the same, and ends otherwise: {now.answer:.200}"


def _parameter(recorded: Recorded, then: Any, now: Any) -> str:
    """The first that differs, and whether it is the time."""
    names = list(then) if isinstance(then, dict) and isinstance(now, dict) else range(len(then))
    old, new = next(((then[k], now[k]) for k in names if then[k] != now[k]), (then, now))
    clock = all(isinstance(x, float) and abs(x - t) < 600 for x, t in ((old, recorded.t), (new, time.time())))
    words = "; this is the clock, not asked for by call.now()" if clock else ""
    return f"has another parameter: {new!r}, recorded is {old!r}{words}"
