"""A small model trained on a synthetic table through the service: stalls, ramp, and every row once.

The trainer is real, but small (embeddings, layers, an optimiser). A step of it takes a fixed time, as on an
accelerator: what its few lookups leave of that it sleeps, so that the host's processors are for workers. The
time is given, or chosen so that the trainer wants just what one worker of this host makes.
"""

from __future__ import annotations

import contextlib
import os
import signal
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from windtunnel.base.errors import UserError
from windtunnel.base.keys import NAME as SECRET
from windtunnel.base.keys import Keys
from windtunnel.base.processes import Identity
from windtunnel.data.ingest import reader, synthetic
from windtunnel.data.ingest.live.calls import MasterSettings
from windtunnel.data.ingest.live.dataset import IngestDataset, Ragged
from windtunnel.data.ingest.live.protocol import FlightLink
from windtunnel.data.ingest.live.serve import started
from windtunnel.data.ingest.model import IngestSession, Transform
from windtunnel.store import eventlog

ROW = "row"
HASHED = 100_000
LOOKED_UP = 1
"""Ragged columns that the model looks up: it is small, and the host's processors are for the workers."""
DRAWN = 16_384
"""Rows that are drawn; a larger table has them several times, each with a number of its own."""
WANTED = 1.0
"""Workers whose work the trainer takes, where its step is not given: one has no time to spare for it, two
have. A batch costs the trainer's process (receiving, tensors, the step) 0.4 of what it costs a worker: so two
processors serve this with a quarter of them to spare. At 1.1 they had a fifth, and the trainer waited for 3
to 5 % of the time behind two workers (measured)."""
SERVED = 1.4
"""What a batch costs a worker, of what reading it costs alone: it is cut, copied and sent, too (measured)."""
STEADY = 0.02
"""Share of stalls in a second below which there is none to speak of."""


@dataclass
class TrainerTimes:
    """What the trainer saw. ``times``: when each step's batch was there, seconds from the start; ``waits``:
    seconds that it was waited for, with those for the end of the epoch before; ``starts``: the first steps
    of epochs; ``rows``: how often each row came."""

    rows: np.ndarray[Any, np.dtype[np.int64]]
    times: list[float] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    waits: list[float] = field(default_factory=list)
    loss: float = 0.0
    began: float = field(default_factory=time.perf_counter)
    waiting_since: float = 0.0
    """Since when it has waited."""

    @property
    def seconds(self) -> float:
        return self.times[-1] if self.times else 0.0

    def stall(self, after: float = 0.0, *, starts: bool = True) -> float:
        """The share of the time from ``after`` on that went by waiting; ``starts``: also for the first batch
        of an epoch."""
        left_out = () if starts else set(self.starts)
        waited = sum(
            wait for step, (at, wait) in enumerate(zip(self.times, self.waits, strict=True))
            if at >= after and step not in left_out
        )  # fmt: skip
        return min(1.0, waited / max(self.seconds - after, 1e-9))

    def ramp(self) -> float:
        """Seconds from which on, in each second, no more than `STEADY` of the time was waited, but for first
        batches of epochs."""
        by_second: dict[int, float] = {}
        for step, (at, wait) in enumerate(zip(self.times, self.waits, strict=True)):
            if step not in self.starts or not step:
                by_second[int(at)] = by_second.get(int(at), 0.0) + wait
        return max((second + 1.0 for second, wait in by_second.items() if wait > STEADY), default=0.0)


