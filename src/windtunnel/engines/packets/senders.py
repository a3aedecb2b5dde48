"""When a sender may send, and how it answers acknowledgements, marks and timeouts.

**Our TCP is a sketch.** Windows count packets of one size. Every data packet is acknowledged at once, and the
acknowledgement tells which packet it is for, that packet's mark and times, and the first that is lacking:
what SACK tells, while acknowledgements arrive. A packet is lost when one sent three later has arrived (as
in RFC 6675, where routes keep the order); it is sent again once, then only after a timeout (RFC 6298). No
handshake, no end of connection, no HyStart, no delayed acknowledgement, no proportional rate reduction.

Reno and CUBIC (RFC 9438, with its Reno-friendly region and fast convergence) answer a mark as a loss, once a
window; DCTCP (RFC 8257) by its share of marks. *Vegas-like*: once a window by the least round trip in it and
what gates reported as virtual delay; two to four packets are kept in queues. *BBR-like*: version 1's model
(startup, drain, cycle of gains, probing of the round trip), without its long-term policer model.
"""

from __future__ import annotations

import numpy as np

from windtunnel.base.compiled import jit, jit_inline
from windtunnel.engines.packets import layout
from windtunnel.engines.packets.layout import Record, reorder_at

DUPLICATES = 3
FIRST_WINDOW = 10.0
FIRST_RTO = layout.SECOND
MAX_RTO = 60 * layout.SECOND
CUBIC_C, CUBIC_BETA = 0.4, 0.7
CUBIC_ALPHA = 3.0 * (1.0 - CUBIC_BETA) / (1.0 + CUBIC_BETA)
DCTCP_GAIN = 1.0 / 16.0
VEGAS_LEAST, VEGAS_MOST = 2.0, 4.0
BBR_HIGH = 2.885
BBR_HALF_ROUNDS = 5
BBR_BASE_AGE, BBR_PROBE_TIME = 10 * layout.SECOND, layout.SECOND // 5


@jit_inline
def next_number(w: Record, flow: Record, base: int) -> int:
    """The packet that the window lets go next, a lost one before a new one; -1 for none. ``base``: where the
    flow's packets begin in the array of those beyond gaps."""
    flight = flow.next - flow.una
    if flow.again == 0 and flight - flow.sacked - flow.missing + 1 > min(flow.cwnd, flow.window_cap):
        return -1
    if flow.missing > 0:
        hole = flow.hole
        while reorder_at(w, base + (hole & (layout.REORDER - 1))).sacked:
            hole += 1
        return hole  # type: ignore[no-any-return]
    return flow.next if flow.next < flow.total and flight < layout.REORDER else -1  # type: ignore[no-any-return]


@jit_inline
def is_sent(flow: Record, number: int) -> None:
    """Packet ``number``, which `next_number` gave, goes."""
    flow.sent += 1
    flow.again = 0
    if number == flow.next:
        flow.next += 1
    else:
        flow.resent += 1
        flow.hole = number + 1
        flow.missing -= 1


@jit
def cut(flow: Record, now: int) -> None:
    """The window after a loss, or a mark that is answered as one."""
    share = 0.5
    if flow.kind == layout.CUBIC:
        flow.w_max = flow.cwnd if flow.cwnd >= flow.w_max else flow.cwnd * (1.0 + CUBIC_BETA) / 2.0
        flow.epoch = -1
        if flow.ssthresh < np.inf:  # slow start without HyStart has sent twice what fits
            share = CUBIC_BETA
    if flow.kind != layout.BBR:
        flow.ssthresh = max(flow.cwnd * share, 2.0)
        flow.cwnd = flow.ssthresh


@jit
def time_out(flow: Record, now: int) -> None:
    """All in flight that the receiver is not known to have is taken for lost."""
    cut(flow, now)
    flow.timeouts += 1
    flow.cwnd = 1.0
    flow.recovering = 2
    flow.recover = flow.next
    flow.hole = flow.una
    flow.fence = flow.next
    flow.missing = flow.next - flow.una - flow.sacked
    flow.backoff = min(flow.backoff + 1, 16)


@jit_inline
def timeout(flow: Record) -> int:
    """Picoseconds until its timer is due."""
    return min(flow.rto << flow.backoff, MAX_RTO)


@jit_inline
def measure(flow: Record, trip: int) -> None:
    """Smooth the round trip and set the timeout (RFC 6298, in whole picoseconds)."""
    if flow.srtt == 0:
        flow.srtt = trip
        flow.rttvar = trip >> 1
    else:
        error = trip - flow.srtt
        flow.srtt += error >> 3
        flow.rttvar += (abs(error) - flow.rttvar) >> 2
    flow.rto = min(max(flow.min_rto, flow.srtt + (flow.rttvar << 2)), MAX_RTO)


