"""Conditions on the points of a sweep: ``tp * pp <= world_size`` holds or does not hold.

A spec may come from somebody else, so a condition is no Python: its syntax tree is walked, and only numbers,
text, names, arithmetic, comparison and ``and``, ``or``, ``not`` are known. There are no powers, calls or
attributes, and arithmetic is on numbers alone, so that no condition takes long or reaches anything.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping

Value = int | float | str | bool
"""What an argument can be: ``--tp 4``, ``--lr 3e-4``, ``--ac full``, or ``--compile``, given or not."""

LONGEST = 500
"""Characters of a condition; deeper nesting than these allow would only trouble the parser."""

ACCEPTED = "accepted are names, numbers, text, + - * / // %, comparisons, in, and, or, not"

_ARITHMETIC: dict[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_COMPARISON: dict[type[ast.cmpop], Callable[[object, object], bool]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,  # type: ignore[dict-item]
    ast.LtE: operator.le,  # type: ignore[dict-item]
    ast.Gt: operator.gt,  # type: ignore[dict-item]
    ast.GtE: operator.ge,  # type: ignore[dict-item]
    ast.In: lambda one, many: one in many,  # type: ignore[operator]
    ast.NotIn: lambda one, many: one not in many,  # type: ignore[operator]
}


def parse(text: str) -> ast.expr:
    """The syntax tree of a condition, of parts that `holds` knows.

    Raises ValueError, whose message says what is accepted.
    """
    if len(text) > LONGEST:
        raise ValueError(f"accepted are at most {LONGEST} characters")
    try:
        tree = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise ValueError(f"it cannot be read; {ACCEPTED}") from None
    for node in ast.walk(tree):
        _check(node)
    return tree


def _check(node: ast.AST) -> None:
    known = (
        ast.BoolOp, ast.And, ast.Or, ast.UnaryOp, ast.Not, ast.USub, ast.BinOp, ast.Compare,
        ast.Name, ast.Load, ast.Tuple, ast.List, ast.Constant, *_ARITHMETIC, *_COMPARISON,
    )  # fmt: skip
    if not isinstance(node, known):
        raise ValueError(f"{type(node).__name__} is not known here; {ACCEPTED}")
    if isinstance(node, ast.Constant) and not isinstance(node.value, int | float | str):
        raise ValueError(f"{node.value!r} is not known here; {ACCEPTED}")


def names(tree: ast.expr) -> list[str]:
    """The names that the condition uses, each once."""
    return list(dict.fromkeys(node.id for node in ast.walk(tree) if isinstance(node, ast.Name)))


def holds(tree: ast.expr, values: Mapping[str, Value]) -> bool:
    """Whether the condition holds where names have ``values``.

    Raises ValueError where it cannot be said: text compared with a number, a division by zero, a result that
    is neither true nor false.
    """
    try:
        result = _value(tree, values)
    except TypeError:
        raise ValueError("numbers go with numbers, and text with text") from None
    except (ZeroDivisionError, OverflowError) as error:
        raise ValueError(str(error)) from None
    if not isinstance(result, bool):
        raise ValueError(f"it gives {result!r}; accepted is what is true or false, such as tp * pp <= 64")
    return result


def _value(node: ast.expr, values: Mapping[str, Value]) -> object:
    match node:
        case ast.Constant(value=value):
            return value
        case ast.Name(id=name):
            return values[name]
        case ast.Tuple(elts=parts) | ast.List(elts=parts):
            return [_value(part, values) for part in parts]
        case ast.UnaryOp(op=ast.Not(), operand=part):
            return not _value(part, values)
        case ast.UnaryOp(operand=part):
            return -_number(_value(part, values))
        case ast.BinOp(left=left, op=op, right=right):
            return _ARITHMETIC[type(op)](_number(_value(left, values)), _number(_value(right, values)))
        case ast.BoolOp(op=ast.And(), values=parts):
            return all(_value(part, values) for part in parts)
        case ast.BoolOp(values=parts):
            return any(_value(part, values) for part in parts)
        case ast.Compare(left=left, ops=ops, comparators=rest):
            sides = [_value(part, values) for part in (left, *rest)]
            compared = zip(ops, sides[:-1], sides[1:], strict=True)
            return all(_COMPARISON[type(op)](one, other) for op, one, other in compared)
    raise AssertionError(f"{type(node).__name__} passed the check")


def _number(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError
    return value
