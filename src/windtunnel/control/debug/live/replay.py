"""Past requests replayed, every read compared; and tried with changed code, in other orders, too."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from windtunnel.base.errors import UserError
from windtunnel.control.debug.live import checkpoint, handlers
from windtunnel.control.debug.live.capture import code_digest
from windtunnel.control.debug.live.trace import Recorded, Trace, decode, encode
from windtunnel.control.debug.live.world import Execution, World
from windtunnel.control.debug.policy import POLICIES, Observation, Step
from windtunnel.store.eventlog import EventLog
from windtunnel.store.transactions import Handler

CAPABILITY = "control.debug"


@dataclass(frozen=True)
class Divergence:
    """A transaction that did otherwise than it was recorded."""

    n: int
    request: int
    handler: str
    what: str


@dataclass
class Replayed:
    """``same``: transactions that did the same again; ``reads``: that were compared; ``state``: a digest of
    all rows afterwards. ``notes``: in a sentence each, what the trace lacks, or what has changed."""

    transactions: int
    same: int
    reads: int
    divergences: list[Divergence]
    state: str
    notes: list[str]
    damaged: bool
    executions: list[Execution] = field(repr=False)
    keys: dict[str, list[str]] = field(repr=False)
    rows: checkpoint.Tables = field(repr=False)
    tables: dict[int, tuple[set[str], set[str]]] = field(repr=False)


@dataclass
class Outcome:
    """Orders that came to the same end. ``orders``: their places among those that were tried, 0 for the
    recorded one; ``violations``: rows that the check found; ``changed``: rows [table, key, before, after]
    that differ from the recorded run's end; ``answers``: [request, handler, before, after] that do."""

    state: str
    orders: list[int]
    violations: list[dict[str, Any]]
    changed: list[list[Any]]
    answers: list[list[Any]]


@dataclass
class Retro:
    """``explored`` of ``possible`` orders (at least so many, where not ``counted``) within ``preemptions``."""

    recorded: Replayed
    recorded_violations: list[dict[str, Any]]
    changed_handlers: list[str]
    outcomes: list[Outcome]
    explored: int
    possible: int
    counted: bool
    preemptions: int


def replay(
    trace: Trace, *, log: EventLog | None = None, database: str | None = None, policy: str = "snapshot",
    stop: int | None = None, changes: bool = False, code: Mapping[str, Handler] | None = None,
    check: str | None = None, violations: list[dict[str, Any]] | None = None,
) -> Replayed:  # fmt: skip
    """Make all requests of a trace again, and compare what each transaction reads, writes and answers.

    Args:
        log: where the order is written down, and what was done. database: a server for a trace of Postgres.
        policy: by which the order is decided. stop: a request whose handlers run in pdb. changes: rows are
        kept before and after. code: handlers in the place of the recorded ones.

    Raises:
        UserError: handlers or checkpoint are gone, or ``stop`` is no request.
        ScriptError: a function hangs.
    """
    if stop is not None and stop not in {one.request for one in trace.transactions}:
        raise UserError(f"`request`: {stop} was not recorded; `debug sql` shows the view requests")
    found = code or handlers.load(trace.header["handlers"], trace.header["path"])
    observation = Observation(trace.observed())
    decision = POLICIES[policy](observation)
    if log:
        log.decision(CAPABILITY, policy, observation, decision)
    with World(trace, found, database, changes=changes, stop=stop) as world:
        executions = world.run(decision.orders[0])
        _effect(log, world)
        rows, tables = checkpoint.rows(world.engine), world.tables()
        if violations is not None and check:
            violations += _violations(world, check)
    if code is None:
        notes = [
            f"the code of {name} is not the recorded one"
            for name, of in trace.header["codes"].items()
            if code_digest(found[name]) != of
        ]
    else:
        notes = []
    divergences = _divergences(trace, executions)
    bad = {one.n for one in divergences}
    return Replayed(
        len(trace.transactions), sum(one.n not in bad for one in trace.transactions),
        sum(one[3] is not None for each in trace.transactions for one in each.statements), divergences,
        checkpoint.digest_of(rows), [*trace.notes, *notes], trace.damaged, executions, world.keys, rows, tables,
    )  # fmt: skip


