"""What is compared delivers the same: the arms of the bench, without processes of their own."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

from benchmarks.data.ingest.rivals import Batches, Ours, loaded, pooled
from support.ingest import KEYS, serving
from windtunnel.data.ingest import IngestDataset, synthetic


def samples(batches: Iterator[dict[str, Any]]) -> list[str]:
    """Rows as text, in no order; NaN is NaN."""
    texts = []
    for batch in batches:
        columns = []
        for name, column in sorted(batch.items()):
            if isinstance(column, torch.Tensor):
                columns.append([(name, value) for value in column.tolist()])
                continue
            columns.append(
                [(name, part.tolist()) for part in column.values.split(column.offsets.diff().tolist())]
            )
        texts += map(repr, zip(*columns, strict=True))
    return sorted(texts)


def test_all_arms_deliver_the_same_rows(tmp_path: Path) -> None:
    synthetic.write(tmp_path / "table", "rm1", 300, maps=False, files=2, group_rows=64)
    (base,) = synthetic.sessions(str(tmp_path / "table"), "rm1", 1)
    session = replace(base, batch=32, split_rows=64)
    by_arm = {
        type(each).__name__: samples(loaded(session, DataLoader, each, 0))
        for each in (Batches(session), Ours(session))
    }
    by_arm["pool"] = samples(pooled(session, ThreadPool))
    with serving(session, tmp_path / "m") as master:
        secret = tmp_path / "secret"
        secret.touch(0o600)
        secret.write_bytes(KEYS.secret)
        by_arm["service"] = samples(iter(IngestDataset(master.address, secret)))
    assert len(by_arm["Ours"]) == 300 and len(set(by_arm["Ours"])) > 290
    for name, rows in by_arm.items():
        assert rows == by_arm["Ours"], name
