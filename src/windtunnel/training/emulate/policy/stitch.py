"""One world from the slices of its classes: collectives get all their members, sends their receives.

Whether calls meet is decided for each group and each pair of ranks exactly, yet cheaply: the sequence of
calls that a class makes in a channel is given a number, and a group is in order when the numbers of its
members are equal (the sender's and the receiver's, for messages). 8,192 ranks are a few array comparisons.
Where they are not equal the two sequences are walked to the first call that differs, and the deadlock that
this would be is told with the ranks and the call sites.

The whole stream is checked, set-up included and what was seen after the steady step. Orders across groups,
which can hang too, show in the replay.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from windtunnel.base.errors import ScriptError
from windtunnel.training.emulate.policy.classes import Classes
from windtunnel.training.emulate.policy.groups import (
    COLLECTIVE,
    RECV,
    SEND,
    Channel,
    ClassCalls,
    Deadlock,
    Family,
    at,
    call_words,
    ranks_words,
    read_calls,
)


@dataclass(frozen=True)
class StitchedWorld:
    """All ranks: their classes, and for each class the calls of the steady step, which meet by number."""

    classes: Classes
    calls: list[ClassCalls]

    @property
    def size(self) -> int:
        return self.classes.world_size

    def family(self, channel: Channel) -> Family:
        return self.classes.families.families[channel[0]]


@dataclass(frozen=True)
class _Break:
    """Where calls stop meeting: the event in some slice (to tell the earliest), and the sentence."""

    event: int
    words: str


def stitch(classes: Classes) -> StitchedWorld:
    """Check that all calls of all ranks meet, and return the world.

    Raises:
        Deadlock: a collective that not all members of its group join, or join with other arguments; a message
            that nobody receives, sends, or receives with another size.
        ScriptError: calls meet, but in different steps of the two ranks.
    """
    whole = [read_calls(cls.slice.outline(), classes.families, steady=False) for cls in classes.classes]
    broken = _first_break(classes, whole)
    if broken:
        raise Deadlock(f"the job would hang: {broken.words}{_doubt(classes)}")
    steady = [read_calls(cls.slice, classes.families, steady=True) for cls in classes.classes]
    broken = _first_break(classes, steady)
    if broken:
        raise ScriptError(
            "the steps of the ranks do not line up (is optimizer.step() called equally often?):"
            f" {broken.words}"
        )
    return StitchedWorld(classes, steady)


def _doubt(classes: Classes) -> str:
    if not len(classes.assumed):
        return ""
    return f" (but {ranks_words(classes.assumed)} were not captured; use `ranks` auto to be sure)"


def _first_break(classes: Classes, calls: list[ClassCalls]) -> _Break | None:
    channels = sorted({channel for call in calls for channel in call.channels})
    breaks = [_outsiders(classes, calls, channel) for channel in channels]
    breaks += [_collectives(classes, calls, channel) for channel in channels if channel[1] == COLLECTIVE]
    sends = {classes.families.sent(channel) for channel in channels if channel[1] != COLLECTIVE}
    breaks += [_messages(classes, calls, channel) for channel in sorted(sends)]
    broken_ones = [broken for broken in breaks if broken]
    return min(broken_ones, key=lambda broken: broken.event) if broken_ones else None


def _numbers(keys: list[Hashable], numbers: dict[Hashable, int]) -> NDArray[np.int64]:
    return np.array([numbers.setdefault(key, len(numbers)) for key in keys], np.int64)


def _outsiders(classes: Classes, calls: list[ClassCalls], channel: Channel) -> _Break | None:
    family = classes.families.families[channel[0]]
    for row, call in enumerate(calls):
        if channel not in call.channels:
            continue
        members = classes.classes[row].members
        outside = members[family.group_of[members] < 0]
        if len(outside):
            event = int(call.event[call.channels[channel][0]])
            words = (
                f"{ranks_words(outside)} would call {call_words(call.collective(call.channels[channel][0]))}"
                f"{at(call.slice, event)} but belong to no group {family.name!r} of {family.size} ranks"
            )
            return _Break(event, words)
    return None


def _collectives(classes: Classes, calls: list[ClassCalls], channel: Channel) -> _Break | None:
    family = classes.families.families[channel[0]]
    numbers = _numbers([call.agreed(channel) for call in calls], {})
    sequences = numbers[classes.rank_class][family.members]
    bad = np.flatnonzero((sequences != sequences[:, :1]).any(axis=1))
    if not len(bad):
        return None
    more = f"; {len(bad) - 1} more groups of this kind likewise" if len(bad) > 1 else ""
    return _parting(classes, calls, dict.fromkeys(family.members[bad[0]].tolist(), channel), more)


def _messages(classes: Classes, calls: list[ClassCalls], channel: Channel) -> _Break | None:
    number, _, distance = channel
    family = classes.families.families[number]
    back: Channel = (number, RECV, -distance % family.size)
    numbers: dict[Hashable, int] = {}
    sent = _numbers([call.agreed(channel) for call in calls], numbers)[classes.rank_class]
    received = _numbers([call.agreed(back) for call in calls], numbers)[classes.rank_class]
    receivers = np.roll(family.members, -distance, axis=1)
    bad = np.flatnonzero((sent[family.members] != received[receivers]).ravel())
    if not len(bad):
        return None
    sender, receiver = int(family.members.ravel()[bad[0]]), int(receivers.ravel()[bad[0]])
    return _parting(classes, calls, {receiver: back, sender: channel})


NEVER = {SEND: "never receives it", RECV: "never sends it"}
"""What the other side does not do, of a message that waits."""


def _parting(classes: Classes, calls: list[ClassCalls], sides: dict[int, Channel], more: str = "") -> _Break:
    """The first call on which not all of the ranks in ``sides`` agree, each in its channel."""
    sequences = {rank: calls[classes.rank_class[rank]].agreed(channel) for rank, channel in sides.items()}
    # None stands for a rank that makes no more calls.
    number, votes = next(
        (k, votes)
        for k in range(max(map(len, sequences.values())))
        if len(votes := Counter(s[k] if k < len(s) else None for s in sequences.values())) > 1
    )
    usual = votes.most_common(1)[0][0]
    agreed = {rank: s[number] if number < len(s) else None for rank, s in sequences.items()}
    odd = next(value for value in agreed.values() if value != usual)
    waiting, others = ([rank for rank, value in agreed.items() if value == side] for side in (odd, usual))
    if odd is None:
        waiting, others = others, waiting
    channel, other = sides[waiting[0]], sides[others[0]]
    family, message = classes.families.families[channel[0]], channel[1] != COLLECTIVE
    event, words, site = _call_of(classes, calls, channel, waiting[0], number)
    where = f"{family.name!r}, message" if message else f"{family.name!r} of {family.size} ranks, call"
    words = (
        f"{ranks_words(waiting)} {'waits' if len(waiting) == 1 else 'wait'} in {words}"
        f" (group {where} {number + 1}){site}, but {ranks_words(others)} "
    )
    if agreed[others[0]] is not None:
        _, called, site = _call_of(classes, calls, other, others[0], number)
        words += f"called {called}{site}"
    elif message:
        words += NEVER[channel[1]]
    else:
        site = _call_of(classes, calls, other, others[0], number - 1)[2] if number else ""
        joins = "joins" if len(others) == 1 else "join"
        words += f"never {joins} it: no call follows number {number}{site}"
    return _Break(event, words + more)


def _call_of(
    classes: Classes, calls: list[ClassCalls], channel: Channel, rank: int, number: int
) -> tuple[int, str, str]:
    """Of a rank's call with that number in its channel: the event, what it is, and where it was called."""
    call = calls[classes.rank_class[rank]]
    position = int(call.channels[channel][number])
    event, row = int(call.event[position]), call.collective(position)
    family, words = classes.families.families[channel[0]], call_words(row)
    if channel[1] != COLLECTIVE:
        words += f" {'to' if channel[1] == SEND else 'from'} rank {family.peer(rank, channel[2])}"
    elif row.peer >= 0:
        words += f" with root {family.members[family.group_of[rank], family.index_of[row.peer]]}"
    return event, words, at(call.slice, event)
