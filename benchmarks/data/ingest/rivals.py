"""Rows a second, and rows a CPU-second, beside other ways to have as many processes make the same batches.

All read the same flat table of RM1's samples with the same transforms (those of `transforms`), and give the
trainer's process tensors; that one does nothing with them. The first epoch is not counted, so that starting
processes is left out; CPU and memory are of the whole tree of processes. Ray Data runs where Ray can be
imported, or in the Python that WINDTUNNEL_RAY_PYTHON names.
"""

from __future__ import annotations

import gc
import itertools
import json
import multiprocessing
import os
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from benchmarks.data.ingest.paces import Pace, paced
from benchmarks.harness.measure import conditions, in_turn, median, scratch
from benchmarks.harness.rows import Row, left_out
from windtunnel.base.keys import NAME as SECRET
from windtunnel.base.plain import from_plain, to_plain
from windtunnel.data.ingest import reader, synthetic, transforms
from windtunnel.data.ingest.live.calls import Settings
from windtunnel.data.ingest.live.dataset import IngestDataset, tensors
from windtunnel.data.ingest.live.serve import started
from windtunnel.data.ingest.model import Session, Split

SECTION = "rows"
PROCESSES = 2
TARGET = 2.0
RAY_PYTHON = "WINDTUNNEL_RAY_PYTHON"


def rival_rows(quick: bool) -> Iterator[Row]:
    """Of each arm three rows; the service against the DataLoader last."""
    rows, epochs, repeats = (32_768, 2, 1) if quick else (65_536, 6, 3)
    yield Row(SECTION, "host", "", note=conditions())
    with scratch() as folder:
        synthetic.write(folder / "table", "rm1", rows, maps=False, files=4, group_rows=4096)
        (one,) = synthetic.sessions(str(folder / "table"), "rm1", 1)
        session = replace(one, epochs=epochs, split_rows=4096)
        numbers = itertools.count()
        fed: dict[str, Callable[[], Iterator[dict[str, Any]]]] = {
            "service": lambda: _service(session, folder / f"run{next(numbers)}"),
            "DataLoader, batches": lambda: loaded(session, DataLoader, Batches(session)),
            "DataLoader, batches of the same reader": lambda: loaded(session, DataLoader, Ours(session)),
            "static pool": lambda: pooled(session),
        }
        try:
            from torchdata.stateful_dataloader import StatefulDataLoader

            fed["torchdata"] = lambda: loaded(session, StatefulDataLoader, Batches(session))
        except ImportError:
            yield left_out(SECTION, "torchdata", "it is not installed (the extra strangers has it)")
        arms: dict[str, Callable[[], Pace]] = {
            name: partial(_paced, one, rows, epochs) for name, one in fed.items()
        }
        python = os.environ.get(RAY_PYTHON) or (sys.executable if _has_ray() else "")
        if python:
            arms["Ray Data"] = partial(_ray, session, python)
        else:
            yield left_out(
                SECTION,
                "Ray Data",
                f"Ray cannot be imported here; {RAY_PYTHON} may name a Python that has it",
            )
        found = in_turn(arms, repeats)
        for name, paces in found.items():
            rates = [one.rate for one in paces]
            span = f"{min(rates):,.0f} to {max(rates):,.0f}"
            note = f"{PROCESSES} processes, median of {repeats}, which are {span}"
            yield Row(SECTION, name, "rows/s", measured=median(rates), note=note)
            yield Row(
                SECTION, f"{name}: of a CPU-second", "rows", measured=median(one.thrift for one in paces)
            )
            yield Row(SECTION, f"{name}: memory", "bytes", measured=median(one.memory for one in paces))
        ours, other = (
            median(one.rate for one in found[it]) or 0 for it in ("service", "DataLoader, batches")
        )
        ratio = ours / (other or 1)
        yield Row(
            SECTION, "service against DataLoader, batches", "x", measured=ratio,
            target=f"at least {TARGET:g} x", met=ratio >= TARGET,
        )  # fmt: skip


