"""What one session asks of storage, processors, memory and network: measured by reading it here once.

The figures are those of the tables of Zhao et al. (ISCA 2022): features and bytes stored and used, coverage
and length of lists, bytes read for a byte wanted, CPU seconds of a sample by phase, and bytes that a sample
moves. Bytes of memory are an estimate: what was read, decoded and given out, each written once and read once.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa

from windtunnel.base import units
from windtunnel.base.errors import UserError
from windtunnel.data.ingest.arrays import lengths_of
from windtunnel.data.ingest.layout import keys
from windtunnel.data.ingest.model import IngestSession
from windtunnel.data.ingest.reader import Reader, needed
from windtunnel.data.ingest.storage import ReadMeter, TableFiles

PHASES = ("read", "decode", "transform", "batch")


@dataclass(frozen=True)
class Character:
    """Bytes are as stored unless said otherwise; what is "a sample" is of the rows given out.

    ``stored_bytes``: of the files; ``session_bytes``: of the row groups that the filter does not rule out.
    ``dense``, ``sparse``, ``other``: features stored, by their kind: numbers, lists, neither; ``used``: of
    those, read by the session; ``used_bytes``: of the columns read, as a share of ``session_bytes``.
    ``coverage``, ``length``: of the used features, mean over them of the share of rows that have one, and of
    the elements of a list that there is. ``cpu``: seconds a sample, by phase. ``memory``: bytes a sample
    (estimated), ``bandwidth``: bytes/s of that while it was read here. ``stall``: of a trainer that takes
    ``demand`` rows/s, the part of time that it would wait for one worker as fast as this (derived).
    """

    files: int
    row_groups: int
    table_rows: int
    stored_bytes: int
    session_bytes: int
    dense: int
    sparse: int
    other: int
    used: int
    used_bytes: float
    coverage: float
    length: float
    rows: int
    kept: int
    reads: int
    read_bytes: int
    wanted_bytes: int
    seconds: float
    cpu: dict[str, float]
    memory: float
    bandwidth: float
    network_in: float
    network_out: float
    demand: float | None = None
    stall: float | None = None
    workers: int | None = None

    @property
    def amplification(self) -> float:
        """Bytes read for a byte wanted."""
        return self.read_bytes / max(1, self.wanted_bytes)

    @property
    def rate(self) -> float:
        """Rows/s given out, by one worker."""
        return self.kept / self.seconds


def characterise(
    session: IngestSession, *, splits: int | None = None, demand: float | None = None,
    progress: Callable[[str, float], None] = lambda part, done: None,
) -> Character:  # fmt: skip
    """Read an epoch of ``session``, or its first ``splits`` splits. ``demand``: rows/s that trainers take.

    Raises:
        UserError: as of `reader.splits`, or no row meets the filter.
    """
    reader = Reader(session)
    entries = reader.splits()
    chosen = entries[:splits]
    if not chosen:
        raise UserError(f"{session.table}: where rules all rows out, accepted is a filter that leaves some")
    out = 0
    begin = time.perf_counter()
    for place, split in enumerate(chosen):
        progress("read", place / len(chosen))
        for batch in reader.batches(split, 0):
            out += pa.ipc.get_record_batch_size(batch)
    seconds = time.perf_counter() - begin
    meter, output_rows = reader.meter, reader.meter.output_rows
    if not output_rows:
        raise UserError(f"{session.table}: no row meets where, accepted is a filter that leaves some")
    counts = {"dense": 0, "sparse": 0, "other": 0}
    files = TableFiles(session.table, session.storage, ReadMeter())  # what it reads is no part of the session
    for column in files.footer(files.names[0]).schema:
        for kind, count in _features(files, column):
            counts[_word(kind)] += count
    footers = reader.files.footers()
    groups = [(reader.files.footer(entry.file), group) for entry in entries for group in entry.groups]
    session_bytes = sum(
        footer.metadata.row_group(group).column(leaf).total_compressed_size
        for footer, group in groups
        for leaf in range(footer.metadata.num_columns)
    )
    chunks = (footer.chunk(group, path) for footer, group in groups for path in reader.paths(footer))
    read_bytes = sum(last - first for first, last in chunks)
    coverage, length = _first_split(session)
    memory = 2 * (meter.nbytes + meter.decoded + meter.output_bytes) / output_rows
    rate = output_rows / seconds
    return Character(
        files=len(footers), row_groups=sum(footer.metadata.num_row_groups for footer in footers),
        table_rows=sum(footer.metadata.num_rows for footer in footers),
        stored_bytes=sum(footer.size for footer in footers), session_bytes=session_bytes, **counts,
        used=len(reader.sources), used_bytes=read_bytes / session_bytes, coverage=coverage, length=length,
        rows=meter.rows, kept=output_rows, reads=meter.reads, read_bytes=meter.nbytes,
        wanted_bytes=meter.wanted, seconds=seconds,
        cpu={name: meter.seconds.get(name, 0.0) / output_rows for name in PHASES}, memory=memory,
        bandwidth=memory * rate, network_in=meter.nbytes / output_rows, network_out=out / output_rows,
        demand=demand, stall=None if demand is None else max(0.0, 1 - rate / demand),
        workers=None if demand is None else math.ceil(demand / rate),
    )  # fmt: skip


def lines(character: Character) -> list[tuple[str, str, str]]:
    """What, how much, and how it is known, for a table on the terminal."""
    stored = character.dense + character.sparse + character.other
    rows = [
        ("table", f"{units.size(character.stored_bytes)}, {character.table_rows:,} rows", "from footers"),
        ("of it for the session", units.size(character.session_bytes), "from footers"),
        (
            "features stored",
            f"{character.dense:,} dense, {character.sparse:,} sparse, {character.other:,} other",
            "counted",
        ),
        ("features used", f"{character.used:,}, {units.share(character.used / stored)}", "counted"),
        ("bytes of used columns", units.share(character.used_bytes), "counted"),
        ("coverage of used features", f"{character.coverage:.2f}", "measured in the first split"),
        ("length of used lists", f"{character.length:.1f}", "measured in the first split"),
        ("reads", f"{character.reads:,} of {units.size(character.read_bytes / character.reads)}", "counted"),
        ("bytes read", units.size(character.read_bytes), "counted"),
        (
            "bytes wanted",
            f"{units.size(character.wanted_bytes)}, amplification {character.amplification:.2f}",
            "counted",
        ),
        *(
            (f"CPU of a sample: {name}", units.seconds(character.cpu[name]), "measured, one thread")
            for name in PHASES
        ),
        (
            "memory of a sample",
            f"{units.size(character.memory)}, {units.rate(character.bandwidth)}",
            "estimated",
        ),
        ("network of a sample, in", units.size(character.network_in), "counted"),
        ("network of a sample, out", units.size(character.network_out), "counted"),
        (
            "rows given out",
            f"{character.kept:,} of {character.rows:,}, {units.count(character.rate)} a second",
            "measured",
        ),
    ]
    if character.demand is not None and character.stall is not None:
        words = f"{units.share(character.stall)} with one worker, {character.workers:,} workers for none"
        rows.append((f"stall at {units.count(character.demand)} rows/s", words, "derived from the rate"))
    return rows


def _features(files: TableFiles, column: pa.Field) -> list[tuple[pa.DataType, int]]:
    """The kinds of features that a stored column has, and how many of each."""
    if pa.types.is_map(column.type):
        return [(column.type.item_type, len(keys(files, column.name)))]
    if pa.types.is_struct(column.type):
        return [(field.type, 1) for field in column.type]
    return [(column.type, 1)]


def _word(kind: pa.DataType) -> str:
    if pa.types.is_nested(kind) and not (pa.types.is_struct(kind) or pa.types.is_map(kind)):
        return "sparse"
    return "dense" if pa.types.is_integer(kind) or pa.types.is_floating(kind) else "other"


def _first_split(session: IngestSession) -> tuple[float, float]:
    """Mean coverage, and mean length of lists, of the used features in the first split that has rows."""
    plain = replace(session, columns=needed(session), transforms=(), shuffle=False)
    reader = Reader(plain)
    tables = (pa.Table.from_batches(reader.batches(split, 0), reader.schema) for split in reader.splits())
    table = next(table for table in tables if table.num_rows)
    coverages, means = [], []
    for column in table.itercolumns():
        coverages.append(1 - column.null_count / table.num_rows)
        if _word(column.type) == "sparse":
            total = sum(int(lengths_of(chunk).sum()) for chunk in column.chunks)
            means.append(total / max(1, table.num_rows - column.null_count))
    return float(np.mean(coverages)), float(np.mean(means)) if means else 0.0
