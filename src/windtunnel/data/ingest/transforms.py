"""What is done to columns between storage and trainers: the work of DLRM models, a block of rows at a time.

A kind of transform is a model of its settings that is called with its input columns (Arrow arrays of one
length) and gives the output column. Kinds that work on values (hash, sigrid_hash, bucketize, clip, log,
normalise, fill, remap, tag) work on the elements of lists alike. Nulls stay nulls, of rows and inside lists,
unless a ``fill`` came before. Nothing depends on how rows are cut into blocks.

Ids are hashed by XXH64 of their 8 bytes (little-endian) or of their text in UTF-8, as ``xxhash`` does and
Spark's ``xxhash64`` (whose seed is 42). Several ids hash by a chain: the hash of one is the seed of the next.

The kinds are those of Zhao et al., Understanding Data Storage and Ingestion for Large-Scale Deep
Recommendation Model Training (ISCA 2022).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated, Any, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray
from pydantic import BaseModel, Field, ValidationInfo, field_validator

from windtunnel.base.errors import UserError
from windtunnel.base.fields import fitted
from windtunnel.data.ingest.model import Transform

Seed = Annotated[int, Field(ge=0, lt=2**64)]
Count = Annotated[int, Field(ge=1, le=2**62)]
Finite = Annotated[float, Field(allow_inf_nan=False)]
ACCEPTED = {
    "rows": "a whole number from 1 up",
    "seed": "a whole number from 0 up to 2**64 - 1",
    "borders": "a list of numbers, ascending",
    "low": "a number",
    "high": "a number",
    "offset": "a number above 0",
    "mean": "a number",
    "std": "a number above 0",
    "value": "a number or text",
    "n": "a whole number from 1 up",
    "size": "a whole number from 1 to 65,536",
    "rate": "a number above 0, up to 1",
    "keep": "a number",
    "order": "the path of a .npy file of ids, the one asked for most first",
    "hot": "a whole number from 0 up",
    "warm": "a whole number from hot up",
}


@dataclass(frozen=True)
class Rows:
    """Which rows a block has: ``numbers`` of them in their ``split``, from 0, before any filter."""

    seed: int
    split: int
    numbers: NDArray[np.int64]


class Kind(Protocol):
    """A transform with its settings. Raises TypeError, in words that end "…, accepted is …", for columns of a
    type that it does not take."""

    def __call__(self, columns: Sequence[pa.Array], rows: Rows) -> pa.Array: ...


class Hash(BaseModel, extra="forbid"):
    """Ids (whole numbers or text) to int64: XXH64, as two's complement."""

    seed: Seed = 0

    def __call__(self, columns: Sequence[pa.Array], rows: Rows) -> pa.Array:
        return _each(columns[0], lambda ids: _kept(ids, _hashed(ids, np.uint64(self.seed)).view(np.int64)))


class SigridHash(BaseModel, extra="forbid"):
    """Ids to rows of an embedding table: XXH64 modulo ``rows``, int64."""

    rows: Count
    seed: Seed = 0

    def __call__(self, columns: Sequence[pa.Array], rows: Rows) -> pa.Array:
        return _each(
            columns[0], lambda ids: _kept(ids, _below(_hashed(ids, np.uint64(self.seed)), self.rows))
        )


class Bucketize(BaseModel, extra="forbid"):
    """Numbers to int32: how many borders are at or below them; NaN is above all."""

    borders: Annotated[tuple[Finite, ...], Field(min_length=1)]

    @field_validator("borders")
    @classmethod
    def _ascending(cls, borders: tuple[float, ...]) -> tuple[float, ...]:
        if list(borders) != sorted(set(borders)):
            raise ValueError(f"accepted is {ACCEPTED['borders']}")
        return borders

    def __call__(self, columns: Sequence[pa.Array], rows: Rows) -> pa.Array:
        borders = np.array(self.borders)
        return _numbers(columns[0], lambda x: np.searchsorted(borders, x, side="right").astype(np.int32))


