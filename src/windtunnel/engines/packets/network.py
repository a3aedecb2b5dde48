"""Links, queues and flows as callers describe them, and how they are checked and laid out.

Rates are bytes a second, times seconds, sizes bytes. A route is the numbers of links in their order, with
forks and nodes between them where there are any. Any directed graph is given by its links; who knows the
graph (``cluster``) finds the routes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from windtunnel.engines.packets import layout
from windtunnel.engines.packets.layout import NEVER, SECOND, Records
from windtunnel.engines.packets.senders import FIRST_RTO, FIRST_WINDOW

QUEUES = ("fifo", "priority", "drr", "codel", "fq_codel")  # names and order as in `layout`
SENDERS = ("udp", "reno", "cubic", "dctcp", "vegas", "bbr", "node")
LONG = 2**53
"""Packets of a flow without end."""


@dataclass(frozen=True)
class Queue:
    """What waits before a link.

    ``kind``: fifo, priority (band 0 first), drr, codel or fq_codel (see `queues`). ``packets``, ``bytes``:
    what it holds at most; of priority and DRR each band. A FIFO counts the packet that is being sent.
    ``mark_at``: a packet that finds so many (in its band) gets a congestion mark, if it takes marks; 0 for
    never; CoDel marks by its own rule. ``bands``: how many (fq_codel: that flows are hashed to).
    ``quantum``: bytes a turn, for each band or one for all; of codel its largest packet. ``target``,
    ``interval``: CoDel's.
    """

    kind: str = "fifo"
    packets: int = 1000
    bytes: int = 2**60
    mark_at: int = 0
    bands: int = 1
    quantum: int | Sequence[int] = 1514
    target: float = 5e-3
    interval: float = 0.1


@dataclass(frozen=True)
class PacketLink:
    """A directed link: ``rate``, ``delay`` and the share of packets that it loses at random (``loss``)."""

    rate: float
    delay: float = 0.0
    queue: Queue = Queue()
    loss: float = 0.0


@dataclass(frozen=True)
class Fork:
    """The end of a route at which a packet goes on along every one of ``branches``, which are routes (a
    splitter that duplicates for free). Every branch's end is a receiver, or a node that consumes."""

    branches: Sequence[Route]


@dataclass(frozen=True)
class At:
    """A place of a route at which node number ``node`` is called, with ``port``."""

    node: int
    port: int = 0


Route = Sequence["int | At | Fork"]


@dataclass(frozen=True)
class Flow:
    """A sender with its receiver.

    ``route``: of the data; ``back``: of acknowledgements (none for udp and node). ``sender``: udp, reno,
    cubic, dctcp, vegas, bbr, or node: its packets are sent by nodes only. ``size``: bytes to send (None:
    without end), in packets of ``packet`` bytes. ``rate``: of UDP; of others a cap, as ``window`` (packets)
    is. ``ecn``: its packets take marks. ``tag``: the entity that gates see, ``band``: of queues with bands.
    """

    route: Route
    back: Route = ()
    sender: str = "reno"
    size: float | None = None
    start: float = 0.0
    rate: float | None = None
    window: float | None = None
    ecn: bool = False
    tag: int = 0
    band: int = 0
    packet: int = 1500
    ack: int = 64
    min_rto: float = 0.01


