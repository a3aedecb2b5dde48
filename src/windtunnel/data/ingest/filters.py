"""A session's filter: which rows meet it, and which statistics say that none can."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from windtunnel.base.errors import UserError
from windtunnel.data.ingest.model import IngestSession

COMPARE: dict[str, Callable[[Any, Any], Any]] = {
    "==": pc.equal, "!=": pc.not_equal, "<": pc.less, "<=": pc.less_equal, ">": pc.greater,
    ">=": pc.greater_equal,
}  # fmt: skip


def mask(columns: dict[str, pa.Array], session: IngestSession, count: int) -> pa.BooleanArray | None:
    """Which rows meet the filter; a comparison with null is not met."""
    mask = None
    for name, operator, value in session.where:
        column = columns[name]
        try:
            if value is None and operator in ("==", "!="):
                result = column.is_null() if operator == "==" else column.is_valid()
            elif operator in COMPARE:
                result = COMPARE[operator](column, _literal(value, column.type))
            else:
                literals = [each if each is None else _literal(each, column.type).as_py() for each in value]
                values = pa.array(literals, column.type)
                if values.to_pylist() != literals:  # Arrow would take 2.5 for the whole number 2
                    raise TypeError
                result = pc.is_in(column, values)
                result = pc.and_(pc.invert(result), column.is_valid()) if operator == "not in" else result
        except (pa.ArrowException, TypeError, OverflowError):
            raise UserError(
                f"{session.table}: where compares column {name} of {column.type} by {operator} with"
                f" {value!r}, accepted is a value of that type"
            ) from None
        result = pc.fill_null(result, False)
        mask = result if mask is None else pc.and_(mask, result)
    return mask


def _literal(value: Any, kind: pa.DataType) -> pa.Scalar:
    """``value`` as rows have it: 0.1 is what a column of float32 holds for it."""
    if isinstance(value, str):
        if pa.types.is_temporal(kind) or pa.types.is_string(kind) or pa.types.is_binary(kind):
            return pa.scalar(value).cast(kind)
        raise TypeError
    if value is None or isinstance(value, bool) != pa.types.is_boolean(kind):
        raise TypeError
    exact = pa.types.is_floating(kind) or (pa.types.is_integer(kind) and isinstance(value, int))
    return pa.scalar(value, kind if exact else None)


def outside(operator: str, value: Any, least: Any, most: Any, kind: pa.DataType) -> bool:
    """No number from ``least`` to ``most`` meets the comparison."""
    try:
        match operator:
            case "in":
                return all(outside("==", each, least, most, kind) for each in value)
            case "==" | "<" | "<=" | ">" | ">=":
                bound = _literal(value, kind).as_py()
                results = {
                    "==": least <= bound <= most, "<": least < bound, "<=": least <= bound, ">": most > bound,
                    ">=": most >= bound,
                }  # fmt: skip
                return not results[operator]
    except (pa.ArrowException, TypeError, ValueError, OverflowError):
        pass  # of types that do not compare, or a value that the type cannot hold
    return False
