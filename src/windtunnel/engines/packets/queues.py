"""What waits before a link, and which packet is sent next.

FIFO needs no event for a departure: when a packet is admitted, its departure is known, and who has left is
looked up when the next one comes. For the others a link serves one packet at a time and chooses at each
departure: the first band that has any (strict priority), bands in turn by deficit (DRR, Shreedhar and
Varghese 1995), CoDel (RFC 8289), or flows hashed to bands with CoDel each (fq_codel, RFC 8290; when all is
full the head of the longest band goes).
"""

from __future__ import annotations

import numpy as np

from windtunnel.base.compiled import jit, jit_inline
from windtunnel.engines.packets import layout
from windtunnel.engines.packets.layout import Record, band_at, flow_at, link_at, log_at, packet_at


@jit_inline
def note(w: Record, kind: int, where: int, packet: Record) -> None:
    """An entry of the log, where there is one."""
    if w.log_room > 0:
        entry = log_at(w, w.logged)
        entry.time = w.now
        entry.kind = kind
        entry.where = where
        entry.flow = packet.flow
        entry.flags = packet.flags
        entry.number = packet.number
        w.logged += 1


@jit_inline
def free(w: Record, p: int) -> None:
    """Packet ``p`` is no more."""
    packet = packet_at(w, p)
    packet.flow = -1
    packet.next = w.free
    w.free = p
    w.free_count += 1


@jit
def lose(w: Record, p: int, where: int, kind: int) -> None:
    """Packet ``p`` ends at link ``where``: GATED, DROPPED or LOST."""
    packet = packet_at(w, p)
    flow = flow_at(w, packet.flow)
    if packet.flags & layout.ACK:
        flow.acks_lost += 1
    elif kind == layout.LOST:
        flow.lost += 1
    else:
        flow.dropped += 1
    note(w, kind, where, packet)
    free(w, p)


@jit_inline
def mark(w: Record, p: int, where: int) -> bool:
    """Whether packet ``p`` takes marks; then it has one."""
    packet = packet_at(w, p)
    if packet.flags & layout.ECT == 0:
        return False
    packet.flags |= layout.CE
    link_at(w, where).marked += 1
    note(w, layout.MARKED, where, packet)
    return True


@jit_inline
def service_time(link: Record, size: int) -> int:
    """Picoseconds, in whole ones, that ``size`` bytes take on ``link``."""
    return max(np.int64(size * link.per_byte + 0.5), np.int64(1))  # type: ignore[return-value]


@jit_inline
def leave(w: Record, link: Record, now: int) -> None:
    """FIFO: count out the packets that have left by ``now``."""
    while link.waiting > 0:
        packet = packet_at(w, link.first)
        if packet.time > now:
            break
        link.waiting -= 1
        link.waiting_bytes -= packet.size
        link.first = packet.next


@jit_inline
def pull(w: Record, link: Record, b: int) -> int:
    """Take the first packet of band ``b`` out, or -1."""
    band = band_at(w, b)
    p = band.head
    if p >= 0:
        packet = packet_at(w, p)
        band.head = packet.next
        band.packets -= 1
        band.bytes -= packet.size
        link.waiting -= 1
        link.waiting_bytes -= packet.size
    return p  # type: ignore[no-any-return]


@jit
def put(w: Record, where: int, p: int, now: int) -> None:
    """Queue packet ``p`` before link ``where``, or lose it, or a packet that is due to go in its place."""
    link = link_at(w, where)
    packet = packet_at(w, p)
    number = np.int64(0)
    if link.queue == layout.FQ_CODEL:
        word = np.uint64(packet.flow + 1) * np.uint64(0x9E3779B97F4A7C15)
        number = np.int64((word >> np.uint64(32)) % np.uint64(link.bands))
    elif link.queue != layout.CODEL:
        number = min(packet.band, link.bands - 1)
    b = link.bands_begin + number
    band = band_at(w, b)
    full = band.packets >= link.max_packets or band.bytes + packet.size > link.max_bytes
    if link.queue == layout.FQ_CODEL:
        full = link.waiting >= link.max_packets or link.waiting_bytes + packet.size > link.max_bytes
    if full and link.queue != layout.FQ_CODEL:
        link.dropped += 1
        lose(w, p, where, layout.DROPPED)
        return
    if link.queue < layout.CODEL and link.mark_at > 0 and band.packets >= link.mark_at:
        mark(w, p, where)
    packet.time = now
    packet.next = -1
    if band.head < 0:
        band.head = p
    else:
        packet_at(w, band.tail).next = p
    band.tail = p
    band.packets += 1
    band.bytes += packet.size
    link.waiting += 1
    link.waiting_bytes += packet.size
    if link.queue != layout.PRIORITY and link.queue != layout.CODEL and band.listed == 0:
        band.deficit = band.quantum
        band.next = -1
        if link.queue == layout.FQ_CODEL:
            band.listed = 1
            if link.new_head < 0:
                link.new_head = b
            else:
                band_at(w, link.new_tail).next = b
            link.new_tail = b
        else:
            to_old(w, link, b)
    if full:
        longest = link.bands_begin
        for other in range(link.bands_begin, link.bands_begin + link.bands):
            if band_at(w, other).bytes > band_at(w, longest).bytes:
                longest = other
        link.dropped += 1
        lose(w, pull(w, link, longest), where, layout.DROPPED)


