"""How likely a job recovers from memory, exactly where that can be counted.

Of all ways to lose k hosts at once, those are fatal in which a whole copy set is lost. A placement falls
into parts that share no host, and the numbers of survivable losses of each size multiply like polynomials:
what can be lost of the one part times what can be lost of the other. A part is

- one copy set of m hosts: every loss but the whole, ``(1 + x)^m - x^m``;
- a ring (each m neighbours are a copy set): no m lost in a row, counted with the length of the present run as
  the state (a transfer matrix), around the circle;
- anything else: enumerated up to `ENUMERATED` hosts, sampled beyond, and then the error is told.

For groups alone there is a closed form by inclusion and exclusion, 1 - sum over j >= 1 of
(-1)^(j+1) C(N/m, j) C(N-jm, k-jm) / C(N, k). The paper (GEMINI, section 4, corollary 1) gives the union
bound, which is lower and equal to it only for k < 2m.

What fails together: a loss of domains is one of all places in them, so the same is asked of the copy sets
with domains in the places' stead.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from windtunnel.training.checkpoint.model import Placement
from windtunnel.training.checkpoint.policy.placement import copy_sets

ENUMERATED = 18
"""A part of at most so many hosts is enumerated (2^18 subsets)."""

Sets = frozenset[frozenset[int]]


@dataclass(frozen=True)
class Estimate:
    """A probability. ``exact`` where it was counted; else ``error`` is the standard error of the sample."""

    value: float
    error: float = 0.0
    exact: Fraction | None = None


def recovery(
    placement: Placement,
    lost: int,
    domains: Sequence[str] = (),
    *,
    rng: np.random.Generator | None = None,
    samples: int = 20_000,
) -> Estimate:
    """Probability that a loss of ``lost`` hosts at once, each choice equally likely, leaves every shard a
    copy; with ``domains`` (``domains[p]`` is that of place p) the loss of ``lost`` whole domains.

    Exact for every placement that `placement.place` makes, hosts being lost. ``rng`` and ``samples`` are used
    only where one part has another shape and more than `ENUMERATED` members.

    Raises:
        ValueError: such a placement without ``rng``.
    """
    names = sorted(set(domains)) if domains else [str(place) for place in range(len(placement.holders))]
    count = len(names)
    if not 0 <= lost <= count:
        raise ValueError(f"{lost} of {count} {'domains' if domains else 'hosts'} cannot be lost")
    sets = _of_domains(placement, domains, names) if domains else copy_sets(placement)
    ways = survivable(sets, count, lost)
    if ways is not None:
        exact = Fraction(ways[lost], math.comb(count, lost))
        return Estimate(float(exact), exact=exact)
    return _sampled(count, lost, sets, rng, samples)


def fatal_alike(placement: Placement, chance: float) -> float:
    """Probability that memory does not suffice where all hosts are lost independently with one ``chance``.

    ``chance``: within the time in which losses count as simultaneous, 1 - exp(-rate * window) for a rate per
    second and the window from a loss until all copies are made again. Added up from what is fatal, so that
    it keeps its digits where it is tiny.

    Raises:
        ValueError: a placement that `placement.place` does not make.
    """
    kept = 0.0  # log of the probability that nothing fatal happens
    shapes: Counter[tuple[int, int]] = Counter()
    for part in _parts(copy_sets(placement)):
        members = sorted(set().union(*part))
        length = len(members) if len(part) == 1 else _ring(part, members)
        if length is None:
            raise ValueError("the placement is made of neither groups nor rings")
        shapes[len(members), length] += 1
    for (size, length), times in shapes.items():
        fatal = chance**size if length == size else _ring_fatal(size, length, chance)
        if fatal >= 1.0:
            return 1.0
        kept += times * math.log1p(-fatal)
    return -math.expm1(kept)


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


def _of_domains(placement: Placement, domains: Sequence[str], names: Sequence[str]) -> Sets:
    number = {name: at for at, name in enumerate(names)}
    return frozenset(frozenset(number[domains[p]] for p in held) for held in copy_sets(placement))


def survivable(sets: Sets, places: int, upto: int) -> tuple[int, ...] | None:
    """For k = 0 .. upto, how many choices of k of ``places`` have no whole one of ``sets`` among them.

    None where a part of the placement is neither a group nor a ring and too large to enumerate.
    """
    kinds: Counter[tuple[int, ...]] = Counter()
    inside = 0
    for part in _parts(sets):
        members = sorted(set().union(*part))
        inside += len(members)
        counts = _count(part, members, upto)
        if counts is None:
            return None
        kinds[tuple(counts[: upto + 1])] += 1
    total = [math.comb(places - inside, k) for k in range(upto + 1)]
    for kind, times in kinds.items():
        total = _times(total, _power(kind, times, upto), upto)
    return tuple(total)


def _count(part: list[frozenset[int]], members: list[int], upto: int) -> list[int] | None:
    size = len(members)
    if len(part) == 1:
        return [math.comb(size, k) for k in range(size)] + [0]
    length = _ring(part, members)
    if length is not None:
        return _ring_counts(size, length, upto)
    if size > ENUMERATED:
        return None
    return _enumerated(part, members)


def _parts(sets: Sets) -> list[list[frozenset[int]]]:
    """The copy sets in parts that share no member; sets that contain another one decide nothing."""
    holding: dict[int, list[frozenset[int]]] = {}
    for one in sets:
        for member in one:
            holding.setdefault(member, []).append(one)
    kept = [one for one in sets if not any(other < one for member in one for other in holding[member])]
    root: dict[int, int] = {}

    def find(member: int) -> int:
        while root.setdefault(member, member) != member:
            root[member] = root[root[member]]
            member = root[member]
        return member

    for one in kept:
        first, *rest = one
        for other in rest:
            root[find(other)] = find(first)
    parts: dict[int, list[frozenset[int]]] = {}
    for one in sorted(kept, key=sorted):
        parts.setdefault(find(next(iter(one))), []).append(one)
    return list(parts.values())


def _ring(part: list[frozenset[int]], members: list[int]) -> int | None:
    """The length of the copy sets if they are all windows of a ring of ``members``, else None."""
    length = len(part[0])
    if any(len(one) != length for one in part) or len(part) != len(members) or length < 2:
        return None
    # Windows that differ by one step share all but one member: walk along them.
    near: dict[frozenset[int], list[frozenset[int]]] = {one: [] for one in part}
    holding: dict[int, list[frozenset[int]]] = {}
    for one in part:
        for member in one:
            holding.setdefault(member, []).append(one)
    for one in part:
        seen = {other for member in one for other in holding[member]}
        near[one] = sorted((o for o in seen if len(o & one) == length - 1), key=sorted)
    if len(members) == length + 1:  # every choice of all but one: a ring in any order
        return length
    if any(len(others) != 2 for others in near.values()):
        return None
    walk = [part[0], near[part[0]][0]]
    while len(walk) < len(part):
        one, other = near[walk[-1]]
        walk.append(other if one == walk[-2] else one)
    order = [next(iter(walk[i + 1] - walk[i]), -1) for i in range(len(walk) - 1)]
    order.append(next(iter(walk[0] - walk[-1]), -1))
    if sorted(order) != members:
        return None
    windows = {frozenset(order[(i + j) % len(order)] for j in range(length)) for i in range(len(order))}
    return length if windows == set(part) else None


def _ring_counts(size: int, length: int, upto: int) -> list[int]:
    """For k = 0 .. upto, the choices of k of ``size`` in a ring without ``length`` in a row around it."""
    width = min(upto, size) + 1
    total = [0] * width
    for head in range(min(length, size, width)):
        # `head` lost ones, then one that is kept; then the rest, whose last run joins the head.
        runs = [[0] * width for _ in range(length)]  # by length of the present run, by number lost
        runs[0][head] = 1
        for _ in range(size - head - 1):
            kept = [sum(column) for column in zip(*runs, strict=True)]
            grown = [[0, *run[:-1]] for run in runs[:-1]]
            runs = [kept, *grown]
        for tail in range(length - head):
            total = [a + b for a, b in zip(total, runs[tail], strict=True)]
    return total


def _enumerated(part: Iterable[frozenset[int]], members: list[int]) -> list[int]:
    """By trying every choice of ``members``."""
    masks = _masks(part, members)
    gone = np.arange(1 << len(members), dtype=np.int64)
    alive = np.ones(len(gone), dtype=bool)
    for mask in masks:
        alive &= (gone & mask) != mask
    sizes = sum((gone >> bit) & 1 for bit in range(len(members)))
    return np.bincount(np.asarray(sizes)[alive], minlength=len(members) + 1).tolist()


def _masks(part: Iterable[frozenset[int]], members: list[int]) -> list[int]:
    bit = {member: 1 << at for at, member in enumerate(members)}
    return [sum(bit[member] for member in one) for one in part]


def _times(left: Sequence[int], right: Sequence[int], upto: int) -> list[int]:
    out = [0] * (upto + 1)
    for i, a in enumerate(left):
        if a:
            for j, b in enumerate(right[: upto + 1 - i]):
                out[i + j] += a * b
    return out


def _power(base: Sequence[int], times: int, upto: int) -> list[int]:
    out = [1]
    square = list(base)
    while times:
        if times & 1:
            out = _times(out, square, upto)
        times >>= 1
        if times:
            square = _times(square, square, upto)
    return out


def _sampled(count: int, lost: int, sets: Sets, rng: np.random.Generator | None, samples: int) -> Estimate:
    if rng is None:
        raise ValueError("a placement of this shape and size can only be sampled; a generator is needed")
    good = 0
    for _ in range(samples):
        gone = set(rng.permutation(count)[:lost].tolist())
        good += not any(gone.issuperset(one) for one in sets)
    share = good / samples
    # Laplace's rule keeps the error above nothing where all samples agree.
    smooth = (good + 1) / (samples + 2)
    return Estimate(share, math.sqrt(smooth * (1 - smooth) / samples))