class Clip(BaseModel, extra="forbid"):
    """Numbers to between ``low`` and ``high``, of the type that they had; NaN stays."""

    low: Finite | None = None
    high: Finite | None = None

    def __call__(self, columns: Sequence[pa.Array], rows: Rows) -> pa.Array:
        def clipped(x: NDArray[Any]) -> NDArray[Any]:
            if x.dtype.kind == "f":
                return np.clip(x, self.low, self.high).astype(x.dtype, copy=False)
            most = np.iinfo(x.dtype)
            low = most.min if self.low is None else min(max(int(np.ceil(self.low)), most.min), most.max)
            high = most.max if self.high is None else min(max(int(np.floor(self.high)), most.min), most.max)
            return np.clip(x, x.dtype.type(low), x.dtype.type(high))

        return _numbers(columns[0], clipped)


class Log(BaseModel, extra="forbid"):
    """Numbers to log(max(x, 0) + offset): float64 stays so, all else becomes float32."""

    offset: Annotated[Finite, Field(gt=0)] = 1.0

    def __call__(self, columns: Sequence[pa.Array], rows: Rows) -> pa.Array:
        # log1p: what is near 0 keeps its digits
        return _numbers(
            columns[0], lambda x: np.log1p(np.maximum(_real(x), 0) + _real(x).dtype.type(self.offset - 1))
        )


class Normalise(BaseModel, extra="forbid"):
    """Numbers to (x - mean) / std: float64 stays so, all else becomes float32."""

    mean: Finite
    std: Annotated[Finite, Field(gt=0)]

    def __call__(self, columns: Sequence[pa.Array], rows: Rows) -> pa.Array:
        def normal(x: NDArray[Any]) -> NDArray[Any]:
            real = _real(x)
            return (real - real.dtype.type(self.mean)) / real.dtype.type(self.std)

        return _numbers(columns[0], normal)


class Fill(BaseModel, extra="forbid"):
    """``value`` in place of nulls, of rows and inside lists; a list that is null becomes an empty one."""

    value: float | str = 0

    def __call__(self, columns: Sequence[pa.Array], rows: Rows) -> pa.Array:
        def filled(values: pa.Array) -> pa.Array:
            try:
                value = pa.scalar(self.value).cast(values.type)
                return pc.fill_null(values, value) if values.null_count else values
            except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
                raise TypeError(f"is of {values.type}, accepted is a value of that type") from None

        if not _is_list(columns[0].type):
            return filled(columns[0])
        lengths, values = _lists(columns[0])
        made = filled(values)
        return _listed(lengths, made) if columns[0].null_count or made is not values else columns[0]


class First(BaseModel, extra="forbid"):
    """The first ``n`` elements of lists."""

    n: Count

    def __call__(self, columns: Sequence[pa.Array], rows: Rows) -> pa.Array:
        if not _is_list(columns[0].type):
            raise TypeError(f"is of {columns[0].type}, accepted are lists")
        lengths, values = _lists(columns[0])
        kept = np.minimum(lengths, self.n)
        if (kept == lengths).all():
            return columns[0]
        return _listed(kept, _cut(values, lengths, kept), columns[0].is_null())


class AsList(BaseModel, extra="forbid"):
    """Lists of one element each; of null, null."""

    def __call__(self, columns: Sequence[pa.Array], rows: Rows) -> pa.Array:
        if _is_list(columns[0].type):
            return columns[0]
        valid = np.asarray(columns[0].is_valid())
        return _listed(valid.astype(np.int64), columns[0].drop_null(), columns[0].is_null())


