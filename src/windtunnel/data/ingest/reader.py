"""Splits of a session's table, and the batches that one split becomes: read, filtered, transformed, cut.

Only what the session needs is read (`storage` joins reads that lie near each other); row groups whose
statistics rule all their rows out are left out of the splits. A column may be a feature within a map or a
struct (``map/key``, ``struct/field``): of a struct that field alone is read, of a map all of it, which is
what `layout` puts right. What a column is does not depend on who wrote the file: dictionaries are decoded,
and large strings and lists are strings and lists; a fixed-size list stays one.

All is deterministic: the batches of a split follow from session, split and epoch. With ``shuffle`` rows
change places within their split, by a permutation drawn from (seed, epoch, number of the split).
"""

from __future__ import annotations

import difflib
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from windtunnel.base.errors import UserError
from windtunnel.data.ingest import filters, transforms
from windtunnel.data.ingest.model import IngestSession, TableSplit
from windtunnel.data.ingest.storage import HOLE, Footer, ReadMeter, TableFiles, line
from windtunnel.data.ingest.transforms import Rows

BLOCK = 8192
"""Rows that are decoded and transformed at a time, or a batch where that is more."""


def order(session: IngestSession, count: int, epoch: int) -> list[int]:
    """The numbers of a session's ``count`` splits, in the order in which the epoch has them."""
    if not session.shuffle:
        return list(range(count))
    return [int(number) for number in np.random.default_rng([session.seed, epoch]).permutation(count)]


@dataclass(frozen=True)
class ColumnSource:
    """Where a feature is stored: a column, or the ``key`` of a map, or a field of a struct; ``kind``: its
    type."""

    column: str
    key: Any
    kind: pa.DataType


