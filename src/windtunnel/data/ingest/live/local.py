"""A session's batches made in the trainer's own process: no master, no workers, nothing is read ahead.

To `dataset` it is what a `Client` is. Batches come from the same reader, split by split in the epoch's order,
so they are those of a service whose one client is ``ordered``; of several ranks each has every ``world``-th
split of that order, and ends by itself. What was handed out is kept by split as a client keeps it: `begin`
goes on behind it, and a state goes from here to a service or back where one rank has all.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from typing import Any

import pyarrow as pa

from windtunnel.base.errors import HostError, UserError
from windtunnel.data.ingest import reader
from windtunnel.data.ingest.live import ledger
from windtunnel.data.ingest.live.client import EpochCounts
from windtunnel.data.ingest.live.ledger import DONE
from windtunnel.data.ingest.model import IngestSession


class LocalClient:
    """Rank ``rank`` of ``world``; the others as of `Client`.

    Raises:
        UserError: the session or its table is wrong, or ``resume`` is of another one.
    """

    def __init__(
        self, session: IngestSession, rank: int, world: int, *, resume: dict[str, Any] | None,
        convert: Callable[[pa.RecordBatch], Any],
    ) -> None:  # fmt: skip
        self.session, self._rank, self._world, self._convert = session, rank, world, convert
        self._reader = reader.Reader(session)
        self._splits = self._reader.splits()
        self.epoch: int = resume["epoch"] if resume else 0
        self._marks = ledger.unpacked(resume["marks"]) if resume else {}
        epochs, last, count = session.epochs, max(self._marks, default=0), len(self._splits)
        if not (0 <= self.epoch < epochs and min(self._marks, default=0) >= 0 and last < max(count, 1)):
            raise UserError(
                f"IngestDataset: the state is of epoch {self.epoch} and split {last}, accepted is one of"
                f" {session.table} with {epochs} epochs, {count} splits"
            )
        self.turn, self._over = 0, False
        self.begin()

    def begin(self) -> None:
        """Begin the next epoch, or go on with this one. Raises `UserError` where all epochs are over."""
        if self._over and self.epoch + 1 >= self.session.epochs:
            raise UserError(
                f"{self.session.table}: all epochs of the session are over; it has {self.session.epochs}"
                " (field epochs of its file)"
            )
        if self._over:
            self.epoch, self._marks, self._over = self.epoch + 1, {}, False
        self.turn += 1
        self.counts = EpochCounts()
        self._batches = self._rest()

    def next(self) -> Any:
        """The next batch; None when the epoch is over.

        Raises:
            UserError: a file is corrupt or another by now. HostError: it cannot be read.
        """
        began, counts = time.monotonic(), self.counts
        try:
            batch = next(self._batches, None)
        except (OSError, pa.ArrowException) as error:
            raise HostError(f"{self.session.table}: cannot be read ({error})") from error
        if batch is None:
            self._over = True
            return None
        converted = self._convert(batch)
        seconds = time.monotonic() - began
        counts.first = counts.first if counts.steps else seconds
        counts.steps, counts.rows = counts.steps + 1, counts.rows + batch.num_rows
        counts.bytes, counts.stalled = counts.bytes + batch.nbytes, counts.stalled + seconds
        return converted

    def state(self) -> dict[str, Any]:
        """Where the trainer is, with the batch that it was given last."""
        return {"epoch": self.epoch, "marks": ledger.packed(self._marks)}

    def end(self) -> None:
        """What is held of a split goes; the next turn reads it again."""
        self._batches.close()

    close = end

    def _rest(self) -> Generator[pa.RecordBatch, None, None]:
        for number in reader.order(self.session, len(self._splits), self.epoch)[self._rank :: self._world]:
            first, at = self._marks.get(number, 0), 0
            if first == DONE:
                continue
            batches = self._reader.batches(self._splits[number], self.epoch)
            batch = next(batches, None)
            while batch is not None:
                # one ahead, as a worker does: the last one is known as such
                after = next(batches, None)
                if at >= first:
                    self._marks[number] = DONE if after is None else at + 1
                    yield batch
                batch, at = after, at + 1
            self._marks[number] = DONE
