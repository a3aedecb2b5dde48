"""Stalls of a trainer whose step is fixed, by who makes its batches; and what faults cost it.

All arms train the same small model on the same table, with the same transforms and the same time of a step,
chosen so that the trainer takes just what one worker makes alone. DataLoader and service have the
host's processors alike. Row counts are checked in every arm.

The ladder of optimisations of Zhao et al. (ISCA 2022): reads and bytes counted.

Samples as RM1's, jobs as RM1's. What a disk would give is emulated from the counts, as of one that takes 8 ms
for a read and then gives 200 MB/s; the paper's storage is of such disks.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

from benchmarks.data.ingest.rivals import Ours, service
from benchmarks.harness.measure import in_turn, scratch
from benchmarks.harness.rows import Row, figure
from windtunnel.data.ingest import layout, reader, synthetic
from windtunnel.data.ingest.live import demo
from windtunnel.data.ingest.live.calls import MasterSettings
from windtunnel.data.ingest.model import IngestSession
from windtunnel.data.ingest.policy import ScalingBounds
from windtunnel.data.ingest.reader import Reader
from windtunnel.data.ingest.storage import HOLE

STALLED = "Zhao et al., ISCA 2022: preprocessing on trainers cost up to 56 % of training throughput"


def stalls_rows(quick: bool) -> Iterator[Row]:
    """Stalls, ramp and rows a second, arm by arm."""
    most = max(2, os.cpu_count() or 1)
    with scratch() as folder:
        session = demo.table(folder / "table", 65_536 if quick else 524_288)
        step = demo.step_seconds(session)
        session = replace(session, epochs=10 if quick else 4)  # a while behind the ramp
        scaled = MasterSettings(scaling=ScalingBounds(1, most))
        number = itertools.count()
        arms: dict[str, Callable[[], dict[str, float]]] = {
            f"DataLoader, {most} processes": lambda: _inside(session, step, most),
            "service, 1 worker": lambda: _fed(
                folder / str(next(number)), session, step, MasterSettings(workers=1)
            ),
            "service, as many as wanted": lambda: _fed(folder / str(next(number)), session, step, scaled),
        }
        found = in_turn(arms, 1 if quick else 3)
        rows = session.epochs * sum(one.rows for one in reader.splits(session))
        for name, runs in found.items():
            each = {key: [one[key] for one in runs] for key in runs[0]}
            yield figure(f"{name}: stalled", "share", each["stall"], note=STALLED)
            goal = f"<= {demo.STEADY:g}" if name.endswith("wanted") else ""
            note = "second half, with the first batches of epochs"
            yield figure(f"{name}: stalled after the ramp", "share", each["steady"], goal, note=note)
            yield figure(f"{name}: rows", "rows/s", each["rate"])
            exact = all(one == rows for one in each["rows"])
            yield figure(f"{name}: rows exactly once", "rows", each["rows"], f"{rows}", met=exact)


def _inside(session: IngestSession, step: float, processes: int) -> dict[str, float]:
    how: dict[str, Any] = {"persistent_workers": True, "multiprocessing_context": "spawn"}
    loader = DataLoader(Ours(session), batch_size=None, num_workers=processes, **how)
    return _trained(session, loader, step)


def _fed(folder: Path, session: IngestSession, step: float, settings: MasterSettings) -> dict[str, float]:
    with service(session, folder, settings) as dataset:
        return _trained(session, dataset, step)


def _trained(session: IngestSession, batches: Iterable[Any], step: float) -> dict[str, float]:
    torch.set_num_threads(1)
    training = demo.TrainerTimes(np.zeros(sum(one.rows for one in reader.splits(session)), np.int64))
    for _ in range(session.epochs):
        demo.train(iter(batches), step, training)
    rows = float(training.rows.sum()) if training.rows.min() == training.rows.max() else -1.0
    return {
        "stall": training.stall(), "steady": training.stall(training.seconds / 2),
        "rate": rows / training.seconds, "rows": rows,
    }  # fmt: skip


SOURCE = "Zhao et al., ISCA 2022"
PUBLISHED = {
    "maps": 1.0, "flattening": 0.03, "coalescing": 0.99, "reordering": 1.84, "large row groups": 2.41,
}  # fmt: skip
"""Of each rung the throughput of storage, in that of the first."""
SEEK, BANDWIDTH = 8e-3, 200e6
GROUP_ROWS = 4096
SEPARATE = -1
"""A hole that joins no reads: each column of a row group is one."""


def ladder_rows(quick: bool) -> Iterator[Row]:
    """Of all sessions together: reads, bytes, storage (emulated)."""
    rows, jobs = (16_384, 3) if quick else (65_536, 5)
    with scratch() as folder:
        rungs = _rungs(folder, rows, jobs)
        disks: dict[str, float] = {}
        for name, (sessions, hole) in rungs.items():
            reads = nbytes = wanted = 0
            for one in sessions:
                plain = replace(one, columns=tuple(sorted(Reader(one).sources)), transforms=())
                meter = _read(plain, hole)[1].meter
                reads, nbytes, wanted = reads + meter.reads, nbytes + meter.nbytes, wanted + meter.wanted
            disks[name] = reads * SEEK + nbytes / BANDWIDTH
            note = f"{jobs} sessions of {rows:,} rows; {nbytes / wanted:.2f} bytes read for one wanted"
            yield figure(f"{name}: reads", "reads", reads, note=note)
            yield figure(f"{name}: bytes read", "bytes", nbytes)
        for name, disk in disks.items():
            goal = f">= {PUBLISHED[name]:g} x" if name == "large row groups" else ""
            yield figure(
                f"{name}: storage, of maps", "x", goal=goal, emulated=disks["maps"] / disk,
                published=PUBLISHED[name], source=SOURCE,
            )  # fmt: skip


def _rungs(folder: Path, rows: int, jobs: int) -> dict[str, tuple[tuple[IngestSession, ...], int]]:
    """Of each rung the sessions, on its table, and the largest hole."""
    maps, flat, near, large = (str(folder / name) for name in ("maps", "flat", "near", "large"))
    for place, as_maps in ((maps, True), (flat, False)):
        synthetic.write(Path(place), "rm1", rows, maps=as_maps, group_rows=GROUP_ROWS)
    sessions = synthetic.sessions(flat, "rm1", jobs)
    layout.lay_out(flat, sessions, Path(near), group_rows=GROUP_ROWS)
    layout.lay_out(flat, sessions, Path(large), group_rows=16 * GROUP_ROWS)

    def of(table: str) -> tuple[IngestSession, ...]:
        return tuple(replace(one, table=table) for one in sessions)

    return {
        "maps": (of(maps), SEPARATE),
        "flattening": (of(flat), SEPARATE),
        "coalescing": (of(flat), HOLE),
        "reordering": (of(near), HOLE),
        "large row groups": (of(large), HOLE),
    }


def _read(session: IngestSession, hole: int) -> tuple[int, Reader]:
    reader = Reader(session, hole=hole)
    rows = sum(batch.num_rows for split in reader.splits() for batch in reader.batches(split, 0))
    return rows, reader
