"""`Simulation`: a network that runs from one time to the next, and what may be read and changed between."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from windtunnel.engines.packets import layout, network
from windtunnel.engines.packets.kernel import run
from windtunnel.engines.packets.layout import NEVER, SECOND, Records
from windtunnel.engines.packets.network import Flow, Fork, PacketLink, Route, Routes, pace, picoseconds

EVENTS_A_SECOND = 4e7
"""What one CPU does, roughly (``python -m benchmarks engines.packets``): for `PacketForecast.cpu_seconds`."""


@dataclass(frozen=True)
class PacketForecast:
    """What a run will take, before it is made: data packets sent, events, seconds of one CPU."""

    packets: float
    events: float

    @property
    def cpu_seconds(self) -> float:
        return self.events / EVENTS_A_SECOND

    def __str__(self) -> str:
        return f"about {self.packets:.2g} packets, {self.events:.2g} events, {self.cpu_seconds:.2g} CPU-s"


class Simulation:
    """Links and flows (see `network`), and nodes: pairs of a compiled function (`hooks.node`) and the array
    that is its state. The same arguments give the same run, packet for packet, however it is cut into calls.

    ``seed``: of random loss. ``log``: keep what became of every packet (``log`` then holds `layout.LOG`).

    Raises:
        ValueError: a link, flow or route that cannot be, by its number.
    """

    def __init__(
        self, links: Sequence[PacketLink], flows: Sequence[Flow], *,
        nodes: Sequence[tuple[Any, NDArray[Any]]] = (), seed: int = 0, log: bool = False,
    ) -> None:  # fmt: skip
        if not 0 <= seed < 2**32:
            raise ValueError(f"seed is {seed}; accepted is 0 to 2^32 - 1")
        self._routes = Routes()
        flow_records = network.pack_flows(flows, self._routes, len(links), len(nodes))
        # a node may send packets of any size
        self._largest = max([2**20 * bool(nodes), 1, *(max(flow.packet, flow.ack) for flow in flows)])
        link_records, bands = network.pack_links(links, seed, self._largest)
        node_records = network.pack_nodes(nodes)
        self._references: list[Any] = [nodes]
        self._flows = list(flows)
        starts = np.flatnonzero(flow_records["deadline"] < NEVER)
        order = starts[np.lexsort((starts, flow_records["deadline"][starts]))]
        clocks = np.zeros(2 * (len(flows) + len(nodes)) + 64, layout.ENTRY)
        clocks["time"][: len(order)] = flow_records["deadline"][order]
        clocks["order"][: len(order)] = clocks["who"][: len(order)] = order
        flow_records["armed"] = flow_records["deadline"]
        self._state = np.zeros(1, layout.STATE)
        self._state["free"] = self._state["resume"] = -1
        self._state["timers"] = len(order)
        self._state["link_count"], self._state["flow_count"] = len(links), len(flows)
        senders = int(np.any(~np.isin(flow_records["kind"], (layout.UDP, layout.NODE))))
        self._rooms: dict[str, Records] = {}
        self._hold(
            packets=np.zeros(0, layout.PACKET), flows=flow_records, links=link_records, bands=bands,
            nodes=node_records, heap=np.zeros(2 * len(links) + len(flows) + 1, layout.ENTRY), clocks=clocks,
            reorder=np.zeros(len(flows) * layout.REORDER * senders, layout.REORDERED),
            outbox=np.zeros(layout.OUTBOX, layout.PACKET), reply=np.zeros(1, layout.REPLY),
            log=np.zeros(1024 if log else 0, layout.LOG),
        )  # fmt: skip
        self._seal()

    def _hold(self, **rooms: Records) -> None:
        """Keep these arrays, and tell the loop where they are."""
        for name, room in rooms.items():
            assert room.dtype == layout.ROOMS[name]
            self._rooms[name] = room
            self._state[name] = room.ctypes.data
        self._state["timer_room"], self._state["log_room"] = (
            len(self._rooms["clocks"]),
            len(self._rooms["log"]),
        )

    def _seal(self) -> None:
        """Lay out the routes as they are now."""
        copies = self._routes.copies * (self._routes.copies if len(self._rooms["nodes"]) else 1)
        hops = np.array([*self._routes.hops, layout.RECEIVE], np.int32).view(layout.HOP)
        self._state["reserve"], self._state["hop_count"] = copies + layout.OUTBOX, len(hops)
        self._hold(hops=hops, stack=np.zeros(copies + layout.OUTBOX, layout.STACK))

    def route(self, route: Route) -> int:
        """Where ``route`` begins, for the packets of a node (their ``hop``). It ends at a receiver, or at a
        node that consumes."""
        begin = self._routes.add(route, layout.RECEIVE, len(self.links), len(self._rooms["nodes"]), "route")
        self._seal()
        return begin

    def set_gate(self, link: int, gate: Any, state: NDArray[Any]) -> None:
        """Put a compiled ``gate`` (`hooks.gate`) before ``link``. ``state`` is its own, and may be read and
        written between runs."""
        self._references.append((gate, state))
        self.links["gate"][link] = gate.address
        self.links["gate_state"][link] = state.ctypes.data

    def wake(self, node: int, when: float) -> None:
        """Call ``node`` at ``when`` seconds at the latest."""
        due = max(picoseconds(when, "when"), int(self._state["now"][0]) + 1)
        record, clocks = self._rooms["nodes"][node], self._rooms["clocks"]
        record["deadline"] = min(record["deadline"], due)
        if record["deadline"] < record["armed"]:
            record["armed"] = record["deadline"]
            count, who = int(self._state["timers"][0]), len(self.flows) + node
            clocks[count] = (record["deadline"], who, who)
            clocks[: count + 1] = np.sort(clocks[: count + 1], order=("time", "order"))  # a heap, too
            self._state["timers"] += 1

    @property
    def now(self) -> float:
        """Seconds."""
        return float(self._state["now"][0]) / SECOND

    @property
    def events(self) -> int:
        """Events so far."""
        return int(self._state["events"][0])

    @property
    def links(self) -> Records:
        """The links' records (`layout.LINK`), as they are; times in picoseconds."""
        return self._rooms["links"]

    @property
    def flows(self) -> Records:
        """The flows' records (`layout.FLOW`), as they are; times in picoseconds."""
        return self._rooms["flows"]

    @property
    def log(self) -> Records:
        """What became of packets so far, in its order."""
        return self._rooms["log"][: int(self._state["logged"][0])]

    @property
    def finished(self) -> NDArray[np.float64]:
        """When each flow's receiver had all, in seconds; nan where it has not."""
        done = self.flows["finished"]
        return np.where(done >= 0, done / SECOND, np.nan)

    def inside(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Data packets and acknowledgements of each flow that are in the network."""
        packets = self._rooms["packets"]
        used = packets[packets["flow"] >= 0]
        acks = used["flags"] & layout.ACK != 0
        count = len(self.flows)
        return (
            np.bincount(used["flow"][~acks], minlength=count).astype(np.int64),
            np.bincount(used["flow"][acks], minlength=count).astype(np.int64),
        )

    def run(self, until: float) -> None:
        """Run all that happens up to and with ``until`` seconds.

        Raises:
            ValueError: ``until`` lies in the past or beyond 50 days.
            RuntimeError: a node sent more than `layout.OUTBOX` packets at once, or one that cannot be.
        """
        end = picoseconds(until, "until")
        if end < self._state["now"][0]:
            raise ValueError(f"until is {until} s, and it is {self.now} s already")
        while (status := run(self._state, end)) == layout.GROW:
            self._grow()
        if status != layout.DONE:
            raise RuntimeError(f"at {self.now} s a node sent too many packets, or one that cannot be")

    def _grow(self) -> None:
        """Twice the memory for packets, for timers and for the log, where there is little left."""
        state, (packets, log, clocks) = self._state, (self._rooms[n] for n in ("packets", "log", "clocks"))
        reserve = int(state["reserve"][0])
        if state["free_count"][0] < reserve:
            count = len(packets)
            packets = _longer(packets, max(count, 2 * reserve, 256))
            packets["flow"][count:] = -1
            packets["next"][count:] = np.arange(count + 1, len(packets) + 1)
            packets["next"][-1] = state["free"][0]
            state["free"] = count
            state["free_count"] += len(packets) - count
        if len(log) and state["logged"][0] + 4 * reserve > len(log):
            log = _longer(log, len(log) + 4 * reserve)
        if state["timers"][0] + reserve > len(clocks):
            clocks = _longer(clocks, len(clocks) + reserve)
        self._hold(packets=packets, log=log, clocks=clocks)

    def set_cap(self, flow: int, *, window: float | None = None, rate: float | None = None) -> None:
        """From now on ``flow`` has at most ``window`` packets in flight (at least one) and sends at most
        ``rate`` bytes a second; None takes a cap away. Of UDP the rate is its rate, and must be given."""
        record = self.flows[flow]
        if rate is None and record["kind"] == layout.UDP:
            raise ValueError(f"flow {flow}: udp needs a rate")
        if window is not None and not window >= 0:
            raise ValueError(f"flow {flow}: window is {window}; accepted is a number of packets, or None")
        record["window_cap"] = np.inf if window is None else max(window, 1.0)
        record["cap_gap"] = 0.0 if rate is None else pace(rate, int(record["size"]), f"flow {flow}: its rate")

    def set_rate(self, link: int, rate: float) -> None:
        """From now on ``link`` sends at ``rate`` bytes a second; what is being sent ends as it began."""
        record, now = self.links[link], int(self._state["now"][0])
        most = int(record["max_packets"]) * self._largest
        record["per_byte"] = network.per_byte(rate, most, int(record["max_bytes"]), f"link {link}")
        if record["queue"] != layout.FIFO or record["waiting"] == 0:
            return
        packets = self._rooms["packets"]
        sent, p = int(packets["time"][record["first"]]), int(packets["next"][record["first"]])
        began = sent  # when the next one would have begun
        while p >= 0:
            record["wait"] += sent - began
            began = int(packets["time"][p])
            sent += max(int(packets["size"][p] * record["per_byte"] + 0.5), 1)
            packets["time"][p] = sent
            p = int(packets["next"][p])
        record["free_at"] = max(sent, now)

    def foretell(self, until: float) -> PacketForecast:
        """Packets and events from now to ``until``, by max-min fair shares of the flows that will be under
        way at some time. Retransmissions, slow start, what nodes send and lanes left idle are not in it.
        """
        flows, links = self.flows, self.links
        spans = np.maximum(until - np.maximum([flow.start for flow in self._flows], self.now), 0.0)
        left = np.where(flows["kind"] == layout.NODE, 0, flows["total"] - flows["next"])
        gaps = np.where(flows["cap_gap"] > 0, flows["cap_gap"], np.nan)
        rates = np.nan_to_num(SECOND / gaps, nan=np.inf)  # packets a second
        ways = [sorted(set(_links(flow.route))) for flow in self._flows]
        free = SECOND / links["per_byte"]
        waiting = {index for index in range(len(flows)) if spans[index] > 0 and left[index] > 0}
        while waiting:  # progressive filling: the scarcest link, or the lowest cap, settles its flows
            users = np.zeros(len(links))
            for index in waiting:
                users[ways[index]] += flows["size"][index]
            shares = free / np.where(users > 0, users, np.nan)
            scarce = int(np.nanargmin(shares))
            who = [index for index in waiting if rates[index] <= shares[scarce]]
            for index in who or [index for index in waiting if scarce in ways[index]]:
                rates[index] = min(rates[index], shares[scarce])
                free[ways[index]] = np.maximum(free[ways[index]] - rates[index] * flows["size"][index], 0.0)
                waiting.remove(index)
        packets = np.minimum(np.where(left > 0, rates, 0.0) * spans, left)
        cost = np.where(links["queue"] == layout.FIFO, 1, 2)
        events = [cost[_links([*flow.route, *flow.back])].sum() for flow in self._flows]
        paced = (flows["cap_gap"] > 0) | (flows["kind"] == layout.BBR)
        return PacketForecast(float(packets.sum()), float((packets * (np.array(events) + paced)).sum()))


def _longer(records: Records, more: int) -> Records:
    """The same records and ``more`` behind them (concatenation would lay out the fields anew)."""
    grown = np.zeros(len(records) + more, records.dtype)
    grown[: len(records)] = records
    return grown


def _links(route: Route) -> list[int]:
    """All links of a route, those of every branch of a fork too."""
    indices: list[int] = []
    for place in route:
        if isinstance(place, int | np.integer):
            indices.append(int(place))
        elif isinstance(place, Fork):
            indices += [link for branch in place.branches for link in _links(branch)]
    return indices
