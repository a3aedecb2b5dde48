"""The loop: take the next event, place what it moves, let the sender that it concerns send.

**Events** are in a heap by (time, order). A link has one entry for all packets on its line: that of the first
to arrive. Equal times go like this, and the order of a packet is drawn when it is admitted to a link: first
packets leave queues, by link; then packets arrive and paced senders go on, by order; then timers, flows
before nodes. Timers (starts, timeouts, wake-ups) have a heap of their own with one lazy entry each, so
that an acknowledgement that defers a timeout costs one store.

**Placing** goes along the packet's route until it is on a link or has ended. Copies made by a fork and
packets sent by nodes wait on a stack, and senders come after them: nothing recurses.

Memory that runs short ends the loop between two events (or two packets of a sender); the caller gives more
and calls again.
"""

from __future__ import annotations

import numpy as np

from windtunnel.base.compiled import jit, jit_inline
from windtunnel.engines.packets import layout
from windtunnel.engines.packets.hooks import call_gate, call_node
from windtunnel.engines.packets.layout import (
    Record,
    entry_at,
    flow_at,
    hop_at,
    link_at,
    node_at,
    outbox_at,
    packet_at,
    reorder_at,
    reply_at,
    stack_at,
    word_at,
)
from windtunnel.engines.packets.queues import free, leave, lose, mark, note, put, service_time, take
from windtunnel.engines.packets.senders import is_sent, next_number, on_ack, random, time_out, timeout

FIRST = -(2**62)
"""The order of a departure of link 0: before all arrivals of its instant."""


@jit_inline
def write(heap: int, place: int, time: int, order: int, who: int) -> None:
    """Set one entry of a heap."""
    entry = entry_at(heap, place)
    entry.time = time
    entry.order = order
    entry.who = who


@jit
def sift_up(heap: int, count: int, time: int, order: int, who: int) -> None:
    """Add an entry to a heap of ``count``."""
    place = count
    while place > 0:
        above = (place - 1) >> 1
        other = entry_at(heap, above)
        if other.time < time or (other.time == time and other.order < order):
            break
        write(heap, place, other.time, other.order, other.who)
        place = above
    write(heap, place, time, order, who)


@jit
def sift_down(heap: int, count: int, time: int, order: int, who: int) -> None:
    """Put an entry in the place of the first of a heap of ``count``."""
    place = 0
    below = 1
    while below < count:
        child = entry_at(heap, below)
        if below + 1 < count:
            other = entry_at(heap, below + 1)
            if other.time < child.time or (other.time == child.time and other.order < child.order):
                below += 1
                child = other
        if time < child.time or (time == child.time and order < child.order):
            break
        write(heap, place, child.time, child.order, child.who)
        place = below
        below = 2 * place + 1
    write(heap, place, time, order, who)


@jit_inline
def push(w: Record, time: int, order: int, who: int) -> None:
    """Add an event."""
    sift_up(w.heap, w.pending, time, order, who)
    w.pending += 1


@jit_inline
def pop(w: Record) -> None:
    """Remove the first event."""
    w.pending -= 1
    last = entry_at(w.heap, w.pending)
    sift_down(w.heap, w.pending, last.time, last.order, last.who)


@jit_inline
def arm(w: Record, timer: Record, who: int) -> None:
    """See to it that the timer of ``who`` (a flow, or after them a node) is looked at by its deadline."""
    if timer.deadline < timer.armed:
        sift_up(w.clocks, w.timers, timer.deadline, who, who)
        w.timers += 1
        timer.armed = timer.deadline


@jit_inline
def is_due(w: Record, timer: Record, who: int, now: int) -> bool:
    """The timer's entry has come at ``now``: whether its time has, too. If not it comes again."""
    if timer.armed != now:
        return False  # an earlier entry took its place
    timer.armed = layout.NEVER
    if timer.deadline <= now:
        timer.deadline = layout.NEVER
        return True
    arm(w, timer, who)
    return False


