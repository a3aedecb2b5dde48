"""The ladder of layouts of Zhao et al. (ISCA 2022): its shape is in reads and bytes, which are counted."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from windtunnel.data.ingest import layout, synthetic
from windtunnel.data.ingest.model import IngestSession
from windtunnel.data.ingest.reader import Reader
from windtunnel.data.ingest.storage import HOLE

ROWS, JOBS, GROUP_ROWS, NEAR = 1024, 2, 256, HOLE // 16
SEPARATE = -1
"""A hole that joins no reads: each column of a row group is one."""


def test_flattening_alone_makes_reads_tiny_and_the_rest_restores_them(tmp_path: Path) -> None:
    maps, flat, near, large = (str(tmp_path / name) for name in ("maps", "flat", "near", "large"))
    for place, as_maps in ((maps, True), (flat, False)):
        synthetic.write(Path(place), "rm1", ROWS, maps=as_maps, group_rows=GROUP_ROWS)
    sessions = synthetic.sessions(flat, "rm1", JOBS)
    for place, rows in ((near, GROUP_ROWS), (large, 16 * GROUP_ROWS)):
        layout.lay_out(flat, sessions, Path(place), group_rows=rows)
    reads, nbytes = {}, {}
    for name, table, hole in (
        ("maps", maps, SEPARATE), ("flattening", flat, SEPARATE), ("coalescing", flat, NEAR),
        ("reordering", near, NEAR), ("large row groups", large, NEAR),
    ):  # fmt: skip
        meters = [meter(replace(session, table=table), hole) for session in sessions]
        reads[name] = sum(reading.reads for reading in meters)
        nbytes[name] = sum(reading.nbytes for reading in meters)
    assert reads["flattening"] > 2 * reads["maps"] and nbytes["flattening"] < nbytes["maps"] / 2
    assert reads["coalescing"] < reads["maps"] and nbytes["coalescing"] > nbytes["flattening"]
    assert nbytes["reordering"] < nbytes["coalescing"]
    assert nbytes["large row groups"] <= nbytes["reordering"]


def meter(session: IngestSession, hole: int):  # type: ignore[no-untyped-def]
    """What was read for all of a session."""
    plain = Reader(session, hole=hole)
    for split in plain.splits():
        for _ in plain.batches(split, 0):
            pass
    return plain.meter
