"""A worker: it reads, transforms and batches the splits that clients ask it for, and streams the batches.

It keeps nothing: all that a split becomes follows from the session and the split, so any worker makes the
same batches with the same numbers, from any of them on. It is a Flight server of its own; the master tells
clients of it. It lives as long as its master answers it (or comes back within ``patience`` seconds), and
as its owner, if it has one.

It is spawned, never forked: gRPC's threads do not survive a fork.
"""

from __future__ import annotations

import json
import os
import select
import struct
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from importlib.abc import MetaPathFinder
from typing import Any, TypeVar

import pyarrow as pa
import pyarrow.flight as fl

from windtunnel.base.errors import UserError, WindtunnelError
from windtunnel.base.keys import Keys
from windtunnel.base.plain import from_plain
from windtunnel.base.processes import Identity
from windtunnel.data.ingest import reader
from windtunnel.data.ingest.live import protocol
from windtunnel.data.ingest.live.protocol import CallRefused, FlightLink, ServerLost
from windtunnel.data.ingest.model import IngestSession, TableSplit

T = TypeVar("T")
STAMP = struct.Struct("!IIIB")
"""Beside each batch: epoch, split, number, whether it is the split's last."""
EMPTY = pa.record_batch([], names=[])
"""In the place of the batches of a split in which no row meets the filter."""