@jit_inline
def take_free(w: Record) -> int:
    """A packet out of those that are not in use."""
    p = w.free
    w.free = packet_at(w, p).next
    w.free_count -= 1
    return p  # type: ignore[no-any-return]


@jit_inline
def next_packet(w: Record, f: int, now: int) -> int:
    """The packet that flow ``f`` sends now, or -1."""
    flow = flow_at(w, f)
    number = next_number(w, flow, f * layout.REORDER)
    if number < 0:
        return -1
    gap = max(flow.gap, flow.cap_gap)
    if gap > 0.0:
        if now < flow.ready_at:
            if flow.pacing == 0:
                flow.pacing = 1
                push(w, flow.ready_at, w.order, 2 * w.link_count + f)
                w.order += 1
            return -1
        flow.ready_at = now + np.int64(gap + 0.5)
    is_sent(flow, number)
    if flow.kind == layout.UDP:
        flow.una = flow.next
    elif flow.deadline == layout.NEVER:
        flow.deadline = now + timeout(flow)
        arm(w, flow, f)
    if flow.acked_at < 0:
        flow.acked_at = now
    p = take_free(w)
    packet = packet_at(w, p)
    packet.sent_at = now
    packet.number = number
    packet.delivered = flow.acks
    packet.delivered_at = flow.acked_at
    packet.virtual_delay = 0
    packet.hop = flow.route
    packet.flow = f
    packet.size = flow.size
    packet.tag = flow.tag
    packet.flags = flow.flags
    packet.band = flow.band
    return p  # type: ignore[no-any-return]


@jit_inline
def receive(w: Record, p: int, now: int) -> bool:
    """Packet ``p`` is at its receiver; whether it goes back as an acknowledgement."""
    packet = packet_at(w, p)
    flow = flow_at(w, packet.flow)
    note(w, layout.DELIVERED, 0, packet)
    flow.delivered += 1
    flow.delay += now - packet.sent_at
    marked = packet.flags & layout.CE
    if marked:
        flow.marked += 1
    if flow.kind == layout.UDP or flow.kind == layout.NODE:
        flow.received += 1
        if flow.received == flow.total:
            flow.finished = now
        free(w, p)
        return False
    number = packet.number
    base = packet.flow * layout.REORDER
    packet.got = number
    if number == flow.expected:
        flow.expected += 1
        flow.received += 1
        while flow.ahead > 0 and reorder_at(w, base + (flow.expected & (layout.REORDER - 1))).there:
            reorder_at(w, base + (flow.expected & (layout.REORDER - 1))).there = 0
            flow.ahead -= 1
            flow.expected += 1
        if flow.expected == flow.total:
            flow.finished = now
    elif number > flow.expected and reorder_at(w, base + (number & (layout.REORDER - 1))).there == 0:
        reorder_at(w, base + (number & (layout.REORDER - 1))).there = 1
        flow.ahead += 1
        flow.received += 1
    packet.number = flow.expected
    packet.flags = layout.ACK | layout.ECHO if marked else layout.ACK
    packet.size = flow.ack_size
    packet.hop += 1
    return True


@jit_inline
def enter(w: Record, where: int, p: int, now: int) -> None:
    """Offer packet ``p`` to link ``where``."""
    link = link_at(w, where)
    packet = packet_at(w, p)
    link.offered += 1
    if link.gate != 0:
        verdict = call_gate(link.gate, now, packet, link.gate_state)
        if verdict == layout.DROP:
            link.gated += 1
            lose(w, p, where, layout.GATED)
            return
        if verdict == layout.MARK:
            mark(w, p, where)
    packet.order = w.order
    w.order += 1
    if link.queue != layout.FIFO:
        put(w, where, p, now)
        if link.serving < 0:
            serve(w, where, now, False)
        return
    leave(w, link, now)
    size = packet.size
    if link.waiting >= link.max_packets or link.waiting_bytes + size > link.max_bytes:
        link.dropped += 1
        lose(w, p, where, layout.DROPPED)
        return
    if link.mark_at > 0 and link.waiting >= link.mark_at and packet.flags & layout.ECT:
        mark(w, p, where)
    begins = max(now, link.free_at)
    link.wait += begins - now
    packet.time = begins + service_time(link, size)
    link.free_at = packet.time
    if link.waiting == 0:
        link.first = p
    link.waiting += 1
    link.waiting_bytes += size
    to_line(w, where, p)


