"""Dataclasses as JSON and back, strictly: what is read is exactly what was written, or an error.

Unions of dataclasses carry the name of their class in the field ``is``. Tuples and frozensets become lists
(frozensets sorted), enumerations the lower-case word of their member, bytes base64.
"""

from __future__ import annotations

import base64
import dataclasses
import json
import types
import typing
from collections.abc import Sequence
from enum import Enum
from functools import cache
from typing import Any, NamedTuple, TypeVar

T = TypeVar("T")
TAG = "is"


def canonical(value: object) -> bytes:
    """The one way to write a JSON value."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def to_plain(value: object, *, tag: bool = False) -> Any:
    """A dataclass as a JSON object. ``tag``: with the name of its class, for a reader who expects a union;
    fields that are unions are tagged in any case. Fields that are no argument (``init=False``) are left out.
    """
    if isinstance(value, Enum):
        return value.name.lower()
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {
            name: to_plain(getattr(value, name), tag=field.union)
            for name, field in _fields(type(value)).items()
        }
        return {TAG: type(value).__name__, **fields} if tag else fields
    if isinstance(value, tuple | list):
        return [to_plain(item, tag=tag) for item in value]
    if isinstance(value, frozenset | set):
        return sorted(to_plain(item, tag=tag) for item in value)
    if isinstance(value, dict):
        return {str(to_plain(key)): to_plain(item, tag=tag) for key, item in value.items()}
    return base64.b64encode(value).decode() if isinstance(value, bytes) else value


def from_plain(kind: type[T] | types.UnionType, value: Any, *, foreign: bool = False) -> T:
    """The dataclass ``kind`` (or one of a union of them, by its tag) from a JSON object.

    ``foreign``: from a program of another version, which may write enumerations by their value: fields that
    are unknown here are left out.

    Raises:
        TypeError, ValueError, KeyError: an unknown or missing field, or one of another type.
    """
    name = getattr(kind, "__name__", "value")
    result: T = _read(kind, value, name, foreign)
    return result


class _Field(NamedTuple):
    kind: Any
    needed: bool
    union: bool
    """It holds one of several dataclasses, so that only a tag tells which."""


@cache
def _fields(kind: type) -> dict[str, _Field]:
    hints = typing.get_type_hints(kind)
    return {
        field.name: _Field(
            hints[field.name],
            field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING,
            _holds_union(hints[field.name]),
        )
        for field in dataclasses.fields(kind)
        if field.init
    }


def _holds_union(kind: Any) -> bool:
    inside = typing.get_args(kind)
    if typing.get_origin(kind) in (types.UnionType, typing.Union):
        return sum(map(dataclasses.is_dataclass, inside)) > 1 or any(map(_holds_union, inside))
    return any(map(_holds_union, inside))


def _read(kind: Any, value: Any, where: str, foreign: bool) -> Any:
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if dataclasses.is_dataclass(kind):
        return _dataclass(typing.cast(type, kind), value, where, foreign)
    if origin in (types.UnionType, typing.Union):
        if value is None and type(None) in arguments:
            return None
        rest = [argument for argument in arguments if argument is not type(None)]
        if len(rest) == 1:
            return _read(rest[0], value, where, foreign)
        tagged: dict[str, Any] = {
            choice.__name__: choice for choice in rest if hasattr(choice, "__dataclass_fields__")
        }
        if isinstance(value, dict) and value.get(TAG) in tagged:
            return _dataclass(tagged[value[TAG]], value, where, foreign)
        for choice in rest:
            if isinstance(choice, type) and type(value) is choice:
                return value
            if typing.get_origin(choice) in (list, Sequence) and isinstance(value, list):
                return _read(choice, value, where, foreign)
    elif origin is typing.Literal:
        if value in arguments:
            return value
        accepted = ", ".join(map(str, arguments))
        raise TypeError(f"{where} is {value!r}, which is not accepted; use {accepted}")
    elif origin is tuple and isinstance(value, list):
        if len(arguments) == 2 and arguments[1] is Ellipsis:
            return tuple(_read(arguments[0], choice, where, foreign) for choice in value)
        if len(arguments) == len(value):
            pairs = zip(arguments, value, strict=True)
            return tuple(_read(choice, item, where, foreign) for choice, item in pairs)
    elif origin is frozenset and isinstance(value, list):
        return frozenset(_read(arguments[0], choice, where, foreign) for choice in value)
    elif origin in (list, Sequence) and isinstance(value, list):
        return [_read(arguments[0], choice, where, foreign) for choice in value]
    elif origin is dict and isinstance(value, dict):
        values = {
            _key(arguments[0], key): _read(arguments[1], choice, f"{where}.{key}", foreign)
            for key, choice in value.items()
        }
        return values
    elif isinstance(kind, type) and issubclass(kind, Enum):
        return kind(value) if foreign and not isinstance(value, str) else kind[value.upper()]
    elif kind is bytes and isinstance(value, str):
        return base64.b64decode(value, validate=True)
    elif kind is float and isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    elif kind is Any or (isinstance(kind, type) and type(value) is kind):
        return value
    raise TypeError(f"{where} is {value!r}, which is not accepted")


def _dataclass(kind: type, value: Any, where: str, foreign: bool) -> Any:
    fields = _fields(kind)
    if not isinstance(value, dict):
        raise TypeError(f"{where} is no object")
    entries = {name: item for name, item in value.items() if name != TAG or TAG in fields}
    if foreign:
        entries = {name: item for name, item in entries.items() if name in fields}
    odd = sorted(set(entries) - set(fields)) + sorted(
        name for name, field in fields.items() if field.needed and name not in entries
    )
    if odd:
        raise ValueError(f"{where} has no or an unknown field {odd[0]}")
    return kind(
        **{name: _read(fields[name].kind, item, f"{where}.{name}", foreign) for name, item in entries.items()}
    )


def _key(kind: Any, key: str) -> Any:
    if isinstance(kind, type) and issubclass(kind, Enum):
        return kind[key.upper()]
    return int(key) if kind is int else key
