"""Tables laid out for the sessions that read them, and how much of a table serves how many of its reads.

Samples are logged as maps of features, and a job wants a tenth of them: it reads all. So each feature becomes
a column of its own (flattening); columns that the same sessions read lie beside each other (reordering), so
that one read takes several; and row groups are large, so that a column's part of one is worth a read. The
ladder of Zhao et al. (ISCA 2022), who find that the first alone makes reads tiny.

What it brings is counted: each session reads its rows from the old table and from the new one, row for row
the same.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from windtunnel.base import atomic
from windtunnel.base.errors import HostError, UserError
from windtunnel.data.ingest.model import IngestSession
from windtunnel.data.ingest.reader import BLOCK, Reader, needed
from windtunnel.data.ingest.storage import HOLE, ReadMeter, TableFiles, line, merge

GROUP_BYTES = 256 * 2**20
"""Of a row group, as Arrow: what is held in memory when it is written."""
CODECS = {"UNCOMPRESSED": "none", "LZ4": "lz4"}


@dataclass(frozen=True)
class Reuse:
    """How sessions share a table's stored columns. ``nbytes``: of all; ``read``: of those that any session
    reads; ``popular``: the share of bytes that serves 80 % of the bytes read; ``sessions``: of each column
    read, how many sessions read it."""

    columns: int
    nbytes: int
    read: int
    popular: float
    sessions: Mapping[str, int]


@dataclass(frozen=True)
class ReadCost:
    """What one session reads of a table: ``reads``, ``nbytes`` by them, of which it ``wanted`` so many."""

    rows: int
    reads: int
    nbytes: int
    wanted: int

    @property
    def amplification(self) -> float:
        """Bytes read for a byte wanted."""
        return self.nbytes / self.wanted if self.wanted else 1.0


@dataclass(frozen=True)
class ColumnLayout:
    """What `lay_out` made. ``order``: the columns'; ``before`` and ``after``: of each session; ``reuse``: of
    the new table."""

    folder: Path
    order: tuple[str, ...]
    group_rows: int
    before: tuple[ReadCost, ...]
    after: tuple[ReadCost, ...]
    reuse: Reuse


def reuse(sessions: Sequence[IngestSession]) -> Reuse:
    """Of the table that all ``sessions`` read, from its footers alone."""
    files = TableFiles(sessions[0].table, sessions[0].storage, ReadMeter())
    sizes: dict[str, int] = {}
    for footer in files.footers():
        for name, paths in footer.leaves.items():
            chunks = [
                footer.chunk(group, path) for group in range(footer.metadata.num_row_groups) for path in paths
            ]
            sizes[name] = sizes.get(name, 0) + sum(last - first for first, last in chunks)
    requested: dict[str, int] = {}
    for session in sessions:
        for name in {source.column for source in Reader(session).sources.values()}:
            requested[name] = requested.get(name, 0) + 1
    ranked = sorted(requested, key=lambda name: (-requested[name], name))
    stored = np.cumsum([0] + [sizes[name] for name in ranked])
    read = np.cumsum([0] + [sizes[name] * requested[name] for name in ranked])
    total = max(1, sum(sizes.values()))
    popular = float(np.interp(0.8 * read[-1], read, stored)) / total
    return Reuse(len(sizes), sum(sizes.values()), int(stored[-1]), popular, requested)


def lay_out(
    table: str, sessions: Sequence[IngestSession], out: Path, *, group_rows: int | None = None,
    progress: Callable[[str, float], None] = lambda part, done: None,
) -> ColumnLayout:  # fmt: skip
    """Write ``table`` anew in ``out``, a folder that is not there yet: a file for each of its files, with the
    same rows in the same order. ``group_rows``: of a row group, default `GROUP_BYTES` of memory.

    A map or a struct of which some session wants only features is flattened: its features become columns
    ``map/key``. (A null map and an empty one are then the same: all its features are null.)

    Raises:
        UserError: of the table or the sessions, as `Reader`'s; or ``out`` is there, or within the table.
        HostError: ``out`` cannot be written; nothing of it is left.
    """
    out = out.absolute()
    sessions = [replace(session, table=table, shuffle=False) for session in sessions]
    if out.exists():
        raise UserError(f"`out` {out}: is there already, accepted is a folder that is not")
    if out.is_relative_to(Path(table).absolute()) and "://" not in table:
        raise UserError(f"`out` {out}: lies in the table {table}, accepted is a folder elsewhere")
    files = TableFiles(table, sessions[0].storage, ReadMeter())
    names = _features(files, sessions)
    whole = IngestSession(
        table, tuple(names), batch=BLOCK, split_rows=1, storage=sessions[0].storage, drift=sessions[0].drift
    )
    signatures = {
        name: frozenset(at for at, session in enumerate(sessions) if name in needed(session))
        for name in names
    }
    reader = Reader(whole)
    splits = reader.splits()
    first = pa.Table.from_batches([next(reader.batches(splits[0], 0))])
    row_bytes = max(1.0, first.nbytes / first.num_rows)
    group_rows = group_rows or max(1, int(GROUP_BYTES / row_bytes))
    sizes = {name: first[name].nbytes * group_rows / first.num_rows for name in names}
    order = best_order(signatures, sizes)
    whole = replace(whole, columns=tuple(order))
    codec = _codec(files)
    part = atomic.temporary(out)
    try:
        part.mkdir(parents=True)
        reader = Reader(whole)
        for place, name in enumerate(files.names):
            progress("write", place / len(files.names))
            path = part / f"part-{place:05}.parquet"
            batches = (batch for split in splits if split.file == name for batch in reader.batches(split, 0))
            _write(path, reader.schema, batches, group_rows, codec)
        before, after = [], []
        for place, session in enumerate(sessions):
            progress("compare", place / len(sessions))
            old, new = compared(session, replace(session, table=str(part), storage={}))
            before.append(old)
            after.append(new)
        os.rename(part, out)
    except BaseException as error:
        shutil.rmtree(part, ignore_errors=True)
        if isinstance(error, OSError):
            raise HostError(f"{out}: cannot be written ({line(error)}), and nothing of it is left") from None
        raise
    anew = [replace(session, table=str(out), storage={}) for session in sessions]
    return ColumnLayout(out, tuple(order), group_rows, tuple(before), tuple(after), reuse(anew))


def compared(old: IngestSession, new: IngestSession) -> tuple[ReadCost, ReadCost]:
    """What the same session reads of two tables with the same rows, without its transforms.

    Raises:
        UserError: their rows differ.
    """
    readers = [
        Reader(replace(session, columns=needed(session), transforms=(), shuffle=False, batch=BLOCK))
        for session in (old, new)
    ]
    streams = [reader.cut(_batches(reader), BLOCK) for reader in readers]
    row = 0
    while True:
        left, right = (next(stream, None) for stream in streams)
        if left is None and right is None:
            break
        if left is None or right is None or not same(left, right):
            raise UserError(f"{new.table}: differs from {old.table} within {BLOCK} rows from row {row}")
        row += left.num_rows
    costs = [
        ReadCost(reader.meter.output_rows, reader.meter.reads, reader.meter.nbytes, reader.meter.wanted)
        for reader in readers
    ]
    return costs[0], costs[1]


def _batches(reader: Reader) -> Iterator[pa.RecordBatch]:
    for split in reader.splits():
        yield from reader.batches(split, 0)


def same(left: pa.RecordBatch, right: pa.RecordBatch) -> bool:
    """Bit for bit: a NaN is the same as itself."""
    if left.equals(right):
        return True
    if left.schema != right.schema or left.num_rows != right.num_rows:
        return False
    return all(
        column.equals(two) or column.view(_bits(column.type)).equals(two.view(_bits(two.type)))
        for column, two in zip(left.columns, right.columns, strict=True)
    )


def best_order(
    signatures: Mapping[str, frozenset[int]], sizes: Mapping[str, float], hole: int = HOLE
) -> list[str]:
    """Columns in the order that costs sessions the fewest bytes in holes, then the fewest reads, of those
    tried: as they are; by how many sessions read them; and so that each is like the one before.

    ``signatures``: of each column the sessions that read it; ``sizes``: bytes of its part of a row group.
    """
    names = list(signatures)
    popular = sorted(names, key=lambda name: (-len(signatures[name]), sorted(signatures[name])))
    chain: list[str] = []
    rest = sorted(set(signatures.values()), key=lambda signature: (-len(signature), sorted(signature)))
    at = rest[0]
    while rest:
        at = max(rest, key=lambda group: (len(group & at) / max(1, len(group | at)), len(group)))
        rest.remove(at)
        chain += [name for name in names if signatures[name] == at]

    def cost(order: Sequence[str]) -> tuple[float, int]:
        ends = dict(zip(order, np.cumsum([sizes[name] for name in order]).tolist(), strict=True))
        nbytes, reads = 0.0, 0
        for session in sorted(set().union(*signatures.values())):
            requested = [(int(ends[n] - sizes[n]), int(ends[n])) for n in order if session in signatures[n]]
            merged = merge(requested, hole)
            nbytes += sum(last - first for first, last in merged)
            reads += len(merged)
        return nbytes, reads

    return min((names, popular, chain), key=cost)


def _features(files: TableFiles, sessions: Sequence[IngestSession]) -> list[str]:
    """The columns that the new table has, in the old one's order."""
    requested = {name for session in sessions for name in needed(session)}
    names: list[str] = []
    for column in files.footer(files.names[0]).schema:
        parts = column.name in requested or not any(name.startswith(f"{column.name}/") for name in requested)
        if pa.types.is_struct(column.type) and not parts:
            names += [f"{column.name}/{field.name}" for field in column.type]
        elif pa.types.is_map(column.type) and not parts:
            names += [f"{column.name}/{key}" for key in keys(files, column.name)]
        else:
            names.append(column.name)
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice:
        raise UserError(
            f"{files.table}: a column {twice} is there beside the feature, accepted are names once"
        )
    return names


