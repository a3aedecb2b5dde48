"""What was recorded is replayed exactly; what cannot be is said."""

from __future__ import annotations

import functools
import json
import os
import random
import runpy
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import text
from sqlalchemy.exc import IntegrityError
from typer.testing import CliRunner

from support import debug as service
from support import postgres
from windtunnel.base.errors import HostError, ScriptError, UserError
from windtunnel.cli.main import app
from windtunnel.control.debug import Recorder, read, replay, retro, sql
from windtunnel.control.debug.live import checkpoint
from windtunnel.control.debug.live.recorder import digest
from windtunnel.control.debug.policy import POLICIES, Decision, Observation, Step, serial
from windtunnel.store.transactions import Call, DatabaseError, Handler, Transactions, open_database, readonly

ROOT = Path(__file__).parent.parent.parent.parent


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with postgres.server() as url:
        yield url


@pytest.fixture(params=["sqlite", "postgres"])
def url(request: pytest.FixtureRequest) -> str:
    """ "" is SQLite's."""
    return "" if request.param == "sqlite" else request.getfixturevalue("server")


def state(folder: Path, url: str = "") -> str:
    """A digest of the rows of the service as it was left."""
    engine = open_database(url or f"sqlite:///{folder / 'live.db'}", "--db")
    with engine.connect() as connection:
        rows = checkpoint.rows(connection, checkpoint.keys(engine))
    engine.dispose()
    return digest(rows)


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "trace" / "trace.jsonl").read_text().splitlines()]


def rewrite(folder: Path, events: list[dict[str, Any]]) -> None:
    (folder / "trace" / "trace.jsonl").write_text("".join(f"{json.dumps(event)}\n" for event in events))


@pytest.mark.parametrize("seed", range(3))
def test_a_replay_reads_the_same_and_ends_the_same(tmp_path: Path, url: str, seed: int) -> None:
    with service.recorder(tmp_path, url) as recorder:
        service.busy(recorder, seed)
    trace = read(tmp_path / "trace")
    said = replay(trace, database=url)
    assert (said["divergences"], said["notes"]) == ([], [])
    assert said["reads"] > 20 and said["transactions"] == len(trace.transactions)
    assert said["state"] == state(tmp_path, url)


def test_a_reader_beside_a_commit_sees_all_of_it_or_nothing(tmp_path: Path) -> None:
    """Its first statement is made again, once the writer that was about to commit has done so."""
    with service.recorder(tmp_path) as recorder, ThreadPoolExecutor(1) as pool:
        recorder.run("put", account=0, amount=1)
        recorder._committing, reading = 2, threading.Event()  # as of a writer that goes on below
        recorder._commits.acquire()
        settle = recorder._settle

        def beside(*given: Any) -> None:
            reading.set()
            settle(*given)

        recorder._settle = beside  # type: ignore[method-assign]
        answer = pool.submit(recorder.run, "look", account=0, name="")
        assert reading.wait(60)
        with recorder.service.engine.begin() as connection:
            connection.exec_driver_sql("UPDATE account SET amount = 2 WHERE id = 0")
        recorder._committed = 2
        recorder._commits.release()
        assert answer.result(60) == 2
    (reader,) = [
        transaction for transaction in read(tmp_path / "trace").transactions if transaction.handler == "look"
    ]
    assert (reader.xmax, len(reader.did[0])) == (3, 1)


@pytest.mark.parametrize("seed", range(2))
def test_changed_code_that_is_not_changed_does_the_same(tmp_path: Path, url: str, seed: int) -> None:
    with service.recorder(tmp_path, url) as recorder:
        service.busy(recorder, seed, requests=12)
    code = tmp_path / "same.py"
    code.write_text("from support.debug import HANDLERS\n")
    said = retro(read(tmp_path / "trace"), code, database=url, limit=1)
    (outcome,) = said["outcomes"]
    assert (outcome["rows"], outcome["answers"], outcome["orders"]) == ([], [], [0])
    assert said["recorded"]["divergences"] == []