@jit_inline
def learn(w: Record, flow: Record, base: int, number: int, got: int) -> None:
    """Keep account of what the receiver has: all below ``number``, and ``got``."""
    if got >= max(number, flow.una):
        there = reorder_at(w, base + (got & (layout.REORDER - 1)))
        if there.sacked == 0:
            there.sacked = 1
            flow.sacked += 1
            if flow.hole <= got < flow.fence:  # it was only late
                flow.missing -= 1
    if number > flow.una:
        if flow.sacked > 0 or flow.missing > 0:
            for below in range(flow.una, number):
                there = reorder_at(w, base + (below & (layout.REORDER - 1)))
                if there.sacked:
                    there.sacked = 0
                    flow.sacked -= 1
                elif flow.hole <= below < flow.fence:
                    flow.missing -= 1
        flow.una = number
        flow.hole = max(flow.hole, number)
        flow.fence = max(flow.fence, number)
    flow.highest = max(flow.highest, got + 1)
    while flow.fence < flow.highest - DUPLICATES:
        if reorder_at(w, base + (flow.fence & (layout.REORDER - 1))).sacked == 0:
            flow.missing += 1
        flow.fence += 1


@jit
def on_ack(w: Record, flow: Record, packet: Record, now: int) -> None:
    """Take in one acknowledgement; what may be sent then is for the caller to find out."""
    trip = now - packet.sent_at
    measure(flow, trip)
    flow.acks += 1
    acked = max(packet.number - flow.una, 0)
    flight = flow.next - flow.una + 1
    limited = flight >= flow.cwnd or (flow.cwnd < flow.ssthresh and 2 * flight >= flow.cwnd)
    grows = acked > 0 and flow.recovering != 1 and limited
    learn(w, flow, packet.flow * layout.REORDER, packet.number, packet.got)
    if acked > 0:
        flow.backoff = 0
        flow.deadline = now + timeout(flow) if flow.una < flow.next else layout.NEVER
        if flow.recovering == 2:
            acked = np.int64(1)
        if flow.una >= flow.recover:
            flow.recovering = 0
    if flow.missing > 0 and flow.recovering == 0:
        flow.recovering = 1
        flow.recover = flow.next
        flow.again = 1
        cut(flow, now)
    echo = (packet.flags & layout.ECHO) != 0
    if flow.kind == layout.RENO:
        if echo:
            answer_mark(flow, now)
        elif grows:
            grow(flow, acked)
    elif flow.kind == layout.CUBIC:
        if echo:
            answer_mark(flow, now)
        elif grows:
            grow_cubic(flow, acked, now)
    elif flow.kind == layout.DCTCP:
        dctcp(flow, acked, echo, grows)
    elif flow.kind == layout.VEGAS:
        vegas(flow, acked, trip, trip + packet.virtual_delay, grows)
    else:
        bbr(flow, packet, trip, now)
    flow.acked_at = now


@jit_inline
def grow(flow: Record, acked: int) -> None:
    """Slow start, then one packet a round trip."""
    flow.cwnd += float(acked) if flow.cwnd < flow.ssthresh else acked / flow.cwnd


@jit
def answer_mark(flow: Record, now: int) -> None:
    """As to a loss, once a window."""
    if flow.una > flow.reacted and flow.recovering == 0:
        flow.reacted = flow.next
        cut(flow, now)


@jit
def grow_cubic(flow: Record, acked: int, now: int) -> None:
    """RFC 9438, 4.2 to 4.4; times in seconds."""
    if flow.cwnd < flow.ssthresh:
        flow.cwnd += acked
        return
    if flow.epoch < 0:
        flow.epoch = now
        flow.w_max = max(flow.w_max, flow.cwnd)
        flow.k = ((flow.w_max - flow.cwnd) / CUBIC_C) ** (1.0 / 3.0)
        flow.w_est = flow.cwnd
    since = (now - flow.epoch + flow.srtt) / 1e12 - flow.k
    target = CUBIC_C * since * since * since + flow.w_max
    target = min(max(target, flow.cwnd), 1.5 * flow.cwnd)
    flow.w_est += CUBIC_ALPHA * acked / flow.cwnd
    flow.cwnd = max(flow.cwnd + acked * (target - flow.cwnd) / flow.cwnd, flow.w_est)


