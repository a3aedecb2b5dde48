"""Each kind of transform against plain Python, row by row, on numbers and lists, with nulls."""

from __future__ import annotations

import bisect
import math
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from windtunnel.base.errors import UserError
from windtunnel.data.ingest import transforms
from windtunnel.data.ingest.model import Transform
from windtunnel.data.ingest.transforms import Rows

IDS = st.none() | st.integers(-(2**63), 2**63 - 1)
LISTS = st.none() | st.lists(IDS, max_size=5)
FLOATS = st.none() | st.floats(width=32)
BORDERS = [-1.0, 0.0, 2.5]
TEXT = st.none() | st.text(max_size=5)


def run(kind: str, columns: list[pa.Array], **options: Any) -> pa.Array:
    """Of columns that are slices of larger ones, as those of a block are."""
    names = tuple(f"c{place}" for place in range(len(columns)))
    step = Transform(kind, names, "out", options)
    longer = [
        pa.concat_arrays([column.slice(0, 1), column, column.slice(0, 1)]).slice(
            min(1, len(column)), len(column)
        )
        for column in columns
    ]
    rows = Rows(3, 7, np.arange(len(columns[0])))
    given_ = dict(zip(names, longer, strict=True))
    array = transforms.apply([(step, transforms.settings(step, "s"))], given_, rows, "t")["out"]
    array.validate(full=True)
    return array


def hashed(key: int | str, seed: int) -> int:
    return xxhash.xxh64_intdigest(key.encode() if isinstance(key, str) else struct.pack("<q", key), seed)


def signed(number: int) -> int:
    return number - 2**64 if number >= 2**63 else number


def each(function: Callable[[Any], Any], value: Any) -> Any:
    """On a value or on those of a list; null stays null."""
    if isinstance(value, list):
        return [each(function, entry) for entry in value]
    return None if value is None else function(value)


@given(
    st.lists(IDS, max_size=9) | st.lists(TEXT, max_size=9) | st.lists(LISTS, max_size=9),
    st.integers(0, 2**64 - 1),
    st.sampled_from([1, 2, 7, 1024, 10**9, 2**62]),
)
@settings(max_examples=60, deadline=None)
def test_hashes_are_xxh64(values: list[Any], seed: int, rows: int) -> None:
    text = any(isinstance(value, str) for value in values)
    lists = any(isinstance(value, list) for value in values)
    column = pa.array(values, pa.string() if text else pa.list_(pa.int64()) if lists else pa.int64())
    assert run("hash", [column], seed=seed).to_pylist() == [
        each(lambda x: signed(hashed(x, seed)), v) for v in values
    ]
    hashes = run("sigrid_hash", [column], rows=rows, seed=seed).to_pylist()
    assert hashes == [each(lambda x: hashed(x, seed) % rows, v) for v in values]


@given(
    st.lists(FLOATS, max_size=9),
    st.lists(st.lists(FLOATS, max_size=3), max_size=9),
    st.sampled_from(["f", "d"]),
)
@settings(max_examples=60, deadline=None)
def test_numbers(scalars: list[Any], lists: list[Any], kind: str) -> None:
    dtype = {"f": pa.float32(), "d": pa.float64()}[kind]
    for values, arrow in ((scalars, dtype), (lists, pa.list_(dtype))):
        column = pa.array(values, arrow)
        numbers = column.to_pylist()
        same(
            run("clip", [column], low=-1.5, high=2.0),
            numbers,
            lambda x: x if math.isnan(x) else min(max(x, -1.5), 2.0),
        )
        same(run("log", [column]), numbers, lambda x: math.nan if math.isnan(x) else math.log1p(max(x, 0.0)))
        same(
            run("log", [column], offset=3.0),
            numbers,
            lambda x: math.nan if math.isnan(x) else math.log(max(x, 0.0) + 3),
        )
        same(run("normalise", [column], mean=0.5, std=2.0), numbers, lambda x: (x - 0.5) / 2)
        buckets = run("bucketize", [column], borders=BORDERS)
        assert buckets.to_pylist() == [
            each(lambda x: 3 if math.isnan(x) else bisect.bisect_right(BORDERS, x), number)
            for number in numbers
        ]
        assert run("clip", [column], low=0).type == column.type == run("log", [column]).type