def crafted(folder: Path, url: str) -> None:
    """A reads account 0 and goes on; B changes that; C reads what B has written; A writes. In the trace A
    came last and, as an id that was given late, has the highest one."""
    name = "copy" if url else "look"  # SQLite has one writer at a time
    snapshot = threading.Event()

    class Held(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            snapshot.set()
            return super().wait(timeout)

    service.held["A"] = Held()
    with service.recorder(folder, url) as recorder, ThreadPoolExecutor(1) as pool:
        arguments = {"source": 0, "target": 1} if url else {"account": 0}
        first = pool.submit(lambda: recorder.run(name, **arguments, name="A"))
        assert snapshot.wait(60)
        # its snapshot is taken; what it reads after that does not matter
        recorder.run("put", account=0, amount=7)
        recorder.run("copy", source=0, target=2, name="C")
        service.held["A"].set()
        assert first.result(60) == 100
    service.held.clear()
    events = lines(folder)
    of = {event["handler"]: event for event in events if event["kind"] == "txn"}
    last = max(event["t"] for event in events if "t" in event)
    early = next(event for event in events if event["kind"] == "txn" and event["args"].get("name") == "A")
    before, early["t"] = early["id"], last + 1
    if url:
        early["id"] = early["xmax"] + 50
        for event in of.values():
            event["active"] = [xid for xid in event["active"] if xid != before]
    rewrite(folder, events)


def by_id(observation: Observation) -> Decision:
    """R3's artefact: in the order of ids; writers are committed when a snapshot shows them."""
    transactions = observation.transactions
    steps, waiting = [], list[int]()
    for k in sorted(range(len(transactions)), key=lambda k: transactions[k].id or transactions[k].xmax):
        due = tuple(
            c
            for c in waiting
            if transactions[c].id < transactions[k].xmax and transactions[c].id not in transactions[k].active
        )
        waiting = [c for c in waiting if c not in due] + [k] * bool(transactions[k].id)
        steps.append(Step(k, due))
    return Decision((tuple(steps),))


def by_commit(observation: Observation) -> Decision:
    """Numbers given after the commit: each at once, by when it was over."""
    ended = [transaction.ended for transaction in observation.transactions]
    order = sorted(range(len(ended)), key=ended.__getitem__)
    return Decision((tuple(Step(k, tuple(order[p - 1 : p])) for p, k in enumerate(order)),))


@pytest.mark.parametrize("order", [by_id, by_commit, serial])
def test_orders_that_others_use_read_other_rows(
    tmp_path: Path, url: str, order: Callable[[Observation], Decision], monkeypatch: pytest.MonkeyPatch
) -> None:
    if order is by_id and not url:
        pytest.skip("SQLite gives ids in the order of snapshots")
    crafted(tmp_path, url)
    trace = read(tmp_path / "trace")
    assert replay(trace, database=url)["divergences"] == []
    monkeypatch.setitem(POLICIES, "snapshot", order)  # type: ignore[arg-type]
    assert any(
        "reads other rows" in divergence[3] for divergence in replay(trace, database=url)["divergences"]
    )


def test_a_clock_that_is_read_elsewhere_is_named(tmp_path: Path) -> None:
    with service.recorder(tmp_path) as recorder:
        recorder.run("clock", account=1)
    (divergence,) = replay(read(tmp_path / "trace"))["divergences"]
    assert (
        divergence[:3] == (1, 1, "clock")
        and "this is the clock, not asked for by call.now()" in divergence[3]
    )


def test_any_beginning_of_a_trace_is_replayed(tmp_path: Path) -> None:
    with service.recorder(tmp_path) as recorder:
        service.busy(recorder, 5)
    path = tmp_path / "trace" / "trace.jsonl"
    whole = path.read_bytes()
    header = whole.index(b"\n") + 1
    for size in random.Random(1).sample(range(header, len(whole) - 1), 8):
        path.write_bytes(whole[:size])
        trace = read(tmp_path / "trace")
        assert "the recording ended suddenly" in trace.notes[0] and not trace.damaged
        assert replay(trace)["divergences"] == []


def test_damage_is_told_and_what_stands_before_it_is_replayed(tmp_path: Path) -> None:
    with service.recorder(tmp_path) as recorder:
        service.busy(recorder, 6, requests=9)
    path = tmp_path / "trace" / "trace.jsonl"
    every = path.read_text().splitlines()
    path.write_text("\n".join([*every[:8], every[8][:-9], *every[9:], ""]))
    shown = CliRunner().invoke(app, ["debug", "replay", str(tmp_path / "trace")])
    assert "line 9 is damaged" in shown.output and "0 of " in shown.output
    assert shown.exception.status == 3 and "part of the trace is missing" in str(shown.exception)  # type: ignore[union-attr]


def test_a_checkpoint_that_was_changed_is_refused(tmp_path: Path) -> None:
    with service.recorder(tmp_path) as recorder:
        recorder.run("total")
    kept = tmp_path / "trace" / "checkpoint"
    kept.write_bytes(kept.read_bytes()[:-1] + b"x")
    with pytest.raises(UserError, match="the checkpoint was changed or removed"):
        replay(read(tmp_path / "trace"))


def test_who_wrote_and_who_read_a_row_and_a_table_as_of_a_commit(tmp_path: Path, url: str) -> None:
    with service.recorder(tmp_path, url) as recorder:
        recorder.run("put", account=1, amount=5)
        recorder.run("amount_of", account=1)
        recorder.run("lost_update", account=1)
    trace = read(tmp_path / "trace")
    wrote = (
        "SELECT handler, commit, before->>'amount', after->>'amount' FROM writes WHERE key = '1' AND n > 0"
    )
    assert sql(trace, wrote, database=url)[1] == [("put", 1, "100", "5"), ("put", 2, "5", "6")]
    read_it = "SELECT request, row->>'amount' FROM reads WHERE list_contains(tables, 'account') ORDER BY n"
    assert sql(trace, read_it, database=url)[1] == [(2, "5"), (3, "5")]
    as_of = "SELECT row->>'amount' FROM as_of('account', {}) WHERE key = '1'"
    for commit, amount in ((0, "100"), (1, "5"), (2, "6")):
        assert sql(trace, as_of.format(commit), database=url)[1] == [(amount,)]
    requests = sql(trace, "SELECT name FROM requests ORDER BY request", database=url)[1]
    assert requests == [("put",), ("amount_of",), ("lost_update",)]
    with pytest.raises(UserError, match=r"debug sql: .*nothing"):
        sql(trace, "SELECT * FROM nothing", database=url)


def test_a_lost_update_is_mended_in_all_orders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    meet = threading.Barrier(2, timeout=60)

    def together(call: Call, account: int) -> int:
        amount = service.amount_of(call, account)
        meet.wait()
        return amount

    engine = service.opened(f"sqlite:///{tmp_path / 'live.db'}")
    handlers: dict[str, Handler] = {
        **service.HANDLERS,
        "amount_of": readonly(functools.wraps(service.amount_of)(together)),
    }
    recording = Recorder(Transactions(engine, handlers), tmp_path / "trace", handlers=service.HERE)
    with recording as recorder, ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda _: recorder.run("lost_update", account=3), range(2)))
    code = tmp_path / "fixed.py"
    code.write_text(
        "from sqlalchemy import update\n"
        "from support.debug import accounts as a\n"
        "def put(call, account, amount):\n"
        "    call.connection.execute(update(a).where(a.c.id == account).values(amount=a.c.amount + 1))\n"
        "HANDLERS = {'put': put}\n"
    )
    lost = "SELECT amount FROM account WHERE id = 3 AND amount <> 102"
    said = retro(read(tmp_path / "trace"), code, check=lost)
    assert said["recorded"]["violations"] == [{"amount": 101}] and said["recorded"]["divergences"] == []
    assert said["explored"] == said["possible"] == 4 and said["counted"]
    assert [outcome["violations"] for outcome in said["outcomes"]] == [[]] * len(said["outcomes"])
    code.write_text("def put(call, account, amount):\n    raise OSError('no')\nHANDLERS = {'put': put}\n")
    said = retro(read(tmp_path / "trace"), code, check=lost)
    assert all(outcome["violations"] == [{"amount": 100}] for outcome in said["outcomes"])
    code.write_text(
        "from support.debug import request\n@request\ndef lost_update(runner, account):\n"
        "    runner.run('pit')\nHANDLERS = {'lost_update': lost_update}\n"
    )
    with pytest.raises(UserError, match="calls 'pit', which is no handler"):
        retro(read(tmp_path / "trace"), code)
    code.write_text(
        code.read_text().replace("    runner.run('pit')", "    while True:\n        runner.run('total')")
    )
    monkeypatch.setattr("windtunnel.control.debug.live.world.MOST", 20)
    with pytest.raises(ScriptError, match="goes on after 20 transactions"):
        retro(read(tmp_path / "trace"), code)
    code.write_text("HANDLERS = {'pit': print}\n")
    with pytest.raises(UserError, match="no 'pit' was recorded"):
        retro(read(tmp_path / "trace"), code)


