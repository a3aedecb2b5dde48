"""A link of opportunities, and a sender that paces, as nodes of the packet engine.

The link holds packets until its trace lets one go (Mahimahi's rule: what nobody uses is gone), and drops what
finds it full. The sender sends datagrams at a gap that is set from outside every interval, and keeps the log
of acknowledgements; the receiver is a port of the same node, where packets turn back. Both lie in memory as
one array of int64: the words below, and then what they point to. Times are picoseconds.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray
from numpy.typing import NDArray

from windtunnel.engines.packets import node
from windtunnel.engines.packets.layout import CONSUME, FORWARD, NEVER, OUTBOX, SECOND, WAKE
from windtunnel.traces.bandwidth import MTU

Words = NDArray[np.int64]
COUNT, NEXT, FIRST, WAITING, MOST, DROPPED, PASSED, RING, LOG = range(9)
"""Of a link: its opportunities, of them the next; the first packet that waits, how many do and may; how many
were dropped and have passed; where the ring of those that wait and the log of those that passed begin."""
KEPT = 9
"""Words of a packet that waits: since when, and what its sender wrote."""
ARRIVED, LEFT = range(2)
"""Words of a packet in the log."""
GAP, MAY, LAST, SENT_AT, RECEIVED, ACKS, ROUTE, DELTA, END = range(9)
"""Of a sender: its pace, how many packets may go in all, the newest and when it went, packets received,
entries of its log, where packets begin, an interval, and when it ends."""
ENTRY = 4
"""Words of an acknowledgement: number, sent, at, received."""
RECEIVE, ACKED = 1, 2
"""Ports of a sender's node."""
_ALL = 2**40
_SLOT = 16


def link_words(times: NDArray[np.float64], packets: int) -> Words:
    """Of a link with opportunities at ``times`` (seconds) that holds ``packets``."""
    words = np.zeros(_SLOT + len(times) + packets * KEPT + len(times) * 2, np.int64)
    words[[COUNT, MOST, RING]] = len(times), packets, _SLOT + len(times)
    words[LOG] = words[RING] + packets * KEPT
    words[_SLOT : words[RING]] = times * SECOND
    return words


def passed(words: Words) -> NDArray[np.float64]:
    """When each packet that has passed arrived and left, seconds; shape (packets, 2)."""
    log = words[words[LOG] :][: 2 * words[PASSED]]
    return log.reshape(-1, 2) / SECOND


@node
def opportunities(now: int, port: int, packet: Any, state: Any, outbox: Any, reply: Any) -> int:
    """The link's node."""
    w = carray(state, (_ALL,), np.int64)
    answer = carray(reply, 1)[0]
    if port != WAKE:
        if w[WAITING] >= w[MOST]:
            w[DROPPED] += 1
            return CONSUME
        head = carray(packet, 1)[0]
        at = w[RING] + (w[FIRST] + w[WAITING]) % w[MOST] * KEPT
        w[at], w[at + 1], w[at + 2], w[at + 3] = now, head.word0, head.word1, head.word2
        w[at + 4], w[at + 5], w[at + 6], w[at + 7], w[at + 8] = (
            head.word3,
            head.flags,
            head.flow,
            head.size,
            head.hop,
        )
        w[WAITING] += 1
        if w[WAITING] == 1:
            while w[NEXT] < w[COUNT] and w[_SLOT + w[NEXT]] < now:
                w[NEXT] += 1
    count = 0
    while w[WAITING] > 0 and w[NEXT] < w[COUNT] and w[_SLOT + w[NEXT]] <= now and count < OUTBOX:
        at, out = w[RING] + w[FIRST] * KEPT, carray(outbox, OUTBOX)[count]
        out.word0, out.word1, out.word2, out.word3 = w[at + 1], w[at + 2], w[at + 3], w[at + 4]
        out.flags, out.flow, out.size, out.hop = w[at + 5], w[at + 6], w[at + 7], w[at + 8] + 3
        out.virtual_delay = 0
        log = w[LOG] + 2 * w[PASSED]
        w[log + ARRIVED], w[log + LEFT] = w[at], now
        w[PASSED] += 1
        w[FIRST] = (w[FIRST] + 1) % w[MOST]
        w[WAITING] -= 1
        w[NEXT] += 1
        count += 1
    answer.count = count
    answer.wake = w[_SLOT + w[NEXT]] if w[WAITING] > 0 and w[NEXT] < w[COUNT] else NEVER
    return CONSUME


def sender_words(delta: float, seconds: float, most: int) -> Words:
    """Of a sender with room for ``most`` acknowledgements, which may send all that it wants as yet."""
    words = np.zeros(_SLOT + most * ENTRY, np.int64)
    words[[GAP, MAY, LAST, SENT_AT]] = 0, NEVER, -1, -1
    words[[DELTA, END]] = round(delta * SECOND), round(seconds * SECOND)
    return words


def acknowledged(words: Words, before: int) -> list[list[int]]:
    """The log from entry ``before`` on: number, sent, at, received."""
    entries: list[list[int]] = words[_SLOT:][before * ENTRY : words[ACKS] * ENTRY].reshape(-1, ENTRY).tolist()
    return entries


@node
def paced(now: int, port: int, packet: Any, state: Any, outbox: Any, reply: Any) -> int:
    """The sender's node, and its receiver."""
    w = carray(state, (_ALL,), np.int64)
    answer = carray(reply, 1)[0]
    if port == RECEIVE:
        w[RECEIVED] += 1
        carray(packet, 1)[0].word2 = w[RECEIVED]
        return FORWARD
    if port == ACKED:
        head = carray(packet, 1)[0]
        at = _SLOT + w[ACKS] * ENTRY
        w[at], w[at + 1], w[at + 2], w[at + 3] = head.word1, head.word0, now, head.word2
        w[ACKS] += 1
        return CONSUME
    count = 0
    while now < w[END] and count < OUTBOX and w[LAST] + 1 < w[MAY] and w[SENT_AT] + w[GAP] <= now:
        out = carray(outbox, OUTBOX)[count]
        w[LAST] += 1
        w[SENT_AT] = now
        out.word0, out.word1, out.word2, out.word3 = now, w[LAST], 0, 0
        out.flags, out.flow, out.size, out.hop, out.virtual_delay = 0, 0, MTU, w[ROUTE], 0
        count += 1
    answer.count = count
    # just after the interval's end, when its new pace is there
    tick = (now // w[DELTA] + 1) * w[DELTA] + 1
    if w[LAST] + 1 < w[MAY]:
        tick = min(tick, max(w[SENT_AT] + w[GAP], now + 1))
    answer.wake = tick if now < w[END] else NEVER
    return CONSUME
