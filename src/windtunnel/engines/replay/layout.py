"""How a job lies in memory while it is replayed, and how the functions that replay it are compiled.

Records, and not one array a field: a rank that takes its turn touches a few cache lines instead of thirty,
and the kernel's functions pass a dozen arrays instead of forty.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar, cast

import numpy as np
from numba import njit

from windtunnel.engines.replay.data import Floats, Ints

F = TypeVar("F", bound=Callable[..., Any])


def jit(function: F) -> F:
    """Compile ``function`` with Numba at its first call."""
    return cast(F, njit(cache=True, nogil=True)(function))


def jit_inline(function: F) -> F:
    """As `jit`, but part of its callers: a call would copy the header of every array that it is given."""
    return cast(F, njit(nogil=True, forceinline=True)(function))


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
