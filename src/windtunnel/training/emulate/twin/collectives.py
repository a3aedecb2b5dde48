"""The table of distinct collectives and messages: how many a step, how long, how much of it exposed."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import numpy as np

from windtunnel.engines.replay import Result
from windtunnel.training.emulate.graph import Collective
from windtunnel.training.emulate.policy.calls import COLLECTIVE
from windtunnel.training.emulate.twin.job import Flight
from windtunnel.training.emulate.twin.walk import Split


@dataclass(frozen=True)
class CollectiveUse:
    """One kind of call.

    ``call``: a row of a slice's table. ``label``: of its family. ``ranks``: of one of the groups (of a
    message its sender and receiver). ``count``: in a step of a rank that makes it (the most of any
    class). ``seconds_each``: mean time from the last member's readiness to the end. ``exposed_seconds``:
    what of it the critical path holds.
    """

    call: Collective
    label: str
    group_size: int
    ranks: tuple[int, ...]
    count: int
    seconds_each: float
    exposed_seconds: float


def collective_table(flight: Flight, result: Result, split: Split) -> list[CollectiveUse]:
    """All distinct calls of the steady step, the most exposed first, then the longest in all."""
    exposed: dict[tuple[object, ...], float] = defaultdict(float)
    for (kind, row, node), seconds in split.reasons.items():
        if kind.startswith("communication:"):
            exposed[_key(flight, row, int(flight.programs[row].program.join[node]))] += seconds
    counts: dict[tuple[object, ...], int] = {}
    times: dict[tuple[object, ...], list[float]] = defaultdict(list)
    samples: dict[tuple[object, ...], tuple[int, int]] = {}
    for c in range(flight.job.ranks):
        row = flight.class_of(c)
        program = flight.programs[row]
        start, stop = result.of(c)
        last_step = slice(len(start) - program.nodes, len(start))
        joins = np.flatnonzero(program.is_join[last_step])
        lasting = (stop - start)[last_step][joins].tolist()
        mine: dict[tuple[object, ...], int] = defaultdict(int)
        for call, seconds in enumerate(lasting):
            key = _key(flight, row, call)
            mine[key] += 1
            times[key].append(seconds)
            samples.setdefault(key, (c, call))
        for key, count in mine.items():
            counts[key] = max(counts.get(key, 0), count)
    uses = [
        _use(flight, *samples[key], counts[key], float(np.mean(times[key])), exposed.get(key, 0.0))
        for key in samples
    ]
    return sorted(uses, key=lambda use: (-use.exposed_seconds, -use.count * use.seconds_each))


def _key(flight: Flight, row: int, call: int) -> tuple[object, ...]:
    """Calls of one kind: same family, direction, sizes, dtype, backend."""
    calls = flight.world.calls[row]
    one = calls.collective(call)
    family = calls.rows[int(calls.row[call])].channel[0]
    return (family, one.kind, one.in_bytes, one.out_bytes, one.dtype, one.backend)


def _use(flight: Flight, c: int, call: int, count: int, each: float, exposed: float) -> CollectiveUse:
    calls = flight.world.calls[flight.class_of(c)]
    one = calls.collective(call)
    rank = int(flight.leader[c])
    number, direction, distance = calls.rows[int(calls.row[call])].channel
    family = flight.world.classes.families.families[number]
    ranks = tuple(family.members[family.group_of[rank]].tolist())
    if direction != COLLECTIVE:
        peer = ranks[(int(family.index_of[rank]) + distance) % family.size]
        ranks = (rank, peer) if one.kind == "send" else (peer, rank)
    return CollectiveUse(one, family.name, family.size, ranks, count, each, exposed)
