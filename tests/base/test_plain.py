"""Dataclasses as JSON: what is read is what was written, and anything else is refused."""

import json
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from windtunnel.base.plain import canonical, from_plain, to_plain


class Colour(Enum):
    RED = 1
    DARK_GREEN = "anything"


@dataclass(frozen=True)
class Point:
    x: int
    y: float = 0.0


@dataclass(frozen=True)
class Empty:
    pass


@dataclass(frozen=True)
class Thing:
    name: str
    colour: Colour
    where: Point | Empty
    points: tuple[Point, ...]
    pair: tuple[int, str]
    marks: frozenset[str]
    sizes: dict[str, float]
    ranks: dict[int, Point]
    mode: Literal["keep", "drop"]
    flag: bool
    maybe: Point | None = None
    either: int | str = 0
    free: Any = None
    turns: tuple[Point | Empty, ...] = ()
    derived: int = field(default=7, init=False, compare=False)


TEXT = st.text(max_size=12)
FLOATS = st.floats(allow_nan=False, allow_infinity=False)
POINTS = st.builds(Point, st.integers(), FLOATS)
THINGS = st.builds(
    Thing,
    name=TEXT,
    colour=st.sampled_from(Colour),
    where=POINTS | st.builds(Empty),
    points=st.lists(POINTS, max_size=3).map(tuple),
    pair=st.tuples(st.integers(), TEXT),
    marks=st.frozensets(TEXT, max_size=3),
    sizes=st.dictionaries(TEXT, FLOATS, max_size=3),
    ranks=st.dictionaries(st.integers(), POINTS, max_size=3),
    mode=st.sampled_from(["keep", "drop"]),
    flag=st.booleans(),
    maybe=st.none() | POINTS,
    either=st.integers() | TEXT,
    free=st.none() | st.integers() | TEXT,
    turns=st.lists(POINTS | st.builds(Empty), max_size=3).map(tuple),
)
GOOD = Thing(
    "a", Colour.RED, Empty(), (Point(1),), (1, "b"), frozenset("zy"), {"a": 1.0}, {3: Point(2)}, "keep", True
)


@given(THINGS)
def test_there_and_back(thing):
    text = canonical(to_plain(thing))
    again = from_plain(Thing, json.loads(text))
    assert again == thing
    assert canonical(to_plain(again)) == text


@given(POINTS | st.builds(Empty))
def test_a_union_is_told_apart_by_its_tag(value):
    plain = json.loads(canonical(to_plain(value, tag=True)))
    assert plain["is"] == type(value).__name__
    assert from_plain(Point | Empty, plain) == value


def test_the_shape_of_the_text():
    plain = to_plain(GOOD)
    assert (
        plain["colour"] == "red"
        and plain["marks"] == ["y", "z"]
        and plain["ranks"] == {"3": {"x": 2, "y": 0.0}}
    )
    assert to_plain(GOOD, tag=True)["is"] == "Thing"
    assert canonical({"b": 1, "a": "ä"}) == b'{"a":"\\u00e4","b":1}'
    with pytest.raises(ValueError):
        canonical(float("nan"))


BAD = [
    ("name", 3),
    ("colour", "blue"),
    ("where", {"x": 1}),
    ("where", {"is": "Line"}),
    ("turns", [{"x": 1}]),
    ("points", {"x": 1}),
    ("points", [{"x": "1"}]),
    ("points", [{"x": 1, "z": 2}]),
    ("pair", [1]),
    ("pair", ["b", 1]),
    ("marks", "zy"),
    ("sizes", []),
    ("sizes", {"a": "1"}),
    ("ranks", {"three": {"x": 1}}),
    ("mode", "burn"),
    ("flag", 1),
    ("maybe", {"x": True}),
    ("either", 1.5),
]


@pytest.mark.parametrize(("name", "value"), BAD)
def test_anything_else_is_refused(name, value):
    with pytest.raises((TypeError, ValueError, KeyError)):
        from_plain(Thing, to_plain(GOOD) | {name: value})


@pytest.mark.parametrize("value", [None, [], "Thing", 3])
def test_what_is_no_object_is_refused(value):
    with pytest.raises(TypeError, match="Thing"):
        from_plain(Thing, value)


def test_fields_that_lack_or_are_unknown():
    with pytest.raises(ValueError, match="Point has no or an unknown field z"):
        from_plain(Point, {"x": 1, "z": 1})
    with pytest.raises(ValueError, match="field x"):
        from_plain(Point, {})
    assert from_plain(Point, {"x": 1}) == Point(1)


def test_an_int_is_a_float_and_nothing_else_is_turned():
    assert from_plain(Point, {"x": 1, "y": 2}) == Point(1, 2.0)
    assert type(from_plain(Point, {"x": 1, "y": 2}).y) is float
    for value in (True, "2", None):
        with pytest.raises(TypeError, match=r"Point\.y"):
            from_plain(Point, {"x": 1, "y": value})
