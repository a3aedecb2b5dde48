"""Values of the command line that are plainly of their type, read without Pydantic.

Typer makes a Pydantic adapter for every parameter of a call, and what it imports for that takes longer than
all else that a short command does. So text for a text, digits for a number and a path without conditions are
read here. Whatever is not as plain (a choice, a number out of its range, a folder that must be there) goes to
Typer's own adapter as before: there is one set of rules, and one of messages.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args, get_origin

NUMBERS = {int: re.compile(r"-?\d{1,15}"), float: re.compile(r"-?\d{1,15}(\.\d{1,15})?")}


def read_plainly(parameters: Iterable[Any]) -> None:
    """Let the values of ``parameters`` be read so. A Typer that makes no adapters is left as it is."""
    for parameter in parameters:
        own = getattr(parameter, "get_runtime_param", None)
        if own is not None and "get_runtime_param" not in vars(parameter):
            parameter.get_runtime_param = _Plain(own).itself


class _NotPlain(Exception):
    """This is for Typer's adapter."""


@dataclass(frozen=True)
class _Plain:
    """In the place of what `own` makes for a parameter."""

    own: Callable[[], Any]

    def itself(self) -> _Plain:
        return self

    def coerce(self, value: Any, param: Any, ctx: Any) -> Any:
        several = param.multiple or param.nargs == -1
        if value is None:
            return () if several else None
        described = param.type_descriptor
        kind, settings = described.annotation, described.parameter_info
        try:
            if get_origin(kind) is list and several and not isinstance(value, str):
                return [_read(one, get_args(kind)[0], settings) for one in value]
            return _read(value, kind, settings)
        except _NotPlain:
            return self.own().coerce(value, param=param, ctx=ctx)


def _read(value: Any, kind: Any, settings: Any) -> Any:
    if settings.parser is None:
        if kind is str and type(value) is str:
            return value
        if kind in NUMBERS and not settings.clamp:
            return _number(value, kind, settings)
        if kind is Path and isinstance(value, str | Path):
            return _path(Path(value), settings)
    raise _NotPlain


def _number(value: Any, kind: type[int | float], settings: Any) -> int | float:
    if isinstance(value, str) and NUMBERS[kind].fullmatch(value):
        value = kind(value)
    low, high = settings.min, settings.max
    if type(value) is not kind or (low is not None and value < low) or (high is not None and value > high):
        raise _NotPlain
    number: int | float = value
    return number


def _path(path: Path, settings: Any) -> Path:
    conditions = settings.exists, settings.writable, settings.resolve_path, settings.allow_dash
    if any(conditions) or settings.path_type is not None or not (settings.file_okay and settings.dir_okay):
        raise _NotPlain
    if settings.readable and os.path.exists(path) and not os.access(path, os.R_OK):
        raise _NotPlain
    return path