@dataclass
class Routes:
    """All routes, end to end, as the loop walks them; ``copies``: the most packets that one may become at one
    instant."""

    hops: list[int] = field(default_factory=list)
    copies: int = 1

    def add(self, route: Route, end: int, links: int, nodes: int, where: str) -> int:
        """Where ``route``, which ends at ``end``, begins.

        Raises:
            ValueError: it does not begin with a link, or names what there is not.
        """
        if not len(route) or not isinstance(route[0], int | np.integer):
            raise ValueError(f"{where}: a route must begin with a link")
        begin, copies = self._add(route, end, links, nodes, where)
        self.copies = max(self.copies, copies)
        return begin

    def _add(self, route: Route, end: int, links: int, nodes: int, where: str) -> tuple[int, int]:
        code: list[int] = []
        copies = 1
        for index, place in enumerate(route):
            if isinstance(place, Fork):
                if index + 1 < len(route) or end != layout.RECEIVE or not place.branches:
                    raise ValueError(f"{where}: a fork must be the last of a route without acknowledgements")
                parts = [self._add(branch, end, links, nodes, where) for branch in place.branches]
                code += [layout.FORK, len(parts), *(begin for begin, _ in parts)]
                copies += sum(count for _, count in parts)
            elif isinstance(place, At):
                if not 0 <= place.node < nodes:
                    raise ValueError(f"{where}: node {place.node} is not among 0 to {nodes - 1}")
                code += [layout.AT_NODE, place.node, place.port]
                copies += layout.OUTBOX
            else:
                if not 0 <= place < links:
                    raise ValueError(f"{where}: link {place} is not among 0 to {links - 1}")
                code.append(int(place))
        if not route or not isinstance(route[-1], Fork):
            code.append(end)
        begin = len(self.hops)
        self.hops += code
        return begin, copies


def picoseconds(seconds: float, what: str) -> int:
    """Whole picoseconds.

    Raises:
        ValueError: negative, or 50 days and more, which int64 does not hold safely.
    """
    if not 0 <= seconds < 50 * 86400:
        raise ValueError(f"{what} is {seconds} s; accepted is 0 up to 50 days")
    return round(seconds * SECOND)


def pace(rate: float, size: int, what: str) -> float:
    """Picoseconds that ``size`` bytes take at ``rate``."""
    gap = size * SECOND / rate if rate > 0 else np.inf
    if not 1.0 <= gap < 86400 * SECOND:
        raise ValueError(f"{what} is {rate} bytes/s; a packet must take 1 ps to a day")
    return gap


def per_byte(rate: float, most: int, limit: int, where: str) -> float:
    """Picoseconds a byte takes, when a queue holds up to ``most`` bytes by packets and ``limit`` by bytes."""
    ns = pace(rate, 1, f"{where}: its rate")
    if min(most, limit) * ns > NEVER / 16:
        raise ValueError(f"{where}: a full queue of it lasts longer than a run can; lower its queue")
    return ns


def pack_links(links: Sequence[PacketLink], seed: int, largest: int) -> tuple[Records, Records]:
    """The records of links and of their bands."""
    records = np.zeros(len(links), layout.LINK)
    counts = [0] * len(links)
    for index, (link, record) in enumerate(zip(links, records, strict=True)):
        queue, where = link.queue, f"link {index}"
        if queue.kind not in QUEUES:
            raise ValueError(f"{where}: queue {queue.kind!r} is unknown; accepted are {', '.join(QUEUES)}")
        if not 0 <= link.loss <= 1:
            raise ValueError(f"{where}: loss is {link.loss}; accepted is 0 to 1")
        if not 1 <= queue.packets < 2**31 or queue.bytes < 1 or queue.mark_at < 0:
            raise ValueError(f"{where}: a queue holds at least a packet and marks at 0 (never) or more")
        kind = QUEUES.index(queue.kind)
        record["queue"] = kind
        counts[index] = {layout.FIFO: 0, layout.CODEL: 1}.get(kind, queue.bands)
        quanta = np.broadcast_to(np.asarray(queue.quantum), (max(queue.bands, 1),))
        if kind != layout.FIFO and (queue.bands < 1 or quanta.min() < 1):
            raise ValueError(f"{where}: bands and quanta must be at least 1")
        record["per_byte"] = per_byte(link.rate, queue.packets * largest, queue.bytes, where)
        record["delay"] = picoseconds(link.delay, f"{where}: its delay")
        record["max_packets"], record["max_bytes"] = queue.packets, min(queue.bytes, 2**60)
        record["mark_at"], record["quantum"] = queue.mark_at, quanta[0]
        record["target"] = picoseconds(queue.target, f"{where}: its target")
        record["interval"] = picoseconds(queue.interval, f"{where}: its interval")
        record["loss"] = link.loss
        record["random"] = (np.uint64(seed) << np.uint64(32)) + np.uint64(index)
        record["bands"] = counts[index]
    for name in ("head", "tail", "first", "serving", "new_head", "new_tail", "old_head", "old_tail"):
        records[name] = -1
    begins = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    records["bands_begin"] = begins[:-1]
    bands = np.zeros(int(begins[-1]), layout.BAND)
    bands["head"] = bands["tail"] = bands["next"] = -1
    for link, begin, count in zip(links, begins, counts, strict=False):
        if count:
            quanta = np.broadcast_to(np.asarray(link.queue.quantum), (max(link.queue.bands, 1),))
            bands["quantum"][begin : begin + count] = quanta[:count]
    return records, bands