@jit_inline
def to_line(w: Record, where: int, p: int) -> None:
    """Packet ``p``, whose departure is known, is last on the line of link ``where``."""
    link = link_at(w, where)
    packet = packet_at(w, p)
    packet.next = -1
    if link.head < 0:
        link.head = p
        push(w, packet.time + link.delay, packet.order, where)
    else:
        packet_at(w, link.tail).next = p
    link.tail = p


@jit
def serve(w: Record, where: int, now: int, departs: bool) -> None:
    """Link ``where``, no FIFO, is free: the packet in service ``departs`` if there was one, and the next is
    chosen."""
    link = link_at(w, where)
    if departs:
        pop(w)
        to_line(w, where, link.serving)
    link.serving = take(w, where, now)
    if link.serving >= 0:
        packet = packet_at(w, link.serving)
        link.wait += now - packet.time
        packet.time = now + service_time(link, packet.size)
        link.free_at = packet.time
        push(w, packet.time, FIRST + where, w.link_count + where)


@jit_inline
def arrive(w: Record, where: int, now: int) -> int:
    """The first packet of the line is at the end of link ``where``; -1 if it got lost on the way."""
    link = link_at(w, where)
    p = link.head
    packet = packet_at(w, p)
    if link.queue == layout.FIFO and link.waiting > 0 and link.first == p:
        link.waiting -= 1
        link.waiting_bytes -= packet.size
        link.first = packet.next
    link.head = packet.next
    if link.head >= 0:
        other = packet_at(w, link.head)
        sift_down(w.heap, w.pending, other.time + link.delay, other.order, where)
    else:
        pop(w)
    if link.loss > 0.0 and random(link) < link.loss:
        link.lost += 1
        lose(w, p, where, layout.LOST)
        return -1
    link.passed += 1
    link.passed_bytes += packet.size
    packet.hop += 1
    return p  # type: ignore[no-any-return]


@jit
def split(w: Record, p: int) -> None:
    """Packet ``p`` is at a fork: it takes the first branch, copies wait for theirs."""
    packet = packet_at(w, p)
    place = packet.hop + 2
    count = hop_at(w, packet.hop + 1).place
    for branch in range(count - 1, 0, -1):
        c = take_free(w)
        copy = packet_at(w, c)
        copy_packet(w.packets + c * layout.PACKET_BYTES, w.packets + p * layout.PACKET_BYTES)
        copy.hop = hop_at(w, place + branch).place
        stack_at(w, w.stacked).packet = c
        w.stacked += 1
    flow_at(w, packet.flow).copies += count - 1
    packet.hop = hop_at(w, place).place