def test_what_cannot_be_recorded_is_not_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with service.recorder(tmp_path) as recorder:
        with pytest.raises(UserError, match=r"put: arguments: .* accepted are values of JSON, and bytes"):
            recorder.run("put", account=1, amount={1, 2})

        def full(*_: Any) -> None:
            raise OSError(28, "No space left on device")

        with monkeypatch.context() as patch:
            patch.setattr("windtunnel.control.debug.live.recorder.write_all", full)
            with pytest.raises(HostError, match="No space left on device, so nothing is done"):
                recorder.run("put", account=1, amount=5)
        assert recorder.run("amount_of", account=1) == 100
    assert replay(read(tmp_path / "trace"))["divergences"] == []
    with pytest.raises(UserError, match="there is a trace already"), service.recorder(tmp_path):
        pass


def test_a_commit_that_fails_is_not_in_the_trace(tmp_path: Path) -> None:
    engine = service.opened(f"sqlite:///{tmp_path / 'live.db'}")
    with engine.begin() as connection:
        connection.execute(
            text("CREATE TABLE child (of INTEGER REFERENCES account DEFERRABLE INITIALLY DEFERRED)")
        )

    def orphan(call: Call, of: int) -> None:
        call.connection.execute(text("PRAGMA defer_foreign_keys = on"))
        call.connection.execute(text("INSERT INTO child VALUES (:of)"), {"of": of})

    from sqlalchemy import event

    engine.dispose()
    event.listen(engine, "connect", lambda raw, _: raw.execute("PRAGMA foreign_keys = on"))
    service_ = Transactions(engine, {**service.HANDLERS, "orphan": orphan})
    with Recorder(service_, tmp_path / "trace", handlers=service.HERE) as recorder:
        with pytest.raises(DatabaseError, match="FOREIGN KEY"):
            recorder.run("orphan", of=99)
        recorder.run("put", account=1, amount=5)
    trace = read(tmp_path / "trace")
    assert [txn.handler for txn in trace.transactions] == ["put"] and trace.transactions[0].id == 1


