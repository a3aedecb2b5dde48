"""Logs of lookups: which rows the samples of a training set ask for, read piece by piece.

Parquet, Arrow IPC (files, streams, Feather) and NumPy (.npz), told apart by their first bytes, here or at a
URL of fsspec. A feature is a column of whole numbers (one row a sample) or of lists of them, to any depth,
with any offsets and of dictionaries; an .npz file has for each feature ``NAME.ids`` and ``NAME.offsets``
(samples + 1, from 0), or ``NAME.ids`` alone: one a sample, or as many as its second dimension. A sample that
has null or an empty list does not have the feature; a null in a list is no lookup.

What is read is cut into parts (a row group, a record batch, an .npz file), and a part into pieces of one
feature, so memory does not grow with the files.
"""

from __future__ import annotations

import math
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import IO, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from windtunnel.base.errors import UserError
from windtunnel.store.columns import hidden, is_list

BATCH = 65_536
"""Samples of a piece, or ids of one where they are apart."""
BUFFER = 4 << 20
"""Bytes of a Parquet column that are read at once."""
FORMATS = "Parquet, Arrow IPC or .npz"


@dataclass(frozen=True)
class FeatureLookups:
    """Part of one feature's lookups: how many each sample asks for (int64), and the ids (any integers).

    ``nulls``: ids that were null and are left out.
    """

    lengths: NDArray[np.int64]
    ids: NDArray[Any]
    nulls: int = 0


@dataclass(frozen=True)
class SampleBlock:
    """So many samples of a file. ``where`` names it in errors; ``pieces(feature)`` reads one feature of
    it."""

    where: str
    samples: int
    features: tuple[str, ...]
    pieces: Callable[[str], Iterator[FeatureLookups]]


def files(logs: Sequence[str]) -> list[str]:
    """The files that paths, folders, globs and URLs name, those of one by name. In folders what begins with
    a dot or an underscore is no log.

    Raises:
        UserError: there are none, or a URL cannot be reached.
    """
    import fsspec

    paths: list[str] = []
    for log in logs:
        try:
            system, path = fsspec.core.url_to_fs(log)
            if system.isdir(path):
                names = [entry for entry in system.find(path) if not hidden(entry[len(path.rstrip("/")) :])]
            else:
                names = [path] if system.exists(path) else system.glob(path)
        except (OSError, ValueError, ImportError) as fault:
            raise UserError(f"{log}: cannot be reached ({fault})") from None
        if not names:
            raise UserError(
                f"{log}: there is no such log, accepted are files, folders and globs of {FORMATS}"
            )
        paths += [system.unstrip_protocol(name) if "://" in log else name for name in sorted(names)]
    return paths


def parts(file: str) -> Iterator[SampleBlock]:
    """The parts of a file, in order.

    Raises:
        UserError: it cannot be read, or is none of these formats.
    """
    with _naming(file), _open_file(file) as opened:
        start = opened.read(6)
        opened.seek(0)
        if start[:4] == b"PK\x03\x04":
            yield _npz(file, opened)
        elif start[:4] == b"PAR1":
            yield from _parquet(file, opened)
        elif start[:4] == b"PARE":
            raise UserError(f"{file}: this Parquet file is encrypted, accepted is one that is not")
        elif start == b"ARROW1":
            reader = pa.ipc.open_file(opened)
            yield from _ipc(
                file, reader.schema, (reader.get_batch(number) for number in range(reader.num_record_batches))
            )
        elif start[:4] == b"\xff\xff\xff\xff":
            stream = pa.ipc.open_stream(opened)
            yield from _ipc(file, stream.schema, stream)
        else:
            raise UserError(f"{file}: begins with {start!r}, accepted are {FORMATS} files")


def _open_file(file: str) -> Any:
    if "://" not in file:
        return pa.OSFile(file)
    import fsspec

    return fsspec.open(file, "rb")


@contextmanager
def _naming(where: str) -> Iterator[None]:
    """What goes wrong in reading becomes a sentence that begins with ``where``."""
    try:
        yield
    except (
        OSError,
        pa.ArrowException,
        ValueError,
        zipfile.BadZipFile,
        EOFError,
        NotImplementedError,
    ) as fault:
        if "crypt" in str(fault):
            raise UserError(f"{where}: is encrypted, accepted is what is not") from None
        raise UserError(f"{where}: is damaged or cannot be read ({str(fault).splitlines()[0]})") from None


def _parquet(file: str, stream: IO[bytes]) -> Iterator[SampleBlock]:
    # read ahead by so much and no more: a column of a row group can be larger than the memory
    reader = pq.ParquetFile(stream, buffer_size=BUFFER, pre_buffer=False, page_checksum_verification=True)
    features = _features(reader.schema_arrow)

    def of(group: int) -> Callable[[str], Iterator[FeatureLookups]]:
        def pieces(feature: str) -> Iterator[FeatureLookups]:
            with _naming(f"{file}: row group {group}, column {feature}"):
                for batch in reader.iter_batches(
                    BATCH, row_groups=[group], columns=[feature], use_threads=False
                ):
                    yield _piece(batch.column(feature))

        return pieces

    for group in range(reader.num_row_groups):
        yield SampleBlock(
            f"{file}: row group {group}", reader.metadata.row_group(group).num_rows, features, of(group)
        )


