"""What the services of a control plane do to its tables: each call is one transaction of a stateless handler.

    pending -> assigned -> running -> done, or failed after as many attempts as a task has
       ^___________|__________|

All take groups: a list of rows goes into one statement as one JSON parameter, so that a group of a hundred
costs little more than one. Who writes for a worker gives the epoch that it joined with; once its lease has
expired, or another has joined by its name, the epoch is another one and the write changes nothing.

Arguments are values of JSON, and bytes. Handlers look at no clock but `Call.now`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from sqlalchemy.exc import OperationalError

from windtunnel.base.errors import ScriptError, UserError
from windtunnel.control.database.policy import POLICIES, Decision, Observation, Task, Worker
from windtunnel.store.transactions import Call, Handler, readonly

GROUP = 100
"""Tasks that are placed, or messages that are taken, in one transaction at most: a claim of a whole backlog
keeps all others waiting (dbos-transact-ts, issue 1302)."""
BLOCK = 1 << 20
"""Bytes of a block of a file."""
SPEC = {"key": "", "priority": 0, "slots": 1, "data": "", "gang": "", "members": 1, "not_before": 0.0,
        "attempts": 3}  # fmt: skip
"""What a task is beside its command, unless it says so."""
_KINDS: dict[str, Any] = {name: type(value) for name, value in SPEC.items()}
_KINDS |= {"command": list, "not_before": int | float}
_ACCEPTED = (f"command (a list of words), {', '.join(SPEC)}; slots and attempts from 1 up, members 2 to"
             f" {GROUP} with the name of a gang, else 1")  # fmt: skip
_TYPES = {"text": "value->>{}", "int": "CAST(value->>{} AS bigint)", "real": "CAST(value->>{} AS float8)"}


class PolicyError(ScriptError):
    """A policy raised, or decided what cannot be: nothing was assigned."""


@dataclass(frozen=True)
class TaskPlacement:
    """What a policy saw and decided, and what was then ``assigned``: task and worker, by task."""

    observation: Observation
    decision: Decision
    assigned: tuple[tuple[int, str], ...]


@cache
def _statement(dialect: str, sql: str, alone: bool) -> str:
    """``sql`` in a dialect: ``ROWS(task int, ...)`` is a table r of the rows in the parameter ``rows``. Of a
    row that is ``alone`` the values are parameters, ``r0`` and so on, and an update needs no table."""
    lite = dialect == "sqlite"
    source = "json_each(:rows)" if lite else "json_array_elements(CAST(:rows AS json))"

    def table(match: re.Match[str]) -> str:
        read = [f":r{at}" if alone else f"json_extract(value, '$[{at}]')" if lite
                else _TYPES[kind].format(at) for at, (_, kind) in enumerate(columns)]  # fmt: skip
        named = ", ".join(f"{value} AS {name}" for value, (name, _) in zip(read, columns, strict=True))
        return f"FROM (SELECT {named}{'' if alone else f' FROM {source}'}) AS r"

    pattern = r"FROM ROWS\(([^)]*)\)"
    if match := re.search(pattern, sql):
        columns = [column.split() for column in match[1].split(",")]
        names = [name for name, _ in columns]
        if alone and re.search(r"\br\.", sql):
            sql = re.sub(pattern, "", sql)
            sql = re.sub(r"\br\.(\w+)", lambda match: f":r{names.index(match[1])}", sql)
        sql = re.sub(pattern, table, sql)
    return sql if lite else re.sub(r":(\w+)", r"%(\1)s", sql)


def _run(call: Call, sql: str, rows: Sequence[Sequence[Any]] | None = None, **parameters: Any) -> list[Any]:
    """The rows that ``sql`` gives, sorted where it does not sort them."""
    dialect, alone = call.connection.dialect.name, False
    if rows is not None and len(rows) == 1 and dialect == "sqlite":
        alone = True
        parameters |= {f"r{at}": value for at, value in enumerate(rows[0])}
    elif rows is not None:
        parameters["rows"] = json.dumps(rows, separators=(",", ":"))
    result = call.rows(_statement(dialect, sql, alone), parameters)
    return sorted(result) if len(result) > 1 and "RETURNING" in sql else result


# --- tasks


def submit(call: Call, tasks: Sequence[dict[str, Any]]) -> list[int]:
    """Put tasks on the queue, each once for each of its keys: their ids, in order. A task is ``command``
    (words) and, where it differs, what stands in `SPEC`: ``gang`` with its number of ``members``,
    ``not_before`` in seconds since 1970.

    Raises:
        UserError: a task cannot be, or its key is of another command.
    """
    specs = [{**SPEC, **spec, "command": json.dumps(spec.get("command"))} for spec in tasks]
    for spec in tasks:
        _check({"command": None, **SPEC, **spec})
    keys, now = [spec["key"] or call.uuid() for spec in specs], call.now()
    names = ("command", *list(SPEC)[1:])
    columns = ", ".join(names)
    rows = [[key, *(spec[name] for name in names)] for key, spec in zip(keys, specs, strict=True)]
    new = dict(_run(call, f"""INSERT INTO task (key, {columns}, created) SELECT key, {columns}, :now
        FROM ROWS(key text, command text, priority int, slots int, data text, gang text, members int,
        not_before real, attempts int) WHERE true ON CONFLICT (key) DO NOTHING RETURNING key, id""",
        rows, now=now))  # fmt: skip
    if len(new) < len(keys):
        there = _run(call, "SELECT key, id, command FROM task WHERE key IN (SELECT key FROM ROWS(key text))",
                     [[key] for key in keys])  # fmt: skip
        new = {key: number for key, number, _ in there}
        commands = {key: command for key, _, command in there}
        for key, spec in zip(keys, specs, strict=True):
            if spec["command"] != commands[key]:
                raise UserError(f"submit: key {key!r} is of task {new[key]}, which runs {commands[key]}")
    return [new[key] for key in keys]


def _check(spec: dict[str, Any]) -> None:
    words = spec["command"]
    wrong = [name for name, value in spec.items() if not isinstance(value, _KINDS.get(name, ()))]
    wrong += [name for name in ("slots", "members", "attempts") if not wrong and spec[name] < 1]
    if not wrong and (not words or not all(isinstance(word, str) and word for word in words)):
        wrong = ["command"]
    if wrong or (spec["members"] > 1) != bool(spec["gang"]) or spec["members"] > GROUP:
        name = (wrong or ["members"])[0]
        raise UserError(f"submit: {name} is {spec[name]!r}, accepted are {_ACCEPTED}")


_PENDING = "SELECT id, slots, priority, data, gang FROM task WHERE state = 'pending' AND not_before <= :now"


def schedule(call: Call, policy: str = "least", most: int = GROUP) -> TaskPlacement | None:
    """Have ``policy`` place up to ``most`` pending tasks; None where there is nothing to decide. What is
    seen, decided and written is one transaction, so that several schedulers may run.

    Raises:
        PolicyError: the policy raised, or decided what cannot be.
    """
    now = call.now()
    workers = _run(call, """SELECT name, free, slots, data, epoch FROM worker WHERE free > 0
        AND lease_until >= :now ORDER BY free DESC, name LIMIT :most""", now=now, most=most)  # fmt: skip
    # what fits nobody who is there, and a gang that is not complete, would fill the window
    tasks = _run(call, f"""{_PENDING}
        AND EXISTS (SELECT 1 FROM worker WHERE worker.slots >= task.slots AND lease_until >= :now)
        AND (gang = '' OR members <= (SELECT count(*) FROM task AS other WHERE other.gang = task.gang
            AND other.gang <> '' AND (other.state <> 'pending' OR other.not_before <= :now)))
        ORDER BY priority DESC, id LIMIT :most""", now=now, most=most) if workers else []  # fmt: skip
    if gangs := {row[4] for row in tasks if row[4]}:  # whole, also where the window cut one
        whole = _run(call, f"{_PENDING} AND gang IN (SELECT name FROM ROWS(name text)) ORDER BY id",
                     [[name] for name in sorted(gangs)], now=now)  # fmt: skip
        tasks = [*(row for row in tasks if not row[4]), *whole]
    if not tasks:
        return None
    observation = Observation(
        tuple([Task(*row) for row in tasks]), tuple([Worker(*row[:4]) for row in workers])
    )
    epochs = {row[0]: row[4] for row in workers}
    try:
        decision = POLICIES[policy](observation)
        rows = [
            [assignment.task, assignment.worker, epochs[assignment.worker], assignment.reason]
            for assignment in decision.assignments
        ]
        assigned = _run(call, """UPDATE task SET state = 'assigned', holder = r.worker, worker = r.worker,
            epoch = r.epoch, policy = :policy, reason = r.reason, assigned = :now
            FROM ROWS(task int, worker text, epoch int, reason text)
            WHERE task.id = r.task AND task.state = 'pending' RETURNING id, holder""",
            rows, policy=policy, now=now) if rows else []  # fmt: skip
        if len(assigned) < len(rows):
            raise ValueError("it placed a task that does not wait")
    except OperationalError:  # a conflict, or a disk that is full
        raise
    except Exception as error:  # of the policy, or a check of the tables refused what it decided
        why = str(getattr(error, "orig", error)).partition("\n")[0]
        raise PolicyError(
            f"policy {policy} failed, its tasks stay pending: {type(error).__name__}: {why}"
        ) from error
    return TaskPlacement(observation, decision, tuple((number, name) for number, name in assigned))


def claim(call: Call, workers: Sequence[tuple[str, int]]) -> list[dict[str, Any]]:
    """Begin what is assigned to these workers (name and epoch): the tasks, by their ids."""
    rows = _run(call, """UPDATE task SET state = 'running', attempt = attempt + 1, started = :now
        FROM ROWS(worker text, epoch int) WHERE task.holder = r.worker AND task.epoch = r.epoch
        AND task.state = 'assigned' RETURNING id, key, command, attempt, holder, task.epoch""",
        workers, now=call.now())  # fmt: skip
    names = ("task", "key", "command", "attempt", "worker", "epoch")
    return [dict(zip(names, row, strict=True)) for row in rows]


def finish(call: Call, results: Sequence[tuple[int, str, int, int, str, str]]) -> list[int]:
    """Write down how attempts ended: task, worker, its epoch, exit status, error ("" for none), output. One
    with an error is tried again, as often as its task says. The ids of those that were written: who is not
    among them was fenced, or had written it before."""
    rows = _run(call, """UPDATE task SET holder = NULL, ended = :now, status = r.status, output = r.output,
        error = nullif(r.error, ''), state = CASE WHEN r.error = '' THEN 'done'
            WHEN attempt >= attempts THEN 'failed' ELSE 'pending' END
        FROM ROWS(task int, worker text, epoch int, status int, error text, output text)
        WHERE task.id = r.task AND task.holder = r.worker AND task.epoch = r.epoch AND task.state = 'running'
        RETURNING id""", results, now=call.now())  # fmt: skip
    return [number for (number,) in rows]


# --- workers


def join(call: Call, workers: Sequence[tuple[str, int, str]], lease: float) -> dict[str, int]:
    """Workers that begin: name, slots, data that they hold. Their epochs, by name; an earlier worker of that
    name is fenced, and what it had is pending again. ``lease``: seconds."""
    _requeue(call, [row[0] for row in workers])
    return dict(_run(call, """INSERT INTO worker (name, slots, free, data, lease_until)
        SELECT name, slots, slots, data, CAST(:until AS float) FROM ROWS(name text, slots int, data text)
        WHERE true ON CONFLICT (name) DO UPDATE SET slots = excluded.slots, free = excluded.free,
        data = excluded.data, lease_until = excluded.lease_until, epoch = worker.epoch + 1
        RETURNING name, epoch""", workers, until=call.now() + lease))  # fmt: skip


def renew(call: Call, worker: str, epoch: int, lease: float) -> bool:
    """Whether the worker is still the one: its lease then holds for another ``lease`` seconds; 0 ends it."""
    return bool(_run(call, "UPDATE worker SET lease_until = :until WHERE name = :name AND epoch = :epoch"
                     " RETURNING name", name=worker, epoch=epoch, until=call.now() + lease))  # fmt: skip


def expire(call: Call) -> list[str]:
    """Fence the workers whose leases have ended; what they had is pending again. Their names."""
    ended = "SELECT name FROM worker WHERE lease_until <= :now AND lease_until > 0 ORDER BY name"
    names = [name for (name,) in _run(call, ended, now=call.now())]
    if names:
        _requeue(call, names)
        _run(call, "UPDATE worker SET epoch = epoch + 1, lease_until = 0"
             " WHERE name IN (SELECT name FROM ROWS(name text))", [[name] for name in names])  # fmt: skip
    return names


def _requeue(call: Call, names: Sequence[str]) -> None:
    _run(call, """UPDATE task SET holder = NULL, error = 'worker ' || holder || ' was lost', ended = :now,
        state = CASE WHEN state = 'running' AND attempt >= attempts THEN 'failed' ELSE 'pending' END
        WHERE holder IN (SELECT name FROM ROWS(name text))""", [[name] for name in names],
        now=call.now())  # fmt: skip


# --- messages and files


def send(call: Call, messages: Sequence[tuple[str, str]], sender: str = "") -> None:
    """Messages: receiver and body of each."""
    _run(call, """INSERT INTO message (receiver, sender, body, sent)
        SELECT receiver, :sender, body, :now FROM ROWS(receiver text, body text)""",
        messages, sender=sender, now=call.now())  # fmt: skip


def receive(call: Call, receiver: str, most: int = GROUP) -> list[tuple[str, str]]:
    """Sender and body of the oldest messages, in order (of each sender); the transaction that reads them
    deletes them, so that nobody gets one twice."""
    rows = _run(call, """DELETE FROM message WHERE id IN (SELECT id FROM message WHERE receiver = :receiver
        ORDER BY id LIMIT :most) RETURNING id, sender, body""", receiver=receiver, most=most)  # fmt: skip
    return [(sender, body) for _, sender, body in rows]


def write_file(call: Call, path: str, data: bytes) -> None:
    """The file at ``path``, new or in the place of the one that was there."""
    remove_files(call, [path])
    new = call.uuid()
    _run(call, "INSERT INTO file (path, id, size, modified) VALUES (:path, :id, :size, :now)",
         path=path, id=new, size=len(data), now=call.now())  # fmt: skip
    for at in range(0, len(data), BLOCK):
        _run(call, "INSERT INTO file_block (file, number, data) VALUES (:id, :number, :data)",
             id=new, number=at // BLOCK, data=data[at : at + BLOCK])  # fmt: skip


@readonly
def read_file(call: Call, path: str) -> bytes | None:
    """The bytes of a file; None where there is none."""
    ids = _run(call, "SELECT id FROM file WHERE path = :path", path=path)
    rows = _run(call, "SELECT data FROM file_block WHERE file IN (SELECT id FROM file WHERE path = :path)"
                " ORDER BY number", path=path)  # fmt: skip
    return b"".join(bytes(data) for (data,) in rows) if ids else None


@readonly
def list_files(call: Call, prefix: str) -> list[tuple[Any, ...]]:
    """Path, bytes and time of every file whose path begins with ``prefix``, by their paths."""
    return _run(call, "SELECT path, size, modified FROM file WHERE substr(path, 1, :length) = :prefix"
                " ORDER BY path",
                length=len(prefix), prefix=prefix)  # fmt: skip


def remove_files(call: Call, paths: Sequence[str]) -> int:
    """Delete files: how many there were."""
    rows, which = [[path] for path in paths], "path IN (SELECT path FROM ROWS(path text))"
    _run(call, f"DELETE FROM file_block WHERE file IN (SELECT id FROM file WHERE {which})", rows)
    return len(_run(call, f"DELETE FROM file WHERE {which} RETURNING path", rows))


HANDLERS: dict[str, Handler] = {
    handler.__name__: handler
    for handler in (submit, schedule, claim, finish, join, renew, expire, send, receive, write_file,
                    read_file, list_files, remove_files)
}  # fmt: skip
"""Every service of the control plane, by name."""
