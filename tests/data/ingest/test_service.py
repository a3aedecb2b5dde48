"""Every row exactly once an epoch, whatever happens to clients, workers and the master."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from dataclasses import replace
from pathlib import Path

import pyarrow.flight as fl
import pytest

from support.ingest import KEYS, QUICK, ROWS, Threads, rows, serving, table, whole
from support.small_disk import small_disk
from support.waiting import gone, until
from windtunnel.base.errors import HostError, UserError
from windtunnel.base.keys import Keys
from windtunnel.base.processes import Identity
from windtunnel.data.ingest.live import ledger, protocol
from windtunnel.data.ingest.live import serve as serve_module
from windtunnel.data.ingest.live.calls import MasterSettings
from windtunnel.data.ingest.live.client import IngestClient, Replaced
from windtunnel.data.ingest.live.ledger import SplitLog
from windtunnel.data.ingest.live.master import Master
from windtunnel.data.ingest.live.pool import ProcessLauncher
from windtunnel.data.ingest.live.protocol import CallRefused, FlightLink, ServerLost
from windtunnel.data.ingest.live.serve import serve, started
from windtunnel.data.ingest.live.worker import WorkerServer
from windtunnel.data.ingest.model import IngestSession


@pytest.fixture
def session(tmp_path: Path) -> IngestSession:
    return table(tmp_path)


def settings(**given: object) -> MasterSettings:
    return MasterSettings(**{"workers": 2, **QUICK, **given})  # type: ignore[arg-type]


def test_each_epoch_has_every_row_once_and_there_are_no_more_epochs(
    session: IngestSession, tmp_path: Path
) -> None:
    session = replace(session, epochs=3, shuffle=True)
    orders = []
    with serving(session, tmp_path / "m") as master:
        client = IngestClient(master.address, KEYS, ordered=True)
        orders.append(rows(client))
        client.begin()
        orders.append(rows(client, 3) + rows(client))
        # of the next epoch nothing is its own before it begins
        until(lambda: any(stream.queue for stream in client._ahead))
        assert client.state()["epoch"] == 1 and master.ledger.state.owners == {}
        ahead = [(stream.number, stream.worker) for stream in client._ahead]
        client.begin()
        orders.append(rows(client))
        assert client.counts.breaks == client.counts.duplicates == 0
        with pytest.raises(UserError, match="all epochs of the session are over; it has 3"):
            client.begin()
        client.close()
    assert all(map(whole, orders)) and orders[0] != orders[1] != orders[2]
    assert orders[2][0] // 500 == ahead[0][0], "the first split is the one read ahead"
    with serving(session, tmp_path / "again") as master:
        client = IngestClient(master.address, KEYS, ordered=True)
        assert rows(client) == orders[0], "the order of one client follows from session and epoch"
        until(lambda: any(stream.queue for stream in client._ahead))
        drained = client._ahead[0].worker
        master.crew.there[drained].drain = True  # and what is read ahead may be lost
        until(lambda: drained not in {worker for _, worker in master._ahead.values()})
        with client._turn:
            client._drop_ahead(client._ahead[:1])
        client.begin()
        assert rows(client) == orders[1]
        client.close()


def test_small_splits_are_read_ahead_as_deep_as_large_ones(session: IngestSession, tmp_path: Path) -> None:
    """A split that has come whole keeps neither its client nor its worker from the next one."""
    session = replace(session, batch=500)
    with serving(session, tmp_path / "m") as master:
        client = IngestClient(master.address, KEYS)
        until(lambda: sum(len(stream.queue) for stream in client._streams) >= 12)
        assert whole(rows(client))
        client.close()


def test_no_split_waits_for_a_regular_report(session: IngestSession, tmp_path: Path) -> None:
    """That one has come whole, and that the last is consumed, is told at once."""
    session = replace(session, batch=500)
    with serving(session, tmp_path / "m", settings(client_lease=3600.0)) as master:
        until(lambda: len(master.crew.there) == 2)
        client, numbers = IngestClient(master.address, KEYS), list[int]()
        client._every = 3600.0
        reading = threading.Thread(target=lambda: numbers.extend(rows(client)), daemon=True)
        reading.start()
        until(lambda: not reading.is_alive())
        assert whole(numbers)
        client.close()


@pytest.mark.parametrize("ends", ["pad", "uneven", "drop"])
def test_ranks_share_the_session(session: IngestSession, tmp_path: Path, ends: str) -> None:
    """They step together, as ranks that sum gradients do; uneven ones do not wait for each other."""
    by_rank: list[list[int]] = [[], [], []]
    epochs = 2 if ends == "drop" else 1
    steps, errors = threading.Barrier(3), list[BaseException]()

    def train(rank: int) -> None:
        try:
            client = IngestClient(master.address, KEYS, str(rank), 3)
            for epoch in range(epochs):
                if epoch:
                    by_rank[rank].clear()
                    client.begin()
                while (batch := client.next()) is not None:
                    by_rank[rank].append(batch.column(0).to_pylist()[0])
                    if ends != "uneven":
                        steps.wait(30)
            padded[rank] = client.counts.padded
            client.close()
        except BaseException as error:
            errors.append(error)
            steps.abort()

    padded = [0] * 3
    with serving(replace(session, split_rows=1500), tmp_path / "m", settings(ends=ends)) as master:
        ranks = [threading.Thread(target=train, args=(rank,)) for rank in range(3)]
        for thread in ranks:
            thread.start()
        for thread in ranks:
            thread.join(60)
    assert errors == []
    starts = [row for each in by_rank for row in each]
    if ends == "uneven":
        assert len(starts) == len(set(starts))
    else:
        assert len({len(each) for each in by_rank}) == 1, "equally many steps"
    assert len(starts) - sum(padded) == len(set(starts))
    wanted = set(expected_batches(session))
    if ends == "drop":  # less than what two of them have ahead of the third
        assert set(starts) <= wanted and len(wanted) - len(starts) <= 2 * 2 * 24
    else:
        assert set(starts) == wanted


def expected_batches(session: IngestSession) -> list[int]:
    from windtunnel.data.ingest import reader

    wide = replace(session, split_rows=1500)
    return [
        batch.column(0)[0].as_py()
        for split in reader.Reader(wide).splits()
        for batch in reader.Reader(wide).batches(split, 0)
    ]


def test_a_trainer_goes_on_behind_its_checkpoint(session: IngestSession, tmp_path: Path) -> None:
    """At the master that it had, and at a new one."""
    with serving(session, tmp_path / "m") as master:
        client = IngestClient(master.address, KEYS)
        before = rows(client, 50)
        state = client.state()
        lost = rows(client, 20)
        client.close()
        client = IngestClient(master.address, KEYS, resume=state)
        after = rows(client)
        client.close()
        assert set(lost) <= set(after) and whole(before + after)
    with serving(session, tmp_path / "new") as master:
        client = IngestClient(master.address, KEYS, resume=state)
        assert whole(before + rows(client))
        client.close()
        assert len(str(state)) < 1000


def test_ranks_that_go_back_get_nothing_before_all_have(
    session: IngestSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until then marks are of before: whoever got a split by them would begin behind the checkpoint. They say
    so, and a master that is killed meanwhile knows it again."""
    monkeypatch.setattr("windtunnel.data.ingest.live.client.ALONE", 0.0)
    with serving(session, tmp_path / "m") as master:
        ranks = {name: IngestClient(master.address, KEYS, name, 2) for name in "01"}
        numbers = [row for client in ranks.values() for row in rows(client, 3)]
        states = {name: client.state() for name, client in ranks.items()}
        for client in ranks.values():
            rows(client, 4)
            client.close()
        # the first one to come is given the first split, which the other had
        late, early = sorted(ranks, key=lambda name: min(master.ledger.state.claims[name]))
        with pytest.warns(UserWarning, match=f"client {early} waits for 1 of 2 ranks to come back"):
            first = IngestClient(master.address, KEYS, early, 2, resume=states[early])
            until(lambda: first._warned or early in master.ledger.state.owners.values())
        snapshot = FlightLink(master.address, KEYS).call("snapshot")
        assert (snapshot["came"], snapshot["world"]) == (1, 2)
    with serving(session, tmp_path / "m", settings(port=master.port)) as master:
        until(lambda: early in master._clients and master._clients[early].waits)
        assert not master.ledger.state.owners
        theirs: list[int] = []
        reading = threading.Thread(target=lambda: theirs.extend(rows(first)))
        reading.start()
        second = IngestClient(master.address, KEYS, late, 2, resume=states[late])
        numbers += rows(second)
        reading.join(60)
        second.close()
        first.close()
        assert whole(numbers + theirs)


