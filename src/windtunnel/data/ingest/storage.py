"""Files of a table, on any file system of fsspec, and what is read of them: counted, and as few reads as pay.

Columns that are wanted lie apart in a file: read one by one they are many small reads, and a disk or an
object store serves few a second. So those that lie within `HOLE` of each other are read as one, with what is
between (Zhao et al., ISCA 2022: coalesced reads). What a decoder then asks for comes out of what was read.
"""

from __future__ import annotations

import bisect
import struct
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from windtunnel.base.errors import UserError
from windtunnel.store.columns import hidden

HOLE = 1_310_720
"""Bytes that are not wanted and are read nevertheless, for one read less: 1.25 MiB, the paper's."""
TAIL = 65_536
"""Bytes of a file's end that are read first: most footers are within."""
SIGNATURE = 28
"""Bytes after a footer that can be read, of a file with encrypted columns: a nonce and a tag."""
READERS = 8
"""Footers read at once."""


@dataclass
class ReadMeter:
    """What was read, and what it took; sums over all that a reader did.

    ``reads`` and ``nbytes``: of data; footers are counted apart. ``wanted``: bytes of the columns wanted, as
    stored. ``decoded``: the same, as Arrow. ``rows``: stored, ``output_rows``: given out. ``seconds``: of
    CPU, by phase (read, decode, transform, batch)."""

    reads: int = 0
    nbytes: int = 0
    footers: int = 0
    footer_bytes: int = 0
    wanted: int = 0
    decoded: int = 0
    output_bytes: int = 0
    rows: int = 0
    output_rows: int = 0
    seconds: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Footer:
    """What a Parquet file says of itself; ``size``: its bytes."""

    size: int
    metadata: Any
    schema: pa.Schema

    @cached_property
    def leaves(self) -> dict[str, tuple[str, ...]]:
        """Of each column the paths of its leaf columns."""
        paths = [self.metadata.schema.column(leaf).path for leaf in range(self.metadata.num_columns)]
        places, first = {}, 0
        for column in self.schema:
            last = first + _leaves(column.type)
            places[column.name], first = tuple(paths[first:last]), last
        return places

    @cached_property
    def places(self) -> dict[str, int]:
        """Of each leaf column its number."""
        return {self.metadata.schema.column(leaf).path: leaf for leaf in range(self.metadata.num_columns)}

    def chunk(self, group: int, path: str) -> tuple[int, int]:
        """Where a leaf column of a row group begins and ends."""
        column = self.metadata.row_group(group).column(self.places[path])
        first = column.data_page_offset
        if column.dictionary_page_offset is not None and 0 < column.dictionary_page_offset < first:
            first = column.dictionary_page_offset
        return first, first + column.total_compressed_size


