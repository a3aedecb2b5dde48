"""Which neighbouring gradients are synchronised as one, and which option each such group gets.

*Options*: a search over choices, each priced by the whole timeline.

A choice pays only where the iteration waits for what it shortens, which depends on all other choices. One
greedy sweep (Espresso, EuroSys '23, algorithm 1) can end far from the optimum, so each uniform choice is a
start, and from each the search goes on until no change helps. *Blocks* of groups change together: first all
of one size, then the halves of these farther from or nearer to the output (Espresso's lemma on which of equal
gradients to move), down to single groups; small jobs also try what follows when one group is held at another
option.

*Groups* share fixed costs and keep overlap. Each costs ``encode.fixed + encode.rate * numel`` on the device
that also runs backward, then ``send.fixed + send.rate * numel`` on the network. When y groups end at gradient
i, the device is done at

    device(i, y) = backward of all up to i + y * encode.fixed + encode.rate * elements up to i

wherever the cuts are, since the cost of encoding is affine. So only the end of the network's work needs to be
minimised over the last cut, which makes the optimum a dynamic programme of O(n^2 y):

    network(i, y) = min over j < i of  max(network(j, y-1), device(i, y)) + send(j, i)

The problem is Cupcake's (MLSys '23); this exact algorithm for it is our own, held against all partitions in
the tests.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from windtunnel.base.compiled import jit
from windtunnel.training.gradsync.policy.options import GroupTask
from windtunnel.training.gradsync.policy.timeline import EACH, Costs, iteration_seconds

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
BUDGET = 1_000_000
"""Tasks that one search may schedule; about 10 ns each."""
STARTS = 6
"""Starts that are gone on from, the best ones."""
SMALL = 16
"""Groups up to which each is held at other options."""


def undominated(options: Sequence[Sequence[GroupTask]]) -> list[int]:
    """Those that no other option (or an earlier, equal one) beats on every resource and in sum."""
    used = np.zeros((len(options), EACH + 1))
    for place, option in enumerate(options):
        for task in option:
            used[place, task.resource] += task.seconds
        used[place, EACH] = len(option) * 1e-12  # of equal ones the shorter
    places = []
    for place, row in enumerate(used):
        beaten = (used <= row).all(axis=1) & ((used < row).any(axis=1) | (np.arange(len(used)) < place))
        beaten[place] = False
        if not beaten.any():
            places.append(place)
    return places


def blocks(numels: Sequence[int], options: Sequence[int]) -> list[list[int]]:
    """Groups that are tried together, large ones first, each set before its parts: those of one size and as
    many options, since a table of rows has others than a dense gradient of its size."""
    alike: dict[tuple[int, int], list[int]] = defaultdict(list)
    for place, kind in enumerate(zip(numels, options, strict=True)):
        alike[kind].append(place)
    levels: list[list[int]] = []
    level = [members for _, members in sorted(alike.items(), key=lambda item: -item[0][0] * len(item[1]))]
    while level:
        levels += level
        level = [
            part
            for members in level
            if len(members) > 1
            for part in (members[: len(members) // 2], members[len(members) // 2 :])
        ]
    return levels


def search(costs: Costs, numels: Sequence[int], starts: Sequence[Ints], budget: int = BUDGET) -> Ints:
    """The best choice found from all ``starts``; ``numels`` are the groups' sizes. Deterministic."""
    groups = len(numels)
    sets = blocks(numels, costs.options.tolist())
    flat = np.array([member for members in sets for member in members], np.int64)
    ends = np.cumsum([len(members) for members in sets])
    tasks = max(1, int(costs.length.max(axis=1).sum()) + groups)
    tries = max(1, budget // tasks // max(1, min(STARTS, len(starts))))
    ended: list[tuple[float, Ints]] = []
    for start in sorted(starts, key=costs.iteration)[:STARTS]:
        choice = start.copy()
        ended.append((_descend(costs, choice, flat, ends, -1, tries)[0], choice))
    best = min(ended, key=lambda item: item[0])[1]
    if groups <= SMALL:
        _search_fixed(costs, best, tries)
    return best


@jit
def _descend(costs: Costs, choice: Ints, flat: Ints, ends: Ints, fixed: int, tries: int) -> tuple[float, int]:
    """Change block after block, but the group ``fixed``, to the option that helps most until none does;
    ``choice`` in place. Seconds of the end, and how many choices were tried."""
    best = iteration_seconds(costs, choice)
    tried = 0
    previous = choice.copy()
    better = True
    while better and tried <= tries:
        better = False
        begin = 0
        for end in ends:
            members = flat[begin:end]
            begin = end
            if members[0] == fixed or tried > tries:
                continue
            winner = -1
            previous[members] = choice[members]
            for option in range(costs.options[members[0]]):
                if (previous[members] == option).all():
                    continue
                choice[members] = option
                seconds = iteration_seconds(costs, choice)
                tried += 1
                if seconds < best * (1 - 1e-12):
                    best, winner = seconds, option
            if winner >= 0:
                better = True
                choice[members] = winner
            else:
                choice[members] = previous[members]
    return best, tried


@jit
def _search_fixed(costs: Costs, choice: Ints, tries: int) -> None:
    """Hold one group at another option while the others go to what is best for them then; until no such turn
    helps."""
    best = iteration_seconds(costs, choice)
    single = np.arange(len(choice))
    tried = 0
    better = True
    while better and tried < tries:
        better = False
        for g in range(len(choice)):
            for option in range(costs.options[g]):
                if option == choice[g] or tried >= tries:
                    continue
                previous = choice.copy()
                choice[g] = option
                now, more = _descend(costs, choice, single, single + 1, g, tries - tried)
                tried += more
                if now < best * (1 - 1e-12):
                    best = now
                    better = True
                else:
                    choice[:] = previous


FIRST = 2**18
"""Elements of DDP's first bucket: 1 MiB of float32."""


class Affine(NamedTuple):
    """``fixed`` seconds a group and ``rate`` seconds an element."""

    fixed: float
    rate: float


def best_cuts(
    backward: Sequence[float], numels: Sequence[int], encode: Affine, send: Affine
) -> tuple[float, list[int]]:
    """Seconds until the device and the network are done, and where the groups end: positions, ascending, the
    last is ``len(numels)``."""
    computed = np.concatenate([[0.0], np.cumsum(np.asarray(backward, float))])
    elements = np.concatenate([[0.0], np.cumsum(np.asarray(numels, float))])
    seconds, most, last = _programme(computed, elements, *encode, *send)
    cuts = []
    at, groups = len(numels), int(most)
    while at > 0:
        cuts.append(at)
        at = int(last[groups, at])
        groups -= 1
    return float(seconds), cuts[::-1]


@jit
def _programme(
    computed: Floats, elements: Floats, encode: float, encode_rate: float, send: float, send_rate: float
) -> tuple[float, int, Ints]:
    """``last[y, i]``: the last cut before i of the best way to make y groups of the first i."""
    n = len(computed) - 1
    last = np.zeros((n + 1, n + 1), np.int64)
    before = np.full(n + 1, np.inf)
    before[0] = 0.0
    best, best_groups = np.inf, 1
    for groups in range(1, n + 1):
        # what so many groups take at least grows with them: no better end is possible from here on
        first = computed[1] + encode + encode_rate * elements[1]
        sent = first + groups * send + send_rate * elements[n]
        if max(sent, computed[n] + groups * encode + encode_rate * elements[n]) >= best:
            break
        now = np.full(n + 1, np.inf)
        for i in range(groups, n + 1):
            device = computed[i] + groups * encode + encode_rate * elements[i]
            for j in range(i - 1, groups - 2, -1):
                end = max(before[j], device) + send + send_rate * (elements[i] - elements[j])
                if end < now[i]:
                    now[i] = end
                    last[groups, i] = j
                if before[j] <= device:  # an earlier cut begins no sooner and has more to send
                    break
        device = computed[n] + groups * encode + encode_rate * elements[n]
        if max(now[n], device) < best:
            best, best_groups = max(now[n], device), groups
        before = now
    return best, best_groups, last


def even_cuts(numels: Sequence[int], most: float) -> list[int]:
    """As DDP fills its buckets: each ends with the gradient by which it has ``most`` elements, the first, so
    that sending begins early, with `FIRST`."""
    cuts: list[int] = []
    filled = 0.0
    for i, numel in enumerate(numels):
        filled += numel
        if filled >= (most if cuts else min(FIRST, most)):
            cuts.append(i + 1)
            filled = 0.0
    return cuts if len(numels) in (0, *cuts[-1:]) else [*cuts, len(numels)]
