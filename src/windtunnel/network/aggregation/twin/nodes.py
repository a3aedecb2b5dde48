"""Switches, servers and workers as nodes of the packet engine: the policy's functions on its packets.

A packet carries a fragment's sequence, the set of its workers, its value and its priority in its four words,
and kind and job in its tag. A fragment's value is one integer that is made of sequence and worker, so every
worker knows the sum that must come.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray

from windtunnel.base.compiled import jit, jit_inline
from windtunnel.engines.packets import layout, node
from windtunnel.network.aggregation.policy import (
    ADD,
    ANSWER,
    COMPLETE,
    DOUBLINGS,
    FLUSH,
    HOLD,
    LATER,
    RAW,
    SWAP,
    TAKE,
    is_due,
    merge,
    place,
    where,
)

GRADIENT, RESENT, FLUSHED, RESULT, REMINDER, KNOWN = range(6)
"""Kinds of packets. FLUSHED: a partial sum on its way to the server, which no switch adds to anything. KNOWN:
the server has a sum that the switch told everyone itself."""
MOST_JOBS, MOST_BRANCHES, MOST_SLOTS, RING = 16, 32, 4096, 1024
MOST_LAYERS, MOST_ITERATIONS = 16, 32
SMALL = 64
"""Bytes of a packet without values."""


def _fields(*lines: str) -> list[tuple[str, str]]:
    return [(name, "i8") for line in lines for name in line.split()]


SLOT = np.dtype(_fields("occupied job sequence bits level value"))
MEMBER = np.dtype(
    [*_fields("up full newest window share branches"), ("down", "i8", (MOST_BRANCHES,))]
)  # fmt: skip
"""A job at a switch: routes to its server and to whoever waits for results, and the workers below."""
SWITCH = np.dtype([
    *_fields("rules slots direct size busy since used"), ("did", "i8", (8,)),
    ("jobs", MEMBER, (MOST_JOBS,)), ("memory", SLOT, (MOST_SLOTS,)),
])  # fmt: skip
"""``busy``: slots held since ``since``, ``used``: slots times ps; ``did``: how often each action."""
ENTRY = np.dtype(_fields("sequence have value since asked"))
SERVER = np.dtype([
    *_fields("job full down size window patience remind floor newest last reminders overlaps came"),
    ("alone", "i8", (MOST_BRANCHES,)), ("entries", ENTRY, (RING,)),
])  # fmt: skip
"""``alone``: routes to each worker; ``last``: the newest whole sum; ``came``: packets with values."""
SENT = np.dtype(_fields("at asked done"))
WORKER = np.dtype([
    *_fields("job number up size window patience workers fragments layers iterations slice"),
    *_fields("iteration step busy available next floor newest finished wrong resent"),
    ("jitter", "i8", (MOST_ITERATIONS,)), ("got", "i8", (MOST_LAYERS,)),
    ("priority", "i8", (MOST_ITERATIONS * MOST_LAYERS,)), ("ring", SENT, (RING,)),
])  # fmt: skip
Record = Any


@jit_inline
def send(outbox: Any, reply: Any, kind: int, job: int, hop: int, size: int) -> Record:
    """The next packet that the node sends, with its words blank."""
    answer = carray(reply, 1)[0]
    out = carray(outbox, layout.OUTBOX)[answer.count]
    answer.count += 1
    out.hop, out.flow, out.size, out.tag = hop, job, size, kind << 8 | job
    return out


@jit_inline
def say(out: Record, sequence: int, bits: int, value: int, priority: int) -> None:
    """Fill a packet's words."""
    out.word0, out.word1, out.word2, out.word3 = sequence, bits, value, priority


@jit
def value_of(sequence: int, worker: int) -> int:
    """What a worker adds to a fragment."""
    return (sequence * 2654435761 + worker * 40503 + 12345) & 0xFFFFF


@jit_inline
def count_slots(own: Record, now: int, more: int) -> None:
    """So many slots more are held from ``now`` on."""
    own.used += own.busy * (now - own.since)
    own.since = now
    own.busy += more


@jit_inline
def give_up(own: Record, slot: Record, now: int, outbox: Any, reply: Any) -> None:
    """A slot's sum leaves for its server, and the slot is free unless the sum is whole."""
    out = send(outbox, reply, FLUSHED, slot.job, own.jobs[slot.job].up, own.size)
    say(out, slot.sequence, slot.bits, slot.value, 0)
    if slot.bits != own.jobs[slot.job].full:
        slot.occupied = 0
        count_slots(own, now, -1)


