"""Stalls of a trainer whose step is fixed, by who makes its batches; and what faults cost it.

All arms train the same small model on the same table, with the same transforms and the same time of a step,
chosen so that the trainer takes just what one worker makes alone. DataLoader and service have the
host's processors alike. Row counts are checked in every arm.
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
from windtunnel.data.ingest import reader
from windtunnel.data.ingest.live import demo
from windtunnel.data.ingest.live.calls import MasterSettings
from windtunnel.data.ingest.model import IngestSession
from windtunnel.data.ingest.policy import ScalingBounds

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
        results = in_turn(arms, 1 if quick else 3)
        rows = session.epochs * sum(split.rows for split in reader.Reader(session).splits())
        for name, runs in results.items():
            each = {key: [run[key] for run in runs] for key in runs[0]}
            yield figure(f"{name}: stalled", "share", each["stall"], note=STALLED)
            goal = f"<= {demo.STEADY:g}" if name.endswith("wanted") else ""
            note = "second half, with the first batches of epochs"
            yield figure(f"{name}: stalled after the ramp", "share", each["steady"], goal, note=note)
            yield figure(f"{name}: rows", "rows/s", each["rate"])
            exact = all(count == rows for count in each["rows"])
            yield figure(f"{name}: rows exactly once", "rows", each["rows"], f"{rows}", passed=exact)


def _inside(session: IngestSession, step: float, processes: int) -> dict[str, float]:
    how: dict[str, Any] = {"persistent_workers": True, "multiprocessing_context": "spawn"}
    loader = DataLoader(Ours(session), batch_size=None, num_workers=processes, **how)
    return _trained(session, loader, step)


def _fed(folder: Path, session: IngestSession, step: float, settings: MasterSettings) -> dict[str, float]:
    with service(session, folder, settings) as dataset:
        return _trained(session, dataset, step)


def _trained(session: IngestSession, batches: Iterable[Any], step: float) -> dict[str, float]:
    torch.set_num_threads(1)
    training = demo.TrainerTimes(
        np.zeros(sum(split.rows for split in reader.Reader(session).splits()), np.int64)
    )
    for _ in range(session.epochs):
        demo.train(iter(batches), step, training)
    rows = float(training.rows.sum()) if training.rows.min() == training.rows.max() else -1.0
    return {
        "stall": training.stall(), "steady": training.stall(training.seconds / 2),
        "rate": rows / training.seconds, "rows": rows,
    }  # fmt: skip
