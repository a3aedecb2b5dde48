"""The pipeline does what was decided of it: so many chunks are compressed at once, and no more."""

from __future__ import annotations

import threading
from mmap import PAGESIZE
from pathlib import Path
from typing import Any

import pytest

from support.waiting import until
from windtunnel.data.files.live import pipeline as module
from windtunnel.data.files.live.area import PublicArea
from windtunnel.data.files.live.pipeline import PublishingPipeline
from windtunnel.data.files.log import LogRing, frame
from windtunnel.data.files.model import LEAST_RING, Operation, OperationKind, Position
from windtunnel.data.files.policy import PipelineSchedule


@pytest.mark.parametrize("width", [1, 3])
def test_as_many_chunks_are_compressed_at_once_as_was_decided(
    width: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "CHUNK", 1)  # a frame each
    (tmp_path / "ring").write_bytes(bytes(LEAST_RING + PAGESIZE))
    ring, area = LogRing(tmp_path / "ring", LEAST_RING), PublicArea(tmp_path)
    at = Position()
    for number in range(8):
        framed = frame(Operation(OperationKind.MKDIR, f"/{number}"), b"", 1, at.sequence)
        ring.write(at.offset, framed)
        at = Position(at.sequence + 1, at.offset + len(framed), 1)
    gate, packing = threading.Semaphore(0), list[int]()

    def pack(self: PublishingPipeline, chunk: Any) -> list[Any]:
        packing.append(chunk.begin.sequence)
        assert gate.acquire(timeout=60)
        return []

    monkeypatch.setattr(PublishingPipeline, "_pack", pack)
    failed: list[Exception] = []
    pipeline = PublishingPipeline(
        ring, area, PipelineSchedule((), True, width, False), Position(), failed.append, primary=True
    )  # fmt: skip
    until(lambda: len(packing) == width and pipeline.written.sequence == width + 2)
    assert len(packing) == width  # the next one is fetched, and waits
    for _ in range(8):
        gate.release()
    until(lambda: pipeline.transferred == at)
    assert pipeline.sync(at.sequence, 60) == at.sequence
    pipeline.close()
    assert failed == []
