"""A small service on accounts, which tests record while threads call it."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

from sqlalchemy import Column, Engine, Float, Integer, MetaData, String, Table, func, insert, select, update

from windtunnel.control.debug import Recorder, request
from windtunnel.store.transactions import Call, Handler, Runner, Transactions, open_database, readonly

metadata = MetaData()
accounts = Table("account", metadata, Column("id", Integer, primary_key=True), Column("amount", Integer))
notes = Table(
    "note", metadata, Column("id", String(40), primary_key=True), Column("account", Integer),
    Column("chance", Float), Column("at", Float),
)  # fmt: skip
ACCOUNTS = 5
HERE = f"{Path(__file__).resolve()}:HANDLERS"
held: dict[str, threading.Event] = {}
"""A transaction that reads, called by name, waits for its event."""
meetings: dict[int, threading.Barrier] = {}
"""Requests that update an account meet between their two transactions."""


@readonly
def total(call: Call) -> int:
    return int(call.connection.scalar(select(func.sum(accounts.c.amount))) or 0)


def move(call: Call, source: int, target: int, amount: int) -> int:
    """What is left in the source. ValueError: it had not so much."""
    have = call.connection.execute(select(accounts.c.amount).where(accounts.c.id == source)).scalar_one()
    if have < amount:
        raise ValueError(f"account {source} has {have}")
    for account, more in ((source, -amount), (target, amount)):
        call.connection.execute(
            update(accounts).where(accounts.c.id == account).values(amount=accounts.c.amount + more)
        )
    call.connection.execute(
        insert(notes).values(id=call.uuid(), account=target, chance=call.random(), at=call.now())
    )
    return int(have - amount)


@readonly
def amount_of(call: Call, account: int) -> int:
    return int(call.connection.scalar(select(accounts.c.amount).where(accounts.c.id == account)) or 0)


def put(call: Call, account: int, amount: int) -> None:
    call.connection.execute(update(accounts).where(accounts.c.id == account).values(amount=amount))


@request
def lost_update(runner: Runner, account: int) -> int:
    """One more, read in one transaction and written in another."""
    amount = runner.run("amount_of", account=account) + 1
    if account in meetings:
        meetings[account].wait(60)
    runner.run("put", account=account, amount=amount)
    return int(amount)


def clock(call: Call, account: int) -> None:
    """It asks the clock itself."""
    call.connection.execute(
        insert(notes).values(id=str(account), account=account, chance=0.0, at=time.time())
    )


def copy(call: Call, source: int, target: int, name: str) -> int:
    amount = amount_of(call, source)
    if name in held:
        assert held[name].wait(60)
    put(call, target, amount + 10)
    return amount


@readonly
def look(call: Call, account: int, name: str) -> int:
    amount = amount_of(call, account)
    if name in held:
        assert held[name].wait(60)
    return amount


HANDLERS: dict[str, Handler] = {
    "total": total, "move": move, "amount_of": amount_of, "put": put, "lost_update": lost_update,
    "clock": clock, "copy": copy, "look": look,
}  # fmt: skip


def opened(url: str) -> Engine:
    """A database with accounts of 100 each and no notes."""
    engine = open_database(url, "--db", durable=False)
    metadata.drop_all(engine)
    metadata.create_all(engine)
    with engine.begin() as connection:
        connection.execute(insert(accounts), [{"id": k, "amount": 100} for k in range(ACCOUNTS)])
    return engine


@contextmanager
def recorder(folder: Path, url: str = "") -> Iterator[Recorder]:
    engine = opened(url or f"sqlite:///{folder / 'live.db'}")
    with Recorder(Transactions(engine, HANDLERS), folder / "trace", handlers=HERE) as recording:
        yield recording
    engine.dispose()


def anything(runner: Runner, draw: random.Random) -> None:
    """One request of any kind."""
    account, other = draw.sample(range(ACCOUNTS), 2)
    match draw.randrange(4):
        case 0:
            runner.run("total")
        case 1 | 2 if draw.random() < 0.5:
            runner.run("lost_update", account=account)
        case _:
            with suppress(ValueError):
                runner.run("move", source=account, target=other, amount=draw.randrange(1, 90))


def overlap(runner: Runner, account: int) -> None:
    """Two updates of an account, of which each begins before the other has ended."""
    meetings[account] = threading.Barrier(2)
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda _: runner.run("lost_update", account=account), range(2)))
    del meetings[account]


def busy(runner: Runner, seed: int, requests: int = 30, threads: int = 3) -> None:
    """Threads that ask at once."""

    def work(thread: int) -> None:
        draw = random.Random(f"{seed} {thread}")
        for _ in range(requests // threads):
            anything(runner, draw)

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(work, range(threads)))
