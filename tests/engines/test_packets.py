"""The packet engine against plain objects, packet for packet, and against what queues and senders are for."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numba import carray

from engines.packets_reference import Packet, World
from windtunnel.engines.packets import At, Flow, Fork, PacketLink, Queue, Simulation, gate, layout, node

FLOW_FIELDS = (
    "next", "una", "received", "cwnd", "sent", "resent", "copies", "delivered", "consumed", "dropped",
    "lost", "marked", "acks_lost", "timeouts", "delay", "finished", "acks", "srtt", "rto",
)  # fmt: skip
LINK_FIELDS = ("offered", "gated", "dropped", "marked", "lost", "passed", "passed_bytes")
QUEUES = ("fifo", "priority", "drr", "codel", "fq_codel")


def compare(engine: Simulation, truth: World) -> None:
    entries = [tuple(int(value) for value in entry) for entry in engine.log.tolist()]
    assert entries == truth.log
    for name in FLOW_FIELDS:
        assert engine.flows[name].tolist() == [getattr(flow, name) for flow in truth.flows], name
    for name in LINK_FIELDS:
        assert engine.links[name].tolist() == [getattr(link, name) for link in truth.links], name
    for index, link in enumerate(truth.links):  # a FIFO knows waits that are not over
        assert link.serving or engine.links["wait"][index] == link.wait
    conserved(engine)


def conserved(engine: Simulation) -> None:
    """What was sent is delivered, ended or inside; and so for every link."""
    flows, links = engine.flows, engine.links
    data, acks = engine.inside()
    ended = sum(flows[name] for name in ("delivered", "consumed", "dropped", "lost"))
    assert (flows["sent"] + flows["copies"]).tolist() == (ended + data).tolist()
    answers = ~np.isin(flows["kind"], (0, 6))
    back = flows["acks"] + flows["acks_lost"] + acks
    assert flows["delivered"][answers].tolist() == back[answers].tolist()
    gone = sum(links[name] for name in ("gated", "dropped", "lost", "passed"))
    assert (links["offered"] - gone).sum() == (data + acks).sum()
    assert np.all(links["offered"] >= gone)


def scenario(seed: int) -> tuple[list[PacketLink], list[Flow], np.random.Generator]:
    """Some links with queues that overflow, and flows of all kinds on any way through them."""
    rng = np.random.default_rng(seed)

    def choice(*options: Any) -> Any:
        return options[rng.integers(len(options))]

    links = []
    for _ in range(rng.integers(2, 5)):
        queue = Queue(
            choice(*QUEUES), packets=int(rng.integers(1, 40)), bytes=choice(2**60, 2**60, 9000),
            mark_at=choice(0, 3, 8), bands=int(rng.integers(1, 5)), quantum=choice(300, 1514),
            target=choice(1e-4, 2e-3), interval=choice(1e-3, 1e-2),
        )  # fmt: skip
        links.append(PacketLink(choice(1e6, 3e6, 1.25e7), choice(0.0, 1e-4, 2e-3), queue, choice(0, 0, 0.02)))

    def places() -> list[Any]:
        return rng.integers(0, len(links), rng.integers(1, 4)).tolist()

    flows = []
    for _ in range(rng.integers(1, 7)):
        sender = choice("reno", "cubic", "dctcp", "vegas", "bbr", "udp")
        route, back = places(), places()
        if sender == "udp":
            back = []
            if choice(True, False):
                route += [Fork([places(), [*places(), Fork([places(), places()])], places()])]
        flows.append(
            Flow(
                route,
                back,
                sender,
                size=choice(None, None, 100, 20_000, 150_000),
                start=choice(0.0, 0.0, 1e-3, 7e-3),
                rate=choice(4e5, 2e6) if sender == "udp" else choice(None, None, None, 5e5),
                window=choice(None, None, None, 1, 7.5),
                ecn=choice(True, False),
                band=int(rng.integers(4)),
                packet=choice(1500, 500),
                ack=choice(64, 40),
                min_rto=choice(1e-3, 1e-2),
            )
        )
    return links, flows, rng


SEEDS = settings(max_examples=80, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))


@SEEDS
@given(st.integers(0, 2**32 - 1))
def test_every_packet_has_the_fate_and_the_time_that_plain_objects_give_it(seed: int) -> None:
    """Also when links and caps change between runs, and whatever the runs are cut into."""
    links, flows, rng = scenario(seed)
    engine, truth = Simulation(links, flows, seed=seed, log=True), World(links, flows, seed)
    for until in (0.02, 0.05, 0.13):
        engine.run(until - 0.013)
        engine.run(until)
        truth.run(until)
        compare(engine, truth)
        link, flow = int(rng.integers(len(links))), int(rng.integers(len(flows)))
        rate, loss = float(rng.choice([5e5, 2e6, 1e7])), float(rng.choice([0.0, 0.05]))
        window = float(rng.choice([1.0, 4.0, 100.0]))
        pace = rate / 2 if flows[flow].sender == "udp" else None
        engine.set_rate(link, rate)
        truth.set_rate(link, rate)
        engine.links["loss"][link] = loss
        truth.links[link].loss = loss
        engine.set_cap(flow, window=window, rate=pace)
        truth.set_cap(flow, window, pace)


METER = np.dtype([("gap", "f8"), ("last", "i8")], align=True)
RATE, LIMIT, KNEE = 0.6e6, 90_000.0, 9_000.0  # bytes a second, bytes


@gate
def police(now, packet, state):
    """A meter for each tag: it drops, marks and reports delay (the A-Gap of Augmented Queue)."""
    head = carray(packet, 1)[0]
    meter = carray(state, (4,), METER)[head.tag]
    meter.gap = max(meter.gap - RATE * ((now - meter.last) / 1e12), 0.0)
    meter.last = now
    if meter.gap + head.size > LIMIT:
        return layout.DROP
    meter.gap += head.size
    head.virtual_delay += np.int64(meter.gap / RATE * 1e12)
    return layout.MARK if meter.gap > KNEE else layout.PASS


def policeman() -> Any:
    """The same in plain Python."""
    meters = {tag: [0.0, 0] for tag in range(4)}

    def verdict(now: int, packet: Any) -> int:
        meter = meters[packet.tag]
        meter[:] = [max(meter[0] - RATE * ((now - meter[1]) / 1e12), 0.0), now]
        if meter[0] + packet.size > LIMIT:
            return layout.DROP
        meter[0] += packet.size
        packet.virtual_delay += int(meter[0] / RATE * 1e12)
        return layout.MARK if meter[0] > KNEE else layout.PASS

    return verdict


@settings(SEEDS, max_examples=25)
@given(st.integers(0, 2**32 - 1))
def test_a_gate_sees_every_packet_before_its_link(seed: int) -> None:
    links, flows, rng = scenario(seed)
    flows = [replace(flow, tag=int(rng.integers(4))) for flow in flows]
    engine, meters = Simulation(links, flows, seed=seed, log=True), np.zeros(4, METER)
    engine.set_gate(1, police, meters)
    truth = World(links, flows, seed, gates={1: policeman()})
    engine.run(0.05)
    truth.run(0.05)
    compare(engine, truth)


def test_meters_share_a_link_between_senders_that_do_not() -> None:
    """Eight Reno flows beside UDP at 80 % of the line: in a FIFO they get what it leaves."""
    shares = {}
    for gated in (False, True):
        links = [PacketLink(1.25e6, 1e-3, Queue(packets=100)), PacketLink(1.25e6, 1e-3)]
        flows = [Flow([0], (), "udp", rate=1e6), *[Flow([0], [1], "reno", tag=1) for _ in range(8)]]
        engine = Simulation(links, flows)
        if gated:
            engine.set_gate(0, police, np.zeros(4, METER))
        engine.run(10.0)
        received = engine.flows["received"] * 1500 / 10.0
        shares[gated] = received[0], received[1:].sum()
    assert shares[False][0] > 2.5 * shares[False][1]
    assert shares[True] == pytest.approx((RATE, RATE), rel=0.02)


WORKERS = 3
SWITCH = np.dtype([("counts", "i8", 64), ("sum", "i8", 64), ("hop", "i8"), ("wakes", "i8")])


@node
def switch(now, port, packet, state, outbox, reply):
    """Sums what ports bring under one number, and sends each sum on when all have; tells its count of sums at
    every tenth of a millisecond."""
    own = carray(state, 1, SWITCH)[0]
    out = carray(outbox, 1)[0]
    answer = carray(reply, 1)[0]
    out.hop = own.hop
    out.size = 200
    out.flow = WORKERS
    out.tag = 7
    if port == layout.WAKE:
        own.wakes += 1
        out.word1 = -own.wakes
        answer.count = 1
        answer.wake = now + 10**8 if own.wakes < 5 else layout.NEVER
        return layout.CONSUME
    head = carray(packet, 1)[0]
    number = head.word1
    if number >= 64:
        return layout.FORWARD
    own.counts[number] += 1
    own.sum[number] += port * 100 + number
    if own.counts[number] == WORKERS:
        out.word1 = own.sum[number]
        answer.count = 1
    return layout.CONSUME


def test_a_node_consumes_forwards_sends_and_wakes() -> None:
    links = [PacketLink(1e7, 1e-4) for _ in range(WORKERS)] + [PacketLink(1e7, 1e-5), PacketLink(1e6, 1e-5)]
    out: Any = [3, Fork([[4], [4]])]
    flows = [
        Flow([port, At(0, port), 4], (), "udp", size=70 * 500, packet=500, rate=2e6, start=port * 1e-4)
        for port in range(WORKERS)
    ]
    flows.append(Flow([3], (), "node"))
    state = np.zeros(1, SWITCH)
    engine = Simulation(links, flows, nodes=[(switch, state)], log=True)
    state["hop"] = engine.route(out)
    engine.wake(0, 1e-3)

    counts, sums, wakes = [0] * 64, [0] * 64, [0]

    def plain(world: World, port: int, packet: Any) -> tuple[int, list[Packet]]:
        def reply(number: int) -> Packet:
            return Packet(flow=WORKERS, size=200, number=number, tag=7, route=list(out))

        if packet is None:
            wakes[0] += 1
            if wakes[0] < 5:
                world.wakes[0] = world.now + 10**8
            return layout.CONSUME, [reply(-wakes[0])]
        if packet.number >= 64:
            return layout.FORWARD, []
        counts[packet.number] += 1
        sums[packet.number] += port * 100 + packet.number
        return layout.CONSUME, [reply(sums[packet.number])] if counts[packet.number] == WORKERS else []

    truth = World(links, flows, nodes=[plain])
    truth.wakes[0] = 10**9
    engine.run(0.1)
    truth.run(0.1)
    compare(engine, truth)
    assert wakes == [5] and engine.flows["copies"][WORKERS] == 64 + 5
    numbers = engine.log[(engine.log["flow"] == WORKERS) & (engine.log["number"] > 0)]["number"]
    assert sorted(numbers) == sorted([300 + 3 * number for number in range(64)] * 2)


def test_what_a_node_must_not_do_ends_the_run() -> None:
    @node
    def flood(now, port, packet, state, outbox, reply):
        carray(reply, 1)[0].count = layout.OUTBOX + 1
        return layout.CONSUME

    engine = Simulation(
        [PacketLink(1e6)], [Flow([0, At(0)], (), "udp", rate=1e5)], nodes=[(flood, np.zeros(1))]
    )
    with pytest.raises(RuntimeError, match="too many packets"):
        engine.run(0.1)


def dumbbell(queue: Queue, flows: list[Flow], seconds: float, rate: float = 1.25e7) -> Simulation:
    """Flows over one link with ``queue`` (number 0) and one back, of a millisecond each."""
    engine = Simulation([PacketLink(rate, 1e-3, queue), PacketLink(rate, 1e-3)], flows)
    engine.run(seconds)
    conserved(engine)
    return engine


@pytest.mark.parametrize("sender", ["reno", "cubic", "dctcp", "vegas", "bbr"])
def test_a_long_flow_fills_its_link(sender: str) -> None:
    engine = dumbbell(Queue(packets=60, mark_at=12), [Flow([0], [1], sender, ecn=sender == "dctcp")], 20.0)
    assert engine.flows["received"][0] * 1500 / 20.0 >= 0.93 * 1.25e7


def test_queues_do_what_they_are_for() -> None:
    """Waits and shares of eight Reno flows beside a thin flow of UDP, for ten seconds."""
    bulk = [Flow([0], [1], "reno", band=1, ecn=False) for _ in range(8)]
    thin = Flow([0], (), "udp", rate=1e5, band=0)
    wait = {}
    for kind in ("fifo", "priority", "drr", "codel", "fq_codel"):
        queue = Queue(kind, packets=500, bands=64 if kind == "fq_codel" else 2)
        engine = dumbbell(queue, [thin, *bulk], 10.0)
        wait[kind] = engine.flows["delay"][0] / engine.flows["delivered"][0] / 1e12 - 1e-3
        assert engine.flows["received"].sum() * 1500 / 10.0 >= 0.95 * 1.25e7, kind
    packet = 1500 / 1.25e7
    assert wait["fifo"] > 20e-3
    assert wait["codel"] < 0.5 * wait["fifo"]
    for kind in ("priority", "drr", "fq_codel"):
        assert wait[kind] < 4 * packet, kind
    # bands of DRR share by quantum
    flows = [
        Flow([0], (), "udp", rate=1.25e7, band=band, packet=size) for band, size in ((0, 1500), (1, 500))
    ]
    engine = dumbbell(Queue("drr", packets=50, bands=2, quantum=[1500, 4500]), flows, 2.0)
    bytes_of = engine.flows["received"] * engine.flows["size"]
    assert bytes_of[1] / bytes_of[0] == pytest.approx(3.0, rel=0.01)


def test_marks_keep_dctcp_short_where_reno_fills_the_queue() -> None:
    waits = []
    for sender in ("dctcp", "reno"):
        engine = dumbbell(
            Queue(packets=500, mark_at=20), [Flow([0], [1], sender, ecn=sender == "dctcp")] * 4, 5.0
        )
        waits.append(engine.links["wait"][0] / engine.links["offered"][0] / 1e12 / (1500 / 1.25e7))
    assert waits[0] < 40 < 200 < waits[1]


def test_caps_hold_and_are_lifted_between_runs() -> None:
    engine = Simulation(
        [PacketLink(1.25e7, 1e-3), PacketLink(1.25e7, 1e-3)], [Flow([0], [1], "cubic", window=4)]
    )
    rates, before = [], 0
    for window, rate in ((4.0, None), (None, 1e6), (None, None)):
        engine.set_cap(0, window=window, rate=rate)
        engine.run(engine.now + 2.0)
        received = int(engine.flows["received"][0])
        rates.append((received - before) * 1500 / 2.0)
        before = received
    trip = 2e-3 + (1500 + 64) / 1.25e7
    assert rates[:2] == pytest.approx([4 * 1500 / trip, 1e6], rel=0.02)
    assert rates[2] > 0.9 * 1.25e7


def test_what_is_foretold_comes() -> None:
    queue = Queue("drr", packets=100)
    flows = [Flow([0], [1], "reno") for _ in range(5)] + [Flow([0], (), "udp", rate=1e6, size=3e6)]
    engine = Simulation([PacketLink(1.25e7, 1e-3, queue), PacketLink(1.25e7, 1e-3)], flows)
    foretold = engine.foretell(10.0)
    engine.run(10.0)
    assert foretold.packets == pytest.approx(engine.flows["sent"].sum(), rel=0.1)
    assert foretold.events == pytest.approx(engine.events, rel=0.1)
    assert "CPU-s" in str(foretold)


GOOD = PacketLink(1e6)


@pytest.mark.parametrize(
    ("links", "flow", "words"),
    [
        ([GOOD], Flow([1], [0]), "flow 0: link 1 is not among 0 to 0"),
        ([GOOD], Flow([], [0]), "flow 0: a route must begin with a link"),
        ([GOOD], Flow([0]), "need a route back"),
        ([GOOD], Flow([0], (), "udp"), "udp needs a rate"),
        ([GOOD], Flow([0], [0], "tcp"), "'tcp' is unknown; accepted are udp, reno"),
        ([GOOD], Flow([0], [0], size=0), "size is 0"),
        ([GOOD], Flow([0, At(0)], (), "udp", rate=1e5), "node 0 is not among"),
        ([GOOD], Flow([0, Fork([[0]])], [0]), "cannot send to a fork"),
        ([GOOD], Flow([0], [0], start=-1.0), "its start is -1.0 s; accepted is 0 up to 50 days"),
        ([GOOD], Flow([0], [0], window=float("nan")), "window is nan"),
        ([GOOD], Flow([0], [0], min_rto=61.0), "min_rto is 61.0; accepted is above 0 up to 60 s"),
        ([PacketLink(0.0)], Flow([0], [0]), "its rate is 0.0"),
        ([PacketLink(1e-3)], Flow([0], [0]), "lasts longer than a run can"),
        ([PacketLink(1e6, loss=1.5)], Flow([0], [0]), "loss is 1.5; accepted is 0 to 1"),
        ([PacketLink(1e6, queue=Queue("red"))], Flow([0], [0]), "'red' is unknown; accepted are fifo"),
        (
            [PacketLink(1e6, queue=Queue("drr", bands=0))],
            Flow([0], [0]),
            "bands and quanta must be at least 1",
        ),
    ],
)
def test_what_cannot_be_is_refused_in_a_sentence(links: list[PacketLink], flow: Flow, words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        Simulation(links, [flow])


def test_times_that_int64_does_not_hold_are_refused_in_mid_run() -> None:
    engine = Simulation([PacketLink(1e6), PacketLink(1e6)], [Flow([0], [1])])
    engine.run(1.0)
    with pytest.raises(ValueError, match="link 0: a full queue of it lasts longer than a run can"):
        engine.set_rate(0, 1e-3)
    with pytest.raises(ValueError, match="accepted is 0 up to 50 days"):
        engine.run(5e6)
    with pytest.raises(ValueError, match=r"until is 0.5 s, and it is 1.0 s already"):
        engine.run(0.5)
    engine.set_rate(0, 10.0)  # a packet takes two and a half minutes
    engine.run(4e6)
    conserved(engine)