class OneHot(BaseModel, extra="forbid"):
    """Ids to ``size`` float32, 1 in each id's place; ids that are not from 0 to ``size`` - 1 have none."""

    size: Annotated[int, Field(ge=1, le=65_536)]

    def __call__(self, columns: Sequence[pa.Array], rows: Rows) -> pa.Array:
        lengths, values = _lists(AsList()(columns, rows))
        ids = _whole(values)
        row = np.repeat(np.arange(len(lengths)), lengths)
        fits = (ids >= 0) & (ids < self.size) & np.asarray(values.is_valid())
        made = np.zeros((len(lengths), self.size), np.float32)
        made[row[fits], ids[fits].astype(np.int64)] = 1
        mask = columns[0].is_null() if columns[0].null_count else None
        return pa.FixedSizeListArray.from_arrays(pa.array(made.ravel()), self.size, mask=mask)


class NGram(BaseModel, extra="forbid"):
    """Lists of ids to the hashes of each ``n`` that follow each other, modulo ``rows`` if given."""

    n: Annotated[int, Field(ge=1, le=64)]
    rows: Count | None = None
    seed: Seed = 0

    def __call__(self, columns: Sequence[pa.Array], rows: Rows) -> pa.Array:
        if not _is_list(columns[0].type):
            raise TypeError(f"is of {columns[0].type}, accepted are lists of ids")
        lengths, values = _lists(columns[0])
        kept = np.maximum(lengths - (self.n - 1), 0)
        # of all that follow each other; those from one list into the next are dropped
        count = max(len(values) - (self.n - 1), 0)
        made = _chained([values.slice(place, count) for place in range(self.n)], self.rows, self.seed)
        return _listed(kept, _cut(made, lengths, kept), columns[0].is_null())


class Cross(BaseModel, extra="forbid"):
    """The ids of two columns to hashes of each of one with each of the other, modulo ``rows`` if given."""

    rows: Count | None = None
    seed: Seed = 0

    def __call__(self, columns: Sequence[pa.Array], rows: Rows) -> pa.Array:
        if len(columns) != 2:
            raise TypeError(f"are {len(columns)}, accepted are two columns")
        (many, left), (few, right) = (_lists(AsList()([one], rows)) for one in columns)
        lengths = many * few
        place = np.arange(lengths.sum()) - np.repeat(_starts(lengths), lengths)
        width = np.repeat(few, lengths)
        firsts = np.repeat(_starts(many), lengths) + place // np.maximum(width, 1)
        seconds = np.repeat(_starts(few), lengths) + place % np.maximum(width, 1)
        pairs = [left.take(pa.array(firsts)), right.take(pa.array(seconds))]
        null = pc.or_(columns[0].is_null(), columns[1].is_null())
        return _listed(lengths, _chained(pairs, self.rows, self.seed), null)


class Remap(BaseModel, extra="forbid"):
    """Ids to their ranks (int32 where it fits), by an ``order``: ``order[rank]`` is an id. An id that is not
    in it becomes null."""

    order: Annotated[str, Field(min_length=1)]

    def __call__(self, columns: Sequence[pa.Array], rows: Rows) -> pa.Array:
        ranks = _ranks(self.order)

        def ranked(values: pa.Array) -> pa.Array:
            ids = _whole(values)
            known = (ids >= 0) & (ids < len(ranks))
            found = ranks[np.where(known, ids, 0).astype(np.int64)] if len(ranks) else ids.astype(np.int32)
            known &= np.asarray(values.is_valid()) & (found >= 0)
            return pa.array(found, mask=None if known.all() else ~known)

        return _each(columns[0], ranked)


class Tag(BaseModel, extra="forbid"):
    """Ranks to where their rows lie, int8: 0 below ``hot``, 1 below ``warm``, else 2."""

    hot: Annotated[int, Field(ge=0, le=2**62)]
    warm: Annotated[int, Field(ge=0, le=2**62)]

    @field_validator("warm")
    @classmethod
    def _nested(cls, warm: int, info: ValidationInfo) -> int:
        if warm < info.data.get("hot", 0):
            raise ValueError(f"accepted is {ACCEPTED['warm']}")
        return warm

    def __call__(self, columns: Sequence[pa.Array], rows: Rows) -> pa.Array:
        def tagged(values: pa.Array) -> pa.Array:
            ranks = _whole(values)
            below = [np.greater_equal(ranks, bound).astype(np.int8) for bound in (self.hot, self.warm)]
            return _kept(values, below[0] + below[1])

        return _each(columns[0], tagged)


