"""What a message must look like before anybody acts on it: one table of requests, each with its fields.

A check is a function from a value of JSON to whether it is as it should be; checks are put together to larger
ones. Further fields are let through, and not looked at.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from windtunnel.base.wire import WireError

Check = Callable[[Any], bool]
Table = Mapping[str, Check]
"""By "op": the check of the whole message."""
LARGEST = 1 << 63


def require(message: dict[str, Any], table: Table) -> dict[str, Any]:
    """``message``, which is one of ``table``.

    Raises:
        WireError: there is no such request, or a field is not what it must be.
    """
    op = message.get("op")
    if not isinstance(op, str) or op not in table:
        raise WireError(f"{str(op)[:40]!r} is no message that is known here")
    if not table[op](message):
        raise WireError(f"a {op!r} is not understood: fields are missing, or not what they must be")
    return message


def anything(value: Any) -> bool:
    """Any value; of a field, it may be missing."""
    return True


def integer(value: Any) -> bool:
    return type(value) is int and -LARGEST <= value < LARGEST


def count(value: Any) -> bool:
    """A number of things, or of one among them: 0 or more."""
    return type(value) is int and 0 <= value < LARGEST


def number(value: Any) -> bool:
    """Finite."""
    return type(value) in (int, float) and math.isfinite(value) and abs(value) < LARGEST


def positive(value: Any) -> bool:
    return number(value) and value > 0


def flag(value: Any) -> bool:
    return type(value) is bool


def text(value: Any) -> bool:
    return isinstance(value, str)


def maybe(check: Check) -> Check:
    """None, a field that is missing, or what passes ``check``."""
    return lambda value: value is None or check(value)


def each(check: Check, least: int = 0) -> Check:
    """A list of at least so many."""
    return lambda value: isinstance(value, list) and len(value) >= least and all(map(check, value))


def numbered(check: Check) -> Check:
    """An object whose keys are numbers (JSON writes them as texts)."""

    def passes(value: Any) -> bool:
        if not isinstance(value, dict):
            return False
        keys = all(key.isascii() and key.isdigit() and len(key) < 19 for key in value)
        return keys and all(map(check, value.values()))

    return passes


def fields(**checks: Check) -> Check:
    """An object with these fields."""

    def passes(value: Any) -> bool:
        return isinstance(value, dict) and all(check(value.get(name)) for name, check in checks.items())

    return passes
