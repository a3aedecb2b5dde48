"""Dataclasses as JSON with a checksum, strictly: what is read is exactly what was written, or an error."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import types
import typing
from enum import IntEnum
from functools import cache
from typing import Any, TypeVar

from windtunnel.agents.sandbox.live.images.fault import ImageError

T = TypeVar("T")


def canonical(value: object) -> bytes:
    """The one way to write a JSON value."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def check(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=20).hexdigest()


def sealed(kind: str, version: int, value: object) -> bytes:
    """``value`` with its kind, the version of its format and its checksum."""
    return canonical({"format": version, kind: value, "check": check(canonical(value))}) + b"\n"


def unsealed(kind: str, version: int, data: bytes, where: str) -> Any:
    """What ``sealed`` was given; ``where`` names the file in errors."""
    try:
        whole = json.loads(data)
        found, value, told = whole["format"], whole[kind], whole["check"]
    except (ValueError, KeyError, TypeError):
        raise ImageError(f"{where} is damaged: it is no {kind}") from None
    if isinstance(found, int) and found > version:
        raise ImageError(f"{where} has format {found}; this version of windtunnel reads up to {version}")
    if found != version or told != check(canonical(value)):
        raise ImageError(f"{where} is damaged: it does not match its checksum")
    return value


def to_plain(value: object) -> Any:
    """A dataclass as a JSON object; enumerations by their word."""
    if isinstance(value, IntEnum):
        return value.name.lower()
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: to_plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, tuple | list):
        return [to_plain(one) for one in value]
    if isinstance(value, dict):
        return {key: to_plain(one) for key, one in value.items()}
    return value


def from_plain(kind: type[T], value: Any) -> T:
    """The dataclass ``kind`` from a JSON object. An unknown field, or one of another type, is an error."""
    made: T = _read(kind, value, kind.__name__)
    return made


@cache
def _fields(kind: type) -> dict[str, tuple[Any, bool]]:
    hints = typing.get_type_hints(kind)
    return {
        field.name: (
            hints[field.name],
            field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING,
        )
        for field in dataclasses.fields(kind)
    }


def _read(kind: Any, value: Any, where: str) -> Any:
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if dataclasses.is_dataclass(kind):
        fields = _fields(typing.cast(type, kind))
        if not isinstance(value, dict):
            raise TypeError(f"{where} is no object")
        odd = sorted(set(value) - set(fields)) + sorted(
            name for name, (_, needed) in fields.items() if needed and name not in value
        )
        if odd:
            raise ValueError(f"{where} has no or an unknown field {odd[0]}")
        return typing.cast(type, kind)(
            **{name: _read(fields[name][0], one, f"{where}.{name}") for name, one in value.items()}
        )
    if origin in (types.UnionType, typing.Union):
        if value is None and type(None) in arguments:
            return None
        rest = [one for one in arguments if one is not type(None)]
        if len(rest) == 1:
            return _read(rest[0], value, where)
    elif origin is typing.Literal:
        if value in arguments:
            return value
    elif origin is tuple and isinstance(value, list):
        return tuple(_read(arguments[0], one, where) for one in value)
    elif origin is dict and isinstance(value, dict):
        return {key: _read(arguments[1], one, f"{where}.{key}") for key, one in value.items()}
    elif isinstance(kind, type) and issubclass(kind, IntEnum):
        return kind[value.upper()]
    elif kind is float and isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    elif isinstance(kind, type) and type(value) is kind:
        return value
    raise TypeError(f"{where} is {value!r}, which is not accepted")
