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
    found = []
    for batch in batches:
        columns = []
        for name, one in sorted(batch.items()):
            if isinstance(one, torch.Tensor):
                columns.append([(name, value) for value in one.tolist()])
                continue
            columns.append([(name, part.tolist()) for part in one.values.split(one.offsets.diff().tolist())])
        found += map(repr, zip(*columns, strict=True))
    return sorted(found)


def test_all_arms_deliver_the_same_rows(tmp_path: Path) -> None:
    synthetic.write(tmp_path / "table", "rm1", 300, maps=False, files=2, group_rows=64)
    (one,) = synthetic.sessions(str(tmp_path / "table"), "rm1", 1)
    session = replace(one, batch=32, split_rows=64)
    found = {
        type(each).__name__: samples(loaded(session, DataLoader, each, 0))
        for each in (Batches(session), Ours(session))
    }
    found["pool"] = samples(pooled(session, ThreadPool))
    with serving(session, tmp_path / "m") as master:
        secret = tmp_path / "secret"
        secret.touch(0o600)
        secret.write_bytes(KEYS.secret)
        found["service"] = samples(iter(IngestDataset(master.address, secret)))
    assert len(found["Ours"]) == 300 and len(set(found["Ours"])) > 290
    for name, rows in found.items():
        assert rows == found["Ours"], name