class Reader:
    """A session's table, opened. ``meter`` counts what is read and given; ``hole``: see `storage.merge`."""

    def __init__(self, session: IngestSession, meter: ReadMeter | None = None, hole: int = HOLE) -> None:
        self.session, self.hole = session, hole
        self.meter = meter or ReadMeter()
        self.files = TableFiles(session.table, session.storage, self.meter)
        where = session.table
        self._steps = [
            (transform, transforms.settings(transform, f"{where}: transforms.{place}"))
            for place, transform in enumerate(session.transforms)
        ]

    @cached_property
    def _first(self) -> Footer:
        return self.files.footer(self.files.names[0])

    @cached_property
    def sources(self) -> dict[str, ColumnSource]:
        """Of each feature that is read (for a batch, a transform or the filter) where it is stored."""
        return {name: self._source(name) for name in needed(self.session)}

    @cached_property
    def schema(self) -> pa.Schema:
        """Of the batches."""
        empty = {name: pa.array([], source.kind) for name, source in self.sources.items()}
        filters.mask(empty, self.session, 0)
        outputs = transforms.apply(self._steps, empty, Rows(0, 0, np.zeros(0, np.int64)), self.session.table)
        return pa.schema([(name, outputs[name].type) for name in self.session.columns])

    def splits(self) -> tuple[TableSplit, ...]:
        """Those of the table as it is now, in the order of its files; none where ``where`` rules all out.

        Raises:
            UserError: the table or one of its files cannot be read, lacks a column or has it of another type
                than the first file, or the session's filter or transforms do not take the columns.
        """
        _ = self.schema  # what is wrong with the session is said before any data is read
        footers = self.files.footers()
        if not sum(footer.metadata.num_rows for footer in footers):
            raise UserError(f"{self.session.table}: has no rows, accepted is a table with rows")
        splits: list[TableSplit] = []
        for name, footer in zip(self.files.names, footers, strict=True):
            self._check(name, footer)
            groups: list[int] = []
            rows = 0
            for group in range(footer.metadata.num_row_groups):
                count = footer.metadata.row_group(group).num_rows
                if not count or self._ruled_out(footer, group):
                    continue
                groups.append(group)
                rows += count
                if rows >= self.session.split_rows:
                    splits.append(TableSplit(len(splits), name, tuple(groups), rows))
                    groups, rows = [], 0
            if groups:
                splits.append(TableSplit(len(splits), name, tuple(groups), rows))
        return tuple(splits)

    def batches(self, split: TableSplit, epoch: int) -> Iterator[pa.RecordBatch]:
        """Of a split, in order: ``session.columns`` each, ``session.batch`` rows, the last one what is left;
        none where the filter leaves no row.

        Raises:
            UserError: as of `splits`, or a file is corrupt (with row group and column) or is another by now.
        """
        names = self.schema.names
        blocks = self._rows(split)
        if self.session.shuffle:
            blocks = self._shuffled(blocks, split, epoch)
        for batch in self.cut(self._transformed(blocks, split, names), self.session.batch):
            self.meter.output_rows += batch.num_rows
            self.meter.output_bytes += batch.nbytes
            yield batch

    def cut(self, blocks: Iterable[pa.RecordBatch], size: int) -> Iterator[pa.RecordBatch]:
        """The same rows, ``size`` at a time."""
        partial: list[pa.RecordBatch] = []
        rows = 0
        for block in blocks:
            at = 0
            while rows + block.num_rows - at >= size:
                partial.append(block.slice(at, size - rows))
                at += size - rows
                yield self._joined(partial)
                partial, rows = [], 0
            if at < block.num_rows:
                partial.append(block.slice(at))
                rows += block.num_rows - at
        if partial:
            yield self._joined(partial)

    def _joined(self, parts: list[pa.RecordBatch]) -> pa.RecordBatch:
        with self._phase("batch"):
            return parts[0] if len(parts) == 1 else pa.concat_batches(parts)

    def _rows(self, split: TableSplit) -> Iterator[tuple[dict[str, pa.Array], Any]]:
        """Features of the rows that the filter leaves, block by block, and the rows' numbers in the split."""
        with self._phase("read"):
            footer = self.files.footer(split.file)
            groups = footer.metadata.num_row_groups
            if split.groups[-1] >= groups or split.rows != sum(
                footer.metadata.row_group(group).num_rows for group in split.groups
            ):
                raise UserError(
                    f"{split.file}: is another file than when the session began, accepted is the same"
                )
            self._check(split.file, footer)
            paths = self.paths(footer)
            ranges = [footer.chunk(group, path) for group in split.groups for path in paths]
            row_group = self.files.open(split.file, ranges, self.hole)
            self.meter.wanted += sum(last - first for first, last in ranges)
        begin = 0
        decoded = self._decoded(row_group, footer, split, paths)
        while True:
            with self._phase("decode"):
                block = next(decoded, None)
                if block is None:
                    return
                count = block.num_rows
                columns = {name: _feature(block, source, count) for name, source in self.sources.items()}
                self.meter.decoded += sum(column.nbytes for column in columns.values())
                self.meter.rows += count
                numbers = np.arange(begin, begin + count)
                begin += count
                mask = filters.mask(columns, self.session, count)
                if mask is not None:
                    columns = {name: column.filter(mask) for name, column in columns.items()}
                    numbers = numbers[np.asarray(mask)]
            yield columns, numbers

    def _decoded(
        self, row_group: Any, footer: Footer, split: TableSplit, paths: Sequence[str]
    ) -> Iterator[pa.RecordBatch]:
        options = {"metadata": footer.metadata, "pre_buffer": False, "page_checksum_verification": True}
        try:
            file = pq.ParquetFile(row_group, **options)
            if not paths:  # of a table whose files lack all that is wanted there are still rows
                for start in range(0, split.rows, BLOCK):
                    yield pa.record_batch({"": pa.nulls(min(BLOCK, split.rows - start))})
                return
            size = max(BLOCK // self.session.batch, 1) * self.session.batch
            yield from file.iter_batches(size, list(split.groups), list(paths), use_threads=False)
        except (OSError, pa.ArrowException) as error:
            for group in split.groups:
                for path in paths:
                    try:
                        pq.ParquetFile(row_group, **options).read_row_group(group, [path], use_threads=False)
                    except (OSError, pa.ArrowException) as own:
                        raise UserError(
                            f"{split.file}: row group {group}, column {path} cannot be decoded ({line(own)}),"
                            " accepted is a Parquet file as it was written"
                        ) from None
            raise UserError(
                f"{split.file}: cannot be decoded ({line(error)}), accepted is a Parquet file"
            ) from None

    def _shuffled(
        self, blocks: Iterable[tuple[dict[str, pa.Array], Any]], split: TableSplit, epoch: int
    ) -> Iterator[tuple[dict[str, pa.Array], Any]]:
        runs = list(blocks)
        with self._phase("batch"):
            numbers = np.concatenate([run for _, run in runs])
            rng = np.random.default_rng((self.session.seed, epoch, split.number))
            order = rng.permutation(len(numbers))
            whole = {name: pa.concat_arrays([run[name] for run, _ in runs]) for name in self.sources}
        for start in range(0, len(order), BLOCK):
            with self._phase("batch"):
                part = order[start : start + BLOCK]
                indices = pa.array(part)
                block = {name: run.take(indices) for name, run in whole.items()}
            yield block, numbers[part]

    def _transformed(
        self, blocks: Iterable[tuple[dict[str, pa.Array], Any]], split: TableSplit, names: Sequence[str]
    ) -> Iterator[pa.RecordBatch]:
        for columns, numbers in blocks:
            with self._phase("transform"):
                rows = Rows(self.session.seed, split.number, numbers)
                outputs = transforms.apply(self._steps, columns, rows, split.file)
                block = pa.record_batch([outputs[name] for name in names], schema=self.schema)
            if block.num_rows:
                yield block

    def _source(self, name: str) -> ColumnSource:
        """Where the first file has a feature."""
        schema = self._first.schema
        if (place := schema.get_field_index(name)) >= 0:
            return ColumnSource(name, None, canonical(schema.field(place).type))
        for column in schema:
            if not name.startswith(f"{column.name}/"):
                continue
            kind, key = column.type, name[len(column.name) + 1 :]
            if pa.types.is_struct(kind) and (place := kind.get_field_index(key)) >= 0:
                return ColumnSource(column.name, key, canonical(kind.field(place).type))
            if pa.types.is_map(kind):
                try:
                    return ColumnSource(
                        column.name, pa.scalar(key).cast(kind.key_type).as_py(), canonical(kind.item_type)
                    )
                except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
                    raise UserError(
                        f"{self.session.table}: feature {name} has the key {key!r}, accepted is of"
                        f" {kind.key_type}"
                    ) from None
        near = difflib.get_close_matches(name, schema.names, 1, 0)
        hint = f", did you mean {near[0]}?" if near else ","
        count = len(schema.names)
        raise UserError(
            f"{self.files.names[0]}: column {name} is not there{hint} accepted is one of its {count} columns"
        )

    def _check(self, name: str, footer: Footer) -> None:
        """A file has all columns that are read as the first file has them."""
        for column in {source.column: source for source in self.sources.values()}:
            first = canonical(self._first.schema.field(column).type)
            place = footer.schema.get_field_index(column)
            if place < 0 and self.session.drift == "refuse":
                raise UserError(
                    f"{name}: column {column} is not there, which {self.files.names[0]} has, accepted are"
                    " files of one schema (or drift: fill, for nulls in its place)"
                )
            if place >= 0 and (kind := canonical(footer.schema.field(place).type)) != first:
                raise UserError(
                    f"{name}: column {column} is of {kind}, in {self.files.names[0]} of {first}, accepted are"
                    " files of one schema"
                )

    def paths(self, footer: Footer) -> list[str]:
        """The leaf columns of a file that are read."""
        paths: dict[str, None] = {}
        for source in self.sources.values():
            leaves = footer.leaves.get(source.column, ())
            beneath = f"{source.column}.{source.key}"
            struct = source.key is not None and pa.types.is_struct(footer.schema.field(source.column).type)
            paths |= dict.fromkeys(
                path for path in leaves if not struct or path == beneath or path.startswith(f"{beneath}.")
            )
        return list(paths)

    def _ruled_out(self, footer: Footer, group: int) -> bool:
        """Statistics say that no row of the group meets the filter."""
        for name, operator, value in self.session.where:
            leaves = footer.leaves.get(name, ())
            if len(leaves) != 1 or footer.schema.field(name).type.num_fields:
                continue
            statistics = footer.metadata.row_group(group).column(footer.places[leaves[0]]).statistics
            if statistics is None or (value is None and not statistics.has_null_count):
                continue
            if value is None:
                count = footer.metadata.row_group(group).num_rows
                if statistics.null_count == (0 if operator == "==" else count):
                    return True
            elif statistics.has_min_max and filters.outside(
                operator, value, statistics.min, statistics.max, self.sources[name].kind
            ):
                return True
        return False

    @contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        """CPU seconds of a block, added to a phase of the meter."""
        begin, seconds = time.thread_time(), self.meter.seconds
        try:
            yield
        finally:
            seconds[name] = seconds.get(name, 0.0) + time.thread_time() - begin


def needed(session: IngestSession) -> tuple[str, ...]:
    """The features that are read: for the filter, for transforms, for batches."""
    names: dict[str, None] = dict.fromkeys(name for name, _, _ in session.where)
    produced: set[str] = set()
    for transform in session.transforms:
        names |= dict.fromkeys(name for name in transform.inputs if name not in produced)
        produced.add(transform.output)
    names |= dict.fromkeys(name for name in session.columns if name not in produced)
    return tuple(names)


def canonical(kind: pa.DataType) -> pa.DataType:
    """The type that a column has here, whoever wrote it."""
    if pa.types.is_dictionary(kind):
        return canonical(kind.value_type)
    if pa.types.is_large_string(kind) or pa.types.is_string_view(kind):
        return pa.string()
    if pa.types.is_large_binary(kind) or pa.types.is_binary_view(kind):
        return pa.binary()
    if pa.types.is_map(kind):
        return pa.map_(canonical(kind.key_type), canonical(kind.item_type))
    if pa.types.is_struct(kind):
        return pa.struct([(field.name, canonical(field.type)) for field in kind])
    if pa.types.is_fixed_size_list(kind):
        return pa.list_(canonical(kind.value_type), kind.list_size)
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return pa.list_(canonical(kind.value_type))
    return kind


def _feature(block: pa.RecordBatch, source: ColumnSource, count: int) -> pa.Array:
    place = block.schema.get_field_index(source.column)
    if place < 0:
        return pa.nulls(count, source.kind)
    column = block.column(place)
    if source.key is None:
        return column if column.type == source.kind else column.cast(source.kind)
    if pa.types.is_struct(column.type):
        return pc.struct_field(column, source.key).cast(source.kind)
    return _of_map(column, source.key).cast(source.kind)


def _of_map(column: pa.MapArray, key: Any) -> pa.Array:
    """The value of one key in each row, the last one where a row has it twice."""
    offsets = np.asarray(column.offsets)
    keys = column.keys.slice(offsets[0], offsets[-1] - offsets[0])
    entries = np.flatnonzero(np.asarray(pc.fill_null(pc.equal(keys, key), False))) + offsets[0]
    rows = np.searchsorted(offsets, entries, side="right") - 1
    entry_of_row = np.full(len(column), -1, np.int64)
    entry_of_row[rows] = entries
    null = entry_of_row < 0
    if column.null_count:
        null |= np.asarray(column.is_null())
    return column.items.take(pa.array(entry_of_row, mask=null))