def test_a_client_that_reports_keeps_its_place(session: IngestSession, tmp_path: Path) -> None:
    with serving(session, tmp_path / "m") as master:
        client = IngestClient(master.address, KEYS, "a", 1)
        begin = until(lambda: master._clients.get("a"), "its place").last_message
        until(lambda: master._clients["a"].last_message > begin, "a heartbeat")
        client.close()


def test_splits_of_a_client_that_is_drained_go_to_others(session: IngestSession, tmp_path: Path) -> None:
    """Also if it comes back: it drops what it lost, or refuses to go on where it is too late for that."""
    with serving(session, tmp_path / "m") as master:
        first = IngestClient(master.address, KEYS, "a", 2)
        other = IngestClient(master.address, KEYS, "b", 2)
        rows(first, 5)
        with first._turn:  # none of its threads goes on, as in a process that is stopped for its lease
            with master._turn:
                master._clients["a"].last_message -= master.settings.client_lease
            first._certain = 0.0
            theirs = rows(other)
            reported = dict(master.ledger.state.claims.get("a", {}))
        with pytest.raises(Replaced):
            while first.next() is not None:
                pass
        # what it had reported is not given out again, all else is
        taken = {500 * split + row for split, mark in reported.items() for row in range(mark * session.batch)}
        assert -1 not in reported.values() and len(taken) <= 5 * session.batch
        assert sorted(theirs) == sorted(set(range(ROWS)) - taken)
        other.close()
        first.close()