@jit_inline
def copy_packet(to: int, source: int) -> None:
    """Copy a packet from one address to another."""
    for index in range(layout.PACKET_BYTES // 8):
        word_at(to, index).value = word_at(source, index).value


@jit
def consult(w: Record, k: int, port: int, packet: Record, now: int) -> int:
    """Call node ``k``; what it sends waits on the stack. Returns its verdict, or -1 for too large a count."""
    node = node_at(w, k)
    reply = reply_at(w, 0)
    reply.count = 0
    reply.wake = node.deadline
    verdict = call_node(node.function, now, port, packet, node.state, outbox_at(w, 0), reply)
    if reply.count < 0 or reply.count > layout.OUTBOX:
        return -1
    for index in range(reply.count - 1, -1, -1):
        out = outbox_at(w, index)
        in_range = 0 <= out.flow < w.flow_count and 0 <= out.hop < w.hop_count
        if not in_range or not 0 < out.size < 2**20:
            return -1
        c = take_free(w)
        copy_packet(w.packets + c * layout.PACKET_BYTES, w.outbox + index * layout.PACKET_BYTES)
        flow_at(w, out.flow).sent += 1
        stack_at(w, w.stacked).packet = c
        w.stacked += 1
    node.deadline = reply.wake if reply.wake == layout.NEVER else max(reply.wake, now + 1)
    arm(w, node, w.flow_count + k)
    return verdict  # type: ignore[no-any-return]


@jit_inline
def is_short(w: Record) -> bool:
    """Whether there may be too little memory for packets, or for the log, of one more event."""
    short_of_log = w.log_room > 0 and w.logged + 4 * w.reserve > w.log_room
    return w.free_count < w.reserve or short_of_log  # type: ignore[no-any-return]


@jit
def run(world: Record, until: int) -> int:
    """Run all events up to and with ``until``. GROW: call again with more memory; REFUSED: a node did what
    it must not."""
    w = world[0]
    count = w.link_count
    f = w.resume
    w.resume = -1
    p = -1
    while True:
        if f < 0:
            if is_short(w) or w.timers + w.reserve > w.timer_room:
                return layout.GROW
            first = entry_at(w.heap, 0).time if w.pending > 0 else layout.NEVER
            if w.timers > 0 and entry_at(w.clocks, 0).time < first:
                now = entry_at(w.clocks, 0).time
                if now > until:
                    break
                w.now = now
                who = entry_at(w.clocks, 0).who
                w.timers -= 1
                last = entry_at(w.clocks, w.timers)
                sift_down(w.clocks, w.timers, last.time, last.order, last.who)
                if who < w.flow_count:
                    flow = flow_at(w, who)
                    if is_due(w, flow, who, now):
                        w.events += 1
                        f = who
                        if flow.started == 0:
                            flow.started = 1
                        else:
                            time_out(flow, now)
                elif is_due(w, node_at(w, who - w.flow_count), who, now):
                    w.events += 1
                    if consult(w, who - w.flow_count, layout.WAKE, outbox_at(w, 0), now) < 0:
                        return layout.REFUSED
            else:
                now = first
                if now > until or now == layout.NEVER:
                    break
                w.now = now
                w.events += 1
                who = entry_at(w.heap, 0).who
                if who < count:
                    p = arrive(w, who, now)
                elif who < 2 * count:
                    serve(w, who - count, now, True)
                else:
                    pop(w)
                    f = who - 2 * count
                    flow_at(w, f).pacing = 0
        else:
            now = w.now
        while True:
            if p < 0:
                if w.stacked > 0:
                    w.stacked -= 1
                    p = stack_at(w, w.stacked).packet
                elif f >= 0:
                    if is_short(w):
                        w.resume = f
                        return layout.GROW
                    p = next_packet(w, f, now)
                    if p < 0:
                        f = -1
                        break
                else:
                    break
            packet = packet_at(w, p)
            place = hop_at(w, packet.hop).place
            if place >= 0:
                enter(w, place, p, now)
                p = -1
            elif place == layout.RECEIVE:
                if not receive(w, p, now):
                    p = -1
            elif place == layout.END:
                f = packet.flow
                flow = flow_at(w, f)
                note(w, layout.ACKED, 0, packet)
                on_ack(w, flow, packet, now)
                arm(w, flow, f)
                free(w, p)
                p = -1
            elif place == layout.FORK:
                split(w, p)
            elif place == layout.AT_NODE:
                port = hop_at(w, packet.hop + 2).place
                verdict = consult(w, hop_at(w, packet.hop + 1).place, port, packet, now)
                if verdict < 0:
                    return layout.REFUSED
                if verdict == layout.CONSUME:
                    flow_at(w, packet.flow).consumed += 1
                    note(w, layout.CONSUMED, port, packet)
                    free(w, p)
                    p = -1
                else:
                    packet.hop += 3
            else:
                return layout.REFUSED
    for where in range(w.link_count):
        link = link_at(w, where)
        if link.queue == layout.FIFO:
            leave(w, link, until)
    w.now = max(w.now, until)
    return layout.DONE
