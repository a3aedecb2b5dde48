"""The ladder's shape is in its counts, which do not depend on how busy a host is."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.data.ingest import service as ladder


def test_flattening_alone_makes_reads_tiny_and_the_rest_restores_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ladder, "GROUP_ROWS", ladder.GROUP_ROWS // 16)
    monkeypatch.setattr(ladder, "HOLE", ladder.HOLE // 16)
    reads, nbytes = {}, {}
    for name, (sessions, hole) in ladder._rungs(tmp_path, 1024, 2).items():
        meters = [ladder._read(one, hole)[1].meter for one in sessions]
        reads[name], nbytes[name] = sum(one.reads for one in meters), sum(one.nbytes for one in meters)
    assert reads["flattening"] > 2 * reads["maps"] and nbytes["flattening"] < nbytes["maps"] / 2
    assert reads["coalescing"] < reads["maps"] and nbytes["coalescing"] > nbytes["flattening"]
    assert nbytes["reordering"] < nbytes["coalescing"]
    assert nbytes["large row groups"] <= nbytes["reordering"]