@jit
def to_old(w: Record, link: Record, b: int) -> None:
    """Band ``b`` comes last among those that take turns."""
    band_at(w, b).listed = 2
    band_at(w, b).next = -1
    if link.old_head < 0:
        link.old_head = b
    else:
        band_at(w, link.old_tail).next = b
    link.old_tail = b


@jit_inline
def is_late(link: Record, band: Record, packet: Record, now: int) -> bool:
    """CoDel: whether delays have been above the target for an interval (RFC 8289, 5.3, dodequeue)."""
    if now - packet.time < link.target or band.bytes <= link.quantum:
        band.above_until = 0
        return False
    if band.above_until == 0:
        band.above_until = now + link.interval
        return False
    return now >= band.above_until  # type: ignore[no-any-return]


@jit
def codel(w: Record, where: int, b: int, now: int) -> int:
    """The next packet of band ``b``, after those that CoDel drops; -1 when none is left (RFC 8289, 5.5)."""
    link = link_at(w, where)
    band = band_at(w, b)
    p = pull(w, link, b)
    if p < 0:
        band.dropping = 0
        band.above_until = 0
        return -1
    late = is_late(link, band, packet_at(w, p), now)
    if band.dropping:
        if not late:
            band.dropping = 0
        while band.dropping and now >= band.drop_next:
            band.count += 1
            if mark(w, p, where):
                band.drop_next += np.int64(link.interval / np.sqrt(float(band.count)))
                break
            link.dropped += 1
            lose(w, p, where, layout.DROPPED)
            p = pull(w, link, b)
            if p < 0 or not is_late(link, band, packet_at(w, p), now):
                band.dropping = 0
            else:
                band.drop_next += np.int64(link.interval / np.sqrt(float(band.count)))
    elif late:
        if not mark(w, p, where):
            link.dropped += 1
            lose(w, p, where, layout.DROPPED)
            p = pull(w, link, b)
            if p >= 0:
                is_late(link, band, packet_at(w, p), now)
        band.dropping = 1
        recent = band.count - band.last_count
        band.count = recent if recent > 1 and now - band.drop_next < 16 * link.interval else 1
        band.drop_next = now + np.int64(link.interval / np.sqrt(float(band.count)))
        band.last_count = band.count
    if p < 0:
        band.above_until = 0
    return p


@jit
def take(w: Record, where: int, now: int) -> int:
    """The packet that link ``where`` sends next, or -1."""
    link = link_at(w, where)
    if link.queue == layout.PRIORITY:
        for b in range(link.bands_begin, link.bands_begin + link.bands):
            if band_at(w, b).head >= 0:
                return pull(w, link, b)  # type: ignore[no-any-return]
        return -1
    if link.queue == layout.CODEL:
        return codel(w, where, link.bands_begin, now)  # type: ignore[no-any-return]
    while True:
        is_new = link.new_head >= 0
        b = link.new_head if is_new else link.old_head
        if b < 0:
            return -1
        band = band_at(w, b)
        # A band that had no turn left, or (DRR) too little for its first packet, gets a quantum and waits.
        needed = 1
        if link.queue != layout.FQ_CODEL and band.head >= 0:
            needed = packet_at(w, band.head).size
        p = -1
        if band.deficit >= needed:
            p = codel(w, where, b, now) if link.queue == layout.FQ_CODEL else pull(w, link, b)
            if p >= 0:
                band.deficit -= packet_at(w, p).size
        emptied = p >= 0 and band.head < 0 and link.queue != layout.FQ_CODEL
        if p >= 0 and not emptied:
            return p
        if is_new:
            link.new_head = band.next
        else:
            link.old_head = band.next
        band.listed = 0
        if p >= 0:
            return p
        if band.deficit < needed:
            band.deficit += band.quantum
            to_old(w, link, b)
        elif is_new:  # it emptied: once more behind the others, so that it cannot starve them
            to_old(w, link, b)