class WorkerServer(protocol.SecretServer):
    """The server of a worker called ``name`` at ``host``, of the master at ``master``.

    Raises:
        ServerLost: no master answers there. HostError: it cannot listen.
    """

    def __init__(
        self, name: str, master: str, keys: Keys, host: str = "127.0.0.1", patience: float = 30.0
    ) -> None:
        super().__init__(keys, host, 0)
        self.name = name
        self._link, self._patience = FlightLink(master, keys), patience
        self._stop = threading.Event()
        self._turn = threading.Lock()
        self._open = self._making = self._produced = 0
        self._busy = self._since = 0.0
        self._requests: list[tuple[str, int, int, int]] = []
        """Client, epoch, split and first batch of what was asked for since it was told."""
        self._session: IngestSession | None = None
        self._reader: reader.Reader | None = None
        self._every = 0.25
        self._register()

    def run(self) -> None:
        """Serve until the master lets it go, or is gone.

        Raises:
            ServerLost: the master is gone.
        """
        try:
            while not self._stop.wait(self._every):
                answer = self._tell()
                if answer.get("unknown"):
                    self._register()
                if answer.get("drain") and not self._open:
                    return
        finally:
            self._link.close()
            self.shutdown()

    def stop(self) -> None:
        self._stop.set()

    def _register(self) -> None:
        response = self._link.persist(
            "register", self._patience, self._stop, role="worker", name=self.name, address=self.address,
            process=str(Identity.own()),
        )  # fmt: skip
        self._session, self._reader = from_plain(IngestSession, response["session"]), None
        self._every = response["every"]

    def _tell(self) -> dict[str, Any]:
        with self._turn:
            self._clock(0)
            rows, busy = self._produced, self._busy
            splits, self._requests = self._requests, []
        try:
            return self._link.persist(
                "heartbeat", self._patience, self._stop, role="worker", name=self.name, produced=rows,
                busy=busy, cpu=time.process_time(), open=self._open, asked=splits,
            )  # fmt: skip
        except CallRefused:
            return {}

    def do_get(self, context: Any, ticket: Any) -> Any:
        """Batches of a split, from number ``first`` on, each with its `STAMP`."""
        request = protocol.parsed(ticket.ticket)
        try:
            split = from_plain(TableSplit, request["split"])
            epoch, first = int(request["epoch"]), int(request["first"])
            with self._turn:
                self._requests.append((str(request["client"]), epoch, split.number, first))
        except (KeyError, TypeError, ValueError) as error:
            raise fl.FlightServerError("a ticket is not understood") from error
        ahead = max(2, 2 * reader.BLOCK // self._session.batch) if self._session else 2
        batches = _ahead(self._batches(split, epoch, first), ahead)
        begun = next(batches, None)
        if begun is None:
            raise fl.FlightServerError(f"split {split.number} has no batch {first}")

        def stream() -> Iterator[tuple[pa.RecordBatch, bytes]]:
            yield begun
            yield from batches

        return fl.GeneratorStream(begun[0].schema, stream())

    def _batches(self, split: TableSplit, epoch: int, first: int) -> Iterator[tuple[pa.RecordBatch, bytes]]:
        assert self._session is not None
        with self._turn:
            self._open += 1
        try:
            opened = self._reader = self._reader or reader.Reader(self._session)  # footers are read once
            batches = opened.batches(split, epoch)
            number, batch = 0, self._timed(batches)
            if batch is None:
                yield EMPTY, STAMP.pack(epoch, split.number, 0, True)
            while batch is not None:
                # One ahead: the last one says that it is.
                after = self._timed(batches)
                if number >= first:
                    with self._turn:
                        self._produced += 1
                    yield batch, STAMP.pack(epoch, split.number, number, after is None)
                batch, number = after, number + 1
        except UserError as error:
            raise fl.FlightServerError(protocol.PERMANENT + str(error)) from error
        except (WindtunnelError, OSError, pa.ArrowException) as error:
            raise fl.FlightServerError(str(error)) from error
        finally:
            with self._turn:
                self._open -= 1

    def _timed(self, batches: Iterator[pa.RecordBatch]) -> pa.RecordBatch | None:
        with self._turn:
            self._clock(1)
        try:
            return next(batches, None)
        finally:
            with self._turn:
                self._clock(-1)

    def _clock(self, change: int) -> None:
        """Busy is while a batch of any stream is being made."""
        now = time.monotonic()
        if self._making:
            self._busy += now - self._since
        self._since = now
        self._making += change


def _ahead(source: Iterator[T], count: int) -> Iterator[T]:
    """What ``source`` gives, ``count`` of them ahead of who takes them: a block of rows is decoded at once,
    and the next one meanwhile. A taker that goes away (a stream that is cancelled) ends it."""
    ready: deque[T] = deque()
    turn = threading.Condition()
    over, failed = False, list[BaseException]()

    def make() -> None:
        nonlocal over
        try:
            for item in source:
                with turn:
                    ready.append(item)
                    turn.notify_all()
                    turn.wait_for(lambda: over or len(ready) < count)
                    if over:
                        return
        except BaseException as error:
            failed.append(error)
        finally:
            source.close()  # type: ignore[attr-defined]  # it is a generator
            with turn:
                over = True
                turn.notify_all()

    threading.Thread(target=make, daemon=True).start()
    try:
        while True:
            with turn:
                turn.wait_for(lambda: over or bool(ready))
                if not ready:
                    break
                item = ready.popleft()
                turn.notify_all()
            yield item
        if failed:
            raise failed[0]
    finally:
        with turn:
            over = True
            turn.notify_all()


def leave_with(owner: Identity) -> None:
    """End this process once ``owner`` has ended, however that was."""

    def watch() -> None:
        try:
            handle = os.pidfd_open(owner.pid)
        except OSError:
            os._exit(0)
        while owner.lives():
            select.select([handle], [], [], 60.0)
        os._exit(0)

    threading.Thread(target=watch, daemon=True).start()


class _NoPandas(MetaPathFinder):
    def find_spec(self, name: str, path: Any, target: Any = None) -> None:
        if name == "pandas":
            raise ImportError("not in this process")


def without_pandas() -> None:
    """Arrow imports pandas, where there is one, with the first array that it makes: a second, and memory, of
    each process that starts, for nothing that is used here."""
    sys.meta_path.insert(0, _NoPandas())


def main() -> None:
    """``python -m`` this: what the master starts. The words are one JSON object."""
    without_pandas()
    settings = json.loads(sys.argv[1])
    if settings.get("owner"):
        leave_with(Identity.parse(settings["owner"]))
    try:
        keys = Keys.of_job(settings["secret"], settings["tls"])
        WorkerServer(settings["name"], settings["master"], keys, settings["host"]).run()
    except ServerLost:
        sys.exit(0)  # there is nobody left to work for
    except WindtunnelError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