def same(column: pa.Array, values: list[Any], function: Callable[[float], float]) -> None:
    """Up to the rounding of the type."""
    inner = column.type.value_type if pa.types.is_list(column.type) else column.type
    near = 1e-6 if inner == pa.float32() else 1e-13
    for cell, want in zip(column.to_pylist(), [each(function, value) for value in values], strict=True):
        if isinstance(want, list):
            assert cell == pytest.approx(want, rel=near, abs=near, nan_ok=True)
        else:
            assert (cell is None) == (want is None)
            assert cell is None or cell == pytest.approx(want, rel=near, abs=near, nan_ok=True)


@given(st.lists(st.none() | st.integers(-128, 127), max_size=9))
@settings(max_examples=30, deadline=None)
def test_whole_numbers_keep_their_type(values: list[int | None]) -> None:
    column = pa.array(values, pa.int8())
    clipped = run("clip", [column], low=-3.5, high=1000)
    assert clipped.type == pa.int8() and clipped.to_pylist() == [
        each(lambda x: max(x, -3), value) for value in values
    ]
    assert run("log", [column]).type == pa.float32()
    assert run("fill", [column], value=5).to_pylist() == [5 if value is None else value for value in values]
    assert run("as_list", [column]).to_pylist() == [None if value is None else [value] for value in values]
    onehots = run("onehot", [column], size=4)
    assert onehots.to_pylist() == [
        each(lambda x: [float(place == x) for place in range(4)], value) for value in values
    ]
    assert run("tag", [column], hot=2, warm=50).to_pylist() == [
        each(lambda x: 0 if x < 2 else 1 if x < 50 else 2, value) for value in values
    ]


@given(st.lists(st.tuples(LISTS, LISTS), max_size=7), st.integers(1, 4), st.none() | st.integers(1, 10**6))
@settings(max_examples=60, deadline=None)
def test_lists(pairs: list[tuple[Any, Any]], n: int, rows: int | None) -> None:
    left, right = (pa.array([pair[place] for pair in pairs], pa.list_(pa.int64())) for place in (0, 1))
    assert run("first", [left], n=n).to_pylist() == [
        None if first is None else first[:n] for first, _ in pairs
    ]
    assert run("fill", [left], value=-7).to_pylist() == [
        [-7 if each is None else each for each in first or []] for first, _ in pairs
    ]

    def chained(ids: list[int | None]) -> int | None:
        digest = 11
        for number in ids:
            if number is None:
                return None
            digest = hashed(number, digest)
        return signed(digest) if rows is None else digest % rows

    asked = {"seed": 11} | ({} if rows is None else {"rows": rows})
    assert run("ngram", [left], n=n, **asked).to_pylist() == [
        None if first is None else [chained(first[at : at + n]) for at in range(len(first) - n + 1)]
        for first, _ in pairs
    ]
    assert run("cross", [left, right], **asked).to_pylist() == [
        None if first is None or second is None else [chained([a, b]) for a in first for b in second]
        for first, second in pairs
    ]
    onehots = run("onehot", [left], size=3).to_pylist()
    assert onehots == [
        None if first is None else [float(place in first) for place in range(3)] for first, _ in pairs
    ]


def test_an_offset_near_0_is_not_lost() -> None:
    """It is what a logarithm of float32 is for: without it the smallest are minus infinity."""
    column = run("log", [pa.array([0.0, -1.0, 3.0], pa.float32())], offset=1e-8)
    assert column.to_pylist() == pytest.approx([math.log(1e-8), math.log(1e-8), math.log(3)], rel=1e-6)


def test_lists_of_fixed_size_have_one_type_whatever_the_rows_are() -> None:
    kind = pa.list_(pa.int64(), 3)
    full, gaps = pa.array([[1, 2, 3]], kind), pa.array([[4, None, 6], None], kind)
    for name, options, lists in (
        ("fill", {"value": 9}, [[4, 9, 6], [9, 9, 9]]),
        ("first", {"n": 2}, [[4, None], None]),
        ("first", {"n": 3}, [[4, None, 6], None]),
    ):
        outputs = [run(name, [column], **options) for column in (full.slice(0, 0), full, gaps)]
        assert len({output.type for output in outputs}) == 1 and outputs[-1].to_pylist() == lists
    big = 2**53 + 1
    assert run("fill", [pa.array([None], pa.int64())], value=big).to_pylist() == [big]