def table(folder: Path, rows: int, *, seed: int = 0, epochs: int = 1, batch: int = 4096) -> IngestSession:
    """A table of ``rows`` samples in ``folder``, each with its number; and a session that reads it: a job on
    RM1, with n-grams of all its lists."""
    folder.mkdir(parents=True, exist_ok=True)
    job = synthetic.sessions(str(folder), "rm1", 1, seed)[0]
    table_features = [feature for feature in synthetic.features("rm1", seed) if feature.name in job.columns]
    drawn = synthetic.drawn(table_features, min(rows, DRAWN), np.random.default_rng((seed, 4)), maps=False)
    for at in range(0, rows, DRAWN):
        part = drawn.slice(0, min(rows - at, DRAWN))
        part = part.append_column(ROW, pa.array(np.arange(at, at + part.num_rows)))
        path = folder / f"part-{at // DRAWN:05}.parquet"
        pq.write_table(part, path, row_group_size=2048, compression="snappy")
    lists = [feature.name for feature in table_features if feature.length]
    grams = [
        Transform("ngram", (column,), f"{column} by {n}", {"n": n, "rows": HASHED})
        for column in lists
        for n in (2, 3)
    ]
    columns = (*job.columns, *(gram.output for gram in grams), ROW)
    # what makes features from others comes before what changes these
    return replace(
        job,
        columns=columns,
        transforms=(*grams, *job.transforms),
        batch=batch,
        epochs=epochs,
        split_rows=8192,
    )


def batch_seconds(session: IngestSession) -> float:
    """What one process takes for a batch: the median of some splits, as the first ones warm up."""
    durations = []
    opened = reader.Reader(session)
    for split in opened.splits()[:7]:
        began = time.perf_counter()
        count = sum(1 for _ in opened.batches(split, 0))
        durations.append((time.perf_counter() - began) / count)
    return statistics.median(durations)


def step_seconds(session: IngestSession) -> float:
    """Of a trainer that takes what `WANTED` workers make."""
    return batch_seconds(session) * SERVED / WANTED


class DemoModel(torch.nn.Module):
    """Ragged columns are embedded and summed, all others are its dense input."""

    def __init__(self, batch: dict[str, Any], rows: int = HASHED, dim: int = 4) -> None:
        super().__init__()
        self.ragged = [name for name, part in batch.items() if isinstance(part, Ragged)][:LOOKED_UP]
        self.dense = [
            name
            for name, part in batch.items()
            if not isinstance(part, Ragged) and name not in ("label", ROW)
        ]
        self.rows = rows
        self.tables = torch.nn.ModuleList(torch.nn.EmbeddingBag(rows, dim, sparse=True) for _ in self.ragged)
        for part in self.tables:
            assert isinstance(part, torch.nn.EmbeddingBag)
            part.mode = "sum"
        self.over = torch.nn.Sequential(
            torch.nn.Linear(len(self.dense) + dim * len(self.ragged), 16),
            torch.nn.ReLU(),
            torch.nn.Linear(16, 1),
        )

    def forward(self, batch: dict[str, Any]) -> torch.Tensor:
        parts = [torch.nan_to_num(batch[name].float()).unsqueeze(1) for name in self.dense]
        for name, bag in zip(self.ragged, self.tables, strict=True):
            values, offsets = batch[name]
            parts.append(bag(values % self.rows, offsets[:-1].long()))
        answer: torch.Tensor = self.over(torch.cat(parts, 1)).squeeze(1)
        return answer


def train(
    batches: Iterator[dict[str, Any]], step: float, training: TrainerTimes,
    each: Callable[[int], None] = lambda _: None,
) -> None:  # fmt: skip
    """Take all ``batches``, for ``step`` seconds each. ``each`` is told the number of each step."""
    training.starts.append(len(training.times))
    training.began = training.began if training.times else time.perf_counter()
    training.waiting_since = training.waiting_since if training.times else training.began
    model: DemoModel | None = None
    while (batch := next(batches, None)) is not None:
        now = time.perf_counter()
        training.waits.append(now - training.waiting_since)
        training.times.append(now - training.began)
        np.add.at(training.rows, batch[ROW].numpy(), 1)
        if model is None:
            model = DemoModel(batch)
            optimiser = torch.optim.SGD(model.parameters(), lr=0.01)
        loss = torch.nn.functional.binary_cross_entropy_with_logits(model(batch), batch["label"].float())
        optimiser.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimiser.step()
        training.loss = float(loss.detach())
        del batch, loss  # megabytes, whose release is a part of the step
        each(len(training.times))
        time.sleep(max(0.0, step - (time.perf_counter() - now)))
        training.waiting_since = time.perf_counter()


