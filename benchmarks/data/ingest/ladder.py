"""The ladder of optimisations of Zhao et al. (ISCA 2022): reads and bytes counted.

Samples as RM1's, jobs as RM1's. What a disk would give is emulated from the counts, as of one that takes 8 ms
for a read and then gives 200 MB/s; the paper's storage is of such disks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from benchmarks.harness.measure import scratch
from benchmarks.harness.rows import Row, figure
from windtunnel.data.ingest import layout, synthetic
from windtunnel.data.ingest.model import IngestSession
from windtunnel.data.ingest.reader import Reader
from windtunnel.data.ingest.storage import HOLE

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
