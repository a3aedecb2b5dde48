"""Rows a second, and rows a CPU-second, beside other ways to have as many processes make the same batches.

All read the same flat table of RM1's samples with the same transforms (those of `transforms`), and give the
trainer's process tensors; that one does nothing with them. The first epoch is not counted, so that starting
processes is left out; CPU and memory are of the whole tree of processes.
"""

from __future__ import annotations

import functools
import gc
import itertools
import multiprocessing
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from benchmarks.harness.measure import in_turn, ratios, scratch
from benchmarks.harness.rows import Row, figure, left_out
from windtunnel.base.keys import NAME as SECRET
from windtunnel.data.ingest import IngestDataset, reader, synthetic, transforms
from windtunnel.data.ingest.live.calls import MasterSettings
from windtunnel.data.ingest.live.dataset import tensors
from windtunnel.data.ingest.live.serve import started
from windtunnel.data.ingest.model import IngestSession, TableSplit

PROCESSES = 2
ALONE = ("in this process", "DataLoader, no processes")
"""What makes its batches in the trainer's own process."""


def rows_rows(quick: bool) -> Iterator[Row]:
    """Of each arm three rows; the service against the DataLoader last."""
    rows, epochs, repeats = (32_768, 2, 1) if quick else (65_536, 6, 3)
    with scratch() as folder:
        synthetic.write(folder / "table", "rm1", rows, maps=False, files=4, group_rows=4096)
        (sample,) = synthetic.sessions(str(folder / "table"), "rm1", 1)
        session = replace(sample, epochs=epochs, split_rows=4096)
        arms = _arms(session, rows, folder)
        arms["DataLoader, batches of the same reader"] = partial(
            _paced, lambda: loaded(session, DataLoader, Ours(session)), rows, epochs
        )
        arms["static pool"] = partial(_paced, lambda: pooled(session), rows, epochs)
        try:
            from torchdata.stateful_dataloader import StatefulDataLoader

            arms["torchdata"] = partial(
                _paced, lambda: loaded(session, StatefulDataLoader, Batches(session)), rows, epochs
            )
        except ImportError:
            yield left_out("torchdata", "it is not installed (the extra strangers has it)")
        yield from _compared(arms, repeats, ">= 2 x")