def test_workers_and_master_are_killed_and_stopped(session: IngestSession, tmp_path: Path) -> None:
    """Real processes: SIGKILL of a worker and of the master, SIGSTOP of a worker that is replaced."""
    folder = tmp_path / "m"
    options = settings(worker_lease=1.0)
    process, address = started(session, folder, options)
    keys = Keys.read(folder / "secret")
    client, link = IngestClient(address, keys), FlightLink(address, keys)
    try:
        numbers = rows(client, 20)
        pids = [
            Identity.parse(worker["process"]).pid for worker in link.call("snapshot")["served_by"].values()
        ]
        os.kill(pids[0], signal.SIGKILL)
        numbers += rows(client, 20)
        process.kill()
        process.communicate()
        again, same = started(session, folder, options)
        assert same == address
        numbers += rows(client)
        assert whole(numbers)
        client.close()
        # a worker that stands is replaced, and ends with the master whatever it does
        alive = until(lambda: link.persist("snapshot", 10.0, threading.Event())["served_by"])
        pid = Identity.parse(next(iter(alive.values()))["process"]).pid
        os.kill(pid, signal.SIGSTOP)
        client = IngestClient(address, keys)
        assert whole(rows(client))
        again.send_signal(signal.SIGTERM)
        again.communicate(timeout=30)
        until(lambda: all(gone(number) for number in (*pids, pid)))
    finally:
        client.close()
        process.kill()


def test_a_zombie_does_no_harm(session: IngestSession, tmp_path: Path) -> None:
    """A worker of another host that stops is passed over; what it sends when it goes on is dropped."""
    with serving(session, tmp_path / "m", settings(workers=0, worker_lease=0.3)) as master:
        pool = Threads()
        pool.start("stands", master.address)
        until(lambda: "stands" in master.crew.there)
        client = IngestClient(master.address, KEYS)
        numbers = rows(client, 3)
        worker = pool.running["stands"][0]
        going, stand = worker._batches, threading.Event()

        def stands(*given: object) -> object:
            for batch in going(*given):  # type: ignore[arg-type]
                stand.wait(20)
                yield batch

        worker._batches = stands  # type: ignore[method-assign, assignment]
        worker._link = FlightLink("127.0.0.1:1", KEYS)
        pool.start("w2", master.address)
        numbers += rows(client, 30)
        stand.set()
        numbers += rows(client)
        assert whole(numbers)
        client.close()