KILLED = """
import sys
from pathlib import Path
from support import debug
with debug.recorder(Path(sys.argv[1])) as recorder:
    print("ready", flush=True)
    debug.busy(recorder, int(sys.argv[2]), requests=100_000)
"""


@pytest.mark.conformance
@pytest.mark.parametrize("seed", range(5))
def test_after_kill_9_every_committed_transaction_is_there(tmp_path: Path, seed: int) -> None:
    worker = subprocess.Popen(
        [sys.executable, "-c", KILLED, str(tmp_path), str(seed)],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    )
    assert worker.stdout is not None and worker.stdout.readline() == b"ready\n"
    path = tmp_path / "trace" / "trace.jsonl"
    size = random.Random(seed).randrange(20_000, 200_000)
    while path.stat().st_size < size:
        assert worker.poll() is None
    worker.kill()
    worker.wait()
    worker.stdout.close()
    trace = read(tmp_path / "trace")
    ids = {transaction.id for transaction in trace.transactions if transaction.id and not transaction.did[3]}
    assert ids == set(range(1, max(ids) + 1))
    (writer,) = (
        transaction
        for transaction in trace.transactions
        if transaction.id == max(ids) and not transaction.did[3]
    )
    # where nobody has seen it, the last writer may have committed or not
    known = writer.ended is not None or any(
        transaction.xmax > writer.id for transaction in trace.transactions
    )
    states = []
    for last in (writer.id,) if known else (writer.id, writer.id - 1):
        trace.transactions = [
            transaction for transaction in trace.transactions if transaction.did[3] or transaction.id <= last
        ]
        said = replay(trace)
        assert said["divergences"] == []
        states.append(said["state"])
    assert state(tmp_path) in states