def test_ids_to_ranks(tmp_path: Path) -> None:
    order, path = [7, 2, 10, 0], tmp_path / "order.npy"
    np.save(path, np.array(order))
    ids = [None, *range(-2, 13)]
    want = [order.index(number) if number in order else None for number in ids]
    ranks = run("remap", [pa.array(ids, pa.int64())], order=str(path))
    assert ranks.type == pa.int32() and ranks.to_pylist() == want
    ranks = run("remap", [pa.array([ids, None, []], pa.list_(pa.int64()))], order=str(path))
    assert ranks.to_pylist() == [want, None, []]
    np.save(path.with_name("twice.npy"), np.array([1, 1]))
    with pytest.raises(UserError, match="holds an id twice"):
        run("remap", [pa.array([1])], order=str(path.with_name("twice.npy")))


def test_samples_follow_from_their_rows_alone() -> None:
    step = Transform("sample", ("label",), "weight", {"rate": 0.25, "keep": 1, "seed": 5})
    steps = [(step, transforms.settings(step, "s"))]
    labels = pa.array([int(row % 10 == 0) for row in range(2000)])

    def kept(numbers: Any) -> dict[int, float]:
        columns = {"label": labels.take(pa.array(numbers)), "row": pa.array(numbers)}
        batch = transforms.apply(steps, columns, Rows(3, 7, numbers), "t")
        return dict(zip(batch["row"].to_pylist(), batch["weight"].to_pylist(), strict=True))

    whole = kept(np.arange(2000))
    assert all(whole[row] == 1 for row in range(0, 2000, 10))
    drawn = {row: weight for row, weight in whole.items() if row % 10}
    assert set(drawn.values()) == {4.0} and 380 < len(drawn) < 520
    parts = [kept(part) for part in np.array_split(np.random.default_rng(0).permutation(2000), 7)]
    assert {row: weight for part in parts for row, weight in part.items()} == whole


@pytest.mark.parametrize(
    ("kind", "columns", "options", "words"),
    [
        ("hash", [pa.array([1.5])], {}, "hash of c0: c0 is of double, accepted are ids (whole numbers)"),
        ("log", [pa.array(["a"])], {}, "c0 is of string, accepted are numbers"),
        ("first", [pa.array([1])], {"n": 2}, "c0 is of int64, accepted are lists"),
        ("fill", [pa.array([1])], {"value": "x"}, "c0 is of int64, accepted is a value of that type"),
        ("cross", [pa.array([1])], {}, "s (cross): inputs are c0, accepted is two columns"),
        ("log", [pa.array([1]), pa.array([2])], {}, "inputs are c0, c1, accepted is one column (each takes"),
        ("sigrid_hash", [pa.array([1])], {}, "field rows is missing"),
        (
            "sigrid_hash",
            [pa.array([1])],
            {"rows": 0},
            "field rows is 0, accepted is a whole number from 1 up",
        ),
        ("bucketize", [pa.array([1])], {"borders": [2, 1]}, "field borders is [2, 1], accepted is a list of"),
        (
            "tag",
            [pa.array([1])],
            {"hot": 3, "warm": 1},
            "field warm is 1, accepted is a whole number from hot",
        ),
        ("clip", [pa.array([1])], {"lo": 1}, "field lo is unknown, did you mean low?"),
        ("clip", [pa.array([1])], {"low": 2, "high": 1}, "field high is 1, accepted is a number from low"),
        ("remap", [pa.array([1])], {"order": "/nowhere.npy"}, "/nowhere.npy: cannot be read"),
    ],
)
def test_what_a_transform_does_not_take_is_said(
    kind: str, columns: list[pa.Array], options: dict[str, Any], words: str
) -> None:
    with pytest.raises(UserError) as error:
        run(kind, columns, **options)
    assert words in str(error.value)
