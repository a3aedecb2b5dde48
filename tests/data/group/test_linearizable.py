"""The checker itself: it takes what a register can answer, and nothing else."""

from __future__ import annotations

import numpy as np
import pytest

from support.linearizable import Operation, linearizable


def history(seed: int, count: int, *, stale: bool) -> list[Operation]:
    """Of a register that does each operation at a time between its beginning and its end; ``stale``: one read
    answers what was overwritten before it began."""
    rng = np.random.default_rng(seed)
    points = np.sort(rng.random(count))
    value, operations, before = 0, list[Operation](), list[int]()
    for number, at in enumerate(points, 1):
        began, ended = at - 0.02 * rng.random(), at + 0.02 * rng.random()
        kind = ("read", "write", "cas")[rng.integers(3)]
        expected = value if rng.random() < 0.5 else -1
        operations.append(Operation(kind, began, ended, expected, number, None if kind == "write" else value))
        if kind == "write" or (kind == "cas" and expected == value):
            before.append(value)
            value = number
    if stale:
        operations.append(Operation("read", 2.0, 2.1, result=before[len(before) // 2]))
    return operations


@pytest.mark.parametrize("seed", range(5))
def test_what_a_register_answers_is_accepted_and_a_stale_read_is_not(seed: int) -> None:
    assert linearizable(history(seed, 80, stale=False))
    assert not linearizable(history(seed, 80, stale=True))


def test_what_has_no_end_may_be_done_or_not() -> None:
    lost = Operation("write", 1.0, new=5)
    assert linearizable([lost, Operation("read", 2.0, 3.0, result=0), Operation("read", 4.0, 5.0, result=5)])
    assert linearizable([lost, Operation("read", 2.0, 3.0, result=0)])
    assert not linearizable([lost, Operation("read", 0.0, 0.5, result=5)])
    flips = [Operation("read", 2.0, 3.0, result=5), Operation("read", 4.0, 5.0, result=0)]
    assert not linearizable([lost, *flips])
