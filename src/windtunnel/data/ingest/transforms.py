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

from collections.abc import Mapping, Sequence
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
from windtunnel.data.ingest import arrays
from windtunnel.data.ingest.hashing import below, chained, hashed, xxh64
from windtunnel.data.ingest.model import Transform
from windtunnel.store.columns import is_list

Seed = Annotated[int, Field(ge=0, lt=2**64)]
Count = Annotated[int, Field(ge=1, le=2**62)]
Finite = Annotated[float, Field(allow_inf_nan=False)]
ACCEPTED = {
    "rows": "a whole number from 1 up",
    "seed": "a whole number from 0 up to 2**64 - 1",
    "borders": "a list of numbers, ascending",
    "low": "a number",
    "high": "a number from low up",
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


class TransformKind(Protocol):
    """A transform with its settings. Raises TypeError, in words that end "…, accepted is …", for columns of a
    type that it does not take."""

    def __call__(self, columns: Sequence[pa.Array], rows: Rows) -> pa.Array: ...


class Hash(BaseModel, extra="forbid"):
    """Ids (whole numbers or text) to int64: XXH64, as two's complement."""

    seed: Seed = 0

    def __call__(self, columns: Sequence[pa.Array], rows: Rows) -> pa.Array:
        return arrays.each(
            columns[0], lambda ids: arrays.with_nulls(ids, hashed(ids, np.uint64(self.seed)).view(np.int64))
        )


class SigridHash(BaseModel, extra="forbid"):
    """Ids to rows of an embedding table: XXH64 modulo ``rows``, int64."""

    rows: Count
    seed: Seed = 0

    def __call__(self, columns: Sequence[pa.Array], rows: Rows) -> pa.Array:
        return arrays.each(
            columns[0],
            lambda ids: arrays.with_nulls(ids, below(hashed(ids, np.uint64(self.seed)), self.rows)),
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
        return arrays.numbers(
            columns[0], lambda x: np.searchsorted(borders, x, side="right").astype(np.int32)
        )


class Clip(BaseModel, extra="forbid"):
    """Numbers to between ``low`` and ``high``, of the type that they had; NaN stays."""

    low: Finite | None = None
    high: Finite | None = None

    @field_validator("high")
    @classmethod
    def _above(cls, high: float | None, info: ValidationInfo) -> float | None:
        low = info.data.get("low")
        if low is not None and high is not None and high < low:
            raise ValueError(f"accepted is {ACCEPTED['high']}")
        return high

    def __call__(self, columns: Sequence[pa.Array], rows: Rows) -> pa.Array:
        def clipped(x: NDArray[Any]) -> NDArray[Any]:
            if x.dtype.kind == "f":
                return np.clip(x, self.low, self.high).astype(x.dtype, copy=False)
            most = np.iinfo(x.dtype)
            low = most.min if self.low is None else min(max(int(np.ceil(self.low)), most.min), most.max)
            high = most.max if self.high is None else min(max(int(np.floor(self.high)), most.min), most.max)
            return np.clip(x, x.dtype.type(low), x.dtype.type(high))

        return arrays.numbers(columns[0], clipped)


class LogTransform(BaseModel, extra="forbid"):
    """Numbers to log(max(x, 0) + offset): float64 stays so, all else becomes float32."""

    offset: Annotated[Finite, Field(gt=0)] = 1.0

    def __call__(self, columns: Sequence[pa.Array], rows: Rows) -> pa.Array:
        def log(x: NDArray[Any]) -> NDArray[Any]:
            positive = np.maximum(arrays.real(x), 0)
            # log1p: what is near 0 keeps its digits; an offset near 0 would lose its own by it
            return np.log1p(positive) if self.offset == 1 else np.log(positive + self.offset)

        return arrays.numbers(columns[0], log)


class Normalise(BaseModel, extra="forbid"):
    """Numbers to (x - mean) / std: float64 stays so, all else becomes float32."""

    mean: Finite
    std: Annotated[Finite, Field(gt=0)]

    def __call__(self, columns: Sequence[pa.Array], rows: Rows) -> pa.Array:
        def normal(x: NDArray[Any]) -> NDArray[Any]:
            real = arrays.real(x)
            return (real - real.dtype.type(self.mean)) / real.dtype.type(self.std)

        return arrays.numbers(columns[0], normal)


class Fill(BaseModel, extra="forbid"):
    """``value`` in place of nulls, of rows and inside lists; a list that is null becomes an empty one, one of
    fixed size has it in each place."""

    value: int | float | str = 0

    def __call__(self, columns: Sequence[pa.Array], rows: Rows) -> pa.Array:
        def filled(values: pa.Array) -> pa.Array:
            try:
                value = pa.scalar(self.value).cast(values.type)
                return pc.fill_null(values, value) if values.null_count else values
            except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
                raise TypeError(f"is of {values.type}, accepted is a value of that type") from None

        if not is_list(columns[0].type):
            return filled(columns[0])
        if pa.types.is_fixed_size_list(kind := columns[0].type):
            whole = pc.fill_null(columns[0], pa.scalar([None] * kind.list_size, kind))
            return pa.FixedSizeListArray.from_arrays(filled(whole.flatten()), type=kind)
        lengths, values = arrays.lists(columns[0])
        result = filled(values)
        return arrays.listed(lengths, result) if columns[0].null_count or result is not values else columns[0]


class First(BaseModel, extra="forbid"):
    """The first ``n`` elements of lists."""

    n: Count

    def __call__(self, columns: Sequence[pa.Array], rows: Rows) -> pa.Array:
        if not is_list(columns[0].type):
            raise TypeError(f"is of {columns[0].type}, accepted are lists")
        lengths, values = arrays.lists(columns[0])
        new_lengths = np.minimum(lengths, self.n)
        size = getattr(columns[0].type, "list_size", 0)  # fixed: the type follows from it, not from the rows
        if size <= self.n if size else (new_lengths == lengths).all():
            return columns[0]
        return arrays.listed(new_lengths, arrays.cut(values, lengths, new_lengths), columns[0].is_null())


class AsList(BaseModel, extra="forbid"):
    """Lists of one element each; of null, null."""

    def __call__(self, columns: Sequence[pa.Array], rows: Rows) -> pa.Array:
        if is_list(columns[0].type):
            return columns[0]
        valid = np.asarray(columns[0].is_valid())
        return arrays.listed(valid.astype(np.int64), columns[0].drop_null(), columns[0].is_null())


class OneHot(BaseModel, extra="forbid"):
    """Ids to ``size`` float32, 1 in each id's place; ids that are not from 0 to ``size`` - 1 have none."""

    size: Annotated[int, Field(ge=1, le=65_536)]

    def __call__(self, columns: Sequence[pa.Array], rows: Rows) -> pa.Array:
        lengths, values = arrays.lists(AsList()(columns, rows))
        ids = arrays.whole(values)
        row = np.repeat(np.arange(len(lengths)), lengths)
        fits = (ids >= 0) & (ids < self.size) & np.asarray(values.is_valid())
        matrix = np.zeros((len(lengths), self.size), np.float32)
        matrix[row[fits], ids[fits].astype(np.int64)] = 1
        mask = columns[0].is_null() if columns[0].null_count else None
        return pa.FixedSizeListArray.from_arrays(pa.array(matrix.ravel()), self.size, mask=mask)


class NGram(BaseModel, extra="forbid"):
    """Lists of ids to the hashes of each ``n`` that follow each other, modulo ``rows`` if given."""

    n: Annotated[int, Field(ge=1, le=64)]
    rows: Count | None = None
    seed: Seed = 0

    def __call__(self, columns: Sequence[pa.Array], rows: Rows) -> pa.Array:
        if not is_list(columns[0].type):
            raise TypeError(f"is of {columns[0].type}, accepted are lists of ids")
        lengths, values = arrays.lists(columns[0])
        new_lengths = np.maximum(lengths - (self.n - 1), 0)
        # of all that follow each other; those from one list into the next are dropped
        count = max(len(values) - (self.n - 1), 0)
        hashes = chained([values.slice(place, count) for place in range(self.n)], self.rows, self.seed)
        return arrays.listed(new_lengths, arrays.cut(hashes, lengths, new_lengths), columns[0].is_null())


class Cross(BaseModel, extra="forbid"):
    """The ids of two columns to hashes of each of one with each of the other, modulo ``rows`` if given."""

    rows: Count | None = None
    seed: Seed = 0

    def __call__(self, columns: Sequence[pa.Array], rows: Rows) -> pa.Array:
        (many, left), (few, right) = (arrays.lists(AsList()([column], rows)) for column in columns)
        lengths = many * few
        place = np.arange(lengths.sum()) - np.repeat(arrays.starts(lengths), lengths)
        width = np.repeat(few, lengths)
        firsts = np.repeat(arrays.starts(many), lengths) + place // np.maximum(width, 1)
        seconds = np.repeat(arrays.starts(few), lengths) + place % np.maximum(width, 1)
        pairs = [left.take(pa.array(firsts)), right.take(pa.array(seconds))]
        null = pc.or_(columns[0].is_null(), columns[1].is_null())
        return arrays.listed(lengths, chained(pairs, self.rows, self.seed), null)


class Remap(BaseModel, extra="forbid"):
    """Ids to their ranks (int32 where it fits), by an ``order``: ``order[rank]`` is an id. An id that is not
    in it becomes null."""

    order: Annotated[str, Field(min_length=1)]

    def __call__(self, columns: Sequence[pa.Array], rows: Rows) -> pa.Array:
        ranks = _ranks(self.order)

        def ranked(values: pa.Array) -> pa.Array:
            ids = arrays.whole(values)
            in_table = (ids >= 0) & (ids < len(ranks))
            ranked_ids = (
                ranks[np.where(in_table, ids, 0).astype(np.int64)] if len(ranks) else ids.astype(np.int32)
            )
            in_table &= np.asarray(values.is_valid()) & (ranked_ids >= 0)
            return pa.array(ranked_ids, mask=None if in_table.all() else ~in_table)

        return arrays.each(columns[0], ranked)


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
            ranks = arrays.whole(values)
            below = [np.greater_equal(ranks, bound).astype(np.int8) for bound in (self.hot, self.warm)]
            return arrays.with_nulls(values, below[0] + below[1])

        return arrays.each(columns[0], tagged)


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
        for seed in seeds:
            chain = xxh64(np.array([seed], np.uint64), chain)[0]
        drawn = xxh64(rows.numbers.view(np.uint64), chain) >> np.uint64(11)
        chosen = drawn < np.uint64(round(self.rate * 2**53))
        weights = np.full(len(chosen), 1 / self.rate, np.float32)
        if self.keep is not None:
            keep = np.asarray(
                pc.fill_null(pc.equal(arrays.scalar(columns[0]).cast(pa.float64()), self.keep), False)
            )
            weights[keep] = 1
            chosen |= keep
        return pa.array(weights, mask=~chosen)


KINDS: dict[str, type[BaseModel]] = {
    "hash": Hash, "sigrid_hash": SigridHash, "bucketize": Bucketize, "clip": Clip, "log": LogTransform,
    "normalise": Normalise, "fill": Fill, "first": First, "as_list": AsList, "onehot": OneHot,
    "ngram": NGram, "cross": Cross, "remap": Remap, "tag": Tag, "sample": Sample,
}  # fmt: skip


def settings(transform: Transform, where: str) -> TransformKind:
    """The transform, ready to be called; ``where``: the file and field that errors name.

    Raises:
        UserError: a setting that is unknown, missing, or not accepted; too many inputs, or too few.
    """
    if len(transform.inputs) != (2 if transform.kind == "cross" else 1):
        accepted = "two columns" if transform.kind == "cross" else "one column (each takes a list of them)"
        raise UserError(
            f"{where} ({transform.kind}): inputs are {', '.join(transform.inputs)}, accepted is {accepted}"
        )
    options: Any = fitted(KINDS[transform.kind], transform.options, f"{where} ({transform.kind})", ACCEPTED)
    return options


def apply(
    steps: Sequence[tuple[Transform, TransformKind]], columns: Mapping[str, pa.Array], rows: Rows, where: str
) -> dict[str, pa.Array]:
    """``columns`` (arrays of one length, by name), and what ``steps`` make of them, in their order.

    Raises:
        UserError: a column of a type that a transform does not take; ``where`` begins the sentence.
    """
    values = dict(columns)
    for transform, kind in steps:
        try:
            result = kind([values[name] for name in transform.inputs], rows)
        except TypeError as error:
            names = ", ".join(transform.inputs)
            raise UserError(f"{where}: {transform.kind} of {names}: {names} {error}") from None
        values[transform.output] = result
        if transform.kind == "sample" and result.null_count:
            valid_rows = np.flatnonzero(result.is_valid())
            rows = Rows(rows.seed, rows.split, rows.numbers[valid_rows])
            values = {name: column.take(pa.array(valid_rows)) for name, column in values.items()}
    return values


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
    inverse = np.full(int(order.max()) + 1 if len(order) else 0, -1, kind)
    inverse[order] = np.arange(len(order), dtype=kind)
    if np.count_nonzero(inverse != -1) != len(order):
        raise UserError(f"{path}: holds an id twice, accepted is each once")
    return inverse
