"""Whether a concurrent history of one register is linearizable: the search of Wing and Gong (1993), with what
is known of a state remembered (Lowe, 2017).

An operation that has no end (its caller was told that the group has halted) may have been done at any time
after its beginning, or never.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf


@dataclass(frozen=True)
class Operation:
    """``kind`` is read (``result``: the value), write (``new``) or cas (``result``: the value before)."""

    kind: str
    began: float
    ended: float = inf
    expected: int = 0
    new: int = 0
    result: int | None = None


def linearizable(history: list[Operation], value: int = 0) -> bool:
    """Whether the register that holds ``value`` first can have answered so."""
    todo = sorted(history, key=lambda operation: operation.began)
    known: set[tuple[frozenset[int], int]] = set()
    stack = [(frozenset(range(len(todo))), value)]
    while stack:
        left, now = stack.pop()
        if all(todo[index].ended == inf for index in left):
            return True
        if (left, now) in known:
            continue
        known.add((left, now))
        first = min(todo[index].ended for index in left)
        for index in left:
            operation = todo[index]
            if operation.began <= first and (after := _done(operation, now)) is not None:
                stack.append((left - {index}, after))
    return False


def _done(operation: Operation, now: int) -> int | None:
    """The register's value after it; None where it cannot come here."""
    if operation.kind == "write":
        return operation.new
    if operation.ended < inf and operation.result != now:
        return None
    return operation.new if operation.kind == "cas" and operation.expected == now else now