class Sample(BaseModel, extra="forbid"):
    """A ``rate`` of the rows, and all whose input is ``keep``; the others go, with all their columns. The
    output is the weight of each row that stays: 1 / rate, or 1 of those kept; float32."""

    rate: Annotated[Finite, Field(gt=0, le=1)]
    keep: Finite | None = None
    seed: Seed = 0

    def __call__(self, columns: Sequence[pa.Array], rows: Rows) -> pa.Array:
        """Null for the rows that go."""
        seeds = (self.seed, rows.seed, rows.split)
        chain = np.uint64(0)
        for one in seeds:
            chain = xxh64(np.array([one], np.uint64), chain)[0]
        drawn = xxh64(rows.numbers.view(np.uint64), chain) >> np.uint64(11)
        chosen = drawn < np.uint64(round(self.rate * 2**53))
        made = np.full(len(chosen), 1 / self.rate, np.float32)
        if self.keep is not None:
            keep = np.asarray(
                pc.fill_null(pc.equal(_scalar(columns[0]).cast(pa.float64()), self.keep), False)
            )
            made[keep] = 1
            chosen |= keep
        return pa.array(made, mask=~chosen)


KINDS: dict[str, type[BaseModel]] = {
    "hash": Hash, "sigrid_hash": SigridHash, "bucketize": Bucketize, "clip": Clip, "log": Log,
    "normalise": Normalise, "fill": Fill, "first": First, "as_list": AsList, "onehot": OneHot,
    "ngram": NGram, "cross": Cross, "remap": Remap, "tag": Tag, "sample": Sample,
}  # fmt: skip


def settings(transform: Transform, where: str) -> Kind:
    """The transform, ready to be called; ``where``: the file and field that errors name.

    Raises:
        UserError: a setting that is unknown, missing, or not accepted.
    """
    made: Any = fitted(KINDS[transform.kind], transform.options, f"{where} ({transform.kind})", ACCEPTED)
    return made


def apply(
    steps: Sequence[tuple[Transform, Kind]], columns: Mapping[str, pa.Array], rows: Rows, where: str
) -> dict[str, pa.Array]:
    """``columns`` (arrays of one length, by name), and what ``steps`` make of them, in their order.

    Raises:
        UserError: a column of a type that a transform does not take; ``where`` begins the sentence.
    """
    found = dict(columns)
    for transform, kind in steps:
        try:
            made = kind([found[name] for name in transform.inputs], rows)
        except TypeError as error:
            names = ", ".join(transform.inputs)
            raise UserError(f"{where}: {transform.kind} of {names}: {names} {error}") from None
        found[transform.output] = made
        if transform.kind == "sample" and made.null_count:
            kept = np.flatnonzero(made.is_valid())
            rows = Rows(rows.seed, rows.split, rows.numbers[kept])
            found = {name: one.take(pa.array(kept)) for name, one in found.items()}
    return found


def lengths_of(column: pa.Array) -> NDArray[np.int64]:
    """Of the lists of a column; of null, 0."""
    if pa.types.is_fixed_size_list(column.type):
        made = np.full(len(column), column.type.list_size, np.int64)
    else:
        made = np.diff(np.from_dlpack(column.offsets)).astype(np.int64)
    if column.null_count:
        made[_null(column)] = 0
    return made


