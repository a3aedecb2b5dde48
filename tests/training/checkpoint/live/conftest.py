"""Ranks of a job whose memory is slots in a temporary folder."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from checkpoint_world import FakeMemory

from windtunnel.training.checkpoint.live import checkpointer
from windtunnel.training.checkpoint.live.access import Access


@pytest.fixture
def folder() -> Iterator[Path]:
    torch.set_num_threads(1)
    path = Path(tempfile.mkdtemp(prefix="windtunnel-test-", dir="/dev/shm"))
    yield path
    shutil.rmtree(path)


@pytest.fixture(autouse=True)
def in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def attach(job, settings):  # type: ignore[no-untyped-def]
        return Access(job, settings, FakeMemory(job.cluster, job.rank)) if job.memory else None

    monkeypatch.setattr(checkpointer, "attach", attach)
