"""The ladder of optimisations of Zhao et al. (ISCA 2022): reads and bytes counted, rows/s measured.

Samples as RM1's, jobs as RM1's. What a disk would give is emulated from the counts, as of one that takes 8 ms
for a read and then gives 200 MB/s; the paper's storage is of such disks.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

from benchmarks.harness.measure import in_turn, median, scratch
from benchmarks.harness.rows import Row
from windtunnel.data.ingest import layout, synthetic
from windtunnel.data.ingest.model import Session
from windtunnel.data.ingest.reader import Reader
from windtunnel.data.ingest.storage import HOLE

SECTION = "ladder"
SOURCE = "Zhao et al., ISCA 2022"
PUBLISHED = {
    "maps": (1.0, 1.0), "flattening": (2.00, 0.03), "coalescing": (2.94, 0.99), "reordering": (2.94, 1.84),
    "large row groups": (2.94, 2.41),
}  # fmt: skip
"""Of each rung the throughput of workers and of storage, in those of the first."""
SEEK, BANDWIDTH = 8e-3, 200e6
GROUP_ROWS = 4096
SEPARATE = -1
"""A hole that joins no reads: each column of a row group is one."""


def ladder_rows(quick: bool) -> Iterator[Row]:
    """Rows of the table, of all sessions together: reads, bytes, storage (emulated), rows/s of a worker."""
    rows, jobs, repeats = (16_384, 3, 2) if quick else (65_536, 5, 3)
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
            yield Row(SECTION, f"{name}: reads", "reads", measured=reads, note=note)
            yield Row(SECTION, f"{name}: bytes read", "bytes", measured=nbytes)
        for name, disk in disks.items():
            yield Row(
                SECTION, f"{name}: storage, of maps", "x", emulated=disks["maps"] / disk,
                published=PUBLISHED[name][1], source=SOURCE,
            )  # fmt: skip
        arms = {name: partial(_rate, sessions[0], hole) for name, (sessions, hole) in rungs.items()}
        rates = {name: median(found) or 0.0 for name, found in in_turn(arms, repeats).items()}
        for name, rate in rates.items():
            yield Row(
                SECTION,
                f"{name}: a worker",
                "rows/s",
                measured=rate,
                note=f"median of {repeats}, one session",
            )
            yield Row(
                SECTION, f"{name}: a worker, of maps", "x", measured=rate / rates["maps"],
                published=PUBLISHED[name][0], source=SOURCE,
            )  # fmt: skip
        last, first = "large row groups", "maps"
        yield Row(
            SECTION, "the whole ladder: storage", "x", emulated=disks[first] / disks[last],
            published=PUBLISHED[last][1], source=SOURCE, target=f"at least {PUBLISHED[last][1]:g} x",
            met=disks[first] / disks[last] >= PUBLISHED[last][1],
        )  # fmt: skip


def _rungs(folder: Path, rows: int, jobs: int) -> dict[str, tuple[tuple[Session, ...], int]]:
    """Of each rung the sessions, on its table, and the largest hole."""
    maps, flat, near, large = (str(folder / name) for name in ("maps", "flat", "near", "large"))
    for place, as_maps in ((maps, True), (flat, False)):
        synthetic.write(Path(place), "rm1", rows, maps=as_maps, group_rows=GROUP_ROWS)
    sessions = synthetic.sessions(flat, "rm1", jobs)
    layout.lay_out(flat, sessions, Path(near), group_rows=GROUP_ROWS)
    layout.lay_out(flat, sessions, Path(large), group_rows=16 * GROUP_ROWS)

    def of(table: str) -> tuple[Session, ...]:
        return tuple(replace(one, table=table) for one in sessions)

    return {
        "maps": (of(maps), SEPARATE),
        "flattening": (of(flat), SEPARATE),
        "coalescing": (of(flat), HOLE),
        "reordering": (of(near), HOLE),
        "large row groups": (of(large), HOLE),
    }


def _read(session: Session, hole: int) -> tuple[int, Reader]:
    reader = Reader(session, hole=hole)
    rows = sum(batch.num_rows for split in reader.splits() for batch in reader.batches(split, 0))
    return rows, reader


def _rate(session: Session, hole: int) -> float:
    begin = time.perf_counter()
    rows, _ = _read(session, hole)
    return rows / (time.perf_counter() - begin)
