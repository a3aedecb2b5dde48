"""How a packet network lies in memory while it runs: one record for each packet, flow, link, band and node.

Times are int64 picoseconds, sizes bytes, rates picoseconds a byte or a packet. A packet that waits, is sent
or is under way is in one list of its link, so a link with traffic has one entry in the heap of events however
many packets it holds. Packets that are not in use are a list of their own.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import from_dtype, types
from numba.extending import intrinsic

NEVER = 2**62
"""A time that does not come. Runs end before it (53 days), so that no sum of a time and a delay overflows."""
SECOND = 10**12
REORDER = 4096
"""Packets that a receiver keeps beyond a gap; no sender is further ahead of what is acknowledged."""
OUTBOX = 64
"""The most packets that a node may send at one call."""

# Senders. NODE: packets come from nodes only.
UDP, RENO, CUBIC, DCTCP, VEGAS, BBR, NODE = range(7)
# Queues. From PRIORITY on a packet's departure is not known when it is admitted.
FIFO, PRIORITY, DRR, CODEL, FQ_CODEL = range(5)
# Places of a route that are no links; FORK is followed by a count and so many positions, AT_NODE by a node's
# number and a port.
RECEIVE, END, FORK, AT_NODE = -1, -2, -3, -4
# What becomes of packets: kinds of the log's entries.
DELIVERED, ACKED, DROPPED, GATED, LOST, MARKED, CONSUMED = range(7)
# Flags of a packet.
ECT, CE, ACK, ECHO = 1, 2, 4, 8
# Verdicts of gates and nodes.
PASS, MARK, DROP = range(3)
FORWARD, CONSUME = range(2)
WAKE = -1
"""The port at which a node is called when its time has come."""
# What `run` returns.
DONE, GROW, REFUSED = range(3)


def _record(*fields: str) -> np.dtype[Any]:
    """A dtype from lines of a kind and names."""
    named = [(name, line.split()[0]) for line in fields for name in line.split()[1:]]
    return np.dtype(named, align=True)


_PACKET = _record(
    "i8 time order",  # since or (where it is known) until when it waits; place among arrivals of an instant
    "i8 sent_at number",  # of an acknowledgement the first packet that is lacking
    "i8 delivered delivered_at",  # packets that its sender knew delivered when it was sent, and since when
    "i8 virtual_delay",  # sum over gates; an acknowledgement takes it back
    "i4 next hop flow size",  # hop: where it stands among all routes; flow -1: not in use
    "i4 tag",  # the entity that gates know it by
    "i2 flags band",
    "i8 got",  # of an acknowledgement the packet that it is for
)
PACKET = np.dtype(
    {
        "names": [*_PACKET.names, *(f"word{k}" for k in range(4))],  # type: ignore[misc]
        "formats": [*(_PACKET[name] for name in _PACKET.names), *["i8"] * 4],  # type: ignore[union-attr]
        "offsets": [*(_PACKET.fields[name][1] for name in _PACKET.names), 16, 24, 32, 40],  # type: ignore
        "itemsize": _PACKET.itemsize,
    }
)
"""``word0`` to ``word3`` are the memory of ``sent_at`` to ``delivered_at``, for the packets of nodes."""
PACKET_BYTES = PACKET.itemsize
FLOW = _record(
    "i8 next una total",  # next new one to send, first unacknowledged, one above all
    "i8 expected received",  # the first that the receiver lacks; how many (different) ones it has
    "f8 cwnd window_cap ssthresh",
    "i8 deadline armed",  # of its timer (start, then timeout); when its entry in the heap of timers comes
    "i8 srtt rttvar rto min_rto base_rtt",
    "f8 gap cap_gap",  # between packets, by the sender and by a cap from outside; 0: not paced
    "i8 ready_at",  # when pacing lets the next packet go
    "i8 acks acked_at",  # acknowledgements that came (packets known to be delivered), and when the last did
    "i8 recover reacted window_end",  # packets at which recovery, the answer to a mark, a window or round end
    "i8 highest",  # one above the highest packet that it knows the receiver to have
    "i8 hole fence",  # below the fence packets not known there are lost; from the hole on not yet sent again
    "i4 sacked missing",  # packets from una on that it knows to be there; that are lost and not sent again
    "i4 kind size ack_size route tag flags band",
    "i4 recovering",  # 1: from losses, 2: from a timeout
    "i4 again",  # 1: one lost packet may go whatever the window
    "i4 pacing",  # an entry in the heap waits for ready_at
    "i4 started backoff",
    "i4 ahead",  # packets that the receiver has beyond a gap
    "i4 phase stuck",  # of BBR; stuck: rounds without growth, then the place in the cycle of gains
    "f8 w_max w_est k",  # CUBIC
    "i8 epoch",
    "f8 alpha",  # DCTCP
    "i8 seen marks",  # Vegas keeps the window's least round trip in seen
    "f8 bandwidth earlier full",  # BBR, packets a picosecond: the best of these rounds and of the five before
    "i8 rounds base_at phase_at",
    "i8 sent resent copies delivered consumed dropped lost marked acks_lost timeouts",
    "f8 delay",  # sum of the one-way delays of delivered packets, ps
    "i8 finished",  # when the receiver had all, or -1
)
LINK = _record(
    "i8 free_at delay",  # when it has sent all that waits
    "f8 per_byte",
    "i4 queue",
    "i4 head tail first",  # packets on the line, with FIFO those that wait too; the first that has not left
    "i4 waiting max_packets mark_at",
    "i4 serving",  # the packet in service where departures are not known ahead, else -1
    "i8 waiting_bytes max_bytes",
    "i8 gate gate_state",  # addresses
    "f8 loss",
    "u8 random",
    "i4 bands_begin bands quantum",
    "i4 new_head new_tail old_head old_tail",  # lists of bands that take turns
    "i8 target interval",
    "i8 offered gated dropped lost passed passed_bytes marked",  # offered = the four + those in it
    "f8 wait",  # sum of the waits of admitted packets in its queue, ps
)
BAND = _record(
    "i4 head tail packets next quantum",
    "i4 listed",  # 0 in no list of its link, 1 among the new, 2 among the old
    "i8 deficit bytes",
    "i8 above_until drop_next",  # CoDel
    "i4 count last_count dropping",
)
NODES = _record("i8 deadline armed function state")
REPLY = _record("i8 count wake")
ENTRY = _record("i8 time order who")
LOG = _record("i8 time", "i4 kind where flow flags", "i8 number")
STATE = _record(
    "i8 now order events",  # order: drawn so far
    "i8 pending timers stacked logged",  # entries of the two heaps, of the stack and of the log
    "i8 free free_count",  # the first packet that is not in use
    "i8 resume reserve",  # the flow in whose turn memory ran out, or -1; packets that one event may take
    "i8 link_count flow_count hop_count timer_room log_room",
    "i8 packets flows links bands nodes hops heap clocks stack reorder outbox reply log",  # addresses
)
"""All that there is. Functions are handed one pointer to it: thirteen arrays with their headers, copied at
every call, took most of the compiler's time and a good part of the loop's."""
WORD = _record("i8 value")
HOP = _record("i4 place")
STACK = _record("i4 packet")
REORDERED = _record("u1 there sacked")  # a packet beyond a gap: the receiver has it; the sender knows
ROOMS = {
    "packets": PACKET, "flows": FLOW, "links": LINK, "bands": BAND, "nodes": NODES, "hops": HOP,
    "heap": ENTRY, "clocks": ENTRY, "stack": STACK, "reorder": REORDERED, "outbox": PACKET, "reply": REPLY,
    "log": LOG,
}  # fmt: skip
"""What lies at each address of `STATE`."""
Record = Any
Records = np.ndarray[Any, Any]


def _accessor(dtype: np.dtype[Any], name: str) -> Any:
    """A compiled function (world, index) -> record of the array at world's address ``name``; with no name of
    the array at the address that is given in the world's place. Nothing is checked."""
    record = from_dtype(dtype)

    @intrinsic  # type: ignore[untyped-decorator]
    def at(_typing: Any, world: Any, index: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            word, byte = ir.IntType(64), ir.IntType(8).as_pointer()
            address = arguments[0]
            if name:
                place = builder.gep(builder.bitcast(arguments[0], byte), [word(world.offset(name))])
                address = builder.load(builder.bitcast(place, word.as_pointer()))
            number = context.cast(builder, arguments[1], signature.args[1], types.int64)
            place = builder.add(address, builder.mul(number, word(record.size)))
            return builder.inttoptr(place, context.get_value_type(record))

        return record(world, index), generate

    return at


packet_at = _accessor(PACKET, "packets")
flow_at = _accessor(FLOW, "flows")
link_at = _accessor(LINK, "links")
band_at = _accessor(BAND, "bands")
node_at = _accessor(NODES, "nodes")
hop_at = _accessor(HOP, "hops")
stack_at = _accessor(STACK, "stack")
reorder_at = _accessor(REORDERED, "reorder")
outbox_at = _accessor(PACKET, "outbox")
reply_at = _accessor(REPLY, "reply")
log_at = _accessor(LOG, "log")
entry_at = _accessor(ENTRY, "")
word_at = _accessor(WORD, "")
