"""Values of the command line that are plainly of their type, read without Pydantic.

Typer makes a Pydantic adapter for every parameter of a call, and what it imports for that takes longer than
all else that a short command does. So text for a text, digits for a number and a path that may be read are
read here. What is not as plain (a choice, a number out of its range) goes to Typer's own adapter as before:
there is one set of rules, and one of messages.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

NUMBERS = {int: re.compile(r"-?\d{1,15}"), float: re.compile(r"-?\d{1,15}(\.\d{1,15})?")}


def read_plainly(parameters: Iterable[Any]) -> None:
    """Let the values of ``parameters`` be read so. A Typer that makes no adapters is left as it is."""
    for parameter in parameters:
        own = getattr(parameter, "get_runtime_param", None)
        if own is not None and "get_runtime_param" not in vars(parameter):
            parameter.get_runtime_param = _PlainParameter(own).itself


@dataclass(frozen=True)
class _PlainParameter:
    """In the place of what `own` makes for a parameter."""

    own: Callable[[], Any]

    def itself(self) -> _PlainParameter:
        return self

    def coerce(self, value: Any, param: Any, ctx: Any) -> Any:
        several = param.multiple or param.nargs == -1
        if value is None:
            return () if several else None
        kind, settings = param.type_descriptor.annotation, param.type_descriptor.parameter_info
        try:
            if several:
                return [_read(item, get_args(kind)[0], settings) for item in value]
            return _read(value, kind, settings)
        except ValueError:
            return self.own().coerce(value, param=param, ctx=ctx)


def _read(value: Any, kind: Any, settings: Any) -> Any:
    """Raises ValueError for what is Typer's to read."""
    if settings.parser is None:
        if kind is str and type(value) is str:
            return value
        if kind is Path and (os.access(value, os.R_OK) or not os.path.exists(value)):
            return Path(value)
        if kind in NUMBERS:
            number = kind(value) if isinstance(value, str) and NUMBERS[kind].fullmatch(value) else value
            low, high = settings.min, settings.max
            inside = (
                type(number) is kind and (low is None or number >= low) and (high is None or number <= high)
            )
            if inside:
                return number
    raise ValueError