def test_strangers_are_refused_and_harm_nobody(session: IngestSession, tmp_path: Path) -> None:
    with serving(session, tmp_path / "m") as master:
        client = IngestClient(master.address, KEYS)
        numbers = rows(client, 5)
        with pytest.raises(UserError, match="secret"):
            FlightLink(master.address, Keys(b"another secret, not it")).call("snapshot")
        with fl.connect(master.address) as bare:
            for action in ("snapshot", "ack", "nothing"):
                with pytest.raises(fl.FlightUnauthenticatedError):
                    list(bare.do_action(fl.Action(action, b"{}")))
            with pytest.raises(fl.FlightUnauthenticatedError):
                list(bare.do_action(fl.Action("ack", b"x" * (8 << 20))))
            worker = master.crew.there[sorted(master.crew.there)[0]].address
            with fl.connect(worker) as other, pytest.raises(fl.FlightUnauthenticatedError):
                other.do_get(fl.Ticket(b"{}")).read_all()
        # one who knows the secret, and says what is not so
        link = FlightLink(master.address, KEYS)
        forged = {"client": "0", "key": "not its", "epoch": 0, "marks": [[15, -1]]}
        assert link.call("ack", **forged) == {"replaced": True}
        mine = {**forged, "key": client._key}
        assert link.call("ack", **{**mine, "marks": [[15, -1]]})["lost"] == [15], "it does not have it"
        for said in ({**mine, "marks": [[99, 1]]}, {**mine, "marks": "all"}, {**mine, "epoch": -1}):
            with pytest.raises(CallRefused):
                link.call("ack", **said)
        for op in ("lease", "heartbeat", "register", "shutdown", "again", "x" * 1000):
            with pytest.raises(CallRefused):
                link.call(op)
        with pytest.raises(CallRefused, match="accepted are at most"):
            link.call("ack", **{**mine, "more": "x" * protocol.LONGEST})
        with link.errors(), fl.connect(master.address) as bare:
            pass
        raw = link._connected()
        for body in (b"\xff" * 100, b"[" * 100_000, b"[]"):
            with pytest.raises(fl.FlightServerError):
                list(raw.do_action(fl.Action("ack", body)))
        with pytest.raises(CallRefused, match="not understood"), (there := FlightLink(worker, KEYS)).errors():
            there.stream({"split": {"number": 0}}).read_all()
        assert whole(numbers + rows(client))
        client.close()


def corrupt(session: IngestSession) -> None:
    """A byte in the middle of the data."""
    import pyarrow.parquet as pq

    path = Path(session.table)
    column = pq.ParquetFile(path).metadata.row_group(9).column(0)
    data = bytearray(path.read_bytes())
    at = column.data_page_offset + column.total_compressed_size // 2
    data[column.data_page_offset : at] = b"\xff" * (at - column.data_page_offset)
    path.write_bytes(data)


@pytest.mark.parametrize("on_error", ["fail", "skip"])
def test_a_corrupt_page(session: IngestSession, tmp_path: Path, on_error: str) -> None:
    corrupt(session)
    with serving(session, tmp_path / "m", settings(on_error=on_error)) as master:
        client = IngestClient(master.address, KEYS)
        if on_error == "fail":
            with pytest.raises(UserError, match=r"table\.parquet.*row group 9.*row"):
                rows(client)
        else:
            numbers = rows(client)
            assert sorted(numbers) == [row for row in range(ROWS) if not 4500 <= row < 5000]
            skipped = FlightLink(master.address, KEYS).call("snapshot")["skipped"]
            assert [(split["split"], split["rows"]) for split in skipped] == [(9, 500)]
            assert "row group 9" in skipped[0]["why"]
        client.close()


