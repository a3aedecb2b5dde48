"""Which ranks to check, because a captured rank that stands for them may not do what they do.

Witnesses exclude what depends on a rank's place on an axis: that shards become uneven, or that the first and
the last are special. They do not exclude what a program makes of the number of a rank (``if rank == 7``). So
its conditions on the rank are collected, and the world is cut into *cases*: ranks for which the same captured
one stands, and for which every condition comes out alike. One rank of each case that has none is checked: run
for its outline only. A condition that cannot be worked out for other ranks makes every place that it asks for
(every rank, as a rule) a case of its own. There may be more of these than can be run; then they are taken
from all over the world, and the others stay assumed.

A rank whose outline is that of another class belongs to it, with its whole case. One whose outline nobody
else has is captured. Nothing here depends on time: the same observations make the same decisions.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from windtunnel.training.emulate.policy.cases import outcomes
from windtunnel.training.emulate.policy.observation import (
    REFUSED,
    Capture,
    Check,
    Decision,
    Known,
    Observation,
)
from windtunnel.training.emulate.policy.standing import stand_ins

Longs = NDArray[np.int64]


def verify(observation: Observation, known: Known) -> Decision:
    """What remains to be run before ``known`` holds; in the end, ``known`` with what the checks showed."""
    captured, checked = observation.captured, observation.checked
    if not observation.checks:
        return known
    if strange := _strange(observation):
        return Capture(strange, "ranks that call what no captured rank calls")
    stands, _ = stand_ins(observation, known)
    row = np.zeros(observation.world_size, np.int64)
    row[list(captured)] = list(captured.values())
    certain, involved = outcomes(observation)
    cases = _numbered([row[stands], *certain])
    run = {*captured, *checked}
    room = max(observation.checks, len(captured) // 2) - len(checked)
    if wanted := _first_of_each(cases, run)[: max(room, 0)]:
        return Check(wanted, "one of each case that the conditions on the rank make")
    finer = _numbered([cases, *involved])
    if wanted := _spread(_first_of_each(finer, run), max(room, 0)):
        return Check(wanted, "conditions on the rank that only a run can tell")
    return Known(known.starts, _alike(observation, finer, row[stands]))


def _strange(observation: Observation) -> tuple[int, ...]:
    """One checked rank of each outline that no captured rank has."""
    first: dict[int, int] = {}
    for rank, number in sorted(observation.checked.items()):
        if number != REFUSED and number not in observation.calls and rank not in observation.captured:
            first.setdefault(number, rank)
    return tuple(first.values())


def _numbered(columns: Sequence[Longs]) -> Longs:
    """For every rank the number of its combination of values in the columns."""
    _, inverse = np.unique(np.stack(columns, axis=1), axis=0, return_inverse=True)
    return np.asarray(inverse, np.int64).reshape(-1)


def _first_of_each(cases: Longs, run: set[int]) -> tuple[int, ...]:
    """The first rank of each case in which no rank was run."""
    _, first = np.unique(cases, return_index=True)
    done = set(cases[list(run)].tolist())
    return tuple(sorted(int(rank) for rank in first if int(cases[rank]) not in done))


def _spread(ranks: tuple[int, ...], room: int) -> tuple[int, ...]:
    """At most ``room`` of the ranks, from all over them: halves before quarters, with a step that no regular
    pattern of places shares (the golden section)."""
    if len(ranks) <= room:
        return ranks
    picked: dict[int, None] = {}
    turn = 0
    while len(picked) < room:
        picked[int((turn * 0.6180339887498949 % 1.0) * len(ranks))] = None
        turn += 1
    return tuple(ranks[place] for place in sorted(picked))


def _alike(observation: Observation, cases: Longs, row: Longs) -> dict[int, int]:
    """For ranks of a case that was found to have another outline than its class: a captured rank with it."""
    with_outline: dict[int, int] = {}
    for rank in sorted(observation.captured):
        with_outline.setdefault(observation.calls[observation.captured[rank]], rank)
    found: dict[int, int] = {}
    for rank, number in sorted(observation.checked.items()):
        if rank in observation.captured or number == observation.calls[row[rank]]:
            continue
        if number not in with_outline:
            continue
        members = np.flatnonzero(cases == cases[rank]).tolist()
        for member in members:
            if member not in observation.captured and (member not in observation.checked or member == rank):
                found[member] = with_outline[number]
    return dict(sorted(found.items()))