@node
def switch(now, port, packet, state, outbox, reply):  # type: ignore[no-untyped-def]
    """The port of a packet is of no matter: its tag says whose it is."""
    own = carray(state, 1, SWITCH)[0]
    head = carray(packet, 1)[0]
    kind, job = head.tag >> 8, head.tag & 255
    mine = own.jobs[job]
    sequence, bits = head.word0, head.word1
    slot = own.memory[where(own.rules, job, sequence, own.slots, mine.share)]
    is_mine = slot.occupied and slot.job == job and slot.sequence == sequence
    if kind in (RESULT, REMINDER, KNOWN):
        if is_mine and kind == REMINDER:
            give_up(own, slot, now, outbox, reply)
        elif is_mine:
            slot.occupied = 0
            count_slots(own, now, -1)
        if kind == KNOWN:
            return layout.CONSUME
        for branch in range(mine.branches):
            out = send(outbox, reply, kind, job, mine.down[branch], head.size)
            say(out, sequence, bits, head.word2, 0)
        return layout.CONSUME
    if kind == FLUSHED:
        say(send(outbox, reply, kind, job, mine.up, own.size), sequence, bits, head.word2, head.word3)
        return layout.CONSUME
    mine.newest = max(mine.newest, sequence)
    other = own.jobs[slot.job]
    behind = (other.newest - slot.sequence) // max(other.window, 1)
    action, there, level = place(
        own.rules, bits, mine.full, head.word3, kind == RESENT, sequence <= mine.newest - mine.window,
        bool(slot.occupied), bool(is_mine), behind, slot.bits == other.full, slot.bits, slot.level,
    )  # fmt: skip
    own.did[action] += 1
    if action == RAW:
        slot.level = level
        say(send(outbox, reply, kind, job, mine.up, own.size), sequence, bits, head.word2, head.word3)
    elif action == FLUSH:
        give_up(own, slot, now, outbox, reply)
        say(send(outbox, reply, kind, job, mine.up, own.size), sequence, bits, head.word2, head.word3)
    elif action == SWAP:
        out = send(outbox, reply, FLUSHED, slot.job, other.up, own.size)
        say(out, slot.sequence, slot.bits, slot.value, 0)
    if action in (TAKE, SWAP, ADD, COMPLETE):
        if is_mine:
            slot.value += head.word2
        else:
            count_slots(own, now, 1 - slot.occupied)
            slot.occupied, slot.job, slot.sequence, slot.value = 1, job, sequence, head.word2
        slot.bits, slot.level = there, level
    if action == COMPLETE:
        say(send(outbox, reply, GRADIENT, job, mine.up, own.size), sequence, there, slot.value, level)
        if own.direct:
            for branch in range(mine.branches):
                out = send(outbox, reply, RESULT, job, mine.down[branch], own.size)
                say(out, sequence, there, slot.value, 0)
        if not own.direct and not own.rules & HOLD:
            slot.occupied = 0
            count_slots(own, now, -1)
    return layout.CONSUME


@node
def server(now, port, packet, state, outbox, reply):  # type: ignore[no-untyped-def]
    """Adds what switches did not, keeps results for whoever still asks, and reminds."""
    own = carray(state, 1, SERVER)[0]
    answer = carray(reply, 1)[0]
    head = carray(packet, 1)[0]
    if port != layout.WAKE:
        own.came += 1
        sequence, bits = head.word0, head.word1
        entry = own.entries[sequence % (2 * own.window)]
        if sequence < entry.sequence:
            return layout.CONSUME  # of two windows ago: nobody asks any more
        if sequence > entry.sequence:
            entry.sequence, entry.have, entry.value = sequence, 0, 0
            entry.since, entry.asked = now, 0
        action, have = merge(bits, entry.have, own.full)
        if action in (ADD, COMPLETE, TAKE):
            entry.value = head.word2 if action == TAKE else entry.value + head.word2
            entry.have = have
            own.newest = max(own.newest, sequence)
        elif bits & ~entry.have:
            own.overlaps += 1
        if action in (COMPLETE, TAKE):
            own.last = max(own.last, sequence)
            if port != 1 or bits != own.full:  # else the switch has told everyone itself
                say(send(outbox, reply, RESULT, own.job, own.down, own.size), sequence, have, entry.value, 0)
        elif action == ANSWER and head.tag >> 8 == RESENT:
            for number in range(MOST_BRANCHES):
                if bits == 1 << number:
                    out = send(outbox, reply, RESULT, own.job, own.alone[number], own.size)
                    say(out, sequence, have, entry.value, 0)
        if port == 1 and bits == own.full:
            say(send(outbox, reply, KNOWN, own.job, own.down, SMALL), sequence, bits, 0, 0)
        if not own.remind:
            return layout.CONSUME
    wake = np.int64(layout.NEVER)
    for sequence in range(own.floor, max(own.newest, own.last) + 1):
        entry = own.entries[sequence % (2 * own.window)]
        if entry.sequence < sequence:  # nothing came of it, though later ones are whole
            if sequence + LATER > own.last:
                continue
            entry.sequence, entry.have, entry.value = sequence, 0, 0
            entry.since, entry.asked = now, 0
        if entry.have == own.full:
            own.floor += sequence == own.floor
            continue
        if is_due(now - entry.since, own.patience, entry.asked, own.last - sequence, LATER):
            missing = own.full & ~entry.have if entry.asked else 0
            out = send(outbox, reply, REMINDER, own.job, own.down, SMALL)
            say(out, sequence, missing, 0, 0)
            entry.since, entry.asked = now, entry.asked + 1
            own.reminders += 1
        wake = min(wake, entry.since + (own.patience << min(entry.asked, DOUBLINGS)))
        if port != layout.WAKE or answer.count >= 32:
            break
    answer.wake = wake if port == layout.WAKE else min(answer.wake, wake)
    return layout.CONSUME


