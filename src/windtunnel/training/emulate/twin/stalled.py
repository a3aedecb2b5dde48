"""A replay that stands still, in words: who waits for whom, in which calls, called from where.

Calls that meet by number can still hang: two groups whose collectives two ranks issue in opposite order
on one stream, or two ranks that both send before they receive.
"""

from __future__ import annotations

import numpy as np

from windtunnel.engines.replay import Stalled
from windtunnel.training.emulate.policy.calls import COLLECTIVE
from windtunnel.training.emulate.policy.deadlock import Deadlock, at, call_words, ranks_words
from windtunnel.training.emulate.twin.job import Flight


def deadlock_of(flight: Flight, stalled: Stalled) -> Deadlock:
    """The deadlock that ``stalled`` is, told by one call that waits and where those it waits for stand."""
    rows = zip(stalled.rank.tolist(), stalled.join.tolist(), strict=True)
    where: dict[int, int] = {}
    for k, (rank, join) in enumerate(rows):
        if join >= 0:
            where.setdefault(rank, k)
    for p in range(len(stalled.pending)):
        missing = stalled.missing_rank[stalled.missing_ptr[p] : stalled.missing_ptr[p + 1]].tolist()
        waiting = np.flatnonzero(stalled.join == stalled.pending[p])
        late = [rank for rank in missing if rank in where]
        if len(waiting) and late:
            first = _stands(flight, stalled, int(waiting[0]))
            second = _stands(flight, stalled, where[late[0]])
            return Deadlock(
                f"the job would hang: {first}, while {second}, and neither comes to the other's call: calls"
                " on one stream run in the order in which they are made, so all ranks must make them in one"
                " order (or send and receive in one batch)"
            )
    blocked = flight.leader[np.unique(stalled.rank)]
    return Deadlock(f"the job would hang: {ranks_words(blocked.tolist())} wait for each other for ever")


def _stands(flight: Flight, stalled: Stalled, k: int) -> str:
    colour = int(stalled.rank[k])
    row = flight.class_of(colour)
    calls = flight.world.calls[row]
    join = int(flight.programs[row].program.join[stalled.node[k]])
    call = join % len(calls.event)
    one = calls.collective(call)
    number, direction, distance = calls.rows[int(calls.row[call])].channel
    family = flight.world.classes.families.families[number]
    rank = int(flight.leader[colour])
    alike = int((flight.colour == colour).sum()) - 1
    words = f"rank {rank}{f' (and {alike} like it)' if alike else ''} waits in {call_words(one)}"
    if direction != COLLECTIVE:
        group = family.members[family.group_of[rank]]
        peer = int(group[(int(family.index_of[rank]) + distance) % family.size])
        words += f" {'to' if one.kind == 'send' else 'from'} rank {peer}"
    order = int(calls.order[call]) + 1
    return (
        f"{words} (group {family.name!r} of {family.size} ranks, call {order} of the step)"
        f"{at(calls.slice, int(calls.event[call]))}"
    )
