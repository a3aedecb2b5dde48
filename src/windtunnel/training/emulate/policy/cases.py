"""What the conditions of a program come to on every rank of the world.

What a place of the program was told on the captured ranks shows which function of the rank it asks for: the
rank itself, its number on the host, the host, or its place in a family of groups. Where several fit, each is
taken in turn. The expression is then worked out for all ranks, by a small interpreter of Python's arithmetic
and comparisons: no code of the program is run.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from windtunnel.training.emulate.policy.observation import Condition, Observation, Source

Longs = NDArray[np.int64]
Values = dict[str, Any]
FUNCTIONS: dict[str, Callable[..., Any]] = {
    "abs": abs, "all": all, "any": any, "bool": bool, "divmod": divmod, "float": float, "int": int,
    "len": len, "max": max, "min": min, "round": round, "str": str, "sum": sum, "set": frozenset,
    "frozenset": frozenset, "tuple": tuple, "list": tuple,
}  # fmt: skip
OPERATORS: dict[type[ast.AST], Callable[..., Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod, ast.BitAnd: operator.and_,
    ast.BitOr: operator.or_, ast.BitXor: operator.xor, ast.LShift: operator.lshift,
    ast.RShift: operator.rshift, ast.Not: operator.not_, ast.USub: operator.neg, ast.UAdd: operator.pos,
    ast.Invert: operator.invert, ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Lt: operator.lt,
    ast.LtE: operator.le, ast.Gt: operator.gt, ast.GtE: operator.ge,
    ast.In: lambda a, b: a in b, ast.NotIn: lambda a, b: a not in b,
    ast.Is: lambda a, b: a == b, ast.IsNot: lambda a, b: a != b,
}  # fmt: skip


class Involved(Exception):
    """The expression is beyond this interpreter."""


def outcomes(observation: Observation) -> tuple[list[Longs], list[Longs]]:
    """Columns of numbers, one of each rank: (what conditions come to, what tells all ranks apart and may
    matter in a way that is not known). Ranks that are equal in a column cannot be told apart by it.

    A condition that is worked out and comes to something else on every rank, as the rank does itself, is no
    column: the witnesses differ in it.
    """
    ranks = np.arange(observation.world_size)
    columns: dict[bytes, Longs] = {}
    apart = False
    for condition in observation.conditions:
        for column, unknown in _columns(condition, observation):
            if len(np.unique(column)) < len(ranks):
                columns.setdefault(column.tobytes(), column)
            else:
                apart = apart or unknown
    return list(columns.values()), [ranks] if apart else []


def _columns(condition: Condition, observation: Observation) -> list[tuple[Longs, bool]]:
    """What the condition comes to on all ranks, for each thing that its sources may ask for; and whether more
    may come of that than is known."""
    ranks = np.arange(observation.world_size)
    meanings = [_meanings(observation, observation.sources[row]) for row in condition.sources]
    if not condition.text or not meanings or not all(meanings):
        return [(ranks, True)]
    found = []
    for turn in range(max(map(len, meanings))):
        told = [fitting[turn % len(fitting)] for fitting in meanings]
        column = _worked_out(condition, told)
        found += [(one, True) for one in told] if column is None else [(column, condition.involved)]
    return found


def _meanings(observation: Observation, source: Source) -> list[Longs]:
    """What the source may tell each rank: all that fits what it told the captured ones."""
    ranks = np.arange(observation.world_size, dtype=np.int64)
    known = [ranks, ranks % observation.devices_per_host, ranks // observation.devices_per_host]
    known += [np.asarray(one.index(observation.world_size), np.int64) for one in observation.families]
    fitting: list[Longs] = []
    for one in known:
        fits = all(one[rank] == value for rank, value in source.values.items())
        if fits and not any(np.array_equal(one, other) for other in fitting):
            fitting.append(one)
    return fitting


def _worked_out(condition: Condition, columns: list[Longs]) -> Longs | None:
    """The outcome on each rank as a number, equal where the outcomes are equal; None where it is involved."""
    tree = ast.parse(condition.text, mode="eval").body
    combined, inverse = np.unique(np.stack(columns, axis=1), axis=0, return_inverse=True)
    numbers: dict[Any, int] = {}
    found = np.zeros(len(combined), np.int64)
    for place, values in enumerate(combined.tolist()):
        names = {f"v{i}": value for i, value in enumerate(values)}
        try:
            value = _value(tree, names)
            outcome = (type(value), repr(value) if isinstance(value, dict) else value)
        except Involved:
            return None
        except Exception as error:
            outcome = (type(error), "")  # what the program would meet there, too
        found[place] = numbers.setdefault(outcome, len(numbers))
    return found[np.asarray(inverse).reshape(-1)]


def _value(node: ast.expr, names: Values) -> Any:
    match node:
        case ast.Constant(value=value):
            return value
        case ast.Name(id=name) if name in names:
            return names[name]
        case ast.Tuple(elts=items) | ast.List(elts=items):
            return tuple(_value(item, names) for item in items)
        case ast.Set(elts=items):
            return frozenset(_value(item, names) for item in items)
        case ast.Dict(keys=keys, values=values) if all(key is not None for key in keys):
            return {
                _value(key, names): _value(value, names)
                for key, value in zip(keys, values, strict=True)
                if key is not None
            }
        case ast.UnaryOp(op=op, operand=operand):
            return OPERATORS[type(op)](_value(operand, names))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATORS:
            return _bounded(OPERATORS[type(op)], _value(left, names), _value(right, names))
        case ast.BoolOp(op=op, values=values):
            return _any_or_all(op, values, names)
        case ast.Compare(left=left, ops=compared, comparators=others):
            value = _value(left, names)
            for compare, other in zip(compared, others, strict=True):
                following = _value(other, names)
                if not OPERATORS[type(compare)](value, following):
                    return False
                value = following
            return True
        case ast.IfExp(test=test, body=body, orelse=orelse):
            return _value(body if _value(test, names) else orelse, names)
        case ast.Subscript(value=base, slice=index) if not isinstance(index, ast.Slice):
            return _value(base, names)[_value(index, names)]
        case ast.Call(func=ast.Name(id="range"), args=arguments, keywords=[]):
            return _short(range(*(_value(one, names) for one in arguments)))
        case ast.Call(func=ast.Name(id="hash"), args=[argument], keywords=[]):
            return _hash(_value(argument, names))
        case ast.Call(func=ast.Name(id=name), args=arguments, keywords=[]) if name in FUNCTIONS:
            return FUNCTIONS[name](*(_value(one, names) for one in arguments))
        case ast.Call(func=ast.Attribute(value=base, attr="get"), args=arguments, keywords=[]):
            table = _value(base, names)
            if isinstance(table, dict):
                return table.get(*(_value(one, names) for one in arguments))
    raise Involved


def _any_or_all(op: ast.boolop, values: list[ast.expr], names: Values) -> Any:
    outcome: Any = None
    for one in values:
        outcome = _value(one, names)
        if bool(outcome) != isinstance(op, ast.And):
            return outcome
    return outcome


BITS = 256
LENGTH = 1 << 16


def _short(numbers: range) -> range:
    if len(numbers) > LENGTH:
        raise Involved
    return numbers


def _hash(value: Any) -> int:
    """Of a number; that of a text differs from process to process."""
    if not isinstance(value, int):
        raise Involved
    return hash(value)


def _bounded(do: Callable[..., Any], left: Any, right: Any) -> Any:
    """An operator on numbers that stay small: a shift or a product of texts may not fill the memory."""
    if any(isinstance(one, int) and abs(one).bit_length() > BITS for one in (left, right)):
        raise Involved
    if do is operator.lshift and right > BITS:
        raise Involved
    if do is operator.mul and not all(isinstance(one, int | float) for one in (left, right)):
        raise Involved
    return do(left, right)
