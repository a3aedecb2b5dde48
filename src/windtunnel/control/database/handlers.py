"""What the services of a control plane do to its tables: every call is one transaction of a stateless handler.

    pending -> assigned -> running -> done
       ^___________|__________|____-> failed, after as many attempts as a task has

All take groups: a list of rows goes into one statement as one JSON parameter, so that a group of a hundred
costs little more than one. Who writes for a worker gives the epoch that the worker joined with; after its
lease has expired, or another joined by its name, the epoch is another one and the write changes nothing.

Arguments are values of JSON, and bytes. Handlers look at no clock but `Call.now`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from windtunnel.base.errors import ScriptError, UserError
from windtunnel.control.database.policy import POLICIES, Decision, Observation, Task, Worker
from windtunnel.store.transactions import Call, Handler, readonly

GROUP = 100
"""Tasks that are claimed in one transaction at most, unless the caller says otherwise: a claim of a whole backlog
keeps all others waiting (dbos-transact-ts, issue 1302)."""
BLOCK = 1 << 20
"""Bytes of a block of a file."""
_SPEC = {"key": "", "priority": 0, "slots": 1, "data": "", "gang": "", "members": 1, "not_before": 0.0,
         "attempts": 3}  # fmt: skip
_TYPES = {"text": "{}", "int": "CAST({} AS bigint)", "real": "CAST({} AS double precision)"}


class PolicyError(ScriptError):
    """A policy raised, or decided what cannot be: nothing was assigned."""


@dataclass(frozen=True)
class Placement:
    """What a policy saw and decided, and what is now ``assigned``: task and worker, in the order of tasks."""

    observation: Observation
    decision: Decision
    assigned: tuple[tuple[int, str], ...]


@cache
def _statement(dialect: str, sql: str) -> str:
    """``sql`` in a dialect: ``ROWS(task int, ...)`` is a table of the rows in the parameter ``rows``."""

    def rows(match: re.Match[str]) -> str:
        columns = [column.split() for column in match[1].split(",")]
        if dialect == "sqlite":
            parts = [f"json_extract(value, '$[{at}]') AS {name}" for at, (name, _) in enumerate(columns)]
            return f"(SELECT {', '.join(parts)} FROM json_each(:rows))"
        parts = [f"{_TYPES[kind].format(f'value->>{at}')} AS {name}" for at, (name, kind) in enumerate(columns)]
        return f"(SELECT {', '.join(parts)} FROM json_array_elements(CAST(:rows AS json)))"

    whole = re.sub(r"ROWS\(([^)]*)\)", rows, sql)
    return whole if dialect == "sqlite" else re.sub(r":(\w+)", r"%(\1)s", whole)


def _run(call: Call, sql: str, rows: Iterable[Any] | None = None, **parameters: Any) -> Sequence[Any]:
    """The rows that ``sql`` gives; it makes its own text, no parser of a builder stands between."""
    if rows is not None:
        parameters["rows"] = json.dumps(list(rows), separators=(",", ":"))
    connection = call.connection
    result = connection.exec_driver_sql(_statement(connection.dialect.name, sql), parameters)
    return result.fetchall() if result.returns_rows else ()


# --- tasks


def submit(call: Call, tasks: Sequence[dict[str, Any]]) -> list[int]:
    """Put tasks on the queue, each once for each of its keys: their ids, in order.

    A task is ``command`` (words) and, where it differs, ``key``, ``priority``, ``slots``, ``data``, ``gang`` with its
    number of ``members``, ``not_before`` (seconds since 1970) and ``attempts``.

    Raises:
        UserError: a task cannot be, or its key is of another command.
    """
    specs = [_checked(spec) for spec in tasks]
    keys, now = [spec["key"] or call.uuid() for spec in specs], call.now()
    names = ("command", *list(_SPEC)[1:])
    new = dict(_run(call, f"""INSERT INTO task (key, {", ".join(names)}, created)
        SELECT key, {", ".join(names)}, :now FROM ROWS(key text, command text, priority int, slots int, data text,
            gang text, members int, not_before real, attempts int) AS r WHERE true
        ON CONFLICT (key) DO NOTHING RETURNING key, id""",
        [[key, *(spec[name] for name in names)] for key, spec in zip(keys, specs, strict=True)], now=now,
    ))  # fmt: skip
    if len(new) < len(keys):
        known = _run(call, "SELECT key, id, command FROM task WHERE key IN (SELECT key FROM ROWS(key text) AS r)",
                     [[key] for key in keys])  # fmt: skip
        commands = {key: command for key, _, command in known}
        new = {key: number for key, number, _ in known}
        for key, spec in zip(keys, specs, strict=True):
            if spec["command"] != commands[key]:
                raise UserError(f"submit: key {key!r} is of task {new[key]}, whose command is {commands[key]}")
    return [new[key] for key in keys]


def _checked(spec: dict[str, Any]) -> dict[str, Any]:
    command = spec.get("command")
    if not isinstance(command, list) or not command or not all(isinstance(word, str) for word in command):
        raise UserError(f"submit: command is {command!r}, accepted is a list of words")
    for name, value in spec.items():
        kind = type(_SPEC[name]) if name in _SPEC else None
        least = {"slots": 1, "attempts": 1, "members": 1}.get(name)
        wrong = kind is None or not (isinstance(value, kind) or (kind is float and isinstance(value, int)))
        if name != "command" and (wrong or (least is not None and value < least)):
            accepted = f"a {kind.__name__}" if kind else f"one of command, {', '.join(_SPEC)}"
            raise UserError(f"submit: {name} is {value!r}, accepted is {accepted}{' from 1 up' if least else ''}")
    whole = {**_SPEC, **spec, "command": json.dumps(command)}
    if (whole["members"] > 1) != bool(whole["gang"]) or whole["members"] > GROUP:
        raise UserError(f"submit: members is {whole['members']!r} of gang {whole['gang']!r}, accepted is"
                        f" 2 to {GROUP} with the name of a gang")  # fmt: skip
    return whole


_PENDING = "SELECT id, slots, priority, data, gang FROM task WHERE state = 'pending' AND not_before <= :now"


def schedule(call: Call, policy: str = "least", most: int = GROUP) -> Placement | None:
    """Have ``policy`` place up to ``most`` pending tasks; None where there is nothing to decide.

    What is seen, decided and written is one transaction, so several schedulers may run.

    Raises:
        PolicyError: the policy raised, or decided what cannot be.
        UserError: there is no such policy.
    """
    if policy not in POLICIES:
        raise UserError(f"policy is {policy!r}, accepted are {', '.join(POLICIES)}")
    now = call.now()
    # what fits nobody who is there, and a gang that is not complete, would fill the window
    tasks = _run(call, f"""{_PENDING}
        AND slots <= (SELECT max(slots) FROM worker WHERE lease_until >= :now)
        AND (gang = '' OR members <= (SELECT count(*) FROM task AS other WHERE other.gang = task.gang AND other.gang <> ''
            AND (other.state <> 'pending' OR other.not_before <= :now)))
        ORDER BY priority DESC, id LIMIT :most""", now=now, most=most)  # fmt: skip
    gangs = {row[4] for row in tasks if row[4]}
    if gangs:  # whole, also where the window cut one
        whole = _run(call, f"{_PENDING} AND gang IN (SELECT name FROM ROWS(name text) AS r) ORDER BY id",
                     [[name] for name in sorted(gangs)], now=now)  # fmt: skip
        tasks = [*(row for row in tasks if not row[4]), *whole]
    if not tasks:
        return None
    workers = "SELECT name, free, slots, data, epoch FROM worker WHERE free > 0 AND lease_until >= :now"
    free = _run(call, f"{workers} ORDER BY free DESC, name LIMIT :most", now=now, most=most)
    wanted = {row[3] for row in tasks} - {""}
    if wanted and len(free) == most:
        known = {row[0] for row in free}
        holding = _run(call, f"{workers} AND data IN (SELECT name FROM ROWS(name text) AS r)"
                       " ORDER BY free DESC, name LIMIT :most",
                       [[name] for name in sorted(wanted)], now=now, most=most)  # fmt: skip
        free = [*free, *(row for row in holding if row[0] not in known)]
    if not free:
        return None
    observation = Observation(
        tuple([Task(*row) for row in tasks]), tuple([Worker(*row[:4]) for row in free])
    )
    try:
        decision = POLICIES[policy](observation)
        epochs = {row[0]: row[4] for row in free}
        rows = [[one.task, one.worker, epochs[one.worker], one.reason] for one in decision.assignments]
    except Exception as error:
        raise PolicyError(f"policy {policy} failed: {type(error).__name__}: {error}; its tasks stay pending") from error
    _check(policy, observation, decision)
    assigned = _run(call, """UPDATE task SET state = 'assigned', holder = r.worker, worker = r.worker, epoch = r.epoch,
        policy = :policy, reason = r.reason, assigned = :now
        FROM ROWS(task int, worker text, epoch int, reason text) AS r
        WHERE task.id = r.task AND task.state = 'pending' RETURNING id, holder""",
        rows, policy=policy, now=now) if rows else ()  # fmt: skip
    return Placement(observation, decision, tuple(sorted((number, name) for number, name in assigned)))


def _check(policy: str, observation: Observation, decision: Decision) -> None:
    """Slots that are free, each task once, gangs whole."""
    free = {worker.name: worker.free for worker in observation.workers}
    waits = {task.id: task for task in observation.tasks}
    for one in decision.assignments:
        task = waits.pop(one.task, None)
        if task is not None:
            free[one.worker] -= task.slots
        if task is None or free[one.worker] < 0:
            why = "which does not wait" if task is None else "which has no room for it"
            raise PolicyError(f"policy {policy} gave task {one.task} to {one.worker}, {why}")
    placed = {task.gang for task in observation.tasks if task.gang and task.id not in waits}
    if split := placed & {task.gang for task in waits.values()}:
        raise PolicyError(f"policy {policy} placed a part of gang {min(split)}")


def claim(call: Call, workers: Sequence[tuple[str, int]]) -> list[dict[str, Any]]:
    """Begin what is assigned to these workers (name and epoch): the tasks, by their ids."""
    rows = _run(call, """UPDATE task SET state = 'running', attempt = attempt + 1, started = :now
        FROM ROWS(worker text, epoch int) AS r
        WHERE task.holder = r.worker AND task.epoch = r.epoch AND task.state = 'assigned'
        RETURNING id, key, command, attempt, holder, task.epoch""", workers, now=call.now())  # fmt: skip
    names = ("task", "key", "command", "attempt", "worker", "epoch")
    return [dict(zip(names, row, strict=True)) for row in sorted(tuple(row) for row in rows)]


def finish(call: Call, results: Sequence[tuple[int, str, int, int, str, str]]) -> list[int]:
    """Write down how attempts ended: task, worker, its epoch, exit status, error ("" for none), output. One with
    an error is tried again, as often as its task says. The ids of those that were written: who is not among
    them was fenced, or had written it before."""
    rows = _run(call, """UPDATE task SET holder = NULL, ended = :now, status = r.status, error = nullif(r.error, ''),
        output = r.output, state = CASE WHEN r.error = '' THEN 'done'
            WHEN attempt >= attempts THEN 'failed' ELSE 'pending' END
        FROM ROWS(task int, worker text, epoch int, status int, error text, output text) AS r
        WHERE task.id = r.task AND task.holder = r.worker AND task.epoch = r.epoch AND task.state = 'running'
        RETURNING id""", results, now=call.now())  # fmt: skip
    return sorted(row[0] for row in rows)


# --- workers


_LOST = """UPDATE task SET holder = NULL, error = 'worker ' || holder || ' was lost',
    ended = CASE WHEN state = 'running' THEN :now ELSE ended END,
    state = CASE WHEN state = 'running' AND attempt >= attempts THEN 'failed' ELSE 'pending' END
    WHERE holder IN (SELECT name FROM ROWS(name text) AS r)"""


def join(call: Call, workers: Sequence[tuple[str, int, str]], lease: float) -> dict[str, int]:
    """Workers that begin: name, slots, data that they hold. Their epochs, by name; what an earlier worker of
    that name had is pending again, and the earlier one is fenced. ``lease``: seconds."""
    now = call.now()
    _run(call, _LOST, [[row[0]] for row in workers], now=now)
    rows = _run(call, """INSERT INTO worker (name, slots, free, data, lease_until)
        SELECT name, slots, slots, data, CAST(:until AS double precision) FROM ROWS(name text, slots int, data text) AS r
        WHERE true ON CONFLICT (name) DO UPDATE SET slots = excluded.slots, free = excluded.free, data = excluded.data,
            lease_until = excluded.lease_until, epoch = worker.epoch + 1
        RETURNING name, epoch""", workers, until=now + lease)  # fmt: skip
    return {name: epoch for name, epoch in rows}


def renew(call: Call, worker: str, epoch: int, lease: float) -> bool:
    """Whether the worker is still the one: its lease then holds for another ``lease`` seconds."""
    return bool(_run(call, "UPDATE worker SET lease_until = :until WHERE name = :name AND epoch = :epoch"
                     " RETURNING name", name=worker, epoch=epoch, until=call.now() + lease))  # fmt: skip


def leave(call: Call, worker: str, epoch: int) -> None:
    """The worker ends: what it has is pending again."""
    if _run(call, "SELECT name FROM worker WHERE name = :name AND epoch = :epoch", name=worker, epoch=epoch):
        _fence(call, [worker])


def expire(call: Call) -> list[str]:
    """Fence the workers whose leases have ended; what they had is pending again. Their names."""
    rows = _run(call, "SELECT name FROM worker WHERE lease_until < :now AND lease_until > 0 ORDER BY name",
                now=call.now())  # fmt: skip
    names = [row[0] for row in rows]
    if names:
        _fence(call, names)
    return names


def _fence(call: Call, names: Sequence[str]) -> None:
    rows = [[name] for name in names]
    _run(call, _LOST, rows, now=call.now())
    _run(call, "UPDATE worker SET epoch = epoch + 1, lease_until = 0"
         " WHERE name IN (SELECT name FROM ROWS(name text) AS r)", rows)  # fmt: skip


# --- messages


def send(call: Call, messages: Sequence[tuple[str, str]], sender: str = "") -> None:
    """Messages, each to a receiver."""
    _run(call, """INSERT INTO message (receiver, sender, body, sent)
        SELECT receiver, :sender, body, :now FROM ROWS(receiver text, body text) AS r""",
        messages, sender=sender, now=call.now())  # fmt: skip


def receive(call: Call, receiver: str, most: int = GROUP) -> list[tuple[str, str]]:
    """Sender and body of the oldest messages, in order (of each sender); they are deleted in the transaction that
    reads them, so that nobody gets one twice."""
    rows = _run(call, """DELETE FROM message WHERE id IN
        (SELECT id FROM message WHERE receiver = :receiver ORDER BY id LIMIT :most)
        RETURNING id, sender, body""", receiver=receiver, most=most)  # fmt: skip
    return [(sender, body) for _, sender, body in sorted(tuple(row) for row in rows)]


# --- files


def write_file(call: Call, path: str, data: bytes) -> None:
    """The file at ``path``, new or in the place of the one that was there."""
    number = call.uuid()
    remove_files(call, [path])
    _run(call, "INSERT INTO file (path, id, size, modified) VALUES (:path, :id, :size, :now)",
         path=path, id=number, size=len(data), now=call.now())  # fmt: skip
    for at in range(0, len(data), BLOCK):
        _run(call, "INSERT INTO file_block (file, number, data) VALUES (:file, :number, :data)",
             file=number, number=at // BLOCK, data=data[at : at + BLOCK])  # fmt: skip


@readonly
def read_file(call: Call, path: str, start: int, end: int) -> bytes | None:
    """Bytes ``start`` to ``end`` of a file; None where there is none."""
    found = _run(call, "SELECT id FROM file WHERE path = :path", path=path)
    if not found:
        return None
    rows = _run(call, "SELECT data FROM file_block WHERE file = :file AND number BETWEEN :first AND :last"
                " ORDER BY number", file=found[0][0], first=start // BLOCK, last=max(start, end - 1) // BLOCK)  # fmt: skip
    first = start // BLOCK * BLOCK
    return b"".join(bytes(row[0]) for row in rows)[start - first : max(start, end) - first]


@readonly
def list_files(call: Call, prefix: str) -> list[tuple[str, int, float]]:
    """Path, bytes and time of every file whose path begins with ``prefix``, by their paths."""
    rows = _run(call, "SELECT path, size, modified FROM file WHERE substr(path, 1, :length) = :prefix"
                " ORDER BY path", length=len(prefix), prefix=prefix)  # fmt: skip
    return [tuple(row) for row in rows]


def remove_files(call: Call, paths: Sequence[str]) -> int:
    """Delete files: how many there were."""
    rows = [[path] for path in paths]
    which = "SELECT path FROM ROWS(path text) AS r"
    _run(call, f"DELETE FROM file_block WHERE file IN (SELECT id FROM file WHERE path IN ({which}))", rows)
    return len(_run(call, f"DELETE FROM file WHERE path IN ({which}) RETURNING path", rows))


def move_file(call: Call, path: str, to: str) -> bool:
    """Another name for a file, in the place of one that has it; whether there is such a file."""
    if path != to and _run(call, "SELECT path FROM file WHERE path = :path", path=path):
        remove_files(call, [to])
    return bool(_run(call, "UPDATE file SET path = :to WHERE path = :path RETURNING path", path=path, to=to))


HANDLERS: dict[str, Handler] = {
    handler.__name__: handler
    for handler in (
        submit, schedule, claim, finish, join, renew, leave, expire, send, receive, write_file, read_file,
        list_files, remove_files, move_file,
    )
}  # fmt: skip
"""Every service of the control plane, by name."""
