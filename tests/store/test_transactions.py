"""One call, one transaction: all or nothing, made again after a conflict, and errors in one sentence."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from sqlalchemy import Engine, event, text
from sqlalchemy.exc import OperationalError

from windtunnel.base.errors import UserError
from windtunnel.store import database, transactions
from windtunnel.store.transactions import (
    ATTEMPTS,
    Call,
    DatabaseError,
    Transactions,
    open_database,
    readonly,
    transact,
)


def add(call: Call, amount: int, fail: bool = False) -> int:
    call.connection.execute(text("UPDATE total SET value = value + :amount"), {"amount": amount})
    if fail:
        raise ValueError("after the write")
    return value(call)


@readonly
def value(call: Call) -> int:
    return int(call.connection.execute(text("SELECT value FROM total")).scalar_one())


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Transactions]:
    engine = open_database(f"sqlite:///{tmp_path}/total.db", "--db", durable=False)
    with engine.begin() as connection:
        connection.execute(text("CREATE TABLE total (value INTEGER CHECK (value < 100))"))
        connection.execute(text("INSERT INTO total VALUES (1)"))
    yield Transactions(engine, {"add": add, "value": value})
    engine.dispose()


def test_a_handler_that_raises_changes_nothing(service: Transactions) -> None:
    assert service.run("add", amount=2) == 3
    with pytest.raises(ValueError, match="after the write"):
        service.run("add", amount=5, fail=True)
    assert service.run("value") == 3
    with pytest.raises(
        DatabaseError, match=r"total\.db: the database cannot be used \(CHECK constraint failed"
    ):
        service.run("add", amount=500)
    assert service.run("value") == 3


def test_who_only_reads_waits_for_no_writer_and_sees_one_snapshot(service: Transactions) -> None:
    with service.engine.connect() as writer, writer.begin():
        writer.execute(text("UPDATE total SET value = 50"))
        assert service.run("value") == 1  # a writer that waited here would wait for ever

        def twice(connection: object) -> tuple[int, int]:
            call = Call(connection)  # type: ignore[arg-type]
            first = value(call)
            writer.commit()
            return first, value(call)

        assert transact(service.engine, twice, readonly=True) == (1, 1)
    assert service.run("value") == 50


class Lost(Exception):
    sqlstate = "40001"


@pytest.mark.parametrize("losses", [2, ATTEMPTS])
def test_a_conflict_is_made_again_from_its_beginning(
    service: Transactions, losses: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = iter(range(losses))
    monkeypatch.setattr(time, "sleep", lambda seconds: None)

    def body(connection: object) -> int:
        total = add(Call(connection), 1)  # type: ignore[arg-type]
        if next(left, None) is not None:
            raise OperationalError("COMMIT", {}, Lost("could not serialize access"))
        return total

    if losses < ATTEMPTS:
        assert transact(service.engine, body) == 2
    else:
        with pytest.raises(DatabaseError, match="could not serialize access"):
            transact(service.engine, body)
        assert service.run("value") == 1


def test_a_database_that_stays_locked_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database, "PATIENCE_S", 0.01)
    url = f"sqlite:///{tmp_path}/x.db"
    first, second = open_database(url, "--db"), open_database(url, "--db")
    with (
        first.connect() as holder,
        holder.begin(),
        pytest.raises(DatabaseError, match=r"x\.db: .*locked") as caught,
    ):
        transact(second, lambda connection: None)
    assert "\n" not in str(caught.value)
    first.dispose()
    second.dispose()


@pytest.mark.parametrize(("durable", "level"), [(True, 2), (False, 1)])
def test_sqlite_is_in_write_ahead_mode(tmp_path: Path, durable: bool, level: int) -> None:
    engine: Engine = open_database(f"sqlite:///{tmp_path}/x.db", "--db", durable=durable)
    with engine.connect() as connection:
        assert connection.exec_driver_sql("PRAGMA journal_mode").scalar() == "wal"
        assert connection.exec_driver_sql("PRAGMA synchronous").scalar() == level
    engine.dispose()


def test_what_is_no_database_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="--db: 'nonsense' is not a database that can be used"):
        open_database("nonsense", "--db")
    with pytest.raises(DatabaseError, match="unable to open database file"):
        open_database(f"sqlite:///{tmp_path}/no/folder/x.db", "--db")


def test_a_call_gives_what_differs() -> None:
    call = Call(None)  # type: ignore[arg-type]
    assert call.uuid() != call.uuid() and 0 <= call.random() < 1
    assert abs(call.now() - time.time()) < 3600
    assert transactions.is_readonly(value) and not transactions.is_readonly(add)


def test_rows_are_the_same_with_and_without_a_listener(service: Transactions) -> None:
    statements: list[str] = []

    def ask(sql: str, parameters: object) -> list[tuple[object, ...]]:
        return transact(service.engine, lambda connection: Call(connection).rows(sql, parameters))  # type: ignore[no-any-return]

    def all_of_them() -> list[object]:
        answers: list[object] = [
            ask("UPDATE total SET value = value + :more", {"more": 1}),
            ask("UPDATE total SET value = value - :more RETURNING value", {"more": 1}),
            ask("SELECT value, :text FROM total", {"text": "x"}),
        ]
        for parameters, why in (({"more": 500}, "CHECK constraint failed"), ({"more": 10**30}, "too large")):
            with pytest.raises((DatabaseError, OverflowError), match=why):
                ask("UPDATE total SET value = value + :more", parameters)
        return answers

    direct = all_of_them()
    event.listen(service.engine, "before_cursor_execute", lambda *words: statements.append(words[2]))
    assert all_of_them() == direct == [[], [(1,)], [(1, "x")]]
    assert len(statements) == 5


def test_who_read_leaves_a_connection_on_which_the_next_writes(service: Transactions) -> None:
    service.run("value")
    with (
        service.engine.begin(),  # of the same pool: it takes the lock at once
        closing(sqlite3.connect(service.engine.url.database or "", timeout=0)) as other,
        pytest.raises(sqlite3.OperationalError, match="locked"),
    ):
        other.execute("BEGIN IMMEDIATE")
