"""`scheduler.py` with a fence: a task starts where it is still pending in the transaction that starts it."""

from __future__ import annotations

from scheduler import starts, tasks
from sqlalchemy import insert, update

from windtunnel.store.transactions import Call


def start(call: Call, task: int, worker: int) -> bool:
    fence = update(tasks).where(tasks.c.id == task, tasks.c.state == "pending").values(state="running")
    if call.connection.execute(fence).rowcount == 0:
        return False
    call.connection.execute(insert(starts).values(id=call.uuid(), task=task, worker=worker, at=call.now()))
    return True


HANDLERS = {"start": start}