def keys(files: TableFiles, column: str) -> list[Any]:
    """All keys that a map has in any row, sorted; only they are read."""
    values: set[Any] = set()
    for name in files.names:
        footer = files.footer(name)
        if column not in footer.leaves:
            continue
        path = footer.leaves[column][0]
        for group in range(footer.metadata.num_row_groups):
            pages = files.open(name, [footer.chunk(group, path)])
            file = pq.ParquetFile(pages, metadata=footer.metadata, pre_buffer=False)
            chunk = file.read_row_group(group, [path], use_threads=False)
            inner: Any = chunk.column(0).combine_chunks()
            while not pa.types.is_primitive(inner.type) and inner.type.num_fields:
                inner = inner.flatten() if isinstance(inner, pa.ListArray) else inner.field(0)
            values |= set(inner.unique().to_pylist())
    return sorted(values - {None})


def _write(path: Path, schema: pa.Schema, batches: Iterator[pa.RecordBatch], rows: int, codec: str) -> None:
    with pq.ParquetWriter(path, schema, compression=codec, write_page_checksum=True) as writer:
        pending: list[pa.RecordBatch] = []
        count = 0
        for batch in batches:
            while count + batch.num_rows >= rows:
                pending.append(batch.slice(0, rows - count))
                batch = batch.slice(rows - count)
                writer.write_table(pa.Table.from_batches(pending, schema), row_group_size=rows)
                pending, count = [], 0
            pending.append(batch)
            count += batch.num_rows
        if count:
            writer.write_table(pa.Table.from_batches(pending, schema), row_group_size=rows)


def _codec(files: TableFiles) -> str:
    """The one that the table's first column has."""
    footer = files.footer(files.names[0])
    if not footer.metadata.num_row_groups or not footer.metadata.num_columns:
        return "zstd"
    name = footer.metadata.row_group(0).column(0).compression
    return CODECS.get(name, name.lower())


def _bits(kind: pa.DataType) -> pa.DataType:
    """The type of the same bytes in which no value is a NaN."""
    if pa.types.is_floating(kind):
        return {16: pa.int16(), 32: pa.int32(), 64: pa.int64()}[kind.bit_width]
    if pa.types.is_list(kind):
        return pa.list_(_bits(kind.value_type))
    if pa.types.is_fixed_size_list(kind):
        return pa.list_(_bits(kind.value_type), kind.list_size)
    if pa.types.is_struct(kind):
        return pa.struct([(field.name, _bits(field.type)) for field in kind])
    return pa.map_(kind.key_type, _bits(kind.item_type)) if pa.types.is_map(kind) else kind