def xxh64(words: NDArray[np.uint64], seed: np.uint64 | NDArray[np.uint64]) -> NDArray[np.uint64]:
    """XXH64 of the 8 bytes of each word, [n]; a ``seed`` for all, or one each."""
    made, spare = np.empty(len(words), np.uint64), np.empty(min(len(words), _CHUNK), np.uint64)
    with np.errstate(over="ignore"):
        begin: Any = seed + _P5 + np.uint64(8)
        for start in range(0, len(words), _CHUNK):
            part = slice(start, start + _CHUNK)
            x = made[part]
            np.multiply(words[part], _P2, out=x)
            _turn(x, spare, 31)
            x *= _P1
            x ^= begin if np.ndim(begin) == 0 else begin[part]
            _turn(x, spare, 27)
            x *= _P1
            x += _P4
            for bits, factor in ((33, _P2), (29, _P3), (32, None)):
                x ^= np.right_shift(x, np.uint64(bits), out=spare[: len(x)])
                if factor is not None:
                    x *= factor
    return made


_CHUNK = 16_384
"""Words that are hashed at a time, in place: they stay in the cache."""
_P1, _P2, _P3, _P4, _P5 = (
    np.uint64(0x9E3779B185EBCA87), np.uint64(0xC2B2AE3D27D4EB4F), np.uint64(0x165667B19E3779F9),
    np.uint64(0x85EBCA77C2B2AE63), np.uint64(0x27D4EB2F165667C5),
)  # fmt: skip


def _turn(x: NDArray[np.uint64], spare: NDArray[np.uint64], bits: int) -> None:
    high = np.right_shift(x, np.uint64(64 - bits), out=spare[: len(x)])
    x <<= np.uint64(bits)
    x |= high