@jit
def compute(own: Record, now: int) -> None:
    """What the worker's device has done by ``now``: forward layer by layer, each when its gradients of the
    iteration before have come; then backward, where each layer gives fragments to send."""
    part = own.fragments // own.layers
    while own.iteration < own.iterations:
        if own.busy > 0:
            if now < own.busy:
                return
            own.busy = 0
            if own.step >= own.layers:
                own.available += part
            own.step += 1
            if own.step == 2 * own.layers:
                own.step = 0
                own.iteration += 1
            continue
        if own.step < own.layers and own.iteration > 0:
            if own.got[own.step] < part:
                return
            own.got[own.step] = 0
        own.busy = now + (own.slice if own.step < own.layers else 2 * own.slice)
        if own.step == 0:
            own.busy += own.jitter[own.iteration]


@jit_inline
def repeat(own: Record, sequence: int, now: int, outbox: Any, reply: Any) -> None:
    """Send a fragment again, past the switch."""
    slot = own.ring[sequence % RING]
    out = send(outbox, reply, RESENT, own.job, own.up, own.size)
    say(out, sequence, 1 << own.number, value_of(sequence, own.number), 0)
    slot.at, slot.asked = now, slot.asked + 1
    own.resent += 1


@node
def worker(now, port, packet, state, outbox, reply):  # type: ignore[no-untyped-def]
    """Computes, sends what its window allows, and sends again what does not come back."""
    own = carray(state, 1, WORKER)[0]
    answer = carray(reply, 1)[0]
    part = own.fragments // own.layers
    if port != layout.WAKE:
        head = carray(packet, 1)[0]
        sequence = head.word0
        slot = own.ring[sequence % RING]
        if not own.floor <= sequence < own.next or slot.done:
            return layout.CONSUME
        if head.tag >> 8 == REMINDER:
            if head.word1 >> own.number & 1:
                repeat(own, sequence, now, outbox, reply)
            return layout.CONSUME
        total = 0
        for number in range(own.workers):
            total += value_of(sequence, number)
        own.wrong += total != head.word2
        slot.done = 1
        own.newest = max(own.newest, sequence)
        own.got[own.layers - 1 - sequence % own.fragments // part] += 1
        while own.floor < own.next and own.ring[own.floor % RING].done:
            own.floor += 1
        if own.floor == own.iterations * own.fragments and own.finished < 0:
            own.finished = now
    compute(own, now)
    bit = 1 << own.number
    last = min(own.available, own.floor + own.window)
    while own.next < last and answer.count < layout.OUTBOX - 16:
        sequence = own.next
        layer = own.layers - 1 - sequence % own.fragments // part
        level = own.priority[sequence // own.fragments * MOST_LAYERS + layer]
        out = send(outbox, reply, GRADIENT, own.job, own.up, own.size)
        say(out, sequence, bit, value_of(sequence, own.number), level)
        slot = own.ring[sequence % RING]
        slot.at, slot.asked, slot.done = now, 0, 0
        own.next += 1
    wake = np.int64(layout.NEVER)
    for sequence in range(own.floor, own.next):
        slot = own.ring[sequence % RING]
        if slot.done:
            continue
        if is_due(now - slot.at, own.patience, slot.asked, own.newest - sequence, own.window - 1):
            repeat(own, sequence, now, outbox, reply)
        wake = min(wake, slot.at + (own.patience << min(slot.asked, DOUBLINGS)))
        if port != layout.WAKE or answer.count >= layout.OUTBOX - 1:
            break
    if own.next < last:
        wake = now + 1
    if own.busy > 0:
        wake = min(wake, own.busy)
    answer.wake = wake if port == layout.WAKE else min(answer.wake, wake)
    return layout.CONSUME
