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
from windtunnel.data.ingest import IngestDataset, reader, synthetic, transforms
from windtunnel.data.ingest.live.calls import Settings
from windtunnel.data.ingest.live.dataset import tensors
from windtunnel.data.ingest.live.serve import started
from windtunnel.data.ingest.model import Session, Split

SECTION, PLAIN = "rows", "plain"
PROCESSES = 2
ALONE = ("in this process", "DataLoader, no processes")
"""What makes its batches in the trainer's own process."""
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
            yield left_out(SECTION, "torchdata", "it is not installed (the extra strangers has it)")
        python = os.environ.get(RAY_PYTHON) or (sys.executable if _has_ray() else "")
        if python:
            arms["Ray Data"] = partial(_ray, session, python)
        else:
            yield left_out(
                SECTION,
                "Ray Data",
                f"Ray cannot be imported here; {RAY_PYTHON} may name a Python that has it",
            )
        yield from _compared(SECTION, arms, repeats)


def plain_rows(quick: bool) -> Iterator[Row]:
    """A table of numbers, of which nothing is made: decoding is cheap, and passing batches on is not."""
    rows, epochs, repeats = (65_536, 2, 1) if quick else (524_288, 6, 3)
    yield Row(PLAIN, "host", "", note=conditions())
    with scratch() as folder:
        rng = np.random.default_rng(1)
        columns = {f"f{one:02d}": rng.random(rows, np.float32) for one in range(12)}
        table = pa.table({"label": rng.integers(0, 2, rows), **columns})
        (folder / "table").mkdir()
        for number in range(4):
            part = table.slice(number * rows // 4, rows // 4)
            pq.write_table(part, folder / "table" / f"{number}.parquet", row_group_size=16_384)
        names = tuple(table.schema.names)
        session = Session(str(folder / "table"), names, batch=4096, epochs=epochs, split_rows=16_384)
        yield from _compared(PLAIN, _arms(session, rows, folder), repeats)


def _arms(session: Session, rows: int, folder: Path) -> dict[str, Callable[[], Pace]]:
    """The service, the DataLoader, and each without processes of its own."""
    numbers = itertools.count()
    fed: dict[str, Callable[[], Iterator[dict[str, Any]]]] = {
        "service": lambda: _service(session, folder / f"run{next(numbers)}"),
        "service, ordered": lambda: _service(session, folder / f"run{next(numbers)}", ordered=True),
        "in this process": lambda: _alone(session),
        "DataLoader, batches": lambda: loaded(session, DataLoader, Batches(session)),
        "DataLoader, no processes": lambda: loaded(session, DataLoader, Batches(session), 0),
    }
    return {name: partial(_paced, one, rows, session.epochs) for name, one in fed.items()}


def _compared(section: str, arms: dict[str, Callable[[], Pace]], repeats: int) -> Iterator[Row]:
    found = in_turn(arms, repeats)
    for name, paces in found.items():
        rates = [one.rate for one in paces]
        span = f"{min(rates):,.0f} to {max(rates):,.0f}"
        count = 0 if name in ALONE else PROCESSES
        note = f"{count} processes, median of {repeats}, which are {span}"
        yield Row(section, name, "rows/s", measured=median(rates), note=note)
        yield Row(section, f"{name}: of a CPU-second", "rows", measured=median(one.thrift for one in paces))
        yield Row(section, f"{name}: memory", "bytes", measured=median(one.memory for one in paces))
    for what in ("rate", "thrift"):
        pairs = zip(found["service"], found["service, ordered"], strict=True)
        cost = median(getattr(one, what) / getattr(other, what) for one, other in pairs)
        name = f"{'time' if what == 'rate' else 'CPU time'} of the service, ordered, over that in any order"
        yield Row(section, name, "x", measured=cost, note=f"median of {repeats} rounds")
    ours, other = (median(one.rate for one in found[it]) or 0 for it in ("service", "DataLoader, batches"))
    ratio = ours / (other or 1)
    judged = section == SECTION
    yield Row(
        section, "service against DataLoader, batches", "x", measured=ratio,
        target=f"at least {TARGET:g} x" if judged else "", met=ratio >= TARGET if judged else None,
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


def _alone(session: Session) -> Iterator[dict[str, Any]]:
    dataset = IngestDataset(session, workers=0)
    for _ in range(session.epochs):
        yield from dataset


def _service(session: Session, folder: Path, *, ordered: bool = False) -> Iterator[dict[str, Any]]:
    master, address = started(session, folder, Settings(workers=PROCESSES))
    try:
        dataset = IngestDataset(address, folder / SECRET, ordered=ordered)
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