def pack_flows(flows: Sequence[Flow], routes: Routes, links: int, nodes: int) -> Records:
    """The records of flows; their routes are added to ``routes``."""
    records = np.zeros(len(flows), layout.FLOW)
    for index, (flow, record) in enumerate(zip(flows, records, strict=True)):
        where = f"flow {index}"
        if flow.sender not in SENDERS:
            raise ValueError(f"{where}: sender {flow.sender!r} is unknown; accepted are {', '.join(SENDERS)}")
        kind = SENDERS.index(flow.sender)
        no_acks = kind in (layout.UDP, layout.NODE)
        if no_acks == bool(len(flow.back)):
            raise ValueError(f"{where}: acknowledgements need a route back; udp and node have none")
        if not 1 <= flow.packet < 2**20 or not 1 <= flow.ack < 2**20:
            raise ValueError(f"{where}: packets have 1 byte to 1 MiB")
        if flow.size is not None and not flow.size > 0:
            raise ValueError(f"{where}: size is {flow.size}; accepted is a positive number of bytes, or None")
        if flow.window is not None and not flow.window >= 0:
            raise ValueError(f"{where}: window is {flow.window}; accepted is a number of packets, or None")
        if not 0 < flow.min_rto <= 60:
            raise ValueError(f"{where}: min_rto is {flow.min_rto}; accepted is above 0 up to 60 s")
        if kind == layout.UDP and flow.rate is None:
            raise ValueError(f"{where}: udp needs a rate")
        if kind == layout.NODE:
            record["route"] = -1
        elif no_acks:
            record["route"] = routes.add(flow.route, layout.RECEIVE, links, nodes, where)
        else:
            for place in (*flow.route, *flow.back):
                if isinstance(place, Fork):
                    raise ValueError(f"{where}: a sender that takes acknowledgements cannot send to a fork")
            # An acknowledgement goes on where its packet was received: the way back follows at once.
            record["route"] = routes.add(flow.route, layout.RECEIVE, links, nodes, where)
            routes.add(flow.back, layout.END, links, nodes, where)
        record["kind"], record["size"], record["ack_size"] = kind, flow.packet, flow.ack
        record["tag"], record["band"], record["flags"] = flow.tag, flow.band, layout.ECT if flow.ecn else 0
        record["total"] = LONG if flow.size is None else -int(-flow.size // flow.packet)
        record["deadline"] = NEVER if kind == layout.NODE else picoseconds(flow.start, f"{where}: its start")
        record["min_rto"] = picoseconds(flow.min_rto, f"{where}: its min_rto")
        record["window_cap"] = np.inf if flow.window is None else max(flow.window, 1.0)
        if flow.rate is not None:
            record["cap_gap"] = pace(flow.rate, flow.packet, f"{where}: its rate")
    records["cwnd"], records["ssthresh"] = FIRST_WINDOW, np.inf
    records["cwnd"][records["kind"] == layout.UDP] = np.inf
    records["rto"], records["armed"] = FIRST_RTO, NEVER
    records["base_rtt"], records["seen"] = NEVER, np.where(records["kind"] == layout.VEGAS, NEVER, 0)
    records["epoch"] = records["finished"] = records["acked_at"] = -1
    records["alpha"] = 1.0
    return records


def pack_nodes(nodes: Sequence[tuple[Any, NDArray[Any]]]) -> Records:
    """The records of nodes: compiled functions, each with the array that is its state."""
    records = np.zeros(len(nodes), layout.NODES)
    for record, (function, state) in zip(records, nodes, strict=True):
        record["function"] = function.address
        record["state"] = state.ctypes.data
    records["armed"] = records["deadline"] = NEVER
    return records
