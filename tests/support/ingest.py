"""A small table, a master of it in this process, and workers as threads of it or as processes."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from windtunnel.base.keys import Keys
from windtunnel.data.ingest.live.calls import MasterSettings
from windtunnel.data.ingest.live.client import IngestClient
from windtunnel.data.ingest.live.master import Master
from windtunnel.data.ingest.live.protocol import ServerLost
from windtunnel.data.ingest.live.worker import WorkerServer
from windtunnel.data.ingest.model import IngestSession

KEYS = Keys(b"a secret of the tests")
ROWS = 8000
QUICK = {"every": 0.05, "period": 0.1}


def table(folder: Path, rows: int = ROWS) -> IngestSession:
    """``row`` numbers the samples; ``ids`` are lists of 0 to 2."""
    ends = np.concatenate([[0], np.cumsum(np.arange(rows) % 3)]).astype(np.int32)
    ids = pa.ListArray.from_arrays(pa.array(ends), pa.array(np.arange(int(ends[-1]))))
    columns = {"row": np.arange(rows), "x": np.arange(rows, dtype=np.float32) / 2, "ids": ids}
    pq.write_table(pa.table(columns), folder / "table.parquet", row_group_size=500)
    return IngestSession(
        str(folder / "table.parquet"), ("row", "x", "ids"), batch=64, epochs=3, split_rows=500
    )


@dataclass
class Threads:
    """Workers as threads of this process."""

    running: dict[str, tuple[WorkerServer, threading.Thread]] = field(default_factory=dict)

    def start(self, name: str, master: str) -> None:
        def work() -> None:
            worker = WorkerServer(name, master, KEYS, patience=1.0)
            self.running[name] = (worker, thread)
            with suppress(ServerLost):
                worker.run()

        thread = threading.Thread(target=work, daemon=True)
        thread.start()

    def ended(self, name: str) -> str | None:
        entry = self.running.get(name)
        return None if entry is None or entry[1].is_alive() else "ended"

    def kill(self, name: str) -> None:
        if name in self.running:
            self.running.pop(name)[0].stop()


@contextmanager
def serving(session: IngestSession, folder: Path, settings: MasterSettings | None = None) -> Iterator[Master]:
    """A master with workers in this process, two unless settings say otherwise."""
    settings = settings or MasterSettings(workers=2, **QUICK)  # type: ignore[arg-type]
    master = Master(session, folder, KEYS, settings, Threads() if settings.workers != 0 else None)
    thread = threading.Thread(target=master.run)
    thread.start()
    try:
        yield master
    finally:
        master.stop()
        thread.join(30)


def rows(client: IngestClient, most: int | None = None) -> list[int]:
    """Row numbers of the next batches, ``most`` of them or all of the epoch."""
    numbers: list[int] = []
    taken = 0
    while (most is None or taken < most) and (batch := client.next()) is not None:
        numbers += batch.column(0).to_pylist()
        taken += 1
    return numbers


def whole(numbers: list[int], count: int = ROWS) -> bool:
    return sorted(numbers) == list(range(count))