def test_the_scheduler_starts_a_task_twice_and_the_fence_mends_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WINDTUNNEL_HOME", str(tmp_path))
    monkeypatch.delenv("WINDTUNNEL_STORE", raising=False)
    runpy.run_path(str(ROOT / "examples/control/scheduler.py"))["record"](4, seed=1)
    twice = "SELECT task, count(*) AS starts FROM start GROUP BY task HAVING count(*) > 1"
    runner = CliRunner()
    asked = ["debug", "sql", "last", "SELECT list(DISTINCT request) FROM writes WHERE table_name = 'start' "
             "GROUP BY after->>'task' HAVING count(*) > 1", "--json"]  # fmt: skip
    ((requests,),) = [row.values() for row in json.loads(runner.invoke(app, asked).stdout)]
    assert len(requests) == 2
    done = json.loads(runner.invoke(app, ["debug", "replay", "last", "--json"]).stdout)
    assert done["divergences"] == [] and done["transactions"] == 12
    fixed = str(ROOT / "examples/control/fixed.py")
    shown = runner.invoke(app, ["debug", "retro", "last", "--code", fixed, "--check", twice])
    assert shown.exit_code == 0
    assert "start changed: 4 of 4 orders within 2 preemptions tried" in shown.output
    assert "the check finds rows in 0 of them" in shown.output
    bad = runner.invoke(app, ["debug", "retro", "last", "--code", fixed, "--check", "SELECT 1 AS always"])
    assert bad.exception.status == 3  # type: ignore[union-attr]
    stopped = runner.invoke(
        app,
        ["debug", "replay", "last", "--request", str(requests[0]), "--pdb"],
        input="where\ncontinue\n" * 2,
    )
    assert stopped.exit_code == 0 and "(Pdb)" in stopped.output and "start()" in stopped.output
    for words, why in (
        (["--pdb"], "--pdb is given without --request"),
        (["--request", "99", "--pdb"], "--request: 99 was not recorded"),
    ):
        assert why in str(runner.invoke(app, ["debug", "replay", "last", *words]).exception)


def many(call: Call) -> list[Any]:
    """Statements of which SQLAlchemy fetches the rows itself, or that are many at once."""
    rows = [{"id": f"n{k}", "account": k, "chance": 0.5, "at": 0.0} for k in range(3)]
    call.connection.execute(service.notes.insert(), rows)
    more = [{**row, "id": f"{row['id']}-more"} for row in rows]
    returned = call.connection.execute(service.notes.insert().returning(service.notes.c.id), more)
    return sorted(returned.scalars())


def test_many_rows_at_once_are_recorded(tmp_path: Path, url: str) -> None:
    engine = service.opened(url or f"sqlite:///{tmp_path / 'live.db'}")
    handlers = tmp_path / "handlers.py"
    handlers.write_text("from control.debug.test_debug_live import many\nHANDLERS = {'many': many}\n")
    recording = Recorder(
        Transactions(engine, {"many": many}), tmp_path / "trace", handlers=f"{handlers}:HANDLERS"
    )
    with recording as recorder:
        assert recorder.run("many") == ["n0-more", "n1-more", "n2-more"]
    engine.dispose()
    said = replay(read(tmp_path / "trace"), database=url)
    assert said["divergences"] == [] and said["state"] == state(tmp_path, url)


def test_a_handler_that_raises_is_replayed_too(tmp_path: Path, url: str) -> None:
    with service.recorder(tmp_path, url) as recorder:
        with pytest.raises(ValueError, match="account 1 has 100"):
            recorder.run("move", source=1, target=2, amount=101)
        recorder.run("clock", account=1)
        with pytest.raises((IntegrityError, DatabaseError)):
            recorder.run("clock", account=1)
    trace = read(tmp_path / "trace")
    assert [bool(transaction.did[3]) for transaction in trace.transactions] == [True, False, True]
    divergences = replay(trace, database=url)["divergences"]
    assert {divergence[0] for divergence in divergences} <= {2, 3}  # the clock