def retro(
    trace: Trace, code: Path, *, log: EventLog | None = None, database: str | None = None,
    preemptions: int = 2, limit: int = 200, check: str | None = None,
) -> Retro:  # fmt: skip
    """Try the requests of a trace with the handlers in the file ``code``, in the recorded order and in others.

    Args:
        preemptions: how often an order may leave the recorded one; limit: how many orders are tried. check:
        SQL that finds what must not be, at the end of each.

    Raises:
        UserError, ScriptError: see `replay`; and of ``code``.
    """
    before = handlers.load(trace.header["handlers"], trace.header["path"])
    after = handlers.changed(before, trace.header["handlers"], code)
    found: list[dict[str, Any]] = []
    recorded = replay(trace, log=log, database=database, check=check, violations=found)
    first = replay(trace, log=log, database=database, code=after)
    both = {
        one.n: tuple(recorded.tables.get(one.n, none)[side] | first.tables.get(one.n, none)[side] for side in (0, 1))
        for one in trace.transactions
        for none in [(set[str](), set[str]())]
    }
    observation = Observation(trace.observed(both), preemptions, limit)  # type: ignore[arg-type]
    decision = POLICIES["snapshot"](observation)
    if log:
        log.decision(CAPABILITY, "snapshot", observation, decision)
    outcomes: dict[str, Outcome] = {}
    for place, order in enumerate(decision.orders):
        _try(trace, after, database, order, place, check, recorded, outcomes, log)
    return Retro(
        recorded, found, [name for name in after if after[name] is not before[name]], list(outcomes.values()),
        len(decision.orders), decision.possible, decision.counted, preemptions,
    )  # fmt: skip


def _try(
    trace: Trace, code: Mapping[str, Handler], database: str | None, order: Sequence[Step], place: int,
    check: str | None, recorded: Replayed, outcomes: dict[str, Outcome], log: EventLog | None,
) -> None:  # fmt: skip
    with World(trace, code, database) as world:
        executions = world.run(order)
        _effect(log, world)
        rows = checkpoint.rows(world.engine)
        violations = _violations(world, check) if check else []
    answers = _answers(recorded.executions, executions)
    state = checkpoint.digest_of(rows)
    outcome = outcomes.setdefault(
        encode([state, violations, answers]), Outcome(state, [], violations, _changed(recorded.rows, rows), answers)
    )
    outcome.orders.append(place)


def _effect(log: EventLog | None, world: World) -> None:
    """``did``: the transactions that were made, by index, and -1 - k where k was committed."""
    if log:
        log.append("effect", did=world.done, forced=world.forced)


def _violations(world: World, check: str) -> list[dict[str, Any]]:
    from sqlalchemy.exc import SQLAlchemyError

    with world.engine.connect() as connection:
        try:
            return [dict(row) for row in connection.exec_driver_sql(check).mappings()]
        except SQLAlchemyError as error:
            raise UserError(f"`check`: {str(error).partition(chr(10))[0]}") from error


def _answers(before: Sequence[Execution], after: Sequence[Execution]) -> list[list[Any]]:
    """Transactions that answer otherwise, or are no more made."""
    then = {one.recorded.n: one for one in before if one.recorded}
    now = {one.recorded.n: one for one in after if one.recorded}
    differing = (
        [one.request, one.handler, _answer(one), _answer(now.get(n))] for n, one in sorted(then.items())
    )
    more = ([one.request, one.handler, "", _answer(one)] for one in after if not one.recorded)
    return [one for one in (*differing, *more) if one[2] != one[3]]