def test_a_full_disk_holds_the_session_up_and_loses_nothing(session: IngestSession, tmp_path: Path) -> None:
    with small_disk(tmp_path, 8 << 20, "-b", "4096") as (_, disk), serving(session, disk / "m") as master:
        client = IngestClient(master.address, KEYS)
        numbers = rows(client, 5)
        fill(disk / "full")
        rest: list[int] = []
        taker = threading.Thread(target=lambda: rest.extend(rows(client)))
        taker.start()
        until(lambda: _refused(master))
        (disk / "full").unlink()
        taker.join(60)
        assert whole(numbers + rest)
        client.close()


def fill(path: Path) -> None:
    """All that is left of a disk."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT)
    with pytest.raises(OSError, match="No space"):
        while True:
            os.write(file, b"\0" * 4096)
    os.close(file)


def _refused(master: Master) -> bool:
    try:
        with master._turn:
            master.ledger.write("free", splits=[])
    except ledger.LogFull as error:
        return "No space left" in str(error)
    return False


def test_the_log(tmp_path: Path) -> None:
    path = tmp_path / "progress.log"
    log = SplitLog(path, "one")
    log.write("grant", split=3, client="a")
    log.write("ack", client="a", marks=[[3, 5]])
    log.write("grant", split=4, client="a")
    log.write("ack", client="a", marks=[[4, -1]])
    log.close()
    with path.open("ab") as file:
        file.write(b'0badc0de {"op"')  # a writer was killed
    again = SplitLog(path, "one")
    assert again.state.owners == {3: "a"} and again.state.marks == {3: 5, 4: -1}
    with pytest.raises(UserError, match="a master runs in it, accepted is a folder for each"):
        SplitLog(path, "one")  # it would begin a log anew that the other goes on with
    again.write("rewind", client="a", epoch=0, marks=[[3, 2]])
    assert again.state.owners == {} and again.state.marks == {3: 2}
    again.close()
    with pytest.raises(UserError, match="another session"):
        SplitLog(path, "two")
    path.write_bytes(path.read_bytes().replace(b"[3,2]", b"[3,9]"))
    with pytest.raises(UserError, match="is damaged"):
        SplitLog(path, "one")


def test_workers_serve_where_their_master_does(
    session: IngestSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret, hosts = tmp_path / "secret", list[str]()
    secret.touch(0o600)
    secret.write_bytes(KEYS.secret)
    monkeypatch.setattr(ProcessLauncher, "start", lambda self, name, master: hosts.append(self.host))
    monkeypatch.setattr(serve_module, "own_address", lambda: "192.0.2.1")
    monkeypatch.setattr(serve_module.signal, "signal", lambda *_: None)
    monkeypatch.setattr(Master, "run", lambda self: self._tick(time.monotonic()) or self._end())
    for host in ("127.0.0.1", "127.0.0.2", "0.0.0.0"):
        serve(session, tmp_path / host, settings(host=host, workers=1), secret=secret)
    assert hosts == ["127.0.0.1", "127.0.0.2", "192.0.2.1"]


def test_ports_and_addresses(session: IngestSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    taken = pytest.raises(HostError, match="it is taken, or not here")
    with serving(session, tmp_path / "m") as master, taken:
        Master(session, tmp_path / "n", KEYS, replace(settings(), port=master.port))
    with pytest.raises(HostError, match=r"nobody can listen on 203\.0\.113\.9:0: it is taken, or not here"):
        WorkerServer("w", "127.0.0.1:1", KEYS, "203.0.113.9")
    with pytest.raises(UserError, match=r"`host` 0\.0\.0\.0: others can reach it"):
        serve(session, tmp_path / "o", settings(host="0.0.0.0"))
    for address in ("here", "127.0.0.1", "a b:7", "here:x", "grpc://"):
        with pytest.raises(UserError, match="is no address of a master, accepted is HOST:PORT"):
            FlightLink(address, KEYS)
    monkeypatch.setattr(protocol, "TIMEOUT", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as mute, pytest.raises(ServerLost, match="Deadline"):
        FlightLink(f"127.0.0.1:{mute.getsockname()[1]}", KEYS).call("snapshot")
    began = time.monotonic()
    with pytest.raises(ServerLost, match="does not answer"):
        IngestClient("127.0.0.1:1", KEYS, patience=0.1)
    assert time.monotonic() - began < 60
