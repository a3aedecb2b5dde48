"""What is replayed and what comes out, and how it lies in memory meanwhile.

A *program* is what one kind of rank does in one step, as nodes in the order in which its host thread issues
them. A *job* says which rank runs which program and which join (collective or message) each of its join nodes
is. Many ranks share one program, so a job of 8,192 like ranks holds one copy of the nodes.

While it is replayed a job is *packed* into records, and not one array a field: a rank that takes its turn
touches a few cache lines instead of thirty, and the kernel's functions pass a dozen arrays instead of forty.

Units are seconds.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int32]
Longs = NDArray[np.int64]
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Program:
    """The nodes of one kind of rank, in issue order; all arrays but ``dep`` are of length n (``dep_ptr``
    n+1).

    ``queue``: 0 is the host thread, 1 and up are device queues (streams), which are first in, first out.
    ``duration``: seconds on the queue; ignored for a join node, whose time belongs to the join. ``issue``:
    host seconds that issuing the node costs. ``dep[dep_ptr[i]:dep_ptr[i+1]]``: earlier nodes, of any queue,
    that must have ended before node i starts. ``join``: -1, or this node's ordinal (0, 1, 2…) among the
    program's join nodes.
    """

    queue: Ints
    duration: Floats
    issue: Floats
    dep_ptr: Ints
    dep: Ints
    join: Ints

    def __len__(self) -> int:
        return len(self.queue)


@dataclass(frozen=True)
class ReplayJob:
    """Programs, and the R ranks that run them.

    ``rank_program[R]``: the program of each rank. ``compute_scale[R]`` multiplies the durations of its
    device nodes that are no joins (a straggler), ``issue_scale[R]`` its issue times and host durations (a
    slow host). ``rank_join[rank_join_ptr[r]:rank_join_ptr[r+1]]``: the join that each join node of rank r
    takes part in, by ordinal. ``join_size[J]``: how many members must be ready; ``join_duration[J]``:
    seconds from the last member's readiness to the end, for all members. ``jitter``: sigma of a lognormal
    factor of mean one on every duration of a node that is no join, drawn from a hash of (``seed``, rank,
    node).
    """

    programs: list[Program]
    rank_program: Ints
    compute_scale: Floats
    issue_scale: Floats
    rank_join_ptr: Longs
    rank_join: Longs
    join_size: Ints
    join_duration: Floats
    jitter: float = 0.0
    seed: int = 0

    @property
    def ranks(self) -> int:
        return len(self.rank_program)

    @cached_property
    def rank_ptr(self) -> Longs:
        """Where the nodes of each rank begin in an array over all nodes of all ranks; length R + 1."""
        lengths = np.array([len(program) for program in self.programs], np.int64)
        ends = np.cumsum(lengths[self.rank_program]) if self.ranks else np.zeros(0, np.int64)
        return np.concatenate([np.zeros(1, np.int64), ends])

    @cached_property
    def join_nodes(self) -> list[Longs]:
        """For each program, its join nodes by ordinal."""
        return [np.flatnonzero(program.join >= 0) for program in self.programs]


@dataclass(frozen=True)
class ReplayResult:
    """When everything happened.

    Node i of rank r is at ``rank_ptr[r] + i`` of ``start``, ``end`` and ``ready``. A join node is ready
    when its queue, its host and its dependencies are; it starts when all members are ready. For other nodes
    the two are the same. Without times (``replay(…, keep_times=False)``) these arrays are empty.
    ``rank_end[R]`` is when the rank's last node ends, ``queue_busy[R, Q]`` how long each of its queues
    worked: on the host that is issuing and host nodes, on a device queue durations and transfers, waiting
    excluded. ``events`` counts nodes.
    """

    rank_ptr: Longs
    start: Floats
    end: Floats
    rank_end: Floats
    queue_busy: Floats
    makespan: float
    events: int
    join_ready: Floats
    join_position: Longs

    @cached_property
    def ready(self) -> Floats:
        """When each node could have started had its join waited for nobody."""
        ready = self.start.copy()
        ready[self.join_position] = self.join_ready
        return ready

    def of(self, rank: int) -> tuple[Floats, Floats]:
        """Start and end of the nodes of one rank."""
        part = slice(self.rank_ptr[rank], self.rank_ptr[rank + 1])
        return self.start[part], self.end[part]


@dataclass
class Stalled(Exception):
    """The job hangs. Row k says that ``rank[k]`` stands before ``node[k]``: a join node whose join
    ``join[k]`` lacks members, or (-1) a node that waits for an earlier node of its rank. A rank has one row
    for each queue that stands.

    ``pending``: the joins that some rank stands in. The members of ``pending[p]`` that never came are
    ``missing_rank`` and ``missing_node`` from ``missing_ptr[p]`` to ``missing_ptr[p+1]``; ``absent[p]``
    more members have no node for it in the job at all.
    """

    rank: Ints
    node: Ints
    join: Longs
    pending: Longs
    missing_ptr: Longs
    missing_rank: Ints
    missing_node: Ints
    absent: Ints

    def __str__(self) -> str:
        ranks = len(np.unique(self.rank))
        return f"{ranks} ranks wait for ever, in {len(self.pending)} joins whose members do not all come"

    def __reduce__(self) -> tuple[Any, ...]:
        fields = tuple(getattr(self, name) for name in self.__dataclass_fields__)
        return type(self), fields


MOVES = 2**31 - 1
"""The front of a queue that does not stand; also the node after the last of a queue."""

NODE = np.dtype(
    [
        ("duration", "f8"),
        ("issue", "f8"),
        ("queue", "i4"),
        ("join", "i4"),  # ordinal, or -1
        ("after", "i4"),  # the next node of the same queue, or MOVES
        ("slot", "i4"),  # where the rank stores this node's end, or -1
        ("dep_begin", "i4"),
        ("dep_end", "i4"),
    ]
)
DEP = np.dtype([("node", "i4"), ("queue", "i4"), ("slot", "i4")])
RANK = np.dtype(
    [
        ("clock", "f8"),  # when the host is free
        ("compute_scale", "f8"),
        ("issue_scale", "f8"),
        ("node_base", "i8"),  # its program's first node
        ("start_base", "i8"),  # its first node in `start`
        ("end_base", "i8"),  # its first slot in `end`
        ("member_base", "i8"),
        ("queue_base", "i8"),
        ("join_node_base", "i8"),
        ("node_count", "i4"),
        ("queues", "i4"),
        ("host_node", "i4"),  # the next node that the host issues
        ("standing", "i4"),  # how many of its queues stand
        ("is_runnable", "i4"),
        ("is_waiting", "i4"),
    ]
)
QUEUE = np.dtype(
    [
        ("tail", "f8"),  # when its last settled node ends
        ("busy", "f8"),
        ("front", "i4"),  # the node before which it stands, or MOVES
        ("arrived", "i4"),  # 1: that node is a join that this rank has come to
    ]
)
JOIN = np.dtype([("latest", "f8"), ("duration", "f8"), ("lacking", "i4"), ("last_member", "i4")])
MEMBER = np.dtype(
    [
        ("join", "i4"),
        ("rank", "i4"),  # -1 until it has come
        ("earlier", "i4"),  # the member that came before it, or -1: a linked list from `last_member`
    ]
)
Records = np.ndarray[Any, Any]


class Packed(NamedTuple):
    """A job, the state of its replay, and where the times go.

    ``nodes``, ``deps``: all programs, end to end. ``queues``: those of each rank, end to end. ``members``:
    one for each join node of each rank, as in ``ReplayJob.rank_join``. ``join_node``: the join nodes of all
    programs. ``start`` also holds the issue time of a node that waits for its queue.
    """

    nodes: Records
    deps: Records
    ranks: Records
    queues: Records
    joins: Records
    members: Records
    join_node: Ints
    runnable: Ints
    start: Floats
    end: Floats
    join_ready: Floats
    keep: bool
    sigma: float
    seed: np.uint64