def demo(
    folder: Path, settings: MasterSettings, *, rows: int = 524_288, seconds: float = 20.0, step: float = 0.0,
    kill: bool = False, on: str = "", seed: int = 0,
) -> dict[str, Any]:  # fmt: skip
    """Train on a table of ``rows`` in ``folder`` by a service of its own, for as many epochs as take about
    ``seconds``.
    ``step``: seconds of one (0: see above). ``kill``: a worker is killed after a third of the steps.

    Raises:
        UserError, HostError: as of the service; or there are no workers.
    """
    if settings.workers == 0:
        raise UserError("ingest demo: `workers` is 0, accepted is a number from 1 up, or auto")
    torch.set_num_threads(1)
    session = table(folder / "table", rows, seed=seed)
    step = step or step_seconds(session)
    session = replace(session, epochs=max(1, round(seconds / (step * rows / session.batch))))
    process, address = started(session, folder / "ingest", settings, on=on)
    training, killed, used = TrainerTimes(np.zeros(rows, np.int64)), list[str](), time.process_time()
    wrong = 0
    keys = Keys.read(folder / "ingest" / SECRET)
    link = FlightLink(address, keys)

    def each(number: int) -> None:
        if kill and not killed and number >= rows * session.epochs // session.batch // 3:
            name, target = next(iter(link.call("snapshot")["served_by"].items()))
            with contextlib.suppress(ProcessLookupError):
                os.kill(Identity.parse(target["process"]).pid, signal.SIGKILL)
            killed.append(name)

    # nobody starts its master again: there is little to wait for
    dataset = IngestDataset(address, folder / "ingest" / SECRET, patience=5.0)
    try:
        for epoch in range(session.epochs):
            train(iter(dataset), step, training, each)
            wrong += int((training.rows != epoch + 1).sum())
        snapshot = link.call("snapshot")
        used = time.process_time() - used + snapshot["cpu_seconds"]
    finally:
        link.close()
        process.send_signal(signal.SIGTERM)
        process.wait(30)
        if process.stderr is not None:
            process.stderr.close()
    return {
        "rows": rows, "epochs": session.epochs, "exactly_once": not wrong, "rows_wrong": wrong,
        "killed": killed, "processors": os.cpu_count() or 1, "processors_used": used / training.seconds,
        **_report(folder, training, snapshot, step, dataset),
    }  # fmt: skip


def _report(
    folder: Path, training: TrainerTimes, snapshot: dict[str, Any], step: float, dataset: IngestDataset
) -> dict[str, Any]:  # fmt: skip
    events = eventlog.read(folder / "ingest" / eventlog.NAME)
    began = next(event["t"] for event in events if event["kind"] == "client")
    workers = [
        {"seconds": round(event["t"] - began, 2), "workers": event["decision"]["workers"]}
        for event in events
        if event["kind"] == "decision" and event["decision"]["is"] == "PoolSize"
    ]
    changes = [
        worker
        for place, worker in enumerate(workers)
        if not place or worker["workers"] != workers[place - 1]["workers"]
    ]
    rows = int(training.rows.sum())
    return {
        "steps": len(training.times), "step_seconds": step, "seconds": training.seconds,
        "stall": training.stall(), "stall_second_half": training.stall(training.seconds / 2),
        "stall_second_half_within_epochs": training.stall(training.seconds / 2, starts=False),
        "ramp_seconds": training.ramp(), "rows_per_second": rows / max(training.seconds, 1e-9),
        "rows_per_cpu_second": rows / snapshot["cpu_seconds"] if snapshot["cpu_seconds"] else None,
        "workers": changes, "duplicates_dropped": dataset.counts.duplicates,
        "streams_broken": dataset.counts.breaks, "loss": training.loss, "skipped": snapshot["skipped"],
    }  # fmt: skip
