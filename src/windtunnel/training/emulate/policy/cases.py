"""What the conditions of a program come to on every rank of the world.

What a place of the program was told on the captured ranks shows which function of the rank it asks for: the
rank itself, its number on the host, the host, or its place in a family of groups. Where several fit, each is
taken in turn. The expression is then worked out for all ranks by simpleeval, which walks its syntax tree: no
code of the program is run.
"""

from __future__ import annotations

import ast
import operator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from windtunnel.training.emulate.policy.observation import Condition, Observation, Source

Longs = NDArray[np.int64]
LENGTH = 1 << 16
"""Numbers of the longest range that is worked out."""


class Involved(Exception):
    """The expression is beyond what can be worked out."""


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
    known += [np.asarray(family.index(observation.world_size), np.int64) for family in observation.families]
    fitting: list[Longs] = []
    for one in known:
        fits = all(one[rank] == value for rank, value in source.values.items())
        if fits and not any(np.array_equal(one, other) for other in fitting):
            fitting.append(one)
    return fitting


def _worked_out(condition: Condition, columns: list[Longs]) -> Longs | None:
    """The outcome on each rank as a number, equal where the outcomes are equal; None where it is involved."""
    import simpleeval  # only a program with conditions needs it

    evaluator = _evaluator(simpleeval)
    tree = evaluator.parse(condition.text)
    combined, inverse = np.unique(np.stack(columns, axis=1), axis=0, return_inverse=True)
    numbers: dict[Any, int] = {}
    found = np.zeros(len(combined), np.int64)
    for place, values in enumerate(combined.tolist()):
        evaluator.names = {f"v{i}": value for i, value in enumerate(values)}
        try:
            value = evaluator.eval(condition.text, tree)
            outcome = (type(value), repr(value))
        except (Involved, simpleeval.InvalidExpression):
            return None
        except Exception as error:
            outcome = (type(error), "")  # what the program would meet there, too
        found[place] = numbers.setdefault(outcome, len(numbers))
    return found[np.asarray(inverse).reshape(-1)]


def _evaluator(simpleeval: Any) -> Any:
    """Of Python's arithmetic and comparisons. Numbers are what they are equal to; powers may be too large."""
    operators = simpleeval.DEFAULT_OPERATORS | {ast.Is: operator.eq, ast.IsNot: operator.ne}
    del operators[ast.Pow]
    functions = (abs, all, any, bool, divmod, float, int, len, max, min, round, str, sum, frozenset)
    named = {function.__name__: function for function in functions} | {"range": _range, "hash": _hash}
    return simpleeval.EvalWithCompoundTypes(operators, named, allowed_attrs={dict: {"get"}})


def _range(*limits: int) -> range:
    numbers = range(*limits)
    if len(numbers) > LENGTH:
        raise Involved
    return numbers


def _hash(value: Any) -> int:
    """Of a number; that of a text differs from process to process."""
    if not isinstance(value, int):
        raise Involved
    return hash(value)
