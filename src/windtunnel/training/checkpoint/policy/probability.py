"""How likely a job recovers from memory, counted exactly.

Of all ways to lose k hosts at once, those are fatal in which a whole copy set is lost. A placement falls
into parts that share no host, and the numbers of survivable losses of each size multiply like polynomials:
what can be lost of the one part times what can be lost of the other. A part is

- one copy set of m hosts: every loss but the whole, ``(1 + x)^m - x^m``;
- a ring (each m neighbours are a copy set): no m lost in a row, counted with the length of the present run as
  the state (a transfer matrix), around the circle.

For groups alone there is a closed form by inclusion and exclusion, 1 - sum over j >= 1 of
(-1)^(j+1) C(N/m, j) C(N-jm, k-jm) / C(N, k). The paper (GEMINI, section 4, corollary 1) gives the union
bound, which is lower and equal to it only for k < 2m.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from fractions import Fraction

import numpy as np

from windtunnel.training.checkpoint.model import Placement


def recovery(placement: Placement, lost: int) -> Fraction:
    """Probability that a loss of ``lost`` hosts at once, each choice equally likely, leaves every shard a
    copy.

    Raises:
        ValueError: a placement that `placement.place` does not make.
    """
    count = len(placement.holders)
    return Fraction(survivable(placement, lost)[lost], math.comb(count, lost))


def fatal_alike(placement: Placement, chance: float) -> float:
    """Probability that memory does not suffice where all hosts are lost independently with one ``chance``.

    ``chance``: within the time in which losses count as simultaneous, 1 - exp(-rate * window) for a rate per
    second and the window from a loss until all copies are made again. Added up from what is fatal, so that
    it keeps its digits where it is tiny.

    Raises:
        ValueError: a placement that `placement.place` does not make.
    """
    log_survival = 0.0  # log of the probability that nothing fatal happens
    for (size, length), times in _shapes(placement).items():
        fatal = chance**size if length == size else _ring_fatal(size, length, chance)
        if fatal >= 1.0:
            return 1.0
        log_survival += times * math.log1p(-fatal)
    return -math.expm1(log_survival)


def _ring_fatal(size: int, length: int, chance: float) -> float:
    """That of ``size`` in a ring ``length`` or more in a row are lost."""
    fatal = 0.0
    for head in range(min(length, size)):
        # `head` lost ones, then one that is kept; then the rest, whose last run joins the head.
        runs = [0.0] * length  # by length of the present run
        runs[0] = chance**head * (1.0 - chance)
        for _ in range(size - head - 1):
            fatal += runs[-1] * chance
            runs = [sum(runs) * (1.0 - chance), *(run * chance for run in runs[:-1])]
        fatal += sum(runs[length - head :])
    return fatal + chance ** min(length, size)


def survivable(placement: Placement, upto: int) -> tuple[int, ...]:
    """For k = 0 .. upto, how many choices of k hosts have no whole copy set among them.

    Raises:
        ValueError: a placement that `placement.place` does not make.
    """
    total = [1]
    for (size, length), times in _shapes(placement).items():
        group = [math.comb(size, k) for k in range(size)] + [0]
        counts = group if length == size else _ring_counts(size, length, upto)
        total = _times(total, _power(counts, times, upto), upto)
    return tuple(total) + (0,) * (upto + 1 - len(total))


def _shapes(placement: Placement) -> Counter[tuple[int, int]]:
    """How many parts have so many hosts, with copy sets of so many: a group where both are equal, else a
    ring."""
    holders, copies = placement.holders, placement.copies
    shapes: Counter[tuple[int, int]] = Counter()
    left = set(range(len(holders)))
    while left:
        ring = [min(left)]
        while copies > 1 and (after := holders[ring[-1]][1]) in left and after != ring[0]:
            ring.append(after)
            left.discard(after)
        left.discard(ring[0])
        around = ring * 2
        if any(around[at : at + copies] != [*holders[place]] for at, place in enumerate(ring)):
            raise ValueError("the placement is made of neither groups nor rings")
        shapes[len(ring), copies] += 1
    return shapes


def _ring_counts(size: int, length: int, upto: int) -> list[int]:
    """For k = 0 .. upto, the choices of k of ``size`` in a ring without ``length`` in a row around it."""
    width = min(upto, size) + 1
    total = [0] * width
    for head in range(min(length, size, width)):
        # `head` lost ones, then one that is kept; then the rest, whose last run joins the head.
        runs = [[0] * width for _ in range(length)]  # by length of the present run, by number lost
        runs[0][head] = 1
        for _ in range(size - head - 1):
            not_lost = [sum(column) for column in zip(*runs, strict=True)]
            grown = [[0, *run[:-1]] for run in runs[:-1]]
            runs = [not_lost, *grown]
        for tail in range(length - head):
            total = [a + b for a, b in zip(total, runs[tail], strict=True)]
    return total


def _times(left: Sequence[int], right: Sequence[int], upto: int) -> list[int]:
    """The product of two polynomials of exact numbers, without the powers above ``upto``."""
    product = np.convolve(np.array(left, object), np.array(right, object))
    return [int(count) for count in product[: upto + 1]]


def _power(base: Sequence[int], times: int, upto: int) -> list[int]:
    if times == 0:
        return [1]
    half = _power(base, times // 2, upto)
    square = _times(half, half, upto)
    return _times(square, base, upto) if times % 2 else square
