"""The truth that the packet engine is held against: plain objects, one heap of all events, a departure event
for every packet on every link, sets in place of byte maps, timers that are looked for anew at each step.

It shares with the engine only the descriptions of links and flows, and the names of kinds and flags.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from windtunnel.engines.packets import At, Flow, Fork, PacketLink
from windtunnel.engines.packets.layout import (
    ACKED,
    CONSUME,
    CONSUMED,
    DELIVERED,
    DROP,
    DROPPED,
    FORWARD,
    GATED,
    LOST,
    MARK,
    MARKED,
    WAKE,
)

SECOND = 10**12
ECT, CE, ACK, ECHO = 1, 2, 4, 8
DEPARTURE, ARRIVAL, TIMER = range(3)
BIG = 2**62


@dataclass
class Packet:
    flow: int
    size: int
    number: int = 0
    flags: int = 0
    tag: int = 0
    band: int = 0
    got: int = 0
    sent_at: int = 0
    delivered: int = 0
    delivered_at: int = 0
    virtual_delay: int = 0
    route: list = field(default_factory=list)  # what is still to come
    order: int = 0
    since: int = 0
    words: list = field(default_factory=list)

    def copy(self, route: list) -> Packet:
        return Packet(**{**self.__dict__, "route": route})


class Band:
    def __init__(self, quantum: int) -> None:
        self.queue: deque[Packet] = deque()
        self.quantum, self.deficit = quantum, 0
        self.above, self.drop_next, self.count, self.last, self.dropping = 0, 0, 0, 0, False

    @property
    def bytes(self) -> int:
        return sum(packet.size for packet in self.queue)


class Wire:
    """A link with its queue."""

    def __init__(self, world: World, index: int, link: PacketLink, seed: int) -> None:
        self.world, self.index, self.spec = world, index, link
        self.per_byte, self.delay = SECOND / link.rate, round(link.delay * SECOND)
        count = {"fifo": 1, "codel": 1}.get(link.queue.kind, link.queue.bands)
        quantum = link.queue.quantum
        self.bands = [Band(quantum if isinstance(quantum, int) else quantum[b]) for b in range(count)]
        self.mtu = quantum if isinstance(quantum, int) else quantum[0]
        self.new: deque[int] = deque()
        self.old: deque[int] = deque()
        self.serving: Packet | None = None
        self.loss, self.random = link.loss, ((seed << 32) + index) % 2**64
        self.offered = self.gated = self.dropped = self.marked = self.lost = self.passed = 0
        self.passed_bytes, self.wait = 0, 0.0
        self.interval, self.target = round(link.queue.interval * SECOND), round(link.queue.target * SECOND)

    def draw(self) -> float:
        mask = 2**64 - 1
        self.random = (self.random + 0x9E3779B97F4A7C15) & mask
        word = self.random
        word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & mask
        word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & mask
        return ((word ^ (word >> 31)) >> 11) / 2.0**53

    def mark(self, packet: Packet) -> bool:
        if packet.flags & ECT:
            packet.flags |= CE
            self.marked += 1
            self.world.note(MARKED, self.index, packet)
            return True
        return False

    def drop(self, packet: Packet) -> None:
        self.dropped += 1
        self.world.lose(DROPPED, self.index, packet)

    def offer(self, packet: Packet) -> None:
        self.offered += 1
        verdict = (
            self.world.gates[self.index](self.world.now, packet) if self.index in self.world.gates else 0
        )
        if verdict == MARK:
            self.mark(packet)
        elif verdict == DROP:
            self.gated += 1
            self.world.lose(GATED, self.index, packet)
            return
        packet.order = self.world.draw_order()
        self.put(packet)
        if self.serving is None:
            self.serve()

    def put(self, packet: Packet) -> None:
        queue, number = self.spec.queue, 0
        if queue.kind == "fq_codel":
            word = ((packet.flow + 1) * 0x9E3779B97F4A7C15) % 2**64
            number = (word >> 32) % len(self.bands)
        elif queue.kind in ("priority", "drr"):
            number = min(packet.band, len(self.bands) - 1)
        band = self.bands[number]
        held, size = len(band.queue), band.bytes
        if queue.kind == "fifo" and self.serving is not None:
            held, size = held + 1, size + self.serving.size
        if queue.kind == "fq_codel":
            held, size = sum(len(band.queue) for band in self.bands), sum(band.bytes for band in self.bands)
        full = held >= queue.packets or size + packet.size > queue.bytes
        marks = queue.kind in ("fifo", "priority", "drr") and 0 < queue.mark_at <= held
        if full and queue.kind != "fq_codel":
            self.drop(packet)
            return
        if marks:
            self.mark(packet)
        packet.since = self.world.now
        band.queue.append(packet)
        if queue.kind in ("drr", "fq_codel") and number not in self.new and number not in self.old:
            band.deficit = band.quantum
            (self.new if queue.kind == "fq_codel" else self.old).append(number)
        if full:
            longest = max(range(len(self.bands)), key=lambda index: (self.bands[index].bytes, -index))
            self.drop(self.bands[longest].queue.popleft())

    def late(self, band: Band, packet: Packet) -> bool:
        now = self.world.now
        if now - packet.since < self.target or band.bytes <= self.mtu:
            band.above = 0
            return False
        if band.above == 0:
            band.above = now + self.interval
            return False
        return now >= band.above

    def codel(self, band: Band) -> Packet | None:
        now = self.world.now

        def dequeue() -> tuple[Packet | None, bool]:
            if not band.queue:
                band.above = 0
                return None, False
            packet = band.queue.popleft()
            return packet, self.late(band, packet)

        def law() -> int:
            return int(self.interval / math.sqrt(float(band.count)))

        packet, late = dequeue()
        if packet is None:
            band.dropping = False
            return None
        if band.dropping:
            if not late:
                band.dropping = False
            while band.dropping and now >= band.drop_next:
                band.count += 1
                if self.mark(packet):
                    band.drop_next += law()
                    break
                self.drop(packet)
                packet, late = dequeue()
                if late:
                    band.drop_next += law()
                else:
                    band.dropping = False
        elif late:
            if not self.mark(packet):
                self.drop(packet)
                packet, _ = dequeue()
            band.dropping = True
            recent = band.count - band.last
            band.count = recent if recent > 1 and now - band.drop_next < 16 * self.interval else 1
            band.drop_next = now + law()
            band.last = band.count
        return packet

    def choose(self) -> Packet | None:
        kind = self.spec.queue.kind
        if kind in ("fifo", "priority"):
            return next((band.queue.popleft() for band in self.bands if band.queue), None)
        if kind == "codel":
            return self.codel(self.bands[0])
        while self.new or self.old:
            turn = self.new if self.new else self.old
            number = turn[0]
            band = self.bands[number]
            if kind == "drr":
                if band.deficit < band.queue[0].size:
                    band.deficit += band.quantum
                    turn.rotate(-1)
                    continue
                packet = band.queue.popleft()
                band.deficit -= packet.size
                if not band.queue:
                    turn.popleft()
                return packet
            if band.deficit <= 0:
                band.deficit += band.quantum
                turn.popleft()
                self.old.append(number)
                continue
            chosen = self.codel(band)
            if chosen is not None:
                band.deficit -= chosen.size
                return chosen
            was_new = turn is self.new
            turn.popleft()
            if was_new:
                self.old.append(number)
        return None

    def serve(self) -> None:
        self.serving = self.choose()
        if self.serving is not None:
            self.wait += self.world.now - self.serving.since
            leaves = self.world.now + max(int(self.serving.size * self.per_byte + 0.5), 1)
            self.world.schedule(leaves, DEPARTURE, self.index, self.depart)

    def depart(self) -> None:
        packet = self.serving
        self.world.schedule(self.world.now + self.delay, ARRIVAL, packet.order, lambda: self.arrive(packet))
        self.serve()

    def arrive(self, packet: Packet) -> None:
        if self.loss > 0 and self.draw() < self.loss:
            self.lost += 1
            self.world.lose(LOST, self.index, packet)
            return
        self.passed += 1
        self.passed_bytes += packet.size
        self.world.place(packet)


class Sender:
    """A flow's sender and receiver."""

    def __init__(self, world: World, index: int, flow: Flow) -> None:
        self.world, self.index, self.spec = world, index, flow
        self.total = 2**53 if flow.size is None else math.ceil(flow.size / flow.packet)
        self.next = self.una = self.hole = self.fence = self.highest = 0
        self.known: set[int] = set()  # what the receiver is known to have, from una on
        self.cwnd, self.ssthresh = (math.inf if flow.sender == "udp" else 10.0), math.inf
        self.cap = math.inf if flow.window is None else flow.window
        self.cap_gap = 0.0 if flow.rate is None else flow.packet * SECOND / flow.rate
        self.gap, self.ready_at, self.pacing = 0.0, 0, False
        self.deadline = round(flow.start * SECOND) if flow.sender != "node" else BIG
        self.started = self.again = False
        self.recovering = ""
        self.backoff = self.recover = self.reacted = self.window_end = 0
        self.srtt = self.rttvar = 0
        self.rto, self.base = SECOND, BIG
        self.acks, self.acked_at = 0, None
        self.has: set[int] = set()
        self.sent = self.resent = self.copies = self.delivered = self.consumed = self.dropped = self.lost = 0
        self.marked = self.acks_lost = self.timeouts = self.received = 0
        self.delay, self.finished = 0.0, -1
        self.w_max = self.w_est = self.k = 0.0
        self.epoch: int | None = None
        self.alpha, self.seen, self.marks = 1.0, 0, 0
        self.least = BIG
        self.phase, self.stuck, self.rounds, self.base_at, self.phase_at = "startup", 0, 0, 0, 0
        self.now_best = self.before_best = self.full = 0.0

    def timeout(self) -> int:
        return min(self.rto * 2**self.backoff, 60 * SECOND)

    def fire(self) -> None:
        self.deadline = BIG
        if not self.started:
            self.started = True
        else:
            self.cut()
            self.timeouts += 1
            self.cwnd, self.recovering, self.recover = 1.0, "timeout", self.next
            self.hole, self.fence = self.una, self.next
            self.backoff = min(self.backoff + 1, 16)
        self.send()

    def send(self) -> None:
        now = self.world.now
        while True:
            lost = self.lost_ones()
            if not self.again and self.pipe() + 1 > min(self.cwnd, self.cap):
                return
            number = lost[0] if lost else self.next
            if number >= self.total or number - self.una >= 4096:
                return
            gap = max(self.gap, self.cap_gap)
            if gap > 0:
                if now < self.ready_at:
                    if not self.pacing:
                        self.pacing = True
                        order = self.world.draw_order()
                        self.world.schedule(self.ready_at, ARRIVAL, order, self.go_on)
                    return
                self.ready_at = now + int(gap + 0.5)
            self.again = False
            if lost:
                self.resent += 1
                self.hole = number + 1
            else:
                self.next += 1
            if self.spec.sender == "udp":
                self.una = self.next
            elif self.deadline == BIG:
                self.deadline = now + self.timeout()
            if self.acked_at is None:
                self.acked_at = now
            self.sent += 1
            route = list(self.spec.route)
            if not route or not isinstance(route[-1], Fork):
                route.append("receive")
            self.world.place(
                Packet(
                    flow=self.index,
                    size=self.spec.packet,
                    number=number,
                    flags=ECT if self.spec.ecn else 0,
                    tag=self.spec.tag,
                    band=self.spec.band,
                    sent_at=now,
                    delivered=self.acks,
                    delivered_at=self.acked_at or 0,
                    route=route,
                )
            )

    def lost_ones(self) -> list[int]:
        """What is lost and was not sent again."""
        return [number for number in range(max(self.hole, self.una), self.fence) if number not in self.known]

    def pipe(self) -> int:
        return self.next - self.una - len(self.known) - len(self.lost_ones())

    def go_on(self) -> None:
        self.pacing = False
        self.send()

    def receive(self, packet: Packet) -> None:
        now = self.world.now
        self.world.note(DELIVERED, 0, packet)
        self.delivered += 1
        self.delay += now - packet.sent_at
        self.marked += bool(packet.flags & CE)
        if self.spec.sender in ("udp", "node"):
            self.received += 1
            if self.received == self.total:
                self.finished = now
            return
        before = len(self.has)
        self.has.add(packet.number)
        self.received = len(self.has)
        if before < self.received == self.total:
            self.finished = now
        self.world.place(
            Packet(
                flow=self.index,
                size=self.spec.ack,
                number=self.expected(),
                got=packet.number,
                flags=ACK | (ECHO if packet.flags & CE else 0),
                tag=packet.tag,
                band=packet.band,
                sent_at=packet.sent_at,
                delivered=packet.delivered,
                delivered_at=packet.delivered_at,
                virtual_delay=packet.virtual_delay,
                route=[*self.spec.back, "end"],
            )
        )

    def expected(self) -> int:
        number = 0
        while number in self.has:
            number += 1
        return number

    def cut(self) -> None:
        if self.spec.sender == "bbr":
            return
        share = 0.5
        if self.spec.sender == "cubic":
            self.w_max = self.cwnd if self.cwnd >= self.w_max else self.cwnd * (1.0 + 0.7) / 2.0
            self.epoch = None
            share = 0.5 if self.ssthresh == math.inf else 0.7
        self.cwnd = self.ssthresh = max(self.cwnd * share, 2.0)

    def answer(self) -> None:
        if self.una > self.reacted and not self.recovering:
            self.reacted = self.next
            self.cut()

    def acknowledged(self, packet: Packet) -> None:
        now = self.world.now
        self.world.note(ACKED, 0, packet)
        trip = now - packet.sent_at
        if self.srtt == 0:
            self.srtt, self.rttvar = trip, trip // 2
        else:
            error = trip - self.srtt
            self.srtt += error // 8
            self.rttvar += (abs(error) - self.rttvar) // 4
        self.rto = min(max(round(self.spec.min_rto * SECOND), self.srtt + 4 * self.rttvar), 60 * SECOND)
        self.acks += 1
        acked, flight = max(packet.number - self.una, 0), self.next - self.una
        limited = flight + 1 >= self.cwnd or (self.cwnd < self.ssthresh and 2 * (flight + 1) >= self.cwnd)
        grows = acked > 0 and self.recovering != "losses" and limited
        self.una = max(self.una, packet.number)
        self.known = {number for number in self.known | {packet.got} if number >= self.una}
        self.highest = max(self.highest, packet.got + 1)
        self.fence = max(self.fence, self.highest - 3)
        if acked > 0:
            self.backoff = 0
            self.deadline = now + self.timeout() if self.una < self.next else BIG
            if self.recovering == "timeout":
                acked = 1
            if self.una >= self.recover:
                self.recovering = ""
        if self.lost_ones() and not self.recovering:
            self.recovering, self.recover, self.again = "losses", self.next, True
            self.cut()
        echo = bool(packet.flags & ECHO)
        getattr(self, "on_" + self.spec.sender)(packet, acked, echo, grows, trip)
        self.acked_at = now
        self.send()

    def on_reno(self, packet: Packet, acked: int, echo: bool, grows: bool, trip: int) -> None:
        if echo:
            self.answer()
        elif grows:
            self.cwnd += acked if self.cwnd < self.ssthresh else acked / self.cwnd

    def on_cubic(self, packet: Packet, acked: int, echo: bool, grows: bool, trip: int) -> None:
        if echo:
            self.answer()
            return
        if not grows:
            return
        if self.cwnd < self.ssthresh:
            self.cwnd += acked
            return
        if self.epoch is None:
            self.epoch, self.w_max = self.world.now, max(self.w_max, self.cwnd)
            self.k = ((self.w_max - self.cwnd) / 0.4) ** (1.0 / 3.0)
            self.w_est = self.cwnd
        since = (self.world.now - self.epoch + self.srtt) / 1e12 - self.k
        target = min(max(0.4 * since * since * since + self.w_max, self.cwnd), 1.5 * self.cwnd)
        self.w_est += 3.0 * (1.0 - 0.7) / (1.0 + 0.7) * acked / self.cwnd
        self.cwnd = max(self.cwnd + acked * (target - self.cwnd) / self.cwnd, self.w_est)

    def on_dctcp(self, packet: Packet, acked: int, echo: bool, grows: bool, trip: int) -> None:
        self.seen += 1
        self.marks += echo
        if echo:
            self.ssthresh = min(self.ssthresh, self.cwnd)
        elif grows:
            self.cwnd += acked if self.cwnd < self.ssthresh else acked / self.cwnd
        if self.una >= self.window_end:
            self.alpha += (self.marks / self.seen - self.alpha) / 16.0
            if self.marks and not self.recovering:
                self.cwnd = self.ssthresh = max(self.cwnd * (1.0 - self.alpha / 2.0), 2.0)
            self.seen, self.marks, self.window_end = 0, 0, self.next

    def on_vegas(self, packet: Packet, acked: int, echo: bool, grows: bool, trip: int) -> None:
        self.base = min(self.base, trip)
        self.least = min(self.least, trip + packet.virtual_delay)
        if grows and self.cwnd < self.ssthresh:
            self.cwnd += acked
        if self.una < self.window_end:
            return
        queued = self.cwnd * (1.0 - self.base / self.least)
        if self.cwnd < self.ssthresh:
            if queued > 2.0:
                self.cwnd = self.ssthresh = max(self.cwnd - queued, 2.0)
        elif queued > 4.0:
            self.cwnd = max(self.cwnd - 1.0, 2.0)
        elif queued < 2.0 and grows:
            self.cwnd += 1.0
        self.least, self.window_end = BIG, self.next

    def on_bbr(self, packet: Packet, acked: int, echo: bool, grows: bool, trip: int) -> None:
        now = self.world.now
        if packet.delivered_at < now:
            rate = (self.acks - packet.delivered) / (now - packet.delivered_at)
            self.now_best = max(self.now_best, rate)
        ended = packet.delivered >= self.window_end
        if ended:
            self.window_end = self.acks
            self.rounds += 1
            if self.rounds % 5 == 0:
                self.before_best, self.now_best = self.now_best, 0.0
        best = max(self.now_best, self.before_best)
        stale = now - self.base_at > 10 * SECOND
        if trip <= self.base or stale:
            self.base, self.base_at = trip, now
        if stale and self.phase != "least":
            self.phase, self.phase_at = "least", now
        product = best * self.base
        if self.phase == "startup" and ended:
            if best >= self.full * 1.25:
                self.full, self.stuck = best, 0
            else:
                self.stuck += 1
                if self.stuck == 3:
                    self.phase = "drain"
        if self.phase == "drain" and self.pipe() <= product:
            self.phase, self.phase_at, self.stuck = "cycle", now, 2
        if self.phase == "cycle" and now - self.phase_at > self.base:
            self.phase_at, self.stuck = now, (self.stuck + 1) % 8
        if self.phase == "least" and now - self.phase_at > SECOND // 5:
            self.phase, self.phase_at, self.stuck = "cycle" if self.full > 0 else "startup", now, 2
        gain = {"startup": 2.885, "drain": 1 / 2.885, "least": 1.0}.get(self.phase)
        if gain is None:
            gain = {0: 1.25, 1: 0.75}.get(self.stuck, 1.0)
        if best > 0:
            self.gap = 1.0 / (gain * best)
            width = 2.885 if self.phase in ("startup", "drain") else 2.0
            self.cwnd = 4.0 if self.phase == "least" else max(width * product, 4.0)