def _ipc(file: str, schema: pa.Schema, batches: Iterator[pa.RecordBatch]) -> Iterator[SampleBlock]:
    features = _features(schema)

    def of(number: int, batch: pa.RecordBatch) -> Callable[[str], Iterator[FeatureLookups]]:
        def pieces(feature: str) -> Iterator[FeatureLookups]:
            with _naming(f"{file}: record batch {number}, column {feature}"):
                column = batch.column(feature)
                column.validate(full=True)  # offsets that point elsewhere would be read as they are
                for first in range(0, len(column), BATCH):
                    yield _piece(column[first : first + BATCH])

        return pieces

    for number, batch in enumerate(batches):
        yield SampleBlock(f"{file}: record batch {number}", batch.num_rows, features, of(number, batch))


def _features(schema: pa.Schema) -> tuple[str, ...]:
    """The columns that are integers or lists of them."""
    names = [field.name for field in schema]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ValueError(f"there are several columns {twice}")
    return tuple(field.name for field in schema if pa.types.is_integer(_inner(field.type)))


def _inner(kind: pa.DataType) -> pa.DataType:
    while True:
        if pa.types.is_dictionary(kind) or is_list(kind):
            kind = kind.value_type
        else:
            return kind


def _piece(column: pa.Array) -> FeatureLookups:
    """Lookups of each entry, and all of their ids."""
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    if not is_list(column.type):
        lengths = column.is_valid().to_numpy(zero_copy_only=False)
        return FeatureLookups(lengths.astype(np.int64), column.drop_null().to_numpy(zero_copy_only=False))
    values = column.flatten()
    inner, nested = _piece(values), is_list(values.type)
    nulls = inner.nulls if nested else len(values) - len(inner.ids)
    if nested or nulls:
        owners = pc.list_parent_indices(column).to_numpy(zero_copy_only=False)
        lengths = np.bincount(owners, inner.lengths, len(column))
    else:
        lengths = pc.list_value_length(column).fill_null(0).to_numpy(zero_copy_only=False)
    return FeatureLookups(lengths.astype(np.int64), inner.ids, nulls)


def _npz(file: str, stream: IO[bytes]) -> SampleBlock:
    archive = zipfile.ZipFile(stream)
    members = {name.removesuffix(".npy") for name in archive.namelist()}
    features = tuple(name.removesuffix(".ids") for name in sorted(members) if name.endswith(".ids"))
    samples = {}
    for name in features:
        with _Array(archive, f"{name}.{'offsets' if f'{name}.offsets' in members else 'ids'}") as array:
            samples[name] = array.rows - (f"{name}.offsets" in members)
    if not features or len(set(samples.values())) > 1:
        lacking = (
            f"features of so many samples {samples}" if features else f"arrays {', '.join(sorted(members))}"
        )
        raise UserError(f"{file}: has {lacking}, accepted are NAME.ids and NAME.offsets, of the same samples")

    def pieces(feature: str) -> Iterator[FeatureLookups]:
        with _naming(f"{file}: column {feature}"), _Array(archive, f"{feature}.ids") as ids:
            if f"{feature}.offsets" not in members:
                while len(block := ids.read(BATCH)):
                    yield FeatureLookups(np.full(len(block), ids.width, np.int64), block.ravel())
                return
            with _Array(archive, f"{feature}.offsets") as offsets:
                last = offsets.read(1)
                ragged = last[0] != 0
                while not ragged and len(block := offsets.read(BATCH)):
                    lengths = block.astype(np.int64)
                    lengths[1:] -= block[:-1].astype(np.int64)
                    lengths[0] -= int(last[0])
                    last = block[-1:]
                    total = int(lengths.sum())
                    flat = ids.read(total) if (lengths >= 0).all() else lengths[:0]
                    ragged = len(flat) != total
                    if not ragged:
                        yield FeatureLookups(lengths, flat)
                if ragged or ids.left:
                    raise ValueError(f"offsets do not rise from 0 to the {ids.rows} ids there are")

    return SampleBlock(file, min(samples.values()), features, pieces)


class _Array:
    """An array of an .npz file, read in blocks: ``rows`` of ``width`` integers."""

    def __init__(self, archive: zipfile.ZipFile, name: str) -> None:
        self._file = archive.open(f"{name}.npy")
        version = np.lib.format.read_magic(self._file)
        header = (
            np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        )
        shape, fortran, self._kind = header(self._file)
        if self._kind.kind not in "iu" or not 1 <= len(shape) <= 2 or (fortran and len(shape) == 2):
            raise ValueError(f"array {name} is {self._kind} of shape {shape}, accepted are rows of integers")
        self.rows = self.left = shape[0]
        self.width = math.prod(shape[1:])

    def __enter__(self) -> _Array:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def read(self, rows: int) -> NDArray[Any]:
        """The next ``rows``, or what is left of them."""
        rows = min(rows, self.left)
        size = rows * self.width * self._kind.itemsize
        data = self._file.read(size)
        if len(data) != size:
            raise EOFError("the array is cut off")
        self.left -= rows
        values = np.frombuffer(data, self._kind)
        return values if self.width == 1 else values.reshape(rows, self.width)