@jit
def dctcp(flow: Record, acked: int, echo: bool, grows: bool) -> None:
    """RFC 8257, 3.3: a mark ends slow start, and once a window the share of marks cuts."""
    flow.seen += 1
    if echo:
        flow.marks += 1
        flow.ssthresh = min(flow.ssthresh, flow.cwnd)
    if grows and not echo:
        grow(flow, acked)
    if flow.una >= flow.window_end:
        flow.alpha += DCTCP_GAIN * (flow.marks / flow.seen - flow.alpha)
        if flow.marks > 0 and flow.recovering == 0:
            flow.cwnd = max(flow.cwnd * (1.0 - flow.alpha / 2.0), 2.0)
            flow.ssthresh = flow.cwnd
        flow.seen = 0
        flow.marks = 0
        flow.window_end = flow.next


@jit
def vegas(flow: Record, acked: int, trip: int, felt: int, grows: bool) -> None:
    """Brakmo and Peterson, 1995, 3.2, decided once a window by the least of the round trips ``felt``."""
    flow.base_rtt = min(flow.base_rtt, trip)
    flow.seen = min(flow.seen, felt)
    if grows and flow.cwnd < flow.ssthresh:
        flow.cwnd += acked
    if flow.una >= flow.window_end:
        queued = flow.cwnd * (1.0 - flow.base_rtt / flow.seen)
        if flow.cwnd < flow.ssthresh:
            if queued > VEGAS_LEAST:
                flow.ssthresh = max(flow.cwnd - queued, 2.0)
                flow.cwnd = flow.ssthresh
        elif queued > VEGAS_MOST:
            flow.cwnd = max(flow.cwnd - 1.0, 2.0)
        elif queued < VEGAS_LEAST and grows:
            flow.cwnd += 1.0
        flow.seen = layout.NEVER
        flow.window_end = flow.next


@jit
def bbr(flow: Record, packet: Record, trip: int, now: int) -> None:
    """Cardwell et al., ACM Queue 2016, by packets a picosecond; the maximum over ten rounds is one over the
    current and the last five."""
    if packet.delivered_at < now:
        rate = (flow.acks - packet.delivered) / (now - packet.delivered_at)
        flow.bandwidth = max(flow.bandwidth, rate)
    round_ended = packet.delivered >= flow.window_end
    if round_ended:
        flow.window_end = flow.acks
        flow.rounds += 1
        if flow.rounds % BBR_HALF_ROUNDS == 0:
            flow.earlier = flow.bandwidth
            flow.bandwidth = 0.0
    most = max(flow.bandwidth, flow.earlier)
    stale = now - flow.base_at > BBR_BASE_AGE
    if trip <= flow.base_rtt or stale:
        flow.base_rtt = trip
        flow.base_at = now
    if stale and flow.phase != 3:
        flow.phase = 3
        flow.phase_at = now
    flight = flow.next - flow.una - flow.sacked - flow.missing
    product = most * flow.base_rtt
    if flow.phase == 0 and round_ended:
        if most >= flow.full * 1.25:
            flow.full = most
            flow.stuck = 0
        else:
            flow.stuck += 1
            if flow.stuck >= 3:
                flow.phase = 1
    if flow.phase == 1 and flight <= product:
        flow.phase = 2
        flow.phase_at = now
        flow.stuck = 2
    if flow.phase == 2 and now - flow.phase_at > flow.base_rtt:
        flow.phase_at = now
        flow.stuck = (flow.stuck + 1) % 8
    if flow.phase == 3 and now - flow.phase_at > BBR_PROBE_TIME:
        flow.phase = 2 if flow.full > 0.0 else 0
        flow.phase_at = now
        flow.stuck = 2
    gain = 1.0
    if flow.phase == 0:
        gain = BBR_HIGH
    elif flow.phase == 1:
        gain = 1.0 / BBR_HIGH
    elif flow.phase == 2:
        if flow.stuck == 0:
            gain = 1.25
        elif flow.stuck == 1:
            gain = 0.75
    if most > 0.0:
        flow.gap = 1.0 / (gain * most)
        width = BBR_HIGH if flow.phase <= 1 else 2.0
        flow.cwnd = 4.0 if flow.phase == 3 else max(width * product, 4.0)


@jit_inline
def random(link: Record) -> float:
    """The link's next number in [0, 1): SplitMix64 (Steele et al., OOPSLA 2014)."""
    link.random = link.random + np.uint64(0x9E3779B97F4A7C15)
    word = link.random
    word = (word ^ (word >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    word = (word ^ (word >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    word = word ^ (word >> np.uint64(31))
    return np.float64(word >> np.uint64(11)) / 9007199254740992.0  # type: ignore[no-any-return]