class TableFiles:
    """The files of ``table``, a path or a URL of fsspec with ``options``: a Parquet file, or a folder.

    Every function raises UserError where the table or a file is not there, cannot be read, or is no Parquet.
    """

    def __init__(self, table: str, options: dict[str, Any], meter: ReadMeter) -> None:
        import fsspec

        self.table, self.meter = table, meter
        try:
            self.system, self.root = fsspec.core.url_to_fs(table, **options)
        except (ImportError, ValueError, TypeError) as error:
            raise UserError(f"{table}: no such storage ({error}), accepted is a URL of fsspec") from None
        self._footers: dict[str, Footer] = {}

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Sorted. Of a folder all beneath it that is not `hidden`."""
        try:
            paths = self.system.find(self.root)
        except OSError as error:
            raise UserError(
                f"{self.table}: cannot be listed ({_reason(error)}), accepted is a table"
            ) from None
        names = [name for name in sorted(paths) if not hidden(name[len(self.root) :])]
        if not names:
            there = "has no files" if self.system.exists(self.root) else "is not there"
            raise UserError(f"{self.table}: {there}, accepted is a Parquet file, or a folder of them")
        return tuple(names)

    def footers(self) -> list[Footer]:
        """Of all files, in their order."""
        with ThreadPoolExecutor(READERS) as pool:
            return list(pool.map(self.footer, self.names))

    def footer(self, name: str) -> Footer:
        if name not in self._footers:
            self._footers[name] = self._read_footer(name)
        return self._footers[name]

    def _read_footer(self, name: str) -> Footer:
        try:
            size = int(self.system.info(name)["size"])
        except OSError as error:
            raise UserError(
                f"{name}: cannot be read ({_reason(error)}), accepted is a Parquet file"
            ) from None
        tail = self._raw(name, [(max(0, size - TAIL), size)])[0] if size >= 12 else b""
        magic = tail[-4:]
        if magic == b"PARE":
            raise UserError(f"{name}: its footer is encrypted, accepted are Parquet files that are not")
        if magic != b"PAR1":
            raise UserError(f"{name}: no Parquet file, or a truncated one, accepted is a whole Parquet file")
        length = struct.unpack("<I", tail[-8:-4])[0] + 8
        if length > len(tail) and length <= size:
            tail = self._raw(name, [(size - length, size)])[0]
        try:
            metadata = pq.read_metadata(pa.BufferReader(tail))
            schema = metadata.schema.to_arrow_schema()
        except (OSError, pa.ArrowException) as error:
            raise UserError(
                f"{name}: its footer cannot be read ({line(error)}), accepted is a whole file"
            ) from None
        if length - 8 - metadata.serialized_size == SIGNATURE:
            # not one of its columns may be asked for: Arrow would end the process at an encrypted one
            raise UserError(f"{name}: has columns that are encrypted, accepted are Parquet files without")
        return Footer(size, metadata, schema)

    def _raw(self, name: str, ranges: Sequence[tuple[int, int]], *, data: bool = False) -> list[bytes]:
        """What is in the ranges of a file, each by one read."""
        starts, ends = [first for first, _ in ranges], [last for _, last in ranges]
        try:
            blocks = self.system.cat_ranges([name] * len(ranges), starts, ends, on_error="raise")
        except OSError as error:
            raise UserError(
                f"{name}: cannot be read ({_reason(error)}), accepted is a Parquet file"
            ) from None
        for (first, last), block in zip(ranges, blocks, strict=True):
            if len(block) != last - first:
                raise UserError(
                    f"{name}: ends within bytes {first} to {last}, which its footer names, accepted is a"
                    " whole file"
                )
        if data:
            self.meter.reads += len(ranges)
            self.meter.nbytes += sum(map(len, blocks))
        else:
            self.meter.footers += len(ranges)
            self.meter.footer_bytes += sum(map(len, blocks))
        return list(blocks)

    def open(self, name: str, ranges: Iterable[tuple[int, int]], hole: int = HOLE) -> PrefetchedFile:
        """A file of which these ranges are read already."""
        merged = merge(ranges, hole)
        return PrefetchedFile(self, name, self.footer(name).size, merged, self._raw(name, merged, data=True))


def merge(ranges: Iterable[tuple[int, int]], hole: int) -> list[tuple[int, int]]:
    """Ranges with at most ``hole`` bytes between them as one; negative: none of them."""
    merged: list[tuple[int, int]] = []
    for first, last in sorted(ranges):
        if merged and first - merged[-1][1] <= hole:
            merged[-1] = (merged[-1][0], max(last, merged[-1][1]))
        else:
            merged.append((first, last))
    return merged


class PrefetchedFile:
    """A file as Arrow reads it, most of it from memory; anything else is a read of its own."""

    closed = False

    def __init__(
        self, files: TableFiles, name: str, size: int, ranges: list[tuple[int, int]], parts: list[bytes]
    ) -> None:
        self._files, self._name, self._size = files, name, size
        self._ranges, self._parts = ranges, [memoryview(part) for part in parts]
        self._at = 0

    def seek(self, offset: int, whence: int = 0) -> int:
        self._at = offset + (0, self._at, self._size)[whence]
        return self._at

    def tell(self) -> int:
        return self._at

    def read(self, count: int = -1) -> memoryview:
        first = self._at
        last = self._size if count < 0 else min(first + count, self._size)
        self._at = last
        place = bisect.bisect_right(self._ranges, (first, self._size)) - 1
        if place >= 0 and last <= self._ranges[place][1]:
            start = self._ranges[place][0]
            return self._parts[place][first - start : last - start]
        return memoryview(self._files._raw(self._name, [(first, last)], data=True)[0])

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def writable(self) -> bool:
        return False

    def close(self) -> None:
        self.closed = True


def _leaves(kind: pa.DataType) -> int:
    """Leaf columns that a column is stored as."""
    if pa.types.is_dictionary(kind):
        return _leaves(kind.value_type)
    return sum(_leaves(kind.field(place).type) for place in range(kind.num_fields)) if kind.num_fields else 1


def _reason(error: OSError) -> str:
    return error.strerror or line(error) or type(error).__name__


def line(error: BaseException) -> str:
    """The first line of what an error says, without the sentence's end."""
    return str(error).splitlines()[0].rstrip(".") if str(error) else type(error).__name__