def plain_rows(quick: bool) -> Iterator[Row]:
    """A table of numbers, of which nothing is made: decoding is cheap, and passing batches on is not."""
    rows, epochs, repeats = (65_536, 2, 1) if quick else (524_288, 6, 3)
    with scratch() as folder:
        rng = np.random.default_rng(1)
        columns = {f"f{number:02d}": rng.random(rows, np.float32) for number in range(12)}
        table = pa.table({"label": rng.integers(0, 2, rows), **columns})
        (folder / "table").mkdir()
        for number in range(4):
            part = table.slice(number * rows // 4, rows // 4)
            pq.write_table(part, folder / "table" / f"{number}.parquet", row_group_size=16_384)
        names = tuple(table.schema.names)
        session = IngestSession(str(folder / "table"), names, batch=4096, epochs=epochs, split_rows=16_384)
        yield from _compared(_arms(session, rows, folder), repeats)


def _arms(session: IngestSession, rows: int, folder: Path) -> dict[str, Callable[[], Pace]]:
    """The service, the DataLoader, and each without processes of its own."""
    numbers = itertools.count()
    fed: dict[str, Callable[[], Iterator[dict[str, Any]]]] = {
        "service": lambda: _served(session, folder / f"run{next(numbers)}"),
        "service, ordered": lambda: _served(session, folder / f"run{next(numbers)}", ordered=True),
        "in this process": lambda: _alone(session),
        "DataLoader, batches": lambda: loaded(session, DataLoader, Batches(session)),
        "DataLoader, no processes": lambda: loaded(session, DataLoader, Batches(session), 0),
    }
    return {name: partial(_paced, batches, rows, session.epochs) for name, batches in fed.items()}


def _compared(arms: dict[str, Callable[[], Pace]], repeats: int, goal: str = "") -> Iterator[Row]:
    paces_of = in_turn(arms, repeats)
    for name, paces in paces_of.items():
        note = f"{0 if name in ALONE else PROCESSES} processes"
        yield figure(name, "rows/s", (pace.rate for pace in paces), note=note)
        yield figure(f"{name}: of a CPU-second", "rows", (pace.thrift for pace in paces))
        yield figure(f"{name}: memory", "bytes", (pace.memory for pace in paces))
    for measure, words in (("rate", "time"), ("thrift", "CPU time")):
        any_order, ordered = (
            [getattr(pace, measure) for pace in paces_of[f"service{it}"]] for it in ("", ", ordered")
        )
        cost = ratios(any_order, ordered)
        yield figure(f"{words} of the service, ordered, over that in any order", "x", cost)
    ours, other = ([pace.rate for pace in paces_of[it]] for it in ("service", "DataLoader, batches"))
    yield figure("service against DataLoader, batches", "x", ratios(ours, other), goal)


class Batches(IterableDataset[dict[str, Any]]):
    """What a careful user writes: each process its row groups by pyarrow, only the columns wanted."""

    def __init__(self, session: IngestSession) -> None:
        self.session = session

    def __iter__(self) -> Iterator[dict[str, Any]]:
        info = get_worker_info()
        return map(tensors, self.part(*((info.id, info.num_workers) if info else (0, 1))))

    def part(self, number: int, count: int) -> Iterator[pa.RecordBatch]:
        """Batches of every ``count``-th row group, without `reader`."""
        session = self.session
        steps = [(transform, transforms.settings(transform, "bench")) for transform in session.transforms]
        columns_read = list(reader.needed(session))
        files = [pq.ParquetFile(path) for path in sorted(Path(session.table).iterdir())]
        groups = [(file, group) for file in files for group in range(file.num_row_groups)]
        for place, (file, group) in enumerate(groups[number::count]):
            for batch in file.iter_batches(
                session.batch, row_groups=[group], columns=columns_read, use_threads=False
            ):
                columns = dict(zip(batch.schema.names, batch.columns, strict=True))
                rows = transforms.Rows(session.seed, place, np.arange(batch.num_rows))
                outputs = transforms.apply(steps, columns, rows, session.table)
                yield pa.record_batch({name: outputs[name] for name in session.columns})


class Ours(Batches):
    """The reader that the service's workers have, without the service."""

    def part(self, number: int, count: int) -> Iterator[pa.RecordBatch]:
        opened = reader.Reader(self.session)
        for split in opened.splits()[number::count]:
            yield from opened.batches(split, 0)


def _paced(arm: Callable[[], Iterator[dict[str, Any]]], rows: int, epochs: int) -> Pace:
    return paced((len(batch["label"]) for batch in arm()), rows, epochs)


def _alone(session: IngestSession) -> Iterator[dict[str, Any]]:
    dataset = IngestDataset(session, workers=0)
    for _ in range(session.epochs):
        yield from dataset


@contextmanager
def service(
    session: IngestSession, folder: Path, settings: MasterSettings, *, ordered: bool = False
) -> Iterator[IngestDataset]:
    """What a service of its own feeds."""
    master, address = started(session, folder, settings)
    try:
        yield IngestDataset(address, folder / SECRET, ordered=ordered)
    finally:
        master.terminate()
        master.communicate(timeout=30)


def _served(session: IngestSession, folder: Path, *, ordered: bool = False) -> Iterator[dict[str, Any]]:
    with service(session, folder, MasterSettings(workers=PROCESSES), ordered=ordered) as dataset:
        for _ in range(session.epochs):
            yield from dataset


def loaded(
    session: IngestSession, kind: Any, dataset: Batches, processes: int = PROCESSES
) -> Iterator[dict[str, Any]]:
    """The batches of a ``kind`` of DataLoader."""
    how: dict[str, Any] = {"persistent_workers": True, "multiprocessing_context": "spawn"}
    loader = kind(dataset, batch_size=None, num_workers=processes, **(how if processes else {}))
    try:
        for _ in range(session.epochs):
            yield from loader
    finally:
        del loader
        gc.collect()  # its processes end with it


_opened = functools.lru_cache(1)(reader.Reader)
"""Footers are read once in a process."""


def _encoded(session: IngestSession, split: TableSplit) -> bytes:
    sink = pa.BufferOutputStream()
    batches = list(_opened(session).batches(split, 0))
    with pa.ipc.new_stream(sink, batches[0].schema) as stream:
        for batch in batches:
            stream.write_batch(batch)
    return sink.getvalue().to_pybytes()


def pooled(session: IngestSession, kind: Any = None) -> Iterator[dict[str, Any]]:
    """As tf.data service has it: as many processes all the time, each the next split, a few of them ahead."""
    with (kind or multiprocessing.get_context("spawn").Pool)(PROCESSES) as pool:
        splits = iter(reader.Reader(session).splits() * session.epochs)

        def ask(count: int) -> list[Any]:
            return [pool.apply_async(_encoded, (session, split)) for split in itertools.islice(splits, count)]

        pending = deque(ask(2 * PROCESSES))
        while pending:
            data = pending.popleft().get()
            pending += ask(1)
            yield from map(tensors, pa.ipc.open_stream(data))


@dataclass(frozen=True)
class Pace:
    """Rows/s, rows a CPU-second, and bytes of memory that the processes have for themselves."""

    rate: float
    thrift: float
    memory: float


def paced(batches: Iterator[int], rows: int, epochs: int) -> Pace:
    """Of this process and those beneath it. ``batches``: rows of each, as they come; ``rows`` of each of the
    ``epochs``. The first epoch is left out: what was read ahead while processes started would count as fast.

    Raises:
        RuntimeError: other than these rows came.
    """
    total = 0
    begin, cpu = time.perf_counter(), _cpu()
    for count in batches:
        total += count
        if total == rows:
            begin, cpu = time.perf_counter(), _cpu()
        if total >= epochs * rows:
            break
    seconds, memory = time.perf_counter() - begin, _memory()
    # of those that are there now: what an earlier arm left may end meanwhile
    spent = sum(used - cpu.get(process, 0.0) for process, used in _cpu().items())
    if next(batches, None) is not None or total != epochs * rows:
        raise RuntimeError(f"{total} rows came, not {epochs * rows}")
    counted = (epochs - 1) * rows
    return Pace(counted / seconds, counted / spent, memory)


def _tree() -> list[psutil.Process]:
    own = psutil.Process()
    return [own, *own.children(recursive=True)]


def _cpu() -> dict[int, float]:
    return {process.pid: sum(process.cpu_times()[:2]) for process in _tree()}


def _memory() -> float:
    return float(sum(process.memory_full_info().uss for process in _tree()))