def _answer(one: Execution | None) -> str:
    return "not made" if one is None else one.error or one.shown


def _changed(before: checkpoint.Tables, after: checkpoint.Tables) -> list[list[Any]]:
    return [
        [table, key, before.get(table, {}).get(key), after.get(table, {}).get(key)]
        for table in sorted({*before, *after})
        for key in sorted({*before.get(table, {}), *after.get(table, {})})
        if before.get(table, {}).get(key) != after.get(table, {}).get(key)
    ]


def _divergences(trace: Trace, executions: Sequence[Execution]) -> list[Divergence]:
    again = {one.recorded.n: one for one in executions if one.recorded}
    found = [
        Divergence(one.n, one.request, one.handler, what)
        for one in trace.transactions
        if (what := _otherwise(one, again.get(one.n), trace.header["t"]))
    ]
    return found + [
        Divergence(0, one.request, one.handler, f"calls {one.handler}, which was not recorded")
        for one in executions
        if one.recorded is None
    ]


def _otherwise(one: Recorded, made: Execution | None, t: float) -> str:
    """In words, the first difference; "" where there is none."""
    if made is None:
        return "is not made any more"
    if (made.handler, encode(made.arguments)) != (one.handler, encode(one.arguments)):
        return f"is called as {made.handler}({made.arguments}), recorded is {one.handler}({one.arguments})"
    for place, (then, now) in enumerate(zip(one.statements, made.statements, strict=False), 1):
        where, now = f"statement {place} ({' '.join(then[0].split()):.80})", _plain(now[:4])
        if then[0] != now[0]:
            return f"{where} is another one: {' '.join(now[0].split()):.80}"
        if _plain(then[1]) != now[1]:
            return f"{where} has other parameters: {_parameters(one, _plain(then[1]), now[1])}"
        if then[3] != now[3]:
            return f"{where} reads other rows: {now[2]}, recorded are {then[2]}"
        if then[2] != now[2]:
            return f"{where} changes {now[2]} rows, recorded are {then[2]}"
    if len(one.statements) != len(made.statements):
        return f"makes {len(made.statements)} statements, recorded are {len(one.statements)}"
    drawn = {kind: sum(name == kind for name, _ in one.draws) for kind in ("now", "random", "uuid")}
    if other := [kind for kind, count in drawn.items() if made.drawn.get(kind, 0) != count]:
        return f"asks {made.drawn.get(other[0], 0)} times for {other[0]}, recorded is {drawn[other[0]]}"
    if one.error != made.error:
        return f"raises {made.error or 'nothing'}, recorded is {one.error or 'nothing'}"
    if one.result != made.result:
        return f"reads the same, and answers otherwise: {made.shown}"
    return ""


def _parameters(one: Recorded, then: Any, now: Any) -> str:
    """The first that differs, and whether it is the clock."""
    if isinstance(then, dict) and isinstance(now, dict):
        pairs = [(then.get(name), now.get(name)) for name in {**then, **now}]
    else:
        pairs = list(zip(then, now, strict=False)) if len(then) == len(now) else [(then, now)]
    before, after = next(pair for pair in pairs if pair[0] != pair[1])
    clock = _near(before, one.t) and _near(after, time.time())
    words = "; this is the clock, read elsewhere than by call.now()" if clock else ""
    return f"{after!r}, recorded is {before!r}{words}"


def _near(value: Any, t: float) -> bool:
    """Whether a value is the time ``t``, in seconds, milliseconds or nanoseconds, or a date."""
    if isinstance(value, datetime):
        return abs(value.timestamp() - t) < 86400
    if isinstance(value, str):
        try:
            return _near(datetime.fromisoformat(value), t)
        except ValueError:
            return False
    return isinstance(value, int | float) and any(abs(value / unit - t) < 600 for unit in (1, 1e3, 1e6, 1e9))


def _plain(value: Any) -> Any:
    """As a line of the trace gives it back."""
    return decode(encode(value))