def _hashed(ids: pa.Array, seed: np.uint64 | NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The hash of each id; of null, anything."""
    if not _is_text(ids.type):
        return xxh64(_whole(ids).astype(np.int64, copy=False).view(np.uint64), seed)
    import xxhash

    if np.ndim(seed):
        seeds: Any = seed
        told = [
            xxhash.xxh64_intdigest(one, int(own))
            for one, own in zip(pc.fill_null(ids.cast(pa.binary()), b"").to_pylist(), seeds, strict=True)
        ]
        return np.array(told, np.uint64)
    # text repeats: each is hashed once
    coded = ids.cast(pa.binary()).dictionary_encode()
    told = [xxhash.xxh64_intdigest(one, int(seed)) for one in coded.dictionary.to_pylist()]
    if not told:
        return np.zeros(len(ids), np.uint64)
    return np.array(told, np.uint64)[pc.fill_null(coded.indices, 0).to_numpy()]


def _chained(ids: Sequence[pa.Array], rows: int | None, seed: int) -> pa.Array:
    """Hashes of several ids each, int64; null where one of them is."""
    made: Any = np.uint64(seed)
    for one in ids:
        made = _hashed(one, made)
    made = _below(made, rows) if rows else made.view(np.int64)
    null = np.zeros(len(made), bool)
    for one in ids:
        if one.null_count:
            null |= _null(one)
    return pa.array(made, mask=null if null.any() else None)


def _below(hashes: NDArray[np.uint64], rows: int) -> NDArray[np.int64]:
    if rows & (rows - 1) == 0:
        return (hashes & np.uint64(rows - 1)).view(np.int64)
    whole = hashes // np.uint64(rows)  # in vectors, which the remainder is not
    whole *= np.uint64(rows)
    return np.subtract(hashes, whole, out=whole).view(np.int64)


@lru_cache(maxsize=64)
def _ranks(path: str) -> NDArray[Any]:
    """Of each id its rank, -1 where it has none."""
    try:
        order = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be read ({error}), accepted is a .npy file of ids by rank") from None
    if order.ndim != 1 or order.dtype.kind not in "iu" or (len(order) and order.min() < 0):
        raise UserError(
            f"{path}: holds {order.ndim} dimensions of {order.dtype}, accepted are ids, from 0 up, by rank"
        )
    kind = np.int32 if len(order) < 2**31 else np.int64
    made = np.full(int(order.max()) + 1 if len(order) else 0, -1, kind)
    made[order] = np.arange(len(order), dtype=kind)
    if np.count_nonzero(made != -1) != len(order):
        raise UserError(f"{path}: holds an id twice, accepted is each once")
    return made


def _is_list(kind: pa.DataType) -> bool:
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind))


def _is_text(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_binary(kind))


def _scalar(values: pa.Array) -> pa.Array:
    """``values``, which are numbers."""
    kind = values.type
    if pa.types.is_boolean(kind):
        return values.cast(pa.int8())
    if pa.types.is_integer(kind) or pa.types.is_floating(kind):
        return values
    raise TypeError(f"is of {kind}, accepted are numbers")


def _plain(values: pa.Array) -> NDArray[Any]:
    """As NumPy of the same type; null is 0."""
    return np.from_dlpack(pc.fill_null(values, pa.scalar(0, values.type)) if values.null_count else values)


def _null(values: pa.Array) -> NDArray[np.bool_]:
    return np.from_dlpack(values.is_null().cast(pa.uint8())).view(bool)


def _whole(values: pa.Array) -> NDArray[Any]:
    kind = values.type
    if pa.types.is_null(kind):
        return np.zeros(len(values), np.int64)
    if not (pa.types.is_integer(kind) or pa.types.is_boolean(kind)):
        raise TypeError(f"is of {kind}, accepted are ids (whole numbers)")
    return _plain(_scalar(values))


def _real(x: NDArray[Any]) -> NDArray[Any]:
    return x if x.dtype.kind == "f" and x.dtype.itemsize >= 4 else x.astype(np.float32)


def _kept(values: pa.Array, made: NDArray[Any]) -> pa.Array:
    """``made``, with the nulls of ``values``."""
    return pa.array(made, mask=_null(values) if values.null_count else None)


def _numbers(column: pa.Array, function: Callable[[NDArray[Any]], NDArray[Any]]) -> pa.Array:
    def one(values: pa.Array) -> pa.Array:
        return _kept(values, function(_plain(_scalar(values))))

    return _each(column, one)


def _each(column: pa.Array, function: Callable[[pa.Array], pa.Array]) -> pa.Array:
    """``function`` of a column's values, or of those in its lists."""
    if not _is_list(column.type):
        return function(column)
    lengths, values = _lists(column)
    return _listed(lengths, function(values), column.is_null())


def _lists(column: pa.Array) -> tuple[NDArray[np.int64], pa.Array]:
    """Lengths of lists, and their elements one after the other."""
    lengths = lengths_of(column)
    if not pa.types.is_fixed_size_list(column.type):
        first, last = column.offsets[0].as_py(), column.offsets[-1].as_py()
        if last - first == lengths.sum():  # what is null holds nothing: nothing need be copied
            return lengths, column.values.slice(first, last - first)
    return lengths, column.flatten()


def _listed(lengths: NDArray[np.int64], values: pa.Array, null: pa.BooleanArray | None = None) -> pa.Array:
    """Lists of such lengths, ``null`` where that is true."""
    mask = null if null is not None and null.true_count else None
    ends = np.zeros(len(lengths) + 1, np.int32)
    np.cumsum(lengths, out=ends[1:])
    return pa.ListArray.from_arrays(pa.array(ends), values, mask=mask)


def _starts(lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    return np.cumsum(lengths) - lengths


def _cut(values: pa.Array, lengths: NDArray[np.int64], kept: NDArray[np.int64]) -> pa.Array:
    """The first ``kept`` elements of each list; the last elements of all may be missing in ``values``."""
    runs = np.stack([kept, lengths - kept], axis=1).ravel()
    within = np.repeat(np.tile([True, False], len(kept)), runs)[: len(values)]
    kind = values.type
    if values.null_count or not (pa.types.is_integer(kind) or pa.types.is_floating(kind)):
        return values.filter(pa.array(within))
    return pa.array(np.from_dlpack(values)[within])  # the same, faster
