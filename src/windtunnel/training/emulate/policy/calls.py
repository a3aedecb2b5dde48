"""The communication of one class of ranks, in names that hold for every member.

A *channel* is where calls meet in order: the collectives of a group, or the messages to (from) one peer in a
group. Call number k of a channel meets call number k of the others' side. The peer of a message is its
distance in the group, round the end, and a root its place in the group, so one table serves all members.

Where calls do not meet the job would hang: `Deadlock`, and the words that all its messages use.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from windtunnel.base.errors import ScriptError
from windtunnel.training.emulate.graph import Collective, EventKind, Slice
from windtunnel.training.emulate.policy.families import Families

COLLECTIVE, SEND, RECV = 0, 1, 2
Channel = tuple[
    int, int, int
]  # family, direction (one of the three above), distance of the peer (0 for none)


@dataclass(frozen=True)
class CallRow:
    """A row of a slice's collective table: where it goes, and what both sides must agree on."""

    channel: Channel
    agreed: tuple[str | int, ...]


@dataclass(frozen=True)
class Calls:
    """All calls of a class, in issue order.

    ``event[n]``: position in the slice's events. ``row[n]``: row of its collective table.
    ``order[n]``: number of the call in its channel. ``rows``: what each row of the table means.
    """

    slice: Slice
    event: NDArray[np.int64]
    row: NDArray[np.int32]
    order: NDArray[np.int64]
    rows: list[CallRow]

    @cached_property
    def channels(self) -> dict[Channel, NDArray[np.int64]]:
        """The calls (positions in ``event``) of each channel."""
        found: dict[Channel, list[int]] = {}
        for position, row in enumerate(self.row.tolist()):
            found.setdefault(self.rows[row].channel, []).append(position)
        return {channel: np.array(positions) for channel, positions in found.items()}

    def agreed(self, channel: Channel) -> tuple[tuple[str | int, ...], ...]:
        """What each call of ``channel`` must agree on with its counterparts, in order."""
        return tuple(self.rows[self.row[position]].agreed for position in self.channels.get(channel, ()))

    def collective(self, position: int) -> Collective:
        return self.slice.collectives[int(self.row[position])]


def read_calls(slice_: Slice, families: Families, steady: bool) -> Calls:
    """The calls of a slice; with ``steady`` only those of its steady step, numbered from its start."""
    family_of = families.of_slice(slice_)
    rows = [_row(row, slice_.rank, family_of[row.group], families) for row in slice_.collectives]
    begin, end = slice_.steady if steady else (0, len(slice_.events))
    events = slice_.events[begin:end]
    event = np.flatnonzero(events["kind"] == EventKind.COLLECTIVE) + begin
    row = slice_.events["ref"][event].astype(np.int32)
    order = np.zeros(len(row), np.int64)
    counts: dict[Channel, int] = {}
    for position, number in enumerate(row.tolist()):
        channel = rows[number].channel
        order[position] = counts.get(channel, 0)
        counts[channel] = counts.get(channel, 0) + 1
    return Calls(slice_, event, row, order, rows)


def _row(row: Collective, rank: int, family_number: int, families: Families) -> CallRow:
    family = families.families[family_number]
    place = int(family.index_of[row.peer]) if row.peer >= 0 else -1
    if row.kind in ("send", "recv"):
        distance = (place - int(family.index_of[rank])) % family.size
        nbytes = row.in_bytes if row.kind == "send" else row.out_bytes
        return CallRow((family_number, SEND if row.kind == "send" else RECV, distance), (nbytes,))
    agreed: tuple[str | int, ...] = (row.kind, row.backend, place)
    if row.kind in ("all_reduce", "reduce_scatter", "reduce"):
        agreed += (row.in_bytes, row.dtype)
    elif row.kind == "all_gather":
        agreed += (row.out_bytes,)
    elif row.kind == "broadcast":
        agreed += (max(row.in_bytes, row.out_bytes),)
    return CallRow((family_number, COLLECTIVE, 0), agreed)


class Deadlock(ScriptError):
    """The ranks of the user's program do not meet: it would hang on a real cluster. Exit status 1."""


def call_site(slice_: Slice, event: int) -> str:
    """Where in the user's script event number ``event`` was called from, ``"train.py:88"``; "" if unknown."""
    calls = np.flatnonzero(slice_.events["kind"][: event + 1] == EventKind.CALL)
    if not len(calls):
        return ""
    row = int(slice_.events["ref"][calls[-1]])
    return slice_.call_sites[row] if 0 <= row < len(slice_.call_sites) else ""


def at(slice_: Slice, event: int) -> str:
    """``" at train.py:88"``, or nothing where the call site is unknown."""
    site = call_site(slice_, event)
    return f" at {site}" if site else ""


def ranges(ranks: Iterable[int], most: int = 4) -> str:
    """``"0-3, 8, 12-15"``; after ``most`` ranges the rest is told by its number."""
    ordered = np.unique(np.fromiter(ranks, np.int64))
    if not len(ordered):
        return "none"
    breaks = np.flatnonzero(np.diff(ordered) != 1)
    firsts = ordered[np.concatenate([[0], breaks + 1])]
    lasts = ordered[np.concatenate([breaks, [len(ordered) - 1]])]
    pairs = list(zip(firsts.tolist(), lasts.tolist(), strict=True))
    words = ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in pairs[:most])
    rest = sum(b - a + 1 for a, b in pairs[most:])
    return f"{words} and {rest} more" if rest else words


def ranks_words(ranks: Iterable[int], most: int = 4) -> str:
    """``"rank 3"`` or ``"ranks 0-2, 7"``."""
    listed = list(ranks)
    return f"{'rank' if len(listed) == 1 else 'ranks'} {ranges(listed, most)}"


def call_words(row: Collective) -> str:
    """What a call is, for a message: kind, bytes and dtype."""
    nbytes = max(row.in_bytes, row.out_bytes)
    return f"{row.kind} of {nbytes} bytes ({row.dtype})" if nbytes else row.kind