class World:
    """``gates``: by link, (now, packet) -> verdict. ``nodes``: (world, port or WAKE, packet or None) ->
    (verdict, packets to send); they set ``wakes[their number]``."""

    def __init__(
        self, links: Sequence[PacketLink], flows: Sequence[Flow], seed: int = 0,
        gates: dict[int, Callable] | None = None, nodes: Sequence[Callable] = (),
    ) -> None:  # fmt: skip
        self.now = self.orders = self.numbers = 0
        self.gates, self.nodes = gates or {}, nodes
        self.links = [Wire(self, index, link, seed) for index, link in enumerate(links)]
        self.flows = [Sender(self, index, flow) for index, flow in enumerate(flows)]
        self.wakes = [BIG] * len(nodes)
        self.heap: list = []
        self.log: list[tuple[int, ...]] = []

    def set_rate(self, link: int, rate: float) -> None:
        self.links[link].per_byte = SECOND / rate

    def set_cap(self, flow: int, window: float, rate: float | None) -> None:
        state = self.flows[flow]
        state.cap, state.cap_gap = window, 0.0 if rate is None else state.spec.packet * SECOND / rate

    def draw_order(self) -> int:
        self.orders += 1
        return self.orders - 1

    def schedule(self, time: int, kind: int, key: int, what: Callable[[], None]) -> None:
        assert time >= self.now
        self.numbers += 1
        heapq.heappush(self.heap, (time, kind, key, self.numbers, what))

    def note(self, kind: int, where: int, packet: Packet) -> None:
        self.log.append((self.now, kind, where, packet.flow, packet.flags, packet.number))

    def lose(self, kind: int, where: int, packet: Packet) -> None:
        flow = self.flows[packet.flow]
        if packet.flags & ACK:
            flow.acks_lost += 1
        elif kind == LOST:
            flow.lost += 1
        else:
            flow.dropped += 1
        self.note(kind, where, packet)

    def place(self, packet: Packet) -> None:
        place, *packet.route = packet.route
        if place == "receive":
            self.flows[packet.flow].receive(packet)
        elif place == "end":
            self.flows[packet.flow].acknowledged(packet)
        elif isinstance(place, Fork):
            routes = [
                [*branch] if isinstance(branch[-1], Fork) else [*branch, "receive"]
                for branch in place.branches
            ]
            self.flows[packet.flow].copies += len(routes) - 1
            for copy in [packet.copy(route) for route in routes]:
                self.place(copy)
        elif isinstance(place, At):
            verdict = self.consult(place.node, place.port, packet)
            if verdict[0] == CONSUME:
                self.flows[packet.flow].consumed += 1
                self.note(CONSUMED, place.port, packet)
            else:
                assert verdict[0] == FORWARD
                self.place(packet)
            for emitted in verdict[1]:
                self.place(emitted)
        else:
            self.links[place].offer(packet)

    def consult(self, number: int, port: int, packet: Packet | None) -> tuple[int, list[Packet]]:
        verdict, packets = self.nodes[number](self, port, packet)
        for emitted in packets:
            self.flows[emitted.flow].sent += 1
        if self.wakes[number] < BIG:
            self.wakes[number] = max(self.wakes[number], self.now + 1)
        return verdict, packets

    def run(self, until: float) -> None:
        end = round(until * SECOND)
        while True:
            timers = [(flow.deadline, flow.index) for flow in self.flows]
            timers += [(wake, len(self.flows) + index) for index, wake in enumerate(self.wakes)]
            due, who = min(timers)
            if self.heap and self.heap[0][0] <= due:
                if self.heap[0][0] > end:
                    break
                self.now, _, _, _, what = heapq.heappop(self.heap)
                what()
            elif due <= end:
                self.now = due
                if who < len(self.flows):
                    self.flows[who].fire()
                else:
                    self.wakes[who - len(self.flows)] = BIG
                    for emitted in self.consult(who - len(self.flows), WAKE, None)[1]:
                        self.place(emitted)
            else:
                break
        self.now = end
