"""An emulated step for a shared network: what waits for which collective, and who takes part in each.

`windtunnel network run` puts several jobs on one cluster. Of a job it needs its
skeleton (`engines.replay.skeleton`: computing as delays between collectives) and of each collective its kind,
bytes and groups, not the 20,000 operators. All groups in which like ranks meet at once are one call, as they
are one join of the replay. The file is ``graph/job.json``; a step is there what repeats, a period of several.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from windtunnel.engines.replay.skeleton import skeleton
from windtunnel.training.emulate.emulation import EmulationResult
from windtunnel.training.emulate.policy.groups import COLLECTIVE, Channel
from windtunnel.training.emulate.twin.costs.collectives import full_bytes
from windtunnel.training.emulate.twin.job import WorldJob

Meeting = tuple[tuple[int, ...], ...]
"""Groups of ranks."""
NAME = "job.json"
CALL = ("kind", "bytes", "dtype", "backend", "groups")
MOST = 500_000
"""Join nodes of all replayed ranks; with more (jitter tells all ranks apart) no such file is made."""


def joins(result: EmulationResult) -> dict[str, Any] | None:
    """The step as values of JSON: ``marks`` [call or -1, [[mark, steps back, seconds], …]], ``ends`` (marks),
    ``calls`` (`CALL`) with ``groups`` a place in the list of that name: ranks, the root
    first, sender and receiver of a message. Marks wait for earlier ones of their step."""
    job = result.timing.job
    begin, end = result.timing.window
    if len(job.replay.rank_join) > MOST:
        return None
    made = skeleton(job.replay, job.programs[0].copies)
    groups: dict[Meeting, int] = {}
    met: dict[tuple[Channel, tuple[int, ...]], Meeting] = {}
    calls: dict[tuple[str, int, str, str, int], int] = {}
    marks = []
    for mark in made.marks:
        call = -1
        if mark.join >= 0:
            named, meeting = _call(job, mark.join, met)
            call = calls.setdefault((*named, groups.setdefault(meeting, len(groups))), len(calls))
        marks.append([call, [list(one) for one in mark.after]])
    return {
        "version": 1, "program": result.program.name, "cluster": result.cluster.name,
        "world_size": result.cluster.world_size, "iteration_time_s": end - begin,
        "marks": marks, "ends": list(made.ends), "groups": [[list(row) for row in group] for group in groups],
        "calls": [dict(zip(CALL, call, strict=True)) for call in calls],
    }  # fmt: skip


def _call(
    job: WorldJob, join: int, met: dict[tuple[Channel, tuple[int, ...]], Meeting]
) -> tuple[tuple[str, int, str, str], Meeting]:
    """Kind, bytes, dtype and backend of a join, and its groups. ``met``: those found before, by channel and
    colours."""
    row, position = job.join_call[join].tolist()
    calls = job.world.calls[row]
    call, channel = calls.collective(position), calls.channel(position)
    ptr, owners, nodes = job.members
    members = slice(ptr[join], ptr[join + 1])
    colours = tuple(sorted(set(owners[members].tolist())))
    message = channel[1] != COLLECTIVE
    if message:  # both ends of a message are of the sender's channel, and of its colour
        for colour, node in zip(owners[members].tolist(), nodes[members].tolist(), strict=True):
            there = job.world.calls[job.class_of(colour)]
            at = int(job.programs[job.class_of(colour)].program.join[node]) % len(there.event)
            if there.collective(at).kind == "send":
                channel, colours = there.channel(at), (colour,)
    family = job.world.family(channel)
    if (channel, colours) not in met:
        if message:
            senders = np.flatnonzero(job.colour == colours[0]).tolist()
            found = tuple((rank, family.peer(rank, channel[2])) for rank in senders)
        else:
            rows = [tuple(sorted(set(one))) == colours for one in job.colour[family.members].tolist()]
            # the root is at the same place in all groups
            root = int(family.index_of[call.peer]) if call.peer >= 0 else 0
            found = tuple(map(tuple, np.roll(family.members[rows], -root, axis=1).tolist()))
        met[channel, colours] = found
    size = full_bytes(call, 2 if message else family.size)
    kind = "send" if message else call.kind
    return (kind, size, call.dtype, call.backend), met[channel, colours]