class Batches(IterableDataset[dict[str, Any]]):
    """What a careful user writes: each process its row groups by pyarrow, only the columns wanted."""

    def __init__(self, session: Session) -> None:
        self.session = session

    def __iter__(self) -> Iterator[dict[str, Any]]:
        info = get_worker_info()
        number, count = (info.id, info.num_workers) if info else (0, 1)
        for batch in by_arrow(self.session, number, count):
            yield tensors(batch)


class Ours(Batches):
    """The reader that the service's workers have, without the service."""

    def __iter__(self) -> Iterator[dict[str, Any]]:
        info = get_worker_info()
        number, count = (info.id, info.num_workers) if info else (0, 1)
        for split in reader.splits(self.session)[number::count]:
            yield from map(tensors, reader.batches(self.session, split, 0))


def by_arrow(session: Session, number: int, count: int) -> Iterator[pa.RecordBatch]:
    """Batches of every ``count``-th row group, without `reader`."""
    steps = [(one, transforms.settings(one, "bench")) for one in session.transforms]
    wanted = list(reader.needed(session))
    files = [pq.ParquetFile(path) for path in sorted(Path(session.table).iterdir())]
    groups = [(file, group) for file in files for group in range(file.num_row_groups)]
    for place, (file, group) in enumerate(groups[number::count]):
        for batch in file.iter_batches(session.batch, row_groups=[group], columns=wanted, use_threads=False):
            columns = dict(zip(batch.schema.names, batch.columns, strict=True))
            rows = transforms.Rows(session.seed, place, np.arange(batch.num_rows))
            made = transforms.apply(steps, columns, rows, session.table)
            yield pa.record_batch({name: made[name] for name in session.columns})


def _paced(arm: Callable[[], Iterator[dict[str, Any]]], rows: int, epochs: int) -> Pace:
    return paced((len(batch["label"]) for batch in arm()), rows, epochs)


def _service(session: Session, folder: Path) -> Iterator[dict[str, Any]]:
    master, address = started(session, folder, Settings(workers=PROCESSES))
    try:
        dataset = IngestDataset(address, folder / SECRET)
        for _ in range(session.epochs):
            yield from dataset
    finally:
        master.terminate()
        master.wait()


def loaded(
    session: Session, kind: Any, dataset: Batches, processes: int = PROCESSES
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


def _made(session: Session, split: Split) -> bytes:
    sink = pa.BufferOutputStream()
    made = list(reader.batches(session, split, 0))
    with pa.ipc.new_stream(sink, made[0].schema) as stream:
        for batch in made:
            stream.write_batch(batch)
    return sink.getvalue().to_pybytes()


def pooled(session: Session, kind: Any = None) -> Iterator[dict[str, Any]]:
    """As tf.data service has it: as many processes all the time, each the next split, a few of them ahead."""
    with (kind or multiprocessing.get_context("spawn").Pool)(PROCESSES) as pool:
        splits = iter(reader.splits(session) * session.epochs)

        def ask(count: int) -> list[Any]:
            return [pool.apply_async(_made, (session, one)) for one in itertools.islice(splits, count)]

        asked = deque(ask(2 * PROCESSES))
        while asked:
            data = asked.popleft().get()
            asked += ask(1)
            yield from map(tensors, pa.ipc.open_stream(data))


def _has_ray() -> bool:
    try:
        import ray.data  # noqa: F401
    except ImportError:
        return False
    return True


def _ray(session: Session, python: str) -> Pace:
    paths = os.pathsep.join([str(Path(__file__).parents[3]), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [python, "-m", f"{__package__}.on_ray", json.dumps(to_plain(session)), str(PROCESSES)],
        capture_output=True, text=True, timeout=300, env={**os.environ, "PYTHONPATH": paths},
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError((done.stderr.strip().splitlines() or ["Ray Data failed"])[-1])
    return from_plain(Pace, json.loads(done.stdout.strip().splitlines()[-1]))
